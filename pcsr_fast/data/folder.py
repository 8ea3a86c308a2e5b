"""Folders of precomputed features and captions, as people have them: f30k, coco, cc152k, now100k and their like.

NAME_precomp/{split}_ims.npy             float32 or float16 [rows, regions, width]
NAME_precomp/{split}_caps.txt            one caption a line, or
NAME_precomp/{split}_caps.tsv            id <tab> caption, or
NAME_precomp/{split}_caps_{variant}.txt  token ids, divided by commas
NAME_precomp_vocab.json                  in the folder, beside it, or in a folder `vocab` beside it
"""

import hashlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

from pcsr_fast.data.files import open_npy, write_whole
from pcsr_fast.data.lines import Lines
from pcsr_fast.data.split import Split
from pcsr_fast.data.tokens import Vocabulary, encode, parse_ids

CAPTIONS_PER_IMAGE = 5
# a new number makes token caches of older rules invalid
_TOKENIZER = 1


def open_split(
    folder: Path | str,
    split: str,
    vocabulary: Vocabulary | Path | str | None = None,
    *,
    dev_images: int | None = 1000,
    cache: Path | str | None = None,
    variant: str | None = None,
    repeated: bool | None = None,
) -> Split:
    """Opens {split}_ims.npy and the captions beside it; features stay on disk.

    Captions are image-major, 5 per row or 1. With 1, rows may be unique images or already repeated for each of their
    5 captions; their content tells (see `is_repeated`), or `repeated` does. Of the split `dev` the first `dev_images`
    images are used, None for all. `vocabulary` is one, a file, or a folder to look in; token ids are kept in the
    folder `cache` and found there by the content of captions and vocabulary. `variant` chooses among several files
    of ids: bpe, bert, jieba.
    """
    folder = Path(folder)
    features_path = folder / f"{split}_ims.npy"
    rows = open_features(features_path)
    lines, variant = open_captions(folder, split, variant)
    if len(lines) not in (len(rows), CAPTIONS_PER_IMAGE * len(rows)):
        raise ValueError(
            f"{lines.path} has {len(lines)} captions and {features_path} has {len(rows)} rows; "
            f"expected 1 or {CAPTIONS_PER_IMAGE} captions for each row"
        )
    if len(lines) == len(rows) and (is_repeated(rows, features_path) if repeated is None else repeated):
        if len(rows) % CAPTIONS_PER_IMAGE:
            raise ValueError(f"{features_path} has {len(rows)} rows, not a multiple of {CAPTIONS_PER_IMAGE}")
        rows = rows[::CAPTIONS_PER_IMAGE]
    if not isinstance(vocabulary, Vocabulary):
        vocabulary = Vocabulary.load(find_vocabulary(folder, variant, vocabulary))
    tokens, offsets = _tokens(lines, variant, vocabulary, cache)
    image_of = np.arange(len(lines), dtype=np.int64) // (len(lines) // len(rows))
    opened = Split(f"{folder.name}/{split}", rows, tokens, offsets, image_of, image_of, lines)
    return opened.head(dev_images) if split == "dev" and dev_images is not None else opened


def open_features(path: Path) -> np.ndarray:  # [rows, regions, width]
    """A memory map of features, of a kind that training can use."""
    rows = open_npy(path)
    kind = f"{rows.dtype.str} {list(rows.shape)}"
    if rows.dtype not in (np.float32, np.float16) or not rows.dtype.isnative or rows.ndim != 3:
        raise ValueError(f"{path} has {kind}; expected float32 or float16 [rows, regions, width]")
    if rows.size == 0:
        raise ValueError(f"{path} is empty: {kind}")
    if not rows.flags.c_contiguous:
        raise ValueError(f"{path} is in Fortran order; save it again with np.ascontiguousarray")
    return rows


def open_captions(folder: Path, split: str, variant: str | None = None) -> tuple[Lines, str | None]:
    """The captions of a split, and the variant of their ids if they are ids already."""
    text, table = folder / f"{split}_caps.txt", folder / f"{split}_caps.tsv"
    prefix = f"{split}_caps_"
    variants = {path.stem.removeprefix(prefix): path for path in sorted(folder.glob(f"{prefix}*.txt"))}
    found = [path for path in (text, table) if path.exists()] if variant is None else []
    found += [path for name, path in variants.items() if variant in (None, name)]
    if not found:
        wanted = f"{text.name}, {table.name} or {prefix}*.txt" if variant is None else f"{prefix}{variant}.txt"
        raise FileNotFoundError(f"no captions in {folder}: {wanted} is missing")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(f"{folder} has {names}; name one by variant=..., or move the others away")
    (path,) = found
    lines = Lines(path, tabs=path == table)
    if not len(lines):
        raise ValueError(f"{path} is empty")
    return lines, next((name for name, p in variants.items() if p == path), None)


def is_repeated(rows: np.ndarray, path: Path) -> bool:  # [rows, regions, width]
    """Whether rows 0 to 4 are one image, 5 to 9 the next, and so on; judged by content, never by names.

    Whole rows are compared in up to 64 groups spread over the file. No group of equal rows: every row is an image of
    its own (also where all rows are the same, which says nothing). Only such groups: the beginnings of the rows of
    all other groups are compared too. Anything between is an error.
    """
    step = CAPTIONS_PER_IMAGE
    if len(rows) % step:
        return False
    # as bits: NaN is equal to itself
    bits = rows.view(f"u{rows.itemsize}")
    groups = np.unique(np.linspace(0, len(rows) // step - 1, 64).astype(int))
    some = [bits[step * g : step * (g + 1)] for g in groups]
    equal = np.array([bool((group == group[0]).all()) for group in some])
    if not equal.any() or (len(some) > 1 and equal.all() and all(np.array_equal(g[0], some[0][0]) for g in some)):
        return False
    if equal.all():
        heads = np.array(bits[:, 0, :16]).reshape(-1, step, min(16, rows.shape[2]))
        equal, groups = (heads == heads[:, :1]).all((1, 2)), np.arange(len(heads))
    if equal.all():
        return True
    first, other = step * groups[equal][0], step * groups[~equal][0]
    raise ValueError(
        f"{path}: rows {first} to {first + step - 1} are one image, rows {other} to {other + step - 1} are not, so the "
        "rows are neither unique nor repeated throughout; say repeated=True or repeated=False"
    )


def find_vocabulary(folder: Path, variant: str | None, where: Path | str | None) -> Path:
    """The vocabulary of a folder: the file `where`, or NAME_vocab.json in the folder `where` or in the usual places."""
    if where is not None and not Path(where).is_dir():
        return Path(where)
    folder = folder.resolve()
    places = [folder, folder.parent / "vocab", folder.parent] if where is None else [Path(where)]
    # the data set of two names
    names = [folder.name, *(["now100k_precomp"] if folder.name == "h5100k_precomp" else [])]
    files = [f"{name}_vocab{end}.json" for name in names for end in ([f"_{variant}", ""] if variant else [""])]
    for path in (place / file for file in files for place in places):
        if path.exists():
            return path
    raise FileNotFoundError(
        f"no {' or '.join(files)} in {', '.join(map(str, places))}; "
        f"name the file, or build one: pcsr-fast vocab {folder}"
    )


def build_vocabulary(folder: Path | str, threshold: int = 4) -> Vocabulary:
    """Words of the captions of train and dev that occur at least `threshold` times."""
    folder = Path(folder)
    opened = [open_captions(folder, split) for split in ("train", "dev")]
    for lines, variant in opened:
        if variant:
            raise ValueError(f"{lines.path} holds ids: their vocabulary cannot be built from them")
    captions = (caption for lines, _ in opened for caption in lines)
    total = sum(len(lines) for lines, _ in opened)
    return Vocabulary.build(tqdm(captions, "words", total, unit="caption", leave=False, disable=None), threshold)


def _tokens(
    lines: Lines, variant: str | None, vocabulary: Vocabulary, cache: Path | str | None
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and offsets, from the cache where it has them."""
    if cache is None:
        return parse_ids(lines, len(vocabulary)) if variant else encode(lines, vocabulary)
    kind = f"{_TOKENIZER} {variant is not None} {lines.tabs} {vocabulary.key}"
    content = hashlib.blake2b(kind.encode(), digest_size=16)
    content.update(lines.text)
    paths = [Path(cache) / f"{content.hexdigest()}-{name}.npy" for name in ("tokens", "offsets")]
    try:
        # plain arrays: np.memmap is slow to slice
        tokens, offsets = (np.asarray(open_npy(path)) for path in paths)
        return tokens, offsets
    # absent, or cut short by a full disk: made again
    except (OSError, ValueError):
        pass
    arrays = _tokens(lines, variant, vocabulary, None)
    for path, array in zip(paths, arrays, strict=True):
        write_whole(path, lambda file, array=array: np.save(file, array))
    return arrays
