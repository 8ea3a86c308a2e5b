"""`python -m bench.report`: writes the table of results into README.md, between its markers."""

import csv
import sys
from pathlib import Path

from bench.measure import RESULTS

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- bench -->\n", "<!-- /bench -->"


def table(results: Path) -> str:
    lines = []
    for path in sorted(results.glob("*.csv")):
        if path.stem in ("gpu_static", "scale"):
            continue
        with path.open(newline="") as file:
            rows = [*csv.DictReader(file)]
        lines += [f"`{path.stem}`, torch {rows[0]['torch']}:", ""]
        lines += ["| op | task | sizes | backend | median | against | speed-up | extra memory |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
        lines += [
            f"| {r['op']} | {r['task']} | {r['sizes']} | {r['contender']}, {r['device']}, {r['threads']} threads "
            f"| {float(r['median_us']):,.0f} us | {r['baseline']} ({float(r['baseline_median_us']):,.0f} us) "
            f"| {float(r['speedup']):.1f} x | {megabytes(r)} |"
            for r in rows
        ]
        lines.append("")
    return "\n".join(lines)


def megabytes(row: dict[str, str]) -> str:
    """Of the contender and of the baseline."""
    return f"{float(row['extra_mb']):,.0f} / {float(row['baseline_extra_mb']):,.0f} MB" if row.get("extra_mb") else ""


def write(readme: Path, results: Path) -> None:
    head, begin, rest = readme.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{readme}: no lines {BEGIN.strip()} and {END} to write between")
    readme.write_text(head + BEGIN + table(results) + "\n" + END + tail)


if __name__ == "__main__":
    write(README, RESULTS)
