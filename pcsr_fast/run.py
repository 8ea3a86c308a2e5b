"""The folder of a run: what training leaves in it, and how it is opened again.

RUN/config.json     the effective settings           RUN/data.json      where the data is
RUN/log.jsonl       a record for every epoch         RUN/vocab.json     words and their ids
RUN/noise.npy       image of every caption           RUN/division.npy   what the last division said of every pair
RUN/best.pt         weights of the best epoch        RUN/last.pt        everything, to go on from
RUN/evaluation_SPLIT.json, RUN/report/               written by `evaluate` and `report`
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from pcsr_fast import checkpoint
from pcsr_fast.config import Config, differences, from_dict, load
from pcsr_fast.data import dataset
from pcsr_fast.data.dataset import Dataset
from pcsr_fast.data.files import open_npy, write_whole
from pcsr_fast.data.split import Split
from pcsr_fast.data.tokens import Vocabulary
from pcsr_fast.model import Network

# what a network says of a pair: its loss, the belief that it is clean, its image's consistency, its subset
PAIR = (("loss", np.float32), ("posterior", np.float32), ("pcs", np.float32), ("subset", np.uint8))
LOSS_BINS, PCS_BINS = 50, 25


@dataclass(frozen=True, eq=False)
class Run:
    """A run that was trained, or is being trained; weights and data are read when they are asked for."""

    folder: Path
    config: Config
    data: Dataset
    records: list[dict]  # of every epoch
    weights: str = "best"  # or "last"

    @cached_property
    def networks(self) -> list[Network]:
        found = self._saved
        device = choose_device(self.config)
        made = []
        for state in found["networks"]:
            train = found["data"]["train"]
            network = Network(from_dict(found["config"]), train["regions"], train["width"], found["data"]["words"])
            network.load_state_dict(state)
            made.append(network.to(device).eval())
        return made

    @cached_property
    def _saved(self) -> dict:
        path = self.folder / f"{self.weights}.pt"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: no epoch was finished yet, or this is no folder of a run")
        return checkpoint.load(path)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.load(self.folder / "vocab.json")

    def split(self, name: str) -> Split:
        """A split of the data; of `train` the pairs as they were trained on."""
        split = self.data.split(name)
        if name != "train":
            return split
        index = np.asarray(open_npy(self.folder / "noise.npy"))
        split = split.with_noise(index) if len(index) == len(split) else split
        now, then = checkpoint.fingerprint(split), self._saved["data"]["train"]
        # a folder that was moved or renamed is the same data
        if changed := differences(then | {"name": now["name"]}, now):
            raise ValueError(f"{self.data.path} is not what {self.folder} was trained on: {'; '.join(changed)}")
        return split

    @cached_property
    def division(self) -> np.ndarray:
        """Records of A_loss, A_posterior, A_pcs, A_subset and the same of B, one for each pair of train; on disk."""
        path = self.folder / "division.npy"
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing: the run has made no division yet; methods pcsr and clean do, after warm-up"
            )
        return open_npy(path)

    def evaluate(self, split: str = "test", folds: int = 0, progress: Callable = lambda cells: None) -> dict:
        """Recalls of A, B and the mean of their scores; kept in evaluation_SPLIT.json."""
        from pcsr_fast.evaluate import evaluate

        found = evaluate(self.networks, self.split(split), self.config.evaluation_batch, folds, progress)
        path = self.folder / f"evaluation_{split}.json"
        write_whole(path, lambda file: file.write(json.dumps(found, indent=2).encode()))
        return found

    def search(self, query: str | int, split: str = "test", top: int = 10) -> list:
        """The images of a split that fit a text best, or the captions that fit an image best, given by its number."""
        from pcsr_fast.search import find_captions, find_images

        return (find_images if isinstance(query, str) else find_captions)(self, [query], split, top)[0]

    def audit(self, out: Path | str, worst: int | None = None) -> Path:
        """Writes what the networks think of every training pair, as .csv or .parquet."""
        from pcsr_fast.audit import audit

        return audit(self, out, worst)

    def report(self, out: Path | str | None = None, against: Iterable["Run"] = ()) -> Path:
        """Writes one page with everything that happened, beside other runs."""
        from pcsr_fast.report import write

        return write(self, out, against)


def open_run(folder: Path | str, *, data: str | None = None, weights: str = "best", device: str | None = None) -> Run:
    """Opens the folder of a run; `data` says where its data is now, if it was moved."""
    folder = Path(folder)
    for name in ("config.json", "log.jsonl"):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder} is no folder of a run: it has no {name}; train one: pcsr-fast train")
    changes = {} if device is None else {"device": device}
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    if not (folder / "data.json").exists():
        raise FileNotFoundError(f"{folder} does not say where its data is: it has no data.json; train with fit()")
    # words are those that it was trained with, whatever became of the file
    found = dataset.load(folder / "data.json", path=data, vocabulary_path=str(folder / "vocab.json"))
    return Run(folder, load(folder / "config.json", **changes), found, records, weights)


def fit(
    config: Config,
    data: Dataset,
    folder: Path | str,
    *,
    resume: str = "auto",
    report: Callable[[str], None] = print,
    tensorboard: bool = False,
    warmed: Path | str | None = None,
) -> Run:
    """Trains on a data set and returns the run; what train() does, with all that is needed to open the folder again.

    `warmed` is a run with epochs=0, warm-up alone, of the same settings: this one goes on from its end.

    >>> import tempfile
    >>> from pcsr_fast.presets import settings
    >>> config = settings("sample", embedding=8, similarity=4, classes=4, warmup_epochs=1, epochs=1)
    >>> folder = tempfile.mkdtemp()
    >>> run = fit(config, Dataset("sample:4", noise=0.4), folder, report=lambda line: None)
    >>> [record["stage"] for record in run.records]
    ['warm-up', 'clean']
    >>> sorted(run.evaluate("test"))
    ['A', 'B', 'mean']
    >>> [hit.name for hit in open_run(folder).search("a two in the middle", top=4)] != []
    True
    >>> run.division["A_posterior"].shape
    (20,)
    """
    from pcsr_fast.train import train

    folder = Path(folder)
    write = tensorboard_writer(folder) if tensorboard else lambda record: None
    train_split, dev_split, vocabulary = data.split("train"), data.split("dev"), data.vocabulary

    def describe() -> None:
        # of many ranks that torchrun started, the first writes
        if int(os.environ.get("RANK", "0")) > 0:
            return
        data.save(folder / "data.json")
        vocabulary.save(folder / "vocab.json")

    # a folder with another run in it is refused by train, and then keeps its own
    if not (folder / "last.pt").exists():
        describe()
    train(config, train_split, dev_split, len(vocabulary), folder, resume, report, warmed, write)
    describe()
    return open_run(folder)


def choose_device(config: Config) -> torch.device:
    name = config.device
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def write_division(folder: Path, networks: list[dict[str, np.ndarray]]) -> None:
    """Writes division.npy, 26 bytes a pair, from the arrays of each network."""
    kinds = [(f"{network}_{name}", kind) for network in "AB" for name, kind in PAIR]
    found = np.empty(len(networks[0]["loss"]), kinds)
    for network, arrays in zip("AB", networks, strict=True):
        for name, _ in PAIR:
            found[f"{network}_{name}"] = arrays[name]
    write_whole(folder / "division.npy", lambda file: np.save(file, found))


def distributions(losses: np.ndarray, pcs: np.ndarray, components: np.ndarray, mismatched: np.ndarray) -> dict:
    """What a report draws of a division: histograms, of the pairs known to be mismatched too, and the mixture."""
    low, high = float(losses.min()), float(losses.max())
    top = max(1.0, float(pcs.max()))
    found: dict = {"loss_range": [low, high], "mixture": components.tolist(), "pcs_range": [0.0, top]}
    chosen = {"": slice(None)} | ({"_mismatched": mismatched} if mismatched.any() else {})
    for name, some in chosen.items():
        found[f"loss_histogram{name}"] = np.histogram(losses[some], LOSS_BINS, (low, high))[0].tolist()
        found[f"pcs_histogram{name}"] = np.histogram(pcs[some], PCS_BINS, (0, top))[0].tolist()
    return found


def tensorboard_writer(folder: Path) -> Callable[[dict], None]:
    """A function that writes the numbers of an epoch's record for TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("TensorBoard is not installed: pip install tensorboard, or leave out --tensorboard") from None
    writer = SummaryWriter(folder / "tensorboard")

    def write(record: dict) -> None:
        for name, value in record.items():
            if isinstance(value, int | float):
                writer.add_scalar(name, value, record["epoch"])
        writer.flush()

    return write
