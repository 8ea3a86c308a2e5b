"""`python -m bench experiments`: retrieval under noise; what each part of the method is worth, to a CSV and a table.

Runs are resumable: stopped or killed, the same command goes on. What has a row in the CSV is not run again, on any
machine; delete the row, and the folder of the run, to do so. Runs of the same noise and seed share one warm-up.
The best epoch is chosen on dev; test is looked at once, when a run has ended.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.measure import RESULTS
from pcsr_fast.config import PRINTED, Config
from pcsr_fast.presets import PRESETS

# the paper's decay and last stage in 8 epochs instead of 50; captions get new images as soon as labels are known
SCHEDULE = dict(
    batch_size=32, warmup_steps=0, learning_rate=5e-4, epochs=8, refinable_from=2, ambiguous_from=7, decay_every=5,
    target_start=0.9, target_epochs=8, device="cpu",
)  # fmt: skip
AS_PAPER = dict(refinable_from=5, target_start=0.4)  # the first epoch of the stage in proportion, 26 of 50
# as many steps on clean pairs at 40 % noise as sgr has in 8 epochs without noise
LONGER = dict(epochs=13, ambiguous_from=11, decay_every=8, target_epochs=13)
SETTINGS = {"sample": PRESETS["sample"], "folder": dict(embedding=256, similarity=64, warmup_epochs=3)}
DEV_IMAGES, TEST_IMAGES = 300, 500  # of a folder
COLUMNS = ("data", "noise", "variant", "seed", "best_epoch", "dev_rsum", "test_rsum")
RECALLS = tuple(f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10))
FIGURES = ("A_split_precision", "A_split_recall", "A_split_auc", "A_classes_in_use", "A_largest_class",
           "A_random_likeness", "A_agreement_clean", "A_agreement_noisy", "A_refinable_overlap",
           "A_ambiguous_overlap", "A_refinable_right")  # fmt: skip


PERFECT = "clean, perfect split"  # what a division that is always right is worth


class Task(NamedTuple):
    noise: float
    variant: str
    seed: int
    settings: dict

    def name(self) -> str:
        return f"{self.noise}-{self.seed}-{self.variant}"


# nothing that rests on the words of captions: what is known where every image has one
NO_WORDS = dict(siblings=False, rematch="caption") | AS_PAPER

MAIN = [
    *(Task(0.0, "sgr", seed, dict(method="sgr")) for seed in (0, 1)),
    *(Task(0.4, name, seed, dict(method=name)) for seed in (0, 1) for name in ("pcsr", "clean", "sgr")),
    Task(0.4, PERFECT, 0, dict(method="clean", doubt=0.0)),
    Task(0.4, "pcsr as printed", 0, dict(paper=True) | AS_PAPER),
    *(Task(noise, name, 0, dict(method=name)) for noise in (0.2, 0.6) for name in ("pcsr", "sgr")),
    *(Task(0.4, "pcsr without words", seed, NO_WORDS) for seed in (0, 1)),
    *(Task(noise, "pcsr without words", 0, NO_WORDS) for noise in (0.2, 0.6)),
    # its division alone, and no steps on other pairs
    *(Task(0.4, "clean pairs without words", seed, NO_WORDS | dict(subsets=("clean",))) for seed in (0, 1)),
    Task(0.4, "siblings = False", 0, dict(siblings=False)),
    Task(0.4, "rematch = caption", 0, dict(rematch="caption") | AS_PAPER),
]
# on the sample set alone: a run takes minutes, and differs by a few points from seed to seed
MORE_SEEDS = [
    *(Task(0.4, name, seed, dict(method=name)) for seed in (2, 3) for name in ("pcsr", "clean", "sgr")),
    *(Task(0.4, "pcsr without words", seed, NO_WORDS) for seed in (2, 3)),
]
ABLATIONS = [
    Task(0.4, "subsets: clean", 0, dict(subsets=("clean",))),
    Task(0.4, "subsets: clean, ambiguous", 0, dict(subsets=("clean", "ambiguous"))),
    Task(0.4, "subsets: clean, refinable", 0, dict(subsets=("clean", "refinable"))),
    Task(0.4, "all noisy pairs refinable", 0, dict(noisy_treatment="refinable")),
    Task(0.4, "all noisy pairs ambiguous", 0, dict(noisy_treatment="ambiguous")),
    *(Task(0.4, f"K = {k}", 0, dict(classes=k)) for k in (32, 64, 128, 512)),
]
# each deviation from the paper taken back alone, where words have no say; what those are worth is in MAIN
DEVIATIONS = [
    Task(0.4, f"without words, {name} = {value}", 0, NO_WORDS | {name: value})
    for name, value in PRINTED.items()
    if name not in NO_WORDS
]
# on real data alone: what more training is worth
LONG_RUNS = [
    *(Task(0.4, f"{name}, 13 epochs", 0, dict(method=name) | LONGER) for name in ("pcsr", "clean", "sgr")),
    Task(0.4, f"{PERFECT}, 13 epochs", 0, dict(method="clean", doubt=0.0) | LONGER),
    Task(0.0, "sgr, 13 epochs", 0, dict(method="sgr") | LONGER),
]
# and what the division's deviations are worth; the sample set's pairs part too easily
DIVISION = [
    Task(0.4, f"{name} = {PRINTED[name]}", 0, {name: PRINTED[name]})
    for name in ("evidence", "judges", "belief_memory", "doubt")
]


def tasks_of(data: str) -> list[Task]:
    return MAIN + MORE_SEEDS + ABLATIONS + DEVIATIONS if data == "sample" else MAIN + LONG_RUNS + DIVISION


def warmups_of(tasks: list[Task]) -> list[Task]:
    """One for each noise and seed."""
    return [Task(*place, dict(method="sgr", epochs=0)) for place in {(t.noise, "warmup", t.seed): 0 for t in tasks}]


def open_data(data: str, noise_ratio: float):
    """Train with noise, dev and test, and the number of words."""
    from pcsr_fast.data import Vocabulary, noise, open_split
    from pcsr_fast.data.folder import find_vocabulary
    from pcsr_fast.data.sample import sample_split, sample_vocabulary

    if data == "sample":
        train, dev, test = (sample_split(name) for name in ("train", "dev", "test"))
        words = len(sample_vocabulary())
    else:
        train, dev = open_split(data, "train"), open_split(data, "dev", dev_images=DEV_IMAGES)
        test = open_split(data, "test").head(TEST_IMAGES)
        words = len(Vocabulary.load(find_vocabulary(Path(data), None, None)))
    if noise_ratio:
        file = Path(data) / "noise_index" / f"{Path(data).name}_{noise_ratio}.npy"
        sizes = train.images, len(train)
        index = noise.load(file, *sizes) if file.exists() else noise.draw(*sizes, noise_ratio, seed=0)
        train = train.with_noise(index)
    return train, dev, test, words


def config_of(data: str, task: Task) -> Config:
    kind = "sample" if data == "sample" else "folder"
    return Config(seed=task.seed, **SETTINGS[kind] | SCHEDULE | task.settings)


def run_task(data: str, task: Task, runs: Path) -> None:
    """Trains from the shared warm-up and tests the best epoch; does nothing if that is done."""
    import torch

    from pcsr_fast import checkpoint
    from pcsr_fast import train as module
    from pcsr_fast.evaluate import evaluate
    from pcsr_fast.model import Network
    from pcsr_fast.train import train

    folder, warmed = runs / task.name(), runs / f"{task.noise}-{task.seed}-warmup"
    if (folder / "result.json").exists():
        return
    torch.set_num_threads(1)
    train_split, dev, test, words = open_data(data, task.noise)
    started = time.monotonic()
    if task.variant == "warmup":
        train(config_of(data, task), train_split, dev, words, folder)
        (folder / "result.json").write_text("{}")
        return
    config = config_of(data, task)
    if task.variant.startswith(PERFECT):
        real = module.clean_posterior
        truth = (train_split.image_of == train_split.true_image).astype(np.float32)
        module.clean_posterior = lambda *args: (truth, real(*args)[1])
    best = train(config, train_split, dev, words, folder, warmed=warmed)
    networks = []
    for weights in checkpoint.load(folder / "best.pt")["networks"]:
        network = Network(config, train_split.regions, train_split.width, words)
        # the best epoch may be one of the shared warm-up, in which the classifier had no part
        kept = {name: x for name, x in network.state_dict().items() if name.startswith("classifier.")}
        network.load_state_dict({k: v for k, v in weights.items() if not k.startswith("classifier.")} | kept)
        networks.append(network)
    found = evaluate(networks, test)["mean"]
    final = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()][-1]
    row = dict(zip(COLUMNS, (Path(data).name, *task[:3], best["epoch"], best["rsum"], found["rsum"]), strict=True))
    row |= {f"test_{name}": found[name] for name in RECALLS}
    row |= {f"final_{name}": final[name] for name in FIGURES if name in final}
    row["minutes"] = (time.monotonic() - started) / 60
    (folder / "result.json").write_text(json.dumps(row))


def read_rows(path: Path) -> dict[str, dict]:
    """Results in a CSV, by the names of their tasks."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {Task(float(r["noise"]), r["variant"], int(r["seed"]), {}).name(): r for r in csv.DictReader(file)}


def gather(runs: Path, path: Path) -> list[dict]:
    """Adds the results of all runs that have ended to those in the CSV, in the order of the tasks."""
    found = read_rows(path)
    names = dict.fromkeys(task.name() for task in tasks_of("sample") + tasks_of("folder"))
    for name in names:
        if (result := runs / name / "result.json").exists():
            row = json.loads(result.read_text())
            found[name] = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
    columns = [*COLUMNS, *(f"test_{x}" for x in RECALLS), *(f"final_{x}" for x in FIGURES), "minutes"]
    rows = [found[name] for name in dict.fromkeys([*names, *found]) if name in found]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench experiments", description=__doc__.split("\n")[0])
    parser.add_argument("data", help="sample, or a folder of precomputed features")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="where runs are kept")
    parser.add_argument("--only", action="append", help="only variants with this in their name; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, a thread each")
    parser.add_argument("--gather", action="store_true", help="write what is there, and train nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    runs, results = options.runs / Path(options.data).name, RESULTS / f"noise_{Path(options.data).name}.csv"
    if options.one:
        every = tasks_of(options.data)
        run_task(options.data, next(t for t in [*warmups_of(every), *every] if t.name() == options.one), runs)
        return 0
    known = read_rows(results)
    wanted = [t for t in tasks_of(options.data) if not options.only or any(x in t.name() for x in options.only)]
    tasks = [] if options.gather else [t for t in wanted if t.name() not in known]

    def start(task: Task) -> int:
        folder = runs / task.name()
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "bench", "experiments", options.data, "--runs", str(options.runs)]
        with (folder / "output.txt").open("a") as output:
            code = subprocess.run([*command, "--one", task.name()], stdout=output, stderr=output).returncode
        print(f"{task.name()}: {'done' if not code else f'failed, see {output.name}'}", flush=True)
        return code

    codes = []
    for stage in (warmups_of(tasks), tasks):
        with ThreadPoolExecutor(options.jobs) as pool:
            codes += pool.map(start, stage)
    for row in gather(runs, results):
        print(f"{row['noise']:>4}  {row['variant']:28} seed {row['seed']}  test rsum {row['test_rsum']}")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
