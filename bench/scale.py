"""`python -m bench scale`: what a run does beside the network, at 10 thousand to 3.3 million pairs, and its memory.

Makes a store of each size, with tiny features in as many shards as real ones would take and captions as long as those
of CC3M, and measures in a fresh process. Writes bench/results/scale.csv, docs/scale.svg, the tables of docs/scale.md
and what README says of an epoch, and checks the bars. Needs 4 GB of disk under --folder; what it writes there is
deleted.
"""

import argparse
import csv
import json
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.measure import RESULTS
from bench.report import write
from pcsr_fast import checkpoint, train
from pcsr_fast.config import Config
from pcsr_fast.data import store
from pcsr_fast.data.loader import batches
from pcsr_fast.division import Division, Evaluation, clean_posterior, divide, health, mixture, pair_pcs
from pcsr_fast.ops import tally

SIZES = (10_000, 100_000, 1_000_000, 3_300_000)
REGIONS, WIDTH, WORDS, EPOCH = 2, 4, 10_000, 30
ROOT = Path(__file__).parents[1]
# stages of the bar for bookkeeping: all of a division but the pass over the pairs
DIVISION = ("tally", "mixture", "threshold and subsets", "figures")
COUNTS = 256 + 6  # bytes of an image in a tally
ALLOWANCE = 16_000_000  # bytes of a stage that the number of pairs has no part in: libraries, buffers, a batch


def make_store(folder: Path, pairs: int) -> None:
    target = folder / "train"
    target.mkdir(parents=True)
    files = {}

    def keep(name: str, array: np.ndarray) -> None:
        np.save(target / name, array)
        files[name] = {"bytes": (target / name).stat().st_size, "sha256": ""}

    rng = np.random.default_rng(0)
    rows = store.SHARD_BYTES // (36 * 2048 * 2)
    for shard, begin in enumerate(range(0, pairs, rows)):
        shape = (min(rows, pairs - begin), REGIONS, WIDTH)
        keep(f"features-{shard:05}.npy", rng.random(shape, dtype=np.float32).astype(np.float16))
    # ten words in the mean and two markers
    lengths = np.clip(np.round(9.5 * np.exp(0.4 * rng.standard_normal(pairs))), 1, 60).astype(np.int64) + 2
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    keep("tokens.npy", rng.integers(4, WORDS, offsets[-1], dtype=np.int32))
    keep("offsets.npy", offsets)
    keep("image_of.npy", np.arange(pairs))
    keep("text.npy", np.full(offsets[-1] * 5, ord("a"), np.uint8))
    keep("text_offsets.npy", offsets * 5)
    entry = {"images": pairs, "pairs": pairs, "tokens": int(offsets[-1]), "regions": REGIONS, "width": WIDTH}
    entry |= {"dtype": "float16", "rows_per_shard": rows, "files": files}
    (folder / "manifest.json").write_text(json.dumps({"format": store.FORMAT, "splits": {"train": entry}}))


def anonymous() -> int:
    """Memory of the process that is no map of a file."""
    return int(re.search(r"^RssAnon:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024


def measured(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Medians of wall and CPU seconds; memory at its peak, beyond that held before, as seen every few milliseconds."""
    walls, cpus, before = [], [], anonymous()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    finally:
        done.set()
        watcher.join()
    return {"seconds": statistics.median(walls), "cpu_seconds": statistics.median(cpus), "bytes": peak - before}


def measure(folder: Path, repeats: int) -> list[dict]:
    """Every stage of an epoch on the store in a folder, once the libraries are loaded."""
    config = replace(
        Config(), embedding=16, similarity=8, word_embedding=8, classifier_hidden=8, device="cpu", refinable_from=1
    )
    rng = np.random.default_rng(0)
    mixture(rng.random(100, dtype=np.float32))
    rows = []

    def stage(name: str, call: Callable[[], object], times: int = repeats) -> None:
        rows.append({"stage": name} | measured(call, times))

    stage("open", lambda: store.open_store(folder, "train"))
    split = store.open_store(folder, "train")
    pairs = len(split)
    stage("fingerprint", lambda: checkpoint.fingerprint(split))
    stage("loader epoch", lambda: [None for _ in batches(split, config.batch_size, 0, 0)], 1 if pairs > 1e6 else 2)

    state = train.new_state(config, split, WORDS, "cpu")
    # pages of zeros exist only once they are written to
    for counts in state.tallies:
        for tensor in counts:
            tensor.fill_(0)
    labels, ids = torch.from_numpy(rng.integers(0, config.classes, pairs)), torch.arange(pairs)
    stage("tally", lambda: tally(labels, ids, state.tallies[0]))
    state.observations = 3

    clean = rng.random(pairs) < 0.7
    losses = np.where(clean, rng.normal(0.1, 0.03, pairs), rng.normal(0.3, 0.06, pairs)).astype(np.float32)
    codes, likeness = labels.numpy().astype(np.int32), (1 - 2 * losses).clip(0, 1)
    found = Evaluation(losses, codes, codes, likeness, likeness, 0.0, 0.0)
    before = clean.astype(np.float32)
    stage("mixture", lambda: clean_posterior(found, before, EPOCH, config))
    posterior = clean_posterior(found, before, EPOCH, config)[0]

    def subsets() -> Division:
        found = divide(posterior, pair_pcs(state.tallies[0], split, 3, config), 0.4, EPOCH, config)
        for subset in range(3):
            found.pairs(subset)
        return found

    stage("threshold and subsets", subsets)
    division = subsets()
    stage("figures", lambda: health(found, division, split, config))

    state.divisions = [division, subsets()]
    identity = {"train": {}, "dev": {}, "words": WORDS}
    path = folder / "last.pt"
    stage("checkpoint write", lambda: checkpoint.save(train.pack(state, config, identity, []), path))
    stage("checkpoint read", lambda: checkpoint.load(path))
    return [{"pairs": pairs} | row | {"bytes_per_pair": row["bytes"] / pairs} for row in rows]


def bars(rows: list[dict]) -> list[str]:
    """What does not hold, one line each."""
    at = {(row["pairs"], row["stage"]): row for row in rows}
    sizes = sorted({row["pairs"] for row in rows})
    found, most = [], sizes[-1]
    division = sum(at[most, stage]["seconds"] for stage in DIVISION)
    if division >= 60:
        found.append(f"bookkeeping of a division takes {division:.1f} s at {most:,} pairs, the bar is 60 s")
    for (pairs, stage), row in at.items():
        if stage.startswith("checkpoint") and row["seconds"] >= 20:
            found.append(f"{stage} takes {row['seconds']:.1f} s at {pairs:,} pairs, the bar is 20 s")
        # both tallies are read back beside those that are held
        own = row["bytes"] - ALLOWANCE - (2 * COUNTS * pairs if stage == "checkpoint read" else 0)
        if own >= 60 * pairs:
            found.append(
                f"{stage} takes {own / pairs:.0f} bytes a pair at {pairs:,} pairs, beyond {ALLOWANCE / 1e6:.0f} MB and "
                "the counts, the bar is 60"
            )
        small = at.get((100_000, stage))
        # what takes less than a hundredth of a second is no measure of growth
        if pairs > 100_000 and small and small["cpu_seconds"] > 0.01:
            growth = row["cpu_seconds"] / small["cpu_seconds"]
            if growth > 1.5 * pairs / 100_000:
                found.append(f"{stage} grows {growth:.0f} times from 100,000 to {pairs:,} pairs")
    return found


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pcsr_fast"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    sizes = sorted({row["pairs"] for row in rows})
    for stage in dict.fromkeys(row["stage"] for row in rows):
        times = [next(r["cpu_seconds"] for r in rows if (r["pairs"], r["stage"]) == (n, stage)) for n in sizes]
        axes.loglog(sizes, np.maximum(times, 1e-4), marker="o", label=stage)
    axes.loglog(sizes, [n / sizes[-1] * 100 for n in sizes], "k--", linewidth=0.8, label="linear")
    axes.set(xlabel="pairs", ylabel="CPU seconds")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def table(rows: list[dict]) -> str:
    sizes = sorted({row["pairs"] for row in rows})
    lines = [f"| stage | {' | '.join(f'{n:,}' for n in sizes)} | bytes a pair |", "| --- " * (len(sizes) + 2) + "|"]
    for stage in dict.fromkeys(row["stage"] for row in rows):
        found = {row["pairs"]: row for row in rows if row["stage"] == stage}
        times = " | ".join(f"{found[n]['seconds']:.3f} ({found[n]['cpu_seconds']:.3f})" for n in sizes)
        lines.append(f"| {stage} | {times} | {found[sizes[-1]]['bytes_per_pair']:.0f} |")
    return "\n".join(lines)


# peak tf32 flop/s of dense products and bytes/s of memory, as NVIDIA's data sheets give them
GPUS = {"A100 80 GB SXM": (156e12, 2.039e12), "H100 SXM": (494.7e12, 3.35e12)}


def epoch_costs(pairs: int = SIZES[-1], batch: int = 128) -> dict[str, tuple[float, float, str]]:
    """Computed, from the step of sgr: two networks, a pass over all pairs and a step for every batch.

    Seconds of a batch of the pass and of a step, and what an epoch takes.
    """
    with next(RESULTS.glob("amd-epyc-2.csv")).open(newline="") as file:
        steps = {r["task"]: float(r["median_us"]) / 1e6 for r in csv.DictReader(file) if r["shape"] == "f30k_128"}
    with (RESULTS / "gpu_static.csv").open(newline="") as file:
        work = {r["kernel"]: r for r in csv.DictReader(file) if r["what"].startswith("computed")}
    found = {"2 cores": (steps["scores"], steps["step, hardest negatives"])}
    for name, (flops, moved) in GPUS.items():
        both = (work[f"sgr f30k_128: {what}"] for what in ("forward", "forward and backward"))
        found[name] = tuple(max(float(w["gflop"]) * 1e9 / flops, float(w["mbytes"]) * 1e6 / moved) for w in both)
    totals = {name: 2 * -(-pairs // batch) * sum(costs) for name, costs in found.items()}
    return {
        name: (*costs, f"{totals[name] / 3600:.0f} h" if totals[name] > 36_000 else f"{totals[name] / 60:.1f} min")
        for name, costs in found.items()
    }


def epoch_table() -> str:
    lines = ["| | a pass's batch | a step | epoch |", "| --- | --- | --- | --- |"]
    for name, (scores, step, epoch) in epoch_costs().items():
        how = "bound" if name in GPUS else "amd-epyc-2, measured rate"
        lines.append(f"| {name}, {how} | {1e3 * scores:,.1f} ms | {1e3 * step:,.1f} ms | {epoch} |")
    return "\n".join(lines)


def epoch_lines(rows: list[dict]) -> str:
    """What README says of an epoch."""
    most = max(row["pairs"] for row in rows)
    seconds = {row["stage"]: row["seconds"] for row in rows if row["pairs"] == most}
    costs = {name: epoch for name, (_, _, epoch) in epoch_costs(most).items()}
    bounds = " and ".join(f"{costs[name]} on one {name}" for name in GPUS)
    division = sum(seconds[stage] for stage in DIVISION)
    return textwrap.fill(
        f"An epoch of CC3M, {most / 1e6:.1f} million pairs, *computed, not measured*: the similarities of both "
        f"networks take {costs['2 cores']} on two cores at the rates above, and at least {bounds}, bounds from "
        f"flops and bytes that no run reaches. Measured beside that: {division:.1f} s of bookkeeping for a division, "
        f"{seconds['checkpoint write']:.1f} s for a checkpoint. [How](docs/scale.md).",
        120,
        break_long_words=False,
    )


def write_pages(rows: list[dict], root: Path = ROOT) -> None:
    write(root / "docs" / "scale.md", "scale", table(rows))
    write(root / "docs" / "scale.md", "epoch", epoch_table())
    write(root / "README.md", "epoch", epoch_lines(rows))


def read_rows() -> list[dict]:
    with (RESULTS / "scale.csv").open(newline="") as file:
        return [
            {name: value if name == "stage" else float(value) for name, value in row.items()}
            | {"pairs": int(row["pairs"])}
            for row in csv.DictReader(file)
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench scale", description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, nargs="+", default=SIZES, help="sizes (default 10,000 to 3.3 million)")
    parser.add_argument("--folder", help="where to make the stores (default: the system's temporary folder)")
    parser.add_argument("--repeats", type=int, default=3, help="times that a stage is run (default 3)")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--pages", action="store_true", help="measure nothing: write the pages from what was measured")
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.store:
        print(json.dumps(measure(options.store, options.repeats)))
        return 0
    if options.pages:
        write_pages(read_rows())
        return 0
    rows = []
    for pairs in options.pairs:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            make_store(Path(name), pairs)
            command = [sys.executable, "-m", "bench.scale", "--store", name, "--repeats", str(options.repeats)]
            rows += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        print(f"{pairs:,} pairs")
        for row in rows[-len({r["stage"] for r in rows}) :]:
            print(f"  {row['stage']:24}{row['seconds']:9.3f} s {row['cpu_seconds']:9.3f} s of CPU "
                  f"{row['bytes_per_pair']:8.1f} bytes a pair")  # fmt: skip
    if not options.no_save:
        with (RESULTS / "scale.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
        plot(rows, ROOT / "docs" / "scale.svg")
        write_pages(read_rows())
    for line in (failed := bars(rows)):
        print(f"above the bar: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
