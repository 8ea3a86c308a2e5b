"""Captions as token ids: words, the vocabulary, and all captions of a split in one flat array."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from pcsr_fast import _native
from pcsr_fast.data.files import write_whole
from pcsr_fast.data.lines import Lines

PAD, START, END, UNK = range(4)
SPECIAL = ("<pad>", "<start>", "<end>", "<unk>")


class Vocabulary:
    """Words and their ids; ids 0 to 3 are <pad>, <start>, <end> and <unk>."""

    def __init__(self, ids: dict[str, int], size: int | None = None, name: str = "vocabulary"):
        self.ids, self.name = ids, name
        self.size = max(ids.values(), default=-1) + 1 if size is None else size
        for word, i in ids.items():
            if not isinstance(i, int) or not 0 <= i < self.size:
                raise ValueError(f"{name}: id {i!r} of {word!r} is not a number below the size {self.size}")
        if len(set(ids.values())) != len(ids):
            raise ValueError(f"{name}: {len(ids)} words share {len(set(ids.values()))} ids")

    @classmethod
    def load(cls, path: Path | str) -> "Vocabulary":
        """Reads {"word2idx": {word: id}, "idx": size}; where there is an "idx2word", it must agree."""
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON in UTF-8: {error}") from None
        ids, size = (data.get("word2idx"), data.get("idx")) if isinstance(data, dict) else (None, None)
        if not isinstance(ids, dict) or not isinstance(size, int):
            raise ValueError(f'{path}: expected {{"word2idx": {{word: id, ...}}, "idx2word": ..., "idx": size}}')
        vocabulary = cls(ids, size, str(path))
        for i, word in data.get("idx2word", {}).items():
            if ids.get(word) != int(i):
                raise ValueError(f"{path}: idx2word says {i} is {word!r}, word2idx says {ids.get(word)}")
        return vocabulary

    def save(self, path: Path | str) -> None:
        words = {str(i): word for word, i in sorted(self.ids.items(), key=lambda item: item[1])}
        data = {"word2idx": self.ids, "idx2word": words, "idx": self.size}
        write_whole(Path(path), lambda file: file.write(json.dumps(data).encode()))

    @classmethod
    def build(cls, captions: Iterable[str], threshold: int = 4) -> "Vocabulary":
        """Words seen at least `threshold` times, in the order in which they first appear."""
        counts = _native.WordCounts()
        captions = iter(captions)
        # some at a time: memory holds the distinct words, not the captions
        while some := list(itertools.islice(captions, 1 << 16)):
            counts.add(*_packed(some))
        kept = [word for word in counts.at_least(threshold) if word not in SPECIAL]
        return cls({word: i for i, word in enumerate((*SPECIAL, *kept))})

    def __len__(self) -> int:
        return self.size

    @cached_property
    def words(self) -> list[str]:
        """Word of every id; <unk> where the file has none."""
        words = ["<unk>"] * self.size
        for word, i in self.ids.items():
            words[i] = word
        return words

    @cached_property
    def key(self) -> str:
        """Names the content: equal vocabularies have equal keys."""
        return hashlib.blake2b(json.dumps([sorted(self.ids.items()), self.size]).encode(), digest_size=16).hexdigest()


def words(caption: str) -> list[str]:
    """The words of a caption: lower-case, split as NLTK's NLTKWordTokenizer splits the whole caption.

    >>> words("The dog's owner can't run, he's tired.")
    ['the', 'dog', "'s", 'owner', 'ca', "n't", 'run', ',', 'he', "'s", 'tired', '.']
    """
    return _native.words(_utf8(caption, 0))


def encode(captions: Sequence[str], vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all captions back to back, int32, and where each begins, int64 [captions + 1].

    Every caption is wrapped in <start> and <end>; one without words is these two alone.
    """
    for i, word in enumerate(SPECIAL):
        if vocabulary.ids.get(word) != i:
            found = vocabulary.ids.get(word)
            raise ValueError(f"{vocabulary.name}: {word} must have id {i}, but has {found}; ids 0 to 3 are {SPECIAL}")
    return _native.WordIds([*vocabulary.ids], [*vocabulary.ids.values()]).encode(*_packed(captions))


def parse_ids(lines: Lines, size: int) -> tuple[np.ndarray, np.ndarray]:
    """As `encode`, of lines that are comma-separated ids below size already; they are taken as they are."""
    try:
        return _native.parse_ids(lines.text, lines.spans, size)
    except _native.LineError as error:
        raise ValueError(f"{lines.path}, {error}") from None


def _packed(captions: Sequence[str]) -> tuple:
    """Captions as one text, where each stands, and whether they may be quoted."""
    if isinstance(captions, Lines):
        return captions.text, captions.spans, captions.tabs
    parts = [_utf8(caption, n) for n, caption in enumerate(captions)]
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    ends = np.cumsum(lengths)
    return b"".join(parts), np.stack([ends - lengths, ends], 1), False


def _utf8(caption: str, n: int) -> bytes:
    try:
        return caption.encode()
    except UnicodeEncodeError as error:
        at = f"character {error.start} is {caption[error.start]!r}"
        raise ValueError(f"caption {n}: {at}, half of a surrogate pair; read the text as UTF-8") from None
