"""`pcsr-fast report`: one HTML page that needs no other file, and its figures as PNG, from the folder of a run."""

import base64
import dataclasses
import html
import io
import json
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np

from pcsr_fast.audit import Suggestions
from pcsr_fast.config import SUBSETS, Config
from pcsr_fast.data.files import write_whole
from pcsr_fast.data.loader import captions_of
from pcsr_fast.data.sample import draw
from pcsr_fast.data.split import Split
from pcsr_fast.run import Run
from pcsr_fast.search import caption_scores, caption_text, image_scores

NETWORKS = ("A", "B")
# readable for the colour-blind, on white
COLOURS = {"A": "#0072b2", "B": "#d55e00", "mean": "#222222", "clean": "#009e73", "refinable": "#e69f00",
           "ambiguous": "#cc79a7", "divide": "#56b4e9", "train": "#0072b2", "validate": "#999999"}  # fmt: skip
OTHERS = ("#d55e00", "#009e73", "#cc79a7", "#56b4e9")
EXAMPLES, QUERIES, HITS = 4, 3, 5
UNITS = ((3600, "h"), (60, "min"), (1, "s"))


def write(run: Run, out: Path | str | None = None, against: Iterable[Run] = ()) -> Path:
    """Writes index.html and the figures into a folder, RUN/report unless named; returns the page."""
    if not run.records:
        raise ValueError(f"{run.folder} has no finished epoch yet: there is nothing to report")
    pyplot = _pyplot()
    folder = Path(out) if out is not None else run.folder / "report"
    against = list(against)
    figures: dict[str, list[bytes]] = {}
    for name, panels in FIGURES.items():
        for number, panel in enumerate(panels(pyplot, run, against), 1):
            panel.savefig(stream := io.BytesIO(), format="png", dpi=150)
            pyplot.close(panel)
            figures.setdefault(name, []).append(png := stream.getvalue())
            write_whole(folder / f"{name}-{number}.png", lambda file, png=png: file.write(png))
    page = _page(run, against, figures)
    write_whole(folder / "index.html", lambda file: file.write(page.encode()))
    return folder / "index.html"


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ValueError("matplotlib is not installed: pip install matplotlib, or pip install '.[report]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({
        "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.spines.top": False,
        "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False,
        "figure.constrained_layout.use": True,
    })  # fmt: skip
    return pyplot


# figures: each takes pyplot, the run and others to compare with, and returns its panels, none where there is no data


def _panels(pyplot, titles: Iterable[str]) -> tuple[list, list]:
    """Figures of one axis each, so that a page can put them side by side or one below the other."""
    figures, axes = [], []
    for title in titles:
        figure, axis = pyplot.subplots(figsize=(4.6, 3.1))
        axis.set_title(title, loc="left")
        figures.append(figure)
        axes.append(axis)
    return figures, axes


def _mark_stages(axis, records: list[dict]) -> None:
    """A line where a stage begins."""
    axis.set_xlabel("epoch")
    axis.xaxis.get_major_locator().set_params(integer=True)
    for before, record in pairwise(records):
        if before["stage"] != record["stage"]:
            axis.axvline(record["epoch"] - 0.5, color="#bbbbbb", linewidth=1, linestyle=":")


def _plot(axis, records: list[dict], key: str, label: str, colour: str | None = None, style: str = "-") -> None:
    """A curve over the epochs that have this figure."""
    found = [(r["epoch"], r[key]) for r in records if r.get(key) is not None]
    if found:
        axis.plot(*zip(*found, strict=True), style, label=label, color=colour, marker="." if len(found) < 30 else None)


def recall_figure(pyplot, run: Run, against: list[Run]):
    figures, (left, right) = _panels(pyplot, ("rsum on dev", "R@1 on dev, mean of A and B"))
    for name in NETWORKS:
        _plot(left, run.records, f"dev_{name}_rsum", f"network {name}", COLOURS[name], "--")
    _plot(left, run.records, "rsum", "mean of A and B" if not against else label_of(run, against), COLOURS["mean"])
    for other, colour in zip(against, OTHERS * len(against), strict=False):
        _plot(left, other.records, "rsum", label_of(other, [run, *against]), colour)
    _plot(right, run.records, "dev_mean_i2t_r1", "image to text", COLOURS["A"])
    _plot(right, run.records, "dev_mean_t2i_r1", "text to image", COLOURS["B"])
    for axis in (left, right):
        _mark_stages(axis, run.records)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=9)
    return figures


def loss_figure(pyplot, run: Run, against: list[Run]):
    """Whatever parts the log has: the triplet by subset, and all others."""
    pattern = re.compile(r"A_(all|clean|refinable|ambiguous)_(\w+)")
    left_out = {"loss", "steps", "bad_steps", "gradient_norm", "pairs"}
    found = (pattern.fullmatch(key) for record in run.records for key in record)
    parts = {m[0]: (m[1], m[2]) for m in found if m and m[2] not in left_out}
    triplets = {key: subset for key, (subset, part) in parts.items() if part == "triplet"}
    others = {key: f"{part}, {subset}" for key, (subset, part) in parts.items() if part != "triplet"}
    if not triplets:
        return []
    titles = ("triplet loss per pair", "other parts (network A)")
    figures, axes = _panels(pyplot, titles if others else titles[:1])
    for key, subset in triplets.items():
        colour = COLOURS.get(subset, COLOURS["mean"])
        _plot(axes[0], run.records, key, f"{subset} pairs, A", colour)
        _plot(axes[0], run.records, key.replace("A_", "B_", 1), f"{subset} pairs, B", colour, "--")
    for key, label in others.items():
        _plot(axes[1], run.records, key, label)
    for axis in axes:
        _mark_stages(axis, run.records)
        axis.legend(fontsize=8)
    return figures


def _divided(run: Run) -> list[dict]:
    return [r for r in run.records if "A_loss_histogram" in r]


def _histogram(axis, record: dict, key: str, end: float) -> np.ndarray:
    """Bars from 0 to end; those known to be mismatched stand on top. Returns the counts."""
    counts, wrong = np.array(record[key]), record.get(f"{key}_mismatched")
    known = wrong is not None
    matched = counts - wrong if known else counts
    place = dict(x=np.linspace(0, end, len(counts), endpoint=False), width=end / len(counts), align="edge")
    axis.bar(height=matched, color="#8cc6a8", label="matched" if known else "pairs", **place)
    if known:
        axis.bar(height=wrong, bottom=matched, color="#e9b48a", label="mismatched", **place)
    axis.set_ylabel("pairs")
    return counts


def mixture_figure(pyplot, run: Run, against: list[Run]):
    """The first and the last division of network A and B: histogram, fitted components, what is known to be wrong."""
    if not (records := _divided(run)):
        return []
    last = records[-1]
    shown = [(name, record) for record in {r["epoch"]: r for r in (records[0], last)}.values() for name in NETWORKS]
    figures, axes = _panels(pyplot, [f"{name}, epoch {record['epoch']}" for name, record in shown])
    for axis, (name, record) in zip(axes, shown, strict=True):
        counts = _histogram(axis, record, f"{name}_loss_histogram", 1.0)
        x, width = np.linspace(0, 1, 300), 1 / len(counts)
        for (weight, mean, deviation), colour in zip(record[f"{name}_mixture"], ("#00624a", "#a03c00"), strict=True):
            density = weight * np.exp(-0.5 * ((x - mean) / deviation) ** 2) / (deviation * np.sqrt(2 * np.pi))
            axis.plot(x, density * counts.sum() * width, color=colour)
        axis.set_ylim(0, 1.15 * counts.max())
        axis.set_xlabel("loss, scaled to 0..1")
        axis.legend(fontsize=9)
    return figures


def division_figure(pyplot, run: Run, against: list[Run]):
    records = [r for r in run.records if "A_clean_pairs" in r]
    if not records:
        return []
    titles = ("pairs by subset (A)", "share of noisy pairs refined", "threshold tau of PCS")
    figures, (sizes, share, tau) = _panels(pyplot, titles)
    epochs = [r["epoch"] for r in records]
    total = sum(records[0][f"A_{name}_pairs"] for name in SUBSETS)
    stack = [[100 * r[f"A_{name}_pairs"] / total for r in records] for name in SUBSETS]
    bottom = np.zeros(len(epochs))
    for name, values in zip(SUBSETS, stack, strict=True):
        sizes.bar(epochs, values, 0.8, bottom=bottom, label=name, color=COLOURS[name])
        bottom = bottom + values
    sizes.set_ylabel("% of pairs")
    sizes.set_ylim(0, 122)
    sizes.set_yticks(range(0, 101, 25))
    sizes.legend(fontsize=9, loc="upper center", ncols=3)
    _plot(share, records, "A_target", "target", COLOURS["mean"], ":")
    for name in NETWORKS:
        _plot(share, records, f"{name}_utilisation", name, COLOURS[name])
        _plot(tau, records, f"{name}_tau", name, COLOURS[name])
    share.set_ylim(0, 1.02)
    for axis in (sizes, share, tau):
        _mark_stages(axis, records)
    share.legend(fontsize=9)
    if tau.lines:
        tau.legend(fontsize=9)
    else:
        tau.text(0.5, 0.5, "not in use yet", ha="center", transform=tau.transAxes)
    return figures


def consistency_figure(pyplot, run: Run, against: list[Run]):
    if not (records := _divided(run)):
        return []
    last = records[-1]
    titles = [f"PCS of pairs ({name}), epoch {last['epoch']}" for name in NETWORKS]
    figures, axes = _panels(pyplot, titles)
    for axis, name in zip(axes, NETWORKS, strict=True):
        _histogram(axis, last, f"{name}_pcs_histogram", last[f"{name}_pcs_range"][1])
        if last.get(f"{name}_tau") is not None:
            axis.axvline(last[f"{name}_tau"], color=COLOURS[name], label="tau")
        axis.set_xlabel("consistency of the image's pseudo-labels")
        axis.legend(fontsize=9)
    return figures


def split_figure(pyplot, run: Run, against: list[Run]):
    """How right the division is, where the noise is known."""
    records = [r for r in run.records if "A_split_precision" in r]
    if not records:
        return []
    titles = ("precision of clean", "recall of clean", "area under ROC")
    figures, axes = _panels(pyplot, titles)
    for axis, key in zip(axes, ("split_precision", "split_recall", "split_auc"), strict=True):
        for name in NETWORKS:
            _plot(axis, records, f"{name}_{key}", name, COLOURS[name])
        _mark_stages(axis, records)
        axis.set_ylim(0, 1.02)
        axis.legend(fontsize=9)
    return figures


def health_figure(pyplot, run: Run, against: list[Run]):
    records = [r for r in run.records if "A_classes_in_use" in r]
    if not records or run.config.method != "pcsr":
        return []
    titles = ("pseudo-classes in use", "share of the largest class", "agreement of image and caption")
    figures, (classes, largest, agreement) = _panels(pyplot, titles)
    for name in NETWORKS:
        _plot(classes, records, f"{name}_classes_in_use", name, COLOURS[name])
        _plot(largest, records, f"{name}_largest_class", name, COLOURS[name])
        _plot(agreement, records, f"{name}_agreement_clean", f"{name}, clean pairs", COLOURS[name])
        _plot(agreement, records, f"{name}_agreement_noisy", f"{name}, noisy pairs", COLOURS[name], "--")
    classes.axhline(run.config.classes / 4, color="#888888", linestyle=":", label="wanted: at least")
    largest.axhline(0.1, color="#888888", linestyle=":", label="wanted: at most")
    for axis in (classes, largest, agreement):
        _mark_stages(axis, records)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    return figures


def time_figure(pyplot, run: Run, against: list[Run]):
    records = [r for r in run.records if "train_seconds" in r]
    if not records:
        return []
    figures, (axis,) = _panels(pyplot, ("seconds per epoch",))
    bottom = np.zeros(len(records))
    for phase in ("divide", "train", "validate"):
        values = [r[f"{phase}_seconds"] for r in records]
        axis.bar([r["epoch"] for r in records], values, 0.8, bottom=bottom, label=phase, color=COLOURS[phase])
        bottom = bottom + values
    _mark_stages(axis, records)
    axis.legend(fontsize=9)
    return figures


FIGURES = {
    "recall": recall_figure,
    "loss": loss_figure,
    "mixture": mixture_figure,
    "division": division_figure,
    "consistency": consistency_figure,
    "split": split_figure,
    "health": health_figure,
    "time": time_figure,
}
CAPTIONS = {
    "recall": ("Retrieval", "Sum of R@1, 5 and 10 in both directions. Dotted lines: a new stage begins."),
    "loss": ("Losses", "Means over the steps of an epoch."),
    "mixture": (
        "Loss of every pair, and the mixture",
        "Two normal distributions are fitted to the losses of all pairs; a pair that more likely comes from the left "
        "one is clean. Colours of the bars show which pairs are known to be mismatched.",
    ),
    "division": (
        "Division",
        "Noisy pairs whose image gets the same pseudo-label again and again are refinable, the others ambiguous; tau "
        "moves so that the share of refined pairs follows its target.",
    ),
    "consistency": (
        "Consistency of pseudo-labels",
        "PCS: how much more often an image's first pseudo-label was seen than its second.",
    ),
    "split": ("Is the division right?", "Against the noise that was put in."),
    "health": ("Health of the pseudo-labels", "Few classes, or one large class, mean that they have collapsed."),
    "time": ("Time", "Since the epoch began, or was resumed."),
}


# the page


def _page(run: Run, against: list[Run], figures: dict[str, list[bytes]]) -> str:
    title = f"pcsr_fast: {run.folder.resolve().name}"
    parts = [f"<h1>{html.escape(run.folder.resolve().name)}</h1>", _summary(run), _recall_table(run, against)]
    for name in ("recall", "mixture", "split", "division", "consistency", "health", "loss", "time"):
        if name in figures:
            heading, text = CAPTIONS[name]
            panels = "".join(_image(panel, heading, "figure") for panel in figures[name])
            parts.append(
                f'<h2>{heading}</h2><p>{html.escape(text)}</p><div class="panels of{len(figures[name])}">{panels}</div>'
            )
    parts += [_examples(run), _retrieval(run), _settings(run)]
    body = "\n".join(part for part in parts if part)
    return PAGE.replace("{title}", html.escape(title)).replace("{body}", body)


def label_of(run: Run, others: list[Run]) -> str:
    """The folder's name, with its parent where others are called the same."""
    path = run.folder.resolve()
    same = [other for other in others if other is not run and other.folder.resolve().name == path.name]
    return f"{path.parent.name}/{path.name}" if same else path.name


def _summary(run: Run) -> str:
    best = max(run.records, key=lambda r: r["rsum"])
    seconds = sum(r["seconds"] for r in run.records)
    noise = run.data.noise
    drawn = f"{100 * noise:.0f} %, {run.data.noise_protocol}s" if isinstance(noise, float | int) else Path(noise).name
    tiles = {
        "best rsum on dev": f"{best['rsum']:.1f}",
        "in epoch": f"{best['epoch']} of {len(run.records)}",
        "method": run.config.method,
        "noise": drawn if noise else "none added",
        "time": next(f"{seconds / unit:.1f} {name}" for unit, name in UNITS if seconds >= 2 * unit or unit == 1),
        "peak memory": f"{run.records[-1].get('memory_gb', 0):.1f} GB",
    }
    cells = (f"<div><b>{html.escape(str(value))}</b><span>{key}</span></div>" for key, value in tiles.items())
    return f'<div class="tiles">{"".join(cells)}</div>'


def _recall_table(run: Run, against: list[Run]) -> str:
    names = ["rsum", *(f"{side}_r{k}" for side in ("i2t", "t2i") for k in (1, 5, 10))]
    head = ["", *(n.replace("_r", " R@") for n in names)]
    rows = []
    for one in [run, *against]:
        best = max(one.records, key=lambda r: r["rsum"])
        prefix = f"{label_of(one, [run, *against])}: " if against else ""
        figures = {f"{prefix}dev, epoch {best['epoch']}": {n: best[f"dev_mean_{n}"] for n in names}}
        for path in sorted(one.folder.glob("evaluation_*.json")):
            split = path.stem.removeprefix("evaluation_")
            for name, found in json.loads(path.read_text()).items():
                if name.startswith("mean"):
                    figures[f"{prefix}{split}{name.removeprefix('mean')}"] = found
        rows += [[label, *(f"{found[n]:.1f}" for n in names)] for label, found in figures.items()]
    return _table(rows, head, "figures")


def _table(rows: list[list[str]], head: list[str] | None = None, kind: str = "texts") -> str:
    top = f"<tr>{''.join(f'<th>{html.escape(x)}</th>' for x in head)}</tr>" if head else ""
    lines = "".join(f"<tr>{''.join(f'<td>{html.escape(str(x))}</td>' for x in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}">{top}{lines}</table></div>'


def _image(png: bytes, text: str, kind: str) -> str:
    data = base64.b64encode(png).decode()
    return f'<img class="{kind}" alt="{html.escape(text)}" src="data:image/png;base64,{data}">'


def _picture(run: Run, split: str, image: int, kind: str = "picture") -> str:
    """An image of the sample set as it looks; of other data, its number."""
    if not run.data.is_sample:
        names = run.data.image_names(split)
        return f'<div class="{kind} number">image {html.escape(names[image] if names else str(image))}</div>'
    from matplotlib import image as images

    pixels = np.repeat(draw(split, image, scale=5)[..., None], 3, 2)
    images.imsave(stream := io.BytesIO(), pixels, format="png")
    return _image(stream.getvalue(), f"image {image}", kind)


def _examples(run: Run) -> str:
    """Pairs that both networks put into the same subset, those they are surest of first."""
    if not (run.folder / "division.npy").exists() or not (run.folder / "best.pt").exists():
        return ""
    split, division = run.split("train"), run.division
    known = not np.array_equal(split.image_of, split.true_image)
    belief = division["A_posterior"] + division["B_posterior"]
    suggest = None
    parts = ["<h2>Examples</h2><p>Pairs of the last division, on which both networks agree.</p>"]
    for code, name in enumerate(SUBSETS):
        both = np.flatnonzero((division["A_subset"] == code) & (division["B_subset"] == code))
        order = np.argsort(-belief[both] if name == "clean" else belief[both], kind="stable")
        # an image once
        _, first = np.unique(split.image_of[both[order]], return_index=True)
        chosen = both[order][np.sort(first)[:EXAMPLES]]
        heading = f"<h3>{name.capitalize()}</h3>"
        if not len(chosen):
            parts.append(f"{heading}<p>None that both networks agree on.</p>")
            continue
        suggested = [None] * len(chosen)
        if name == "refinable":
            suggest = suggest or Suggestions(run, split, division)
            suggested = suggest(chosen).tolist()
        cards = "".join(
            _card(run, split, int(pair), other, known) for pair, other in zip(chosen, suggested, strict=True)
        )
        parts.append(f'{heading}<div class="cards">{cards}</div>')
    return "\n".join(parts)


def _card(run: Run, split: Split, pair: int, suggested: int | None, known: bool) -> str:
    image = int(split.image_of[pair])
    caption = html.escape(caption_text(run, split, pair))
    struck = suggested is not None and suggested >= 0
    text = f"<s>{caption}</s>" if struck else caption
    if struck:
        text += f"<br>➜ {html.escape(caption_text(run, split, suggested))}"
    truth = ""
    if known:
        right = image == int(split.true_image[pair])
        truth = f'<small class="{"right" if right else "wrong"}">{"a true pair" if right else "a false pair"}</small>'
    return f"<figure>{_picture(run, 'train', image)}<figcaption>{text}{truth}</figcaption></figure>"


def _retrieval(run: Run) -> str:
    """A few queries in both directions on test, or on dev where there is no test."""
    if not (run.folder / "best.pt").exists():
        return ""
    try:
        name, split = "test", run.split("test")
    except (ValueError, OSError):
        name, split = "dev", run.split("dev")
    # a caption each of images spread over the split
    images = np.unique(np.linspace(0, split.images - 1, QUERIES + 2)[1:-1].astype(int))
    captions = np.array([np.flatnonzero(split.image_of == image)[0] for image in images])
    parts = [f"<h2>Retrieval results</h2><p>Queries from {name}; right answers are framed.</p><h3>Text to image</h3>"]
    for caption, scores in zip(
        captions, image_scores(run.networks, split, *captions_of(split, captions)).T, strict=True
    ):
        hits = []
        for i in scores.topk(min(HITS, len(scores))).indices.tolist():
            kind = "hit right" if i == split.image_of[caption] else "hit"
            hits.append(f'<div class="{kind}">{_picture(run, name, i, "small")}</div>')
        query = html.escape(caption_text(run, split, int(caption)))
        parts.append(f'<p class="query">{query}</p><div class="hits">{"".join(hits)}</div>')
    parts.append("<h3>Image to text</h3>")
    for image, row in zip(images.tolist(), caption_scores(run.networks, split, images), strict=True):
        lines = ""
        for n in row.topk(min(HITS, len(row))).indices.tolist():
            kind = "right" if split.image_of[n] == image else ""
            lines += f'<li class="{kind}">{html.escape(caption_text(run, split, n))}</li>'
        parts.append(f'<div class="answer">{_picture(run, name, image)}<ol>{lines}</ol></div>')
    return "\n".join(parts)


def _settings(run: Run) -> str:
    default = Config()
    rows = []
    for name in Config.__dataclass_fields__:
        value, usual = getattr(run.config, name), getattr(default, name)
        rows.append([name, _shown(value), "" if value == usual else _shown(usual)])
    data = [[key, _shown(value)] for key, value in dataclasses.asdict(run.data).items()]
    return (
        f"<h2>Settings</h2>{_table(rows, ['setting', 'value', 'default, where it differs'])}<h2>Data</h2>{_table(data)}"
    )


def _shown(value) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root { color-scheme: light dark; --text: #1d1d1f; --soft: #6a6a70; --back: #fbfbfa; --card: #fff; --line: #dcdcd8;
        --right: #00805c; --wrong: #b3541e; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ececec; --soft: #a2a2a8; --back: #17181a; --card: #222326; --line: #3a3b3f; --right: #4fd0a5;
          --wrong: #f0a070; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 16px 16px 64px; color: var(--text); background: var(--back);
       font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; margin: .4em 0; }
h2 { font-size: 1.25rem; margin: 2.2em 0 .2em; }
h3 { font-size: 1rem; margin: 1.4em 0 .4em; }
p { margin: .2em 0 .8em; color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; margin: 12px 0 20px; }
.tiles div, figure, .answer { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px; }
.tiles b { display: block; font-size: 1.15rem; }
.tiles span, small { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100%; }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.figures th, .figures td { white-space: nowrap; text-align: right; }
.figures td:first-child { text-align: left; }
.texts td { overflow-wrap: anywhere; }
.panels { display: grid; gap: 10px; }
@media (min-width: 700px) {
  .of2, .of4 { grid-template-columns: 1fr 1fr; }
  .of3 { grid-template-columns: 1fr 1fr 1fr; }
}
img.figure { width: 100%; max-width: 620px; background: #fff; border: 1px solid var(--line); border-radius: 8px;
  padding: 6px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 12px; }
figure { margin: 0; }
figcaption { font-size: .92rem; margin-top: 8px; }
figcaption small { display: block; margin-top: 4px; }
s { color: var(--soft); }
.picture, .small { width: 120px; max-width: 100%; aspect-ratio: 1; border-radius: 4px; display: block;
  background: #fff; }
.small { width: 100%; }
.number { display: grid; place-items: center; color: #1d1d1f; font-size: .85rem; background: #e8e8e4;
  overflow-wrap: anywhere; }
.query { margin: 1em 0 .4em; color: var(--text); }
.hits { display: grid; grid-template-columns: repeat(5, 1fr); gap: 8px; max-width: 640px; }
.hit { border: 3px solid transparent; border-radius: 8px; padding: 2px; }
.hit.right { border-color: var(--right); }
.answer { display: flex; gap: 16px; margin-bottom: 12px; align-items: flex-start; flex-wrap: wrap; }
.answer ol { margin: 0; padding-left: 1.4em; flex: 1 1 260px; font-size: .92rem; }
li.right, small.right { color: var(--right); font-weight: 600; }
small.wrong { color: var(--wrong); font-weight: 600; }
</style>
</head>
<body>
{body}
</body>
</html>
"""
