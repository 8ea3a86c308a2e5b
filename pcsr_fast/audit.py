"""What two trained networks think of every training pair, as a table: a list of the pairs that do not match.

A pair that is not clean gets a caption suggested: of up to 4,096 clean pairs, those whose image has the most similar
pseudo-label are candidates, as in training, and the one that scores best with the image is taken.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from pcsr_fast.config import SUBSETS
from pcsr_fast.data.files import write_whole
from pcsr_fast.data.split import Split
from pcsr_fast.evaluate import pair_scores
from pcsr_fast.rematch import unit_predictions
from pcsr_fast.run import Run
from pcsr_fast.search import caption_text, pieces_of_images

CHUNK, BANK, CANDIDATES = 4096, 4096, 8
FIGURES = tuple(f"{network}_{name}" for name in ("posterior", "loss", "pcs", "subset") for network in "AB")


def audit(run: Run, out: Path | str, worst: int | None = None, suggest: bool = True) -> Path:
    """Writes a row for every training pair, or for the `worst` most suspicious, those first; .csv or .parquet.

    `mismatch` is 1 - the mean posterior of both networks; `known_mismatch` is there where the noise is known.
    """
    out = Path(out)
    if out.suffix not in (".csv", ".parquet"):
        raise ValueError(f"{out}: the table is written as .csv or .parquet")
    if worst is not None and worst < 1:
        raise ValueError(f"worst must be at least 1, got {worst}")
    if out.suffix == ".parquet":
        _pyarrow()
    split, division = run.split("train"), run.division
    order = np.arange(len(split))
    if worst is not None:
        order = np.argsort(division["A_posterior"] + division["B_posterior"], kind="stable")[:worst]
    rows = _rows(run, split, division, order, Suggestions(run, split, division) if suggest else None)
    (_write_parquet if out.suffix == ".parquet" else _write_csv)(out, rows)
    return out


class Suggestions:
    """Clean pairs to take captions from: up to BANK of those that both networks call clean, drawn with a fixed seed."""

    def __init__(self, run: Run, split: Split, division: np.ndarray):
        self.run, self.split = run, split
        clean = np.flatnonzero((division["A_subset"] == 0) & (division["B_subset"] == 0))
        generator = np.random.default_rng(0)
        self.pairs = np.sort(generator.choice(clean, min(BANK, len(clean)), replace=False))
        self.images = np.asarray(split.image_of[self.pairs])
        # of each network [M, K], unit vectors
        self.predictions = self._predict(self.images, "clean images") if len(clean) else []

    def __call__(self, pairs: np.ndarray) -> np.ndarray:  # int [P] -> int [P]
        """The suggested pair, whose caption fits; -1 where no clean pair is there."""
        if not len(self.pairs) or not len(pairs):
            return np.full(len(pairs), -1)
        images = np.asarray(self.split.image_of[pairs])
        found = []
        for start in range(0, len(pairs), 256):
            some = images[start : start + 256]
            alike = sum(own @ bank.T for own, bank in zip(self._predict(some), self.predictions, strict=True))
            at = alike.topk(min(CANDIDATES, len(self.pairs)), dim=1).indices.cpu().numpy()
            candidates = self.pairs[at]
            scores = pair_scores(
                self.run.networks, self.split, np.repeat(some, candidates.shape[1]), candidates.ravel()
            ).view(candidates.shape)
            found.append(np.take_along_axis(candidates, scores.argmax(1, keepdim=True).numpy(), 1)[:, 0])
        return np.concatenate(found)

    @torch.no_grad()
    def _predict(self, images: np.ndarray, what: str | None = None) -> list[torch.Tensor]:
        networks = self.run.networks
        device = next(networks[0].parameters()).device
        parts: list[list[torch.Tensor]] = [[] for _ in networks]
        for _, features in pieces_of_images(self.split, images, what):
            for network, part in zip(networks, parts, strict=True):
                logits = network.image_logits(network.encode_images(features.to(device)))
                part.append(unit_predictions(logits, self.run.config))
        return [torch.cat(part) for part in parts]


def _rows(
    run: Run, split: Split, division: np.ndarray, order: np.ndarray, suggest: Suggestions | None
) -> Iterator[dict[str, list]]:
    """Columns of a chunk of pairs at a time."""
    names = run.data.image_names("train")
    known = not np.array_equal(split.image_of, split.true_image)
    with tqdm(total=len(order), desc="audit", unit="pair", disable=None) as bar:
        for start in range(0, len(order), CHUNK):
            pairs = order[start : start + CHUNK]
            chunk, images = division[pairs], np.asarray(split.image_of[pairs])
            columns: dict[str, list] = {
                "pair": pairs.tolist(),
                "image": images.tolist(),
                "image_name": [names[i] for i in images] if names else [""] * len(pairs),
                "caption": [caption_text(run, split, n) for n in pairs.tolist()],
                "mismatch": _rounded(1 - (chunk["A_posterior"] + chunk["B_posterior"]) / 2),
            }
            for name in FIGURES:
                subset = name.endswith("subset")
                columns[name] = np.array(SUBSETS)[chunk[name]].tolist() if subset else _rounded(chunk[name])
            suggested = np.full(len(pairs), -1)
            if suggest is not None:
                noisy = (chunk["A_subset"] != 0) | (chunk["B_subset"] != 0)
                suggested[noisy] = suggest(pairs[noisy])
            columns["suggested_pair"] = [None if n < 0 else n for n in suggested.tolist()]
            columns["suggested_caption"] = ["" if n < 0 else caption_text(run, split, n) for n in suggested.tolist()]
            if known:
                columns["known_mismatch"] = (images != split.true_image[pairs]).astype(int).tolist()
            yield columns
            bar.update(len(pairs))


def _rounded(values: np.ndarray) -> list[float]:
    return values.astype(np.float64).round(6).tolist()


def _write_csv(out: Path, rows: Iterator[dict[str, list]]) -> None:
    def write(file) -> None:
        text = io.TextIOWrapper(file, "utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        for number, columns in enumerate(rows):
            if number == 0:
                writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
        # flushed, and left open for its owner
        text.detach()

    write_whole(out, write)


def _write_parquet(out: Path, rows: Iterator[dict[str, list]]) -> None:
    pyarrow, parquet = _pyarrow()

    def write(file) -> None:
        writer = None
        for columns in rows:
            # a chunk without suggestions does not tell the column's type
            table = pyarrow.table(columns | {"suggested_pair": pyarrow.array(columns["suggested_pair"], "int64")})
            writer = writer or parquet.ParquetWriter(file, table.schema)
            writer.write_table(table)
        writer.close()

    write_whole(out, write)


def _pyarrow():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError("pyarrow is not installed: pip install pyarrow, or write .csv") from None
    return pyarrow, pyarrow.parquet
