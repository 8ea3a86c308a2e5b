"""`python -m bench report`: plots, and the tables of README.md and docs/, from bench/results.

Tables stand between markers such as `<!-- bench -->` and `<!-- /bench -->`; the rest of the pages is left as it is.
"""

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.measure import MACHINE, RESULTS

ROOT = Path(__file__).parents[1]
# what a reader of the front page wants to know: of each task one size and the baseline that people have
FRONT = (
    ("sgr", "step, hardest negatives", "f30k_128", "sgr_caption_loop", "similarity: training step, 128 pairs"),
    (
        "sgr",
        "step, mean of negatives by sgr_mean",
        "f30k_128",
        "sgr_caption_loop",
        "similarity: warm-up step, 128 pairs",
    ),
    ("sgr", "scores", "f30k_128", "sgr_caption_loop", "similarity: scores of 128 x 128"),
    ("step", "features to Adam", "b128_d1024", "caption loop", "whole step, features to Adam"),
    ("evaluate", "score matrix", None, "caption_loop_in_shards", "score matrix of evaluation"),
    ("triplet", "loss and gradient", "b128", "triplet_eager", "triplet loss of 128 x 128"),
    ("gce", "loss and gradient", "b128", "gce_eager", "generalised cross entropy of 128"),
    ("tally", "update", "f30k", "argmax_scatter_add_topk", "pseudo-label counts of 128 images"),
    ("data", "batch of 128", None, "Dataset and collate_fn", "batch of 128 from a float32 map"),
    ("text", "captions to ids", None, "nltk", "2,000 captions to token ids"),
)
METHODS = ("sgr", "clean", "clean, perfect split", "pcsr as printed", "pcsr without words", "pcsr")
BASELINES = {
    "sgr_caption_loop": "loop over captions, as published",
    "sgr_grouped_compiled": "equal lengths grouped, torch.compile",
    "caption_loop_in_shards": "loop over captions, as published",
    "caption loop": "loop over captions, as published",
    **dict.fromkeys(("triplet_eager", "gce_eager", "argmax_scatter_add_topk"), "plain torch"),
    "nltk": "NLTK",
}


def read(results: Path) -> dict[str, list[dict[str, str]]]:
    """Rows of every machine."""
    found = {}
    for path in sorted(results.glob("*.csv")):
        if path.stem in ("gpu_static", "scale") or path.stem.startswith("noise_"):
            continue
        with path.open(newline="") as file:
            found[path.stem] = [*csv.DictReader(file)]
    return found


def front_table(machines: dict[str, list[dict[str, str]]]) -> str:
    """A few rows for each machine."""
    lines = []
    for machine, rows in machines.items():
        lines += [f"`{machine}`, {rows[0]['threads']} threads, torch {rows[0]['torch']}:", ""]
        lines += ["| | pcsr_fast | without | speed-up | extra memory |", "| --- | --- | --- | --- | --- |"]
        for op, task, shape, baseline, label in FRONT:
            named = [r for r in rows if (r["op"], r["task"], r["baseline"]) == (op, task, baseline)]
            row = next((r for r in named if shape in (None, r["shape"])), None)
            # a store is smaller and converts on the way; a map is what people have
            row = next((r for r in named if r["contender"] == "float32 map"), row)
            if row:
                lines.append(
                    f"| {label} | {duration(row['median_us'])} | {duration(row['baseline_median_us'])}, "
                    f"{BASELINES.get(baseline, baseline)} | **{float(row['speedup']):.1f} x** | {megabytes(row)} |"
                )
        lines.append("")
    return "\n".join(lines)


def full_table(machines: dict[str, list[dict[str, str]]]) -> str:
    lines = []
    for machine, rows in machines.items():
        lines += [f"`{machine}`, torch {rows[0]['torch']}:", ""]
        lines += ["| op | task | sizes | backend | median | against | speed-up | extra memory |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
        lines += [
            f"| {r['op']} | {r['task']} | {r['sizes']} | {r['contender']}, {r['device']}, {r['threads']} threads "
            f"| {duration(r['median_us'])} | {r['baseline']} ({duration(r['baseline_median_us'])}) "
            f"| {float(r['speedup']):.1f} x | {megabytes(r)} |"
            for r in rows
            if r["op"] != MACHINE
        ]
        lines.append("")
    return "\n".join(lines)


def test_rsums(results: Path) -> dict[str, dict[tuple[str, float], dict[str, float]]]:
    """By data set and length of training, then by method and noise, then by seed; no ablations."""
    values: dict[str, dict[tuple[str, float], dict[str, float]]] = {}
    for path in sorted(results.glob("noise_*.csv")):
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("test_rsum")]
        for row in rows:
            method, longer = re.fullmatch(r"(.*?)(, \d+ epochs)?", row["variant"]).groups("")
            if method in METHODS:
                cells = values.setdefault(f"`{row['data']}`{longer}", {})
                cells.setdefault((method, float(row["noise"])), {})[row["seed"]] = float(row["test_rsum"])
    return values


def noise_table(results: Path) -> str:
    """rsum on test by method and noise: mean over seeds, with the range where there are several."""
    lines = []
    for data, cells in test_rsums(results).items():
        ratios = sorted({ratio for _, ratio in cells})
        lines += [f"{data}, rsum on test:", "", f"| noise | {' | '.join(f'{100 * r:.0f} %' for r in ratios)} |"]
        lines.append("| --- |" + " --- |" * len(ratios))
        for method in METHODS:
            if any((method, ratio) in cells for ratio in ratios):
                found = [spread([*cells.get((method, r), {}).values()]) for r in ratios]
                lines.append(f"| {method} | {' | '.join(found)} |")
        lines.append("")
    return "\n".join(lines) or "No experiments are in `bench/results` yet.\n"


def won_back_table(results: Path, ratio: float = 0.4) -> str:
    """What each method wins back of the rsum that noise costs sgr with the same seeds, in means over them."""
    others = [method for method in METHODS if method != "sgr"]
    lines = [f"| | cost of {100 * ratio:.0f} % noise | {' | '.join(others)} |", "| --- " * (len(others) + 2) + "|"]
    for data, cells in test_rsums(results).items():
        if ("sgr", 0.0) not in cells or ("sgr", ratio) not in cells:
            continue
        best, noisy = statistics.mean(cells["sgr", 0.0].values()), cells["sgr", ratio]
        shares = []
        for method in others:
            found = {seed: x for seed, x in cells.get((method, ratio), {}).items() if seed in noisy}
            cost = sum(best - noisy[seed] for seed in found)
            won = sum(x - noisy[seed] for seed, x in found.items())
            shares.append(f"{100 * won / cost:.0f} %" if found else "")
        lines.append(f"| {data} | {best - statistics.mean(noisy.values()):.1f} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


def experiments_table(results: Path) -> str:
    """Every run of the experiments; figures of the division and the labels are network A's, of the last epoch."""
    names = {
        "final_A_split_precision": "precision", "final_A_split_recall": "recall", "final_A_classes_in_use": "classes",
        "final_A_largest_class": "largest class", "final_A_refinable_overlap": "overlap, refinable",
        "final_A_ambiguous_overlap": "overlap, ambiguous",
    }  # fmt: skip
    columns = ("data", "noise", "variant", "seed", "best_epoch", "dev_rsum", "test_rsum")
    lines = [f"| {' | '.join((*columns, *names.values())).replace('_', ' ')} |"]
    lines.append("|" + " --- |" * (len(columns) + len(names)))
    for path in sorted(results.glob("noise_*.csv")):
        with path.open(newline="") as file:
            lines += [f"| {' | '.join(row.get(c) or '' for c in (*columns, *names))} |" for row in csv.DictReader(file)]
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else ""
    return f"{statistics.mean(values):.1f} ({min(values):.0f} to {max(values):.0f}, {len(values)} seeds)"


def duration(microseconds: str) -> str:
    value = float(microseconds)
    return next(f"{value / unit:,.{digits}f} {name}" for unit, name, digits in UNITS if value >= unit or unit == 1)


UNITS = ((1e6, "s", 2), (1e3, "ms", 1), (1, "us", 0))


def megabytes(row: dict[str, str]) -> str:
    """Of the contender and of the baseline."""
    return f"{float(row['extra_mb']):,.0f} / {float(row['baseline_extra_mb']):,.0f} MB" if row.get("extra_mb") else ""


def write(page: Path, name: str, table: str) -> None:
    """Puts a table between the markers of a page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, found, rest = page.read_text().partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        sys.exit(f"{page}: no lines {begin.strip()} and {end} to write between")
    page.write_text(head + begin + table + "\n" + end + tail)


# plots


def plots(machines: dict[str, list[dict[str, str]]], folder: Path) -> list[Path]:
    """Time and memory of a step, speed-ups of all tasks, and the roofline, of the machine with most results."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}
    )
    folder.mkdir(parents=True, exist_ok=True)
    rows = max(machines.values(), key=len)
    made = []
    for name, draw in (("step", step_plot), ("speedups", speedup_plot), ("roofline", roofline_plot)):
        if (figure := draw(pyplot, rows)) is not None:
            figure.savefig(folder / f"{name}.png", dpi=130)
            pyplot.close(figure)
            made.append(folder / f"{name}.png")
    return made


def step_plot(pyplot, rows: list[dict[str, str]]):
    """Time and memory of a training step at Flickr30K's sizes."""
    wanted = ("sgr", "step, hardest negatives", "f30k_128")
    rows = [r for r in rows if (r["op"], r["task"], r["shape"]) == wanted]
    if not rows:
        return None
    bars = {"pcsr_fast": (float(rows[0]["median_us"]) / 1e6, float(rows[0]["extra_mb"]))}
    for r in rows:
        label = BASELINES.get(r["baseline"], r["baseline"]).replace(", ", "\n")
        bars[label] = (float(r["baseline_median_us"]) / 1e6, float(r["baseline_extra_mb"]))
    bars = dict(sorted(bars.items(), key=lambda item: item[1]))
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 2.3), sharey=True)
    colours = ["#0072b2" if name == "pcsr_fast" else "#b8b8b8" for name in bars]
    for axis, k, title, form in ((axes[0], 0, "seconds", "{:.1f} s"), (axes[1], 1, "extra memory", "{:,.0f} MB")):
        values = [value[k] for value in bars.values()]
        found = axis.barh([*bars], values, color=colours)
        axis.bar_label(found, [form.format(v) for v in values], padding=4)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlim(0, 1.25 * max(values))
        axis.set_xticks([])
        axis.spines["bottom"].set_visible(False)
        axis.invert_yaxis() if k == 0 else None
    figure.suptitle(
        "One training step of SGR's similarity, 128 pairs, two CPU threads", x=0.01, ha="left", fontweight="bold"
    )
    return figure


def speedup_plot(pyplot, rows: list[dict[str, str]]):
    rows = [r for r in rows if r["op"] != MACHINE]
    named = {"native", "tiles"}
    kinds = ["" if r["contender"] in named else f" ({r['contender']})" for r in rows]
    labels = [
        f"{r['op']}: {r['task']}, {r['shape']}{k}, against {r['baseline']}" for r, k in zip(rows, kinds, strict=True)
    ]
    figure, axis = pyplot.subplots(figsize=(10, 0.24 * len(rows) + 0.8))
    values = [float(r["speedup"]) for r in rows]
    axis.bar_label(axis.barh(range(len(rows)), values, color="#0072b2"), [f"{v:.1f} x" for v in values], padding=3)
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.set_xscale("log")
    axis.axvline(1, color="black", linewidth=1)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel("times as fast")
    return figure


def roofline_plot(pyplot, rows: list[dict[str, str]]):
    """Rate of every op against its arithmetic intensity, from the least flops and bytes that it needs."""
    points = {}
    for r in rows:
        # what a step needs beyond its scores depends on the negatives
        if float(r.get("least_flops") or 0) > 0 and not r["task"].startswith("step"):
            flops, moved = float(r["least_flops"]), float(r["least_bytes"])
            rate = flops / float(r["median_us"]) / 1e3
            points[f"{r['op']} {r['shape']}, {r['task']}"] = (flops / moved, rate, r.get("share_of_mm"))
    if not points:
        return None
    figure, axis = pyplot.subplots(figsize=(7.5, 4))
    peaks = [rate / float(share) for _, rate, share in points.values() if share]
    copies = [float(r["least_bytes"]) / float(r["median_us"]) / 1e3 for r in rows if r["op"] == MACHINE]
    x = [min(p[0] for p in points.values()) / 2, max(p[0] for p in points.values()) * 2]
    if peaks:
        axis.axhline(
            statistics.median(peaks), color="#888888", label=f"torch.mm, {statistics.median(peaks):.0f} GFLOP/s"
        )
    if copies:
        axis.plot(x, [copies[0] * value for value in x], ":", color="#888888", label=f"copy, {copies[0]:.0f} GB/s")
    for op in dict.fromkeys(name.partition(" ")[0] for name in points):
        mine = [(i, rate) for name, (i, rate, _) in points.items() if name.startswith(f"{op} ")]
        axis.scatter(*zip(*mine, strict=True), label=op, s=30)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(*x)
    axis.set_xlabel("flops per byte that must be moved")
    axis.set_ylabel("GFLOP/s")
    axis.legend(frameon=False, fontsize=9)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench report", description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="default bench/results")
    parser.add_argument("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    options = parser.parse_args(arguments)
    machines = read(options.results)
    if not machines:
        sys.exit(f"{options.results}: no results; run python -m bench")
    write(options.root / "README.md", "bench", front_table(machines))
    write(options.root / "README.md", "noise", noise_table(options.results))
    write(options.root / "docs" / "benchmarks.md", "bench", full_table(machines))
    write(options.root / "docs" / "experiments.md", "experiments", experiments_table(options.results))
    write(options.root / "docs" / "experiments.md", "won", won_back_table(options.results))
    for path in plots(machines, options.root / "docs" / "figures"):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
