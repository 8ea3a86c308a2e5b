"""Noise: which image each caption is paired with, drawn once, kept in a file, and never redrawn silently.

**Caption-level** noise picks floor(ratio * captions) captions and permutes their image indices among themselves;
**image-level** noise permutes floor(ratio * images) images, and all captions of an image move together. A file is an
int64 .npy with the image index of every caption, or, for image-level noise, of every image.
"""

import math
import warnings
from pathlib import Path

import numpy as np

from pcsr_fast.data.files import open_npy, write_whole
from pcsr_fast.data.split import check_range

PROTOCOLS = ("caption", "image")


def draw(images: int, captions: int, ratio: float, *, protocol: str = "caption", seed: int) -> np.ndarray:  # int64 [N]
    """Image index of every caption; captions are image-major, the same number for each image.

    Permuted indices may fall on their own place, so slightly fewer pairs than `ratio` are mismatched.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"noise ratio {ratio} is not between 0 and 1")
    if protocol not in PROTOCOLS:
        raise ValueError(f"unknown noise protocol {protocol!r}; choose one of {', '.join(PROTOCOLS)}")
    each = _captions_per_image(images, captions)
    generator = np.random.default_rng(seed)
    index = np.arange(images, dtype=np.int64)
    index = index if protocol == "image" else np.repeat(index, each)
    # 0.58 * 100 is a little less than 58
    picked = generator.permutation(len(index))[: math.floor(round(ratio * len(index), 6))]
    index[picked] = generator.permutation(index[picked])
    return np.repeat(index, each) if protocol == "image" else index


def load(
    path: Path | str,
    images: int,
    captions: int,
    *,
    draw_ratio: float | None = None,
    draw_protocol: str = "caption",
    seed: int = 0,
) -> np.ndarray:  # int64 [N]
    """Image index of every caption, from a file of either length; `.npy` is appended to a path without it.

    A missing file is an error, unless `draw_ratio` asks for noise to be drawn and saved there.
    """
    path = npy_path(path)
    each = _captions_per_image(images, captions)
    if not path.exists():
        if draw_ratio is None:
            raise FileNotFoundError(f"no noise file {path}; name an existing one, or ask for noise to be drawn")
        index = draw(images, captions, draw_ratio, protocol=draw_protocol, seed=seed)
        save(path, index)
        return index
    index = open_npy(path)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        kind = f"{index.dtype} {list(index.shape)}"
        raise ValueError(f"{path} has {kind}; expected one int64 for each caption or each image")
    if len(index) not in (images, captions):
        raise ValueError(f"{path} has {len(index)} entries; expected {captions} (captions) or {images} (images)")
    check_range(index, images, str(path))
    index = np.array(index, dtype=np.int64)
    index = index if len(index) == captions else np.repeat(index, each)
    if protocol(index, images) == "other":
        warnings.warn(f"{path} is no permutation: some images have more or fewer than {each} captions", stacklevel=2)
    return index


def save(path: Path | str, index: np.ndarray) -> Path:  # int [N]
    """Writes the index of every caption, beside the run that used it; returns where."""
    path = npy_path(path)
    write_whole(path, lambda file: np.save(file, np.ascontiguousarray(index, dtype=np.int64)))
    return path


def protocol(index: np.ndarray, images: int) -> str:  # int [N]
    """What an index follows: `none` (all in place), `image`, `caption`, or `other` (no permutation).

    With one caption for each image the two protocols are the same; it is called `caption`.
    """
    each = _captions_per_image(images, len(index))
    if not np.array_equal(np.bincount(index, minlength=images), np.full(images, each)):
        return "other"
    groups = index.reshape(images, each)
    if np.array_equal(groups, np.broadcast_to(np.arange(images)[:, None], groups.shape)):
        return "none"
    return "image" if each > 1 and (groups == groups[:, :1]).all() else "caption"


def npy_path(path: Path | str) -> Path:
    """np.save appends .npy to what lacks it; so do readers, also behind a name such as f30k_precomp_0.2."""
    path = Path(path)
    return path if path.name.endswith(".npy") else path.with_name(path.name + ".npy")


def _captions_per_image(images: int, captions: int) -> int:
    if images < 1 or captions < images or captions % images:
        raise ValueError(f"{captions} captions of {images} images: every image needs the same number of captions")
    return captions // images
