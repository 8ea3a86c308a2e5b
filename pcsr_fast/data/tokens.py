"""Captions as token ids: words, the vocabulary, and all captions of a split in one flat array."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

PAD, START, END, UNK = range(4)
SPECIAL = ("<pad>", "<start>", "<end>", "<unk>")


class Vocabulary:
    """Words and their ids; ids 0 to 3 are <pad>, <start>, <end> and <unk>."""

    def __init__(self, ids: dict[str, int], size: int | None = None):
        self.ids = ids
        self.size = max(ids.values()) + 1 if size is None else size

    @classmethod
    def load(cls, path: Path | str) -> "Vocabulary":
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(data["word2idx"], data["idx"])

    def save(self, path: Path | str) -> None:
        data = {"word2idx": self.ids, "idx2word": {str(i): w for w, i in self.ids.items()}, "idx": self.size}
        Path(path).write_text(json.dumps(data), encoding="utf-8")

    @classmethod
    def build(cls, captions: Iterable[str], threshold: int = 4) -> "Vocabulary":
        """Words seen at least threshold times, in the order in which they first appear."""
        counts = Counter(word for caption in captions for word in words(caption))
        kept = [word for word, count in counts.items() if count >= threshold]
        return cls({word: i for i, word in enumerate((*SPECIAL, *kept))})

    def __len__(self) -> int:
        return self.size


def words(caption: str) -> list[str]:
    """The words of a caption: lower-case, split as NLTK's NLTKWordTokenizer does."""
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer().tokenize(caption.lower())


def encode(captions: Sequence[str], vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all captions back to back, int32, and where each begins, int64 [captions + 1]."""
    ids = [[START, *(vocabulary.ids.get(word, UNK) for word in words(caption)), END] for caption in captions]
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return np.array([i for caption in ids for i in caption], np.int32), offsets
