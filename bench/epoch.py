"""`python -m bench epoch`: division, training and validation of an epoch of pcsr, against the plain-torch reference.

Whole runs of the trainer on made-up features take turns, one with the kernels, one with the reference; the figures are
those of the last epoch, in which all three subsets train. `--profile FILE` writes a trace of one such run instead.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench.measure import RESULTS, machine, save, summary
from bench.step import profile
from pcsr_fast.backend import use_backend
from pcsr_fast.config import Config
from pcsr_fast.data import noise
from pcsr_fast.data.split import Split
from pcsr_fast.train import train

WORDS = 1_000
PHASES = ("divide", "train", "validate")


def made_up_split(name: str, images: int, regions: int, width: int) -> Split:
    """Five captions of an image, whose words follow from it, so that losses differ."""
    rng = np.random.default_rng(len(name))
    features = rng.random((images, regions, width), np.float32)
    lengths = rng.integers(8, 20, 5 * images)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    image_of = np.repeat(np.arange(images), 5)
    tokens = (np.repeat(image_of, lengths) * 7 + rng.integers(0, 5, offsets[-1])) % (WORDS - 4) + 4
    return Split(f"made-up/{name}", features, tokens.astype(np.int32), offsets, image_of, image_of)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench epoch", description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=100, help="of train; five pairs each (default 100)")
    parser.add_argument("--embedding", type=int, default=256, help="default 256")
    parser.add_argument("--similarity", type=int, default=64, help="default 64")
    parser.add_argument("--regions", type=int, default=36, help="default 36")
    parser.add_argument("--batch", type=int, default=64, help="default 64")
    parser.add_argument("--repeats", type=int, default=3, help="default 3")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a trace, print what takes the time")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)

    config = Config(
        embedding=options.embedding, similarity=options.similarity, batch_size=options.batch, classes=64,
        warmup_epochs=1, warmup_steps=0, epochs=2, refinable_from=1, ambiguous_from=1,
    )  # fmt: skip
    data = made_up_split("train", options.images, options.regions, 512)
    data = data.with_noise(noise.draw(data.images, len(data), 0.4, seed=0))
    dev = made_up_split("dev", max(10, options.images // 10), options.regions, 512)

    def run() -> dict:
        with tempfile.TemporaryDirectory() as folder:
            records: list[dict] = []
            train(config, data, dev, WORDS, folder, report=lambda line: None, on_epoch=records.append)
            return records[-1]

    if options.profile:
        profile(run, options.profile, calls=1)
        return 0
    found: dict[str, list[dict]] = {"auto": [], "reference": []}
    for repeat in range(options.repeats):
        for name in [*found][:: 1 if repeat % 2 else -1]:
            with use_backend(name):
                found[name].append(run())
    rows = []
    for phase in PHASES:
        times = {name: [record[f"{phase}_seconds"] for record in records] for name, records in found.items()}
        both = (times["auto"], times["reference"])
        # quartiles need two
        figures = summary(*(x if len(x) > 1 else x * 2 for x in both))
        rows.append(
            {
                "op": "epoch", "shape": f"n{len(data)}_d{options.embedding}", "task": phase, "dtype": "float32",
                "device": "cuda" if torch.cuda.is_available() else "cpu", "threads": str(torch.get_num_threads()),
                "contender": "auto", "baseline": "reference", **figures,
                "sizes": f"pairs={len(data)} batch={options.batch} regions={options.regions} "
                         f"dim={options.embedding} nodes={options.similarity}",
                "torch": torch.__version__,
            }
        )  # fmt: skip
        median = {name: statistics.median(x) for name, x in times.items()}
        print(f"{phase:9}{median['auto']:8.2f} s, reference {median['reference']:8.2f} s, {rows[-1]['speedup']} x")
    if not options.no_save:
        save(rows, RESULTS / f"{machine()}.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
