"""The benchmark's own honesty: what is wrong is not timed, and a rerun replaces its row."""

import csv
import sys
from dataclasses import replace

import pytest

from bench import __main__ as bench
from bench import baselines, measure, report, scale


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Runs the tally benchmark on a small shape into a temporary folder."""
    monkeypatch.setattr(bench, "is_test_shape", lambda shape: shape != "odd")
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", "--op", "tally", "--seconds", "0.05", "--device", "cpu"])
    return tmp_path


def read(folder):
    (path,) = folder.glob("*.csv")
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def test_rerun_replaces_rows(small):
    assert bench.main() == 0
    first = read(small)
    assert bench.main() == 0
    again = read(small)
    assert [[row[k] for k in measure.KEY] for row in first] == [[row[k] for k in measure.KEY] for row in again]
    assert len(first) == len(baselines.TASKS["tally"][0].baselines)
    assert float(first[0]["speedup"]) > 0


def test_wrong_results_are_not_timed(small, monkeypatch, capsys):
    def forgets(votes, *rest):
        return votes.argmax(1)

    monkeypatch.setitem(baselines.TASKS, "tally", (replace(baselines.TASKS["tally"][0], baselines=(forgets,)),))
    assert bench.main() == 1
    assert "WRONG, not timed: tally odd forgets: result 1 differs" in capsys.readouterr().err
    assert not [*small.glob("*.csv")]


def test_other_rows_are_kept(tmp_path):
    row = dict.fromkeys(measure.KEY, "a") | {"speedup": "1"}
    path = tmp_path / "x.csv"
    measure.save([row], path)
    measure.save([row | {"op": "b", "speedup": "2"}], path)
    measure.save([row | {"speedup": "3"}], path)
    with path.open(newline="") as file:
        assert [(r["op"], r["speedup"]) for r in csv.DictReader(file)] == [("a", "3"), ("b", "2")]


def test_contenders_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    times = measure.interleaved(calls, lambda name: None, seconds=0)
    assert order[:2] == ["a", "b"]
    assert order[2:] == list("baabba")
    assert len(times["a"]) == len(times["b"]) == 3


def test_readme_table(tmp_path):
    row = dict.fromkeys(measure.KEY, "a") | {"speedup": "2.55", "median_us": "1234.5", "baseline_median_us": "3148"}
    measure.save([row | {"sizes": "n=1", "torch": "2"}], tmp_path / "x.csv")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}old\n{report.END}\nafter\n")
    report.write(readme, tmp_path)
    text = readme.read_text()
    assert text.startswith("before\n<!-- bench -->\n`x`")
    assert "| 1,234 us | a (3,148 us) | 2.5 x |" in text or "| 1,234 us | a (3,148 us) | 2.6 x |" in text
    assert text.endswith("<!-- /bench -->\nafter\n")
    assert "old" not in text


def test_scale(tmp_path):
    """Every stage of a small store is measured, and a bar that is missed is said."""
    scale.make_store(tmp_path, 300)
    rows = scale.measure(tmp_path, 1)
    assert {row["stage"] for row in rows} > {*scale.DIVISION, "open", "loader epoch", "checkpoint read"}
    assert all(row["pairs"] == 300 and row["seconds"] > 0 for row in rows)
    big = [row | {"pairs": n, "bytes": 0, "cpu_seconds": n / 1e5} for n in (100_000, 3_300_000) for row in rows]
    assert scale.bars(big) == []
    big[-1] |= {"seconds": 21.0}
    big[-3] |= {"cpu_seconds": 100.0}
    big[3] |= {"bytes": 3_300_000 * 61}
    big[len(rows) + 3] |= {"bytes": 3_300_000 * 61}
    assert scale.bars(big) == [
        "tally takes 61 bytes a pair at 3,300,000 pairs, the bar is 60",
        "figures grows 100 times from 100,000 to 3,300,000 pairs",
        "checkpoint read takes 21.0 s at 3,300,000 pairs, the bar is 20 s",
    ]
    text = scale.table(big)
    assert "| open |" in text
    assert "21.000" in text


def test_epoch_cost_is_arithmetic():
    """A measured step of 2.7 s and a pass's batch of 2.3 s, 25,782 of each, twice."""
    line = next(line for line in scale.epoch_cost().splitlines() if line.startswith("| 2 cores"))
    scores, step = (float(cell.strip(" ms").replace(",", "")) / 1e3 for cell in line.split("|")[2:4])
    assert float(line.split("|")[4].strip(" h")) == pytest.approx(2 * 25_782 * (scores + step) / 3600, abs=0.6)
