"""A data set by its path, whichever kind it is: the sample set, a folder of features or a store; kept as JSON."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from pcsr_fast.data import noise, sample, store
from pcsr_fast.data.files import write_whole
from pcsr_fast.data.folder import find_vocabulary, open_captions, open_split
from pcsr_fast.data.split import Split
from pcsr_fast.data.tokens import Vocabulary


@dataclass(frozen=True)
class Dataset:
    """Where pairs come from, and the noise that is put into those of train.

    >>> data = Dataset("sample:20", noise=0.4)
    >>> train = data.split("train")
    >>> len(train), int((train.image_of != train.true_image).sum())
    (100, 38)
    """

    path: str  # a folder of features, a store, or "sample"; "sample:20" has 20 images in each split
    vocabulary_path: str | None = None  # of a folder: a file, or a folder to look in; else the usual places
    noise: float | str = 0.0  # share of pairs to mix up, or a file that says which image each caption has
    noise_protocol: str = "caption"
    noise_seed: int = 0
    dev_images: int | None = 1000
    variant: str | None = None
    repeated: bool | None = None

    def __post_init__(self):
        if self.is_sample:
            images = self.path.partition(":")[2]
            if self.path != "sample" and not (images.isascii() and images.isdigit() and int(images)):
                raise ValueError(f"{self.path}: expected sample, or sample:NUMBER with a number of images")
        elif not Path(self.path).is_dir():
            raise FileNotFoundError(f"{self.path} is no folder; name a folder of features, a store, or: sample")

    @property
    def is_sample(self) -> bool:
        return self.path.partition(":")[0] == "sample"

    @property
    def is_store(self) -> bool:
        return not self.is_sample and (Path(self.path) / "manifest.json").exists()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        if self.is_sample:
            return sample.sample_vocabulary()
        if self.is_store:
            return store.open_vocabulary(self.path)
        folder = Path(self.path)
        splits = sorted(path.name.removesuffix("_ims.npy") for path in folder.glob("*_ims.npy"))
        if not splits:
            raise FileNotFoundError(f"{folder} has neither manifest.json (a store) nor *_ims.npy (features)")
        variant = open_captions(folder, "train" if "train" in splits else splits[0], self.variant)[1]
        return Vocabulary.load(find_vocabulary(folder, variant, self.vocabulary_path))

    def split(self, name: str) -> Split:
        """A split; `train` with its noise."""
        plain = self._plain(name)
        if name != "train" or self.noise == 0:
            return plain
        size = (plain.images, len(plain))
        if isinstance(self.noise, str):
            return plain.with_noise(noise.load(self.noise, *size))
        return plain.with_noise(noise.draw(*size, self.noise, protocol=self.noise_protocol, seed=self.noise_seed))

    def _plain(self, name: str) -> Split:
        if self.is_sample:
            images = self.path.partition(":")[2]
            return sample.sample_split(name, int(images) if images else None)
        if self.is_store:
            split = store.open_store(self.path, name)
            return split.head(self.dev_images) if name == "dev" and self.dev_images is not None else split
        options = dict(dev_images=self.dev_images, variant=self.variant, repeated=self.repeated)
        return open_split(self.path, name, self.vocabulary, **options)

    def image_names(self, name: str) -> Sequence[str] | None:
        """What the source calls each image of a split, where it says: bytes [images] on disk."""
        path = Path(self.path) / name / "ids.npy"
        return Names(np.load(path, mmap_mode="r")) if self.is_store and path.exists() else None

    def save(self, path: Path) -> None:
        """Paths are kept absolute, so that a run can be opened from anywhere."""
        found = dataclasses.asdict(self)
        for key in ("path", "vocabulary_path", "noise"):
            value = found[key]
            if isinstance(value, str) and not (key == "path" and self.is_sample):
                found[key] = str(Path(value).resolve())
        write_whole(path, lambda file: file.write(json.dumps(found, indent=2).encode()))


class Names(Sequence[str]):
    """Ids of images, decoded when asked for."""

    def __init__(self, ids: np.ndarray):  # bytes [images]
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> str:
        return self.ids[i].decode()

    def index(self, name: str) -> int:
        found = np.flatnonzero(self.ids == name.encode())
        if not len(found):
            raise ValueError(f"no image is called {name!r}; the first is {self[0]!r}")
        return int(found[0])


def load(file: Path, **changes) -> Dataset:
    """The data set that a file names, with changes that are not None."""
    try:
        found = json.loads(file.read_text())
        known = {field.name for field in dataclasses.fields(Dataset)}
        found = {key: value for key, value in found.items() if key in known}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    changes = {key: value for key, value in changes.items() if value is not None}
    try:
        return Dataset(**found | changes)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} (from {file}; where the data has moved to: --data FOLDER)") from None
