"""A split: image-caption pairs of one set, as arrays that stay on disk where they are large."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, eq=False)
class Split:
    """Image-caption pairs of one split; features stay on disk until a batch asks for them.

    `features` may be any object with shape, dtype and [int array], such as a memory map or a set of shards. Images
    are unique: where a file repeats every row for each of its captions, this is every fifth row.
    """

    name: str  # "f30k_precomp/train", for messages
    features: np.ndarray  # [images, R, d_img], float16 or float32
    tokens: np.ndarray  # int32 [total], all captions back to back, each with <start> and <end>
    offsets: np.ndarray  # int64 [N + 1], caption n has tokens offsets[n] to offsets[n + 1]
    image_of: np.ndarray  # int64 [N], the image a caption is paired with (after noise)
    true_image: np.ndarray  # int64 [N], the image it was written for; equal to image_of where no noise is known
    texts: Sequence[str] | None = None  # caption n as text

    def __post_init__(self):
        pairs = len(self.image_of)
        lengths = {"offsets": len(self.offsets) - 1, "true_image": len(self.true_image)}
        lengths |= {} if self.texts is None else {"texts": len(self.texts)}
        if wrong := {name: length for name, length in lengths.items() if length != pairs}:
            raise ValueError(f"{self.name}: {pairs} captions in image_of, but {wrong}")
        if len(self.features.shape) != 3:
            raise ValueError(f"{self.name}: features must be [images, regions, width], not {list(self.features.shape)}")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens):
            ends = f"{self.offsets[0]} to {self.offsets[-1]}"
            raise ValueError(f"{self.name}: offsets run from {ends}, but there are {len(self.tokens)} tokens")
        for name in ("image_of", "true_image"):
            check_range(getattr(self, name), self.images, f"{self.name}: {name}")

    def __len__(self) -> int:
        return len(self.image_of)

    @property
    def images(self) -> int:
        return self.features.shape[0]

    @property
    def regions(self) -> int:
        return self.features.shape[1]

    @property
    def width(self) -> int:
        return self.features.shape[2]

    def caption(self, n: int) -> np.ndarray:
        """Token ids of caption n, a view."""
        return self.tokens[self.offsets[n] : self.offsets[n + 1]]

    def with_noise(self, index: np.ndarray) -> "Split":  # int [N]
        """The same captions, each paired with the image that index names; `true_image` stays."""
        index = np.ascontiguousarray(index, dtype=np.int64)
        if index.shape != self.image_of.shape:
            raise ValueError(f"{self.name}: a noise index of shape {list(index.shape)} for {len(self)} captions")
        return replace(self, image_of=index)

    def head(self, images: int) -> "Split":
        """The first images and all captions written for them; pairs must not have been mixed by noise."""
        if images >= self.images:
            return self
        if not np.array_equal(self.image_of, self.true_image):
            raise ValueError(f"{self.name}: cannot cut a split after noise was applied; cut first")
        # captions are image-major, so those of the first images come first
        pairs = int(np.searchsorted(self.true_image, images))
        return replace(
            self,
            features=self.features[:images],
            tokens=self.tokens[: self.offsets[pairs]],
            offsets=self.offsets[: pairs + 1],
            image_of=self.image_of[:pairs],
            true_image=self.true_image[:pairs],
            texts=None if self.texts is None else self.texts[:pairs],
        )


def check_range(index: np.ndarray, images: int, what: str) -> None:
    """Raises unless every entry of the index names an image."""
    if len(index) and (index.min() < 0 or index.max() >= images):
        at = int(np.flatnonzero((index < 0) | (index >= images))[0])
        raise ValueError(f"{what}[{at}] is {index[at]}, but there are {images} images")
