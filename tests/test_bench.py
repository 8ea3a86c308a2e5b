"""The benchmark's own honesty: what is wrong is not timed, and a rerun replaces its row."""

import csv
import json
import re
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from bench import __main__ as entry
from bench import baselines, experiments, measure, report, scale, step
from bench import kernels as bench


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors of a few numbers only wait for a second thread."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(2)


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
    timed = [row for row in first if row["op"] == "tally"]
    assert len(timed) == len(baselines.TASKS["tally"][0].baselines)
    assert float(timed[0]["speedup"]) > 0
    # how fast memory is moved, once
    assert [row["task"] for row in first if row["op"] != "tally"] == ["copy"]


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


FIGURES = {"speedup": "2.55", "median_us": "1234.5", "baseline_median_us": "3148"}


@pytest.fixture
def pages(tmp_path):
    """A README and a page with markers, and results of one machine."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "before\n<!-- bench -->\nold\n<!-- /bench -->\nbetween\n<!-- noise -->\nold\n<!-- /noise -->\nafter\n"
    )
    (tmp_path / "docs/benchmarks.md").write_text("<!-- bench -->\n<!-- /bench -->\n")
    (tmp_path / "docs/experiments.md").write_text(
        "<!-- experiments -->\n<!-- /experiments -->\n<!-- won -->\n<!-- /won -->\n"
    )
    row = dict.fromkeys(measure.KEY, "a") | FIGURES | {"sizes": "n=1", "torch": "2", "threads": "2"}
    step, scores = (dict(zip(("op", "task", "shape", "baseline"), report.FRONT[k], strict=False)) for k in (0, 2))
    heavy = {"extra_mb": "5", "baseline_extra_mb": "8500", "least_flops": "1e9", "least_bytes": "1e8"}
    machine = row | {"op": measure.MACHINE, "least_bytes": "1e9", "least_flops": "0"}
    rows = [row, row | step | heavy, row | scores | heavy | {"share_of_mm": "0.5"}, machine]
    measure.save(rows, tmp_path / "results" / "x.csv")
    return tmp_path


def run_report(root):
    return report.main(["--root", str(root), "--results", str(root / "results")])


def test_report_writes_between_markers(pages):
    assert run_report(pages) == 0
    text = (pages / "README.md").read_text()
    assert text.startswith("before\n<!-- bench -->\n`x`, 2 threads, torch 2:")
    label = report.FRONT[0][4]
    speed = f"{float(FIGURES['speedup']):.1f}"
    line = f"| {label} | 1.2 ms | 3.1 ms, loop over captions, as published | **{speed} x** | 5 / 8,500 MB |"
    assert line in text
    assert "<!-- /bench -->\nbetween\n<!-- noise -->\nNo experiments" in text
    assert text.endswith("<!-- /noise -->\nafter\n")
    assert "old" not in text
    full = (pages / "docs/benchmarks.md").read_text()
    assert f"| a | a | n=1 | a, a, 2 threads | 1.2 ms | a (3.1 ms) | {speed} x |  |" in full
    assert measure.MACHINE not in full
    assert {path.name for path in (pages / "docs/figures").iterdir()} == {"step.png", "speedups.png", "roofline.png"}
    before = text
    run_report(pages)
    assert (pages / "README.md").read_text() == before


def test_report_of_experiments(pages):
    (pages / "results" / "noise_sample.csv").write_text(
        "data,noise,variant,seed,best_epoch,dev_rsum,test_rsum\n"
        "sample,0.4,sgr,0,3,300,310.0\nsample,0.4,sgr,1,3,300,320.0\nsample,0.2,sgr,0,3,300,350.04\n"
        "sample,0.4,pcsr,0,3,300,400.0\nsample,0.2,pcsr,0,3,300,\nsample,0.4,K = 32,0,3,300,500\n"
        'sample,0,sgr,0,3,300,415\nsample,0.4,"pcsr, 13 epochs",0,3,300,420\n'
    )
    run_report(pages)
    text = (pages / "README.md").read_text()
    assert "| noise | 0 % | 20 % | 40 % |" in text
    assert "| sgr | 415.0 | 350.0 | 315.0 (310 to 320, 2 seeds) |" in text
    assert "| pcsr |  |  | 400.0 |" in text
    assert "`sample`, 13 epochs, rsum on test:\n\n| noise | 40 % |\n| --- | --- |\n| pcsr | 420.0 |" in text
    assert "K = 32" not in text
    every = (pages / "docs/experiments.md").read_text()
    assert "| data | noise | variant | seed | best epoch | dev rsum | test rsum | precision |" in every
    assert "| sample | 0.2 | sgr | 0 | 3 | 300 | 350.04 |" in every
    # seed 0 alone: 415 without noise, 310 with it: 90 of 105 are won back
    assert "| `sample` | 100.0 |  |  |  |  | 86 % |" in every
    assert "noise_sample" not in text.partition("between")[0]


def test_experiments_keep_the_rows_of_other_machines(tmp_path, monkeypatch):
    """Results of a folder of runs join those in the CSV, in the order of the tasks; what has a row is not run again."""
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    started, done = [], SimpleNamespace(returncode=0)
    monkeypatch.setattr(experiments.subprocess, "run", lambda command, **_: started.append(command[-1]) or done)
    row = {"data": "sample", "best_epoch": 3, "dev_rsum": 300.0, "minutes": 1.0}

    def ended(runs, task, rsum):
        (tmp_path / runs / "sample" / task.name()).mkdir(parents=True)
        values = row | {"noise": task.noise, "variant": task.variant, "seed": task.seed, "test_rsum": rsum}
        (tmp_path / runs / "sample" / task.name() / "result.json").write_text(json.dumps(values))

    first, second, third = (task for task in experiments.MAIN[:7] if task.variant == "sgr")
    ended("one", third, 330.0)
    ended("two", first, 310.04)
    for runs in ("one", "two"):
        experiments.main(["sample", "--runs", str(tmp_path / runs), "--gather"])
    with (tmp_path / "noise_sample.csv").open(newline="") as file:
        assert [(r["variant"], r["test_rsum"]) for r in csv.DictReader(file)] == [
            (first.variant, "310"),
            (third.variant, "330"),
        ]
    assert started == []
    names = [option for task in (first, second, third) for option in ("--only", task.name())]
    experiments.main(["sample", "--runs", str(tmp_path / "three"), "--jobs", "1", *names])
    assert {*started} == {f"{second.noise}-{second.seed}-warmup", second.name()}


def test_report_without_markers_or_results(pages):
    (pages / "docs/benchmarks.md").write_text("nothing")
    with pytest.raises(SystemExit, match=r"benchmarks\.md: no lines <!-- bench --> and <!-- /bench -->"):
        run_report(pages)
    (pages / "results" / "x.csv").unlink()
    with pytest.raises(SystemExit, match="no results; run python -m bench"):
        run_report(pages)


def test_one_entry(capsys, monkeypatch):
    given = []
    monkeypatch.setattr(bench, "main", lambda arguments: given.append(arguments))
    assert entry.main(["--op", "sgr"]) == entry.main(["kernels", "--op", "sgr"]) == 0
    assert given == [["--op", "sgr"]] * 2
    assert entry.main(["speed"]) == 2
    assert "no benchmark is called 'speed'; there are kernels, step" in capsys.readouterr().err
    assert entry.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{command} " in shown for command in entry.COMMANDS)


TINY = ["--batch", "8", "--embedding", "16", "--similarity", "8", "--regions", "4", "--no-save"]


def test_step(capsys):
    assert entry.main(["step", *TINY, "--seconds", "0"]) == 0
    assert re.match(r"step: [\d.]+ s, caption loop [\d.]+ s, [\d.]+ x; extra memory", capsys.readouterr().out)


def test_a_step_that_differs_is_not_timed(capsys, monkeypatch):
    real = step.loop_loss
    monkeypatch.setattr(step, "loop_loss", lambda *args: 1.01 * real(*args))
    assert entry.main(["step", *TINY, "--seconds", "0"]) == 1
    assert "WRONG, not timed" in capsys.readouterr().err


def test_profile(tmp_path, capsys):
    assert entry.main(["step", *TINY, "--profile", str(tmp_path / "trace.json")]) == 0
    assert "Self CPU" in capsys.readouterr().out
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_epoch(capsys):
    assert entry.main(["epoch", "--images", "6", *TINY, "--repeats", "1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["divide", "train", "validate"]


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
    big[3] |= {"bytes": 100_000 * 61 + 16_000_000}
    big[len(rows) + 3] |= {"bytes": 3_300_000 * 59 + 16_000_000}
    big[len(rows) + 4] |= {"bytes": 3_300_000 * 61 + 16_000_000}
    assert scale.bars(big) == [
        "tally takes 61 bytes a pair at 100,000 pairs, beyond 16 MB and the counts, the bar is 60",
        "mixture takes 61 bytes a pair at 3,300,000 pairs, beyond 16 MB and the counts, the bar is 60",
        "figures grows 100 times from 100,000 to 3,300,000 pairs",
        "checkpoint read takes 21.0 s at 3,300,000 pairs, the bar is 20 s",
    ]
    text = scale.table(big)
    assert "| open |" in text
    assert "21.000" in text


def test_epoch_cost_is_arithmetic():
    """25,782 batches, once with each network; on a GPU what takes longer, flops or bytes."""
    costs = scale.epoch_costs()
    scores, step, epoch = costs["2 cores"]
    assert float(epoch.removesuffix(" h")) == pytest.approx(2 * 25_782 * (scores + step) / 3600, abs=0.6)
    scores, step, epoch = costs["H100 SXM"]
    assert float(epoch.removesuffix(" min")) == pytest.approx(2 * 25_782 * (scores + step) / 60, abs=0.06)


def test_pages_say_what_was_measured(tmp_path):
    """README and docs/scale.md are what `bench scale --pages` makes of the results."""
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/scale.md"):
        shutil.copyfile(ROOT / page, tmp_path / page)
    scale.write_pages(scale.read_rows(), tmp_path)
    for page in ("README.md", "docs/scale.md"):
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), f"{page}: run python -m bench scale --pages"
