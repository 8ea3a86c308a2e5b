"""Many ranks: the numbers of a single one, nothing hangs, and a rank that is lost is named, and survived."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from ranks import record, record_groups, run_ranks

from pcsr_fast import distributed

# nine pairs a batch: 5 and 4 for two ranks, 3, 2, 2 and 2 for four; 40 pairs leave a last batch of 4
UNEVEN = dict(batch_size=9)
# every stage in a single epoch
AT_ONCE = dict(warmup_epochs=0, epochs=1, refinable_from=1, ambiguous_from=1, noisy_treatment="split")


def runs(folder, ranks, function=record, *args):
    """What every rank has recorded."""
    folder.mkdir(exist_ok=True)
    assert run_ranks(function, ranks, folder, *args) == [""] * ranks
    return [read(folder, rank) for rank in range(ranks)]


def read(folder, rank):
    steps, divisions = torch.load(folder / f"steps.{rank}.pt", weights_only=False)
    found, lines = (folder / f"{name}.{rank}.json" for name in ("found", "lines"))
    return SimpleNamespace(
        steps=steps,
        divisions=divisions,
        found=json.loads(found.read_text()) if found.exists() else None,
        lines=json.loads(lines.read_text()),
        records=[json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()],
    )


def vary(result, **changes):
    return SimpleNamespace(**vars(result) | changes)


def check_same(found, expected):
    """Step by step: losses, gradients and divisions; and recalls on dev."""
    assert [s["at"] for s in found.steps] == [s["at"] for s in expected.steps]
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        assert ours["sums"] == pytest.approx(theirs["sums"], rel=1e-9, abs=1e-9), ours["at"]
        torch.testing.assert_close(ours["gradient"], theirs["gradient"], rtol=1e-8, atol=1e-9)
    assert len(found.divisions) == len(expected.divisions)
    for ours, theirs in zip(found.divisions, expected.divisions, strict=True):
        np.testing.assert_allclose(ours[0], theirs[0], atol=1e-5)
        np.testing.assert_array_equal(ours[1], theirs[1])
        assert ours[2:] == pytest.approx(theirs[2:])
    check_records([*found.records, found.found], [*expected.records, expected.found])


def check_records(found, expected):
    """Of epochs, but what is a matter of time."""
    clock = {"memory_gb", "pairs_per_second"}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in {name for name in ours if not name.endswith("seconds")} - clock:
            numbers = isinstance(theirs[name], float)
            assert ours[name] == (pytest.approx(theirs[name], rel=1e-6) if numbers else theirs[name]), name


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return runs(tmp_path_factory.mktemp("single"), 1, record, UNEVEN)[0]


def test_every_stage_is_seen(single):
    subsets = {s["at"][3] for s in single.steps}
    assert subsets == {"all", "clean", "refinable", "ambiguous"}
    assert all(s["gradient"].norm() > 0 for s in single.steps)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_numbers_of_one(single, tmp_path, ranks):
    found = runs(tmp_path, ranks, record, UNEVEN)
    for rank in found:
        check_same(rank, single)
    # one display, from rank 0
    assert [bool(rank.lines) for rank in found] == [True] + [False] * (ranks - 1)


@pytest.mark.parametrize(
    "changes",
    [
        dict(clean_margin="posterior", rematch="caption", bank_size=20, negatives_ramp=True),
        dict(clean_margin="agreement", mask_duplicates=False, evaluation_negatives=3, classifier_input="pooled"),
        dict(method="sgr"),
    ],
    ids=str,
)
def test_options(tmp_path, changes):
    changes = AT_ONCE | UNEVEN | changes
    (expected,) = runs(tmp_path / "1", 1, record, changes)
    for rank in runs(tmp_path / "3", 3, record, changes):
        check_same(rank, expected)


def test_local_negatives(tmp_path):
    """As a single process whose negatives are chosen within each rank's rows; the rest is of the whole batch."""
    changes = UNEVEN | dict(negatives="local", epochs=1, refinable_from=1, ambiguous_from=1)
    (expected,) = runs(tmp_path / "1", 1, record_groups, 2, changes)
    for rank in runs(tmp_path / "2", 2, record, changes):
        check_same(rank, expected)
    (other,) = runs(tmp_path / "other", 1, record, changes)
    assert other.steps[0]["sums"]["loss"] != pytest.approx(expected.steps[0]["sums"]["loss"], rel=0.01)


@pytest.mark.parametrize("negatives", ["global", "local"])
def test_nan_on_one_rank_is_skipped_by_all(tmp_path, negatives):
    changes = AT_ONCE | UNEVEN | dict(negatives=negatives, warmup_epochs=1)
    results = runs(tmp_path, 2, record, changes, 17)
    for rank in results:
        check_same(rank, results[0])
        bad = [s for s in rank.steps if s["sums"]["bad_steps"]]
        assert bad
        assert len(bad) < len(rank.steps)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert records[0]["A_all_bad_steps"] == 1
    assert records[0]["A_all_steps"] == 4


# nothing hangs


def test_a_rank_that_does_not_come_is_named(tmp_path):
    act = dict(rank=1, step=3, do="sleep")
    errors = run_ranks(record, 2, tmp_path, UNEVEN | dict(wait_minutes=0.1), None, act)
    assert "RankError: rank 0 of 2, in train A, epoch 1: all_gather failed after" in errors[0]
    assert "s of at most 6 s (wait_minutes); another rank hangs or has ended" in errors[0]
    # came too late
    assert "RankError: rank 1 of 2" in errors[1]


def test_an_error_of_another_rank_reaches_the_user(tmp_path):
    act = dict(rank=1, step=12, do="disk on fire")
    errors = run_ranks(record, 2, tmp_path, UNEVEN, None, act)
    assert "OSError: disk on fire\non rank 1 of 2" in errors[1]
    assert "RankError: rank 0 of 2, in train" in errors[0]


def test_too_many_ranks(tmp_path):
    errors = run_ranks(record, 3, tmp_path, dict(batch_size=4, negatives="local"))
    message = (
        "batch_size is 4, that of all ranks together, but there are 3 ranks and negatives is local: give at least 6"
    )
    assert all(message in error for error in errors)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("step", [7, 19])
def test_a_signal_to_one_rank_stops_all_and_others_go_on(single, tmp_path, step):
    """Stopped on three ranks, resumed on two: the numbers of a single process."""
    act = dict(rank=1, step=step, do="SIGTERM")
    errors = run_ranks(record, 3, tmp_path, UNEVEN, None, act)
    assert all("KeyboardInterrupt: stopped; everything is saved in" in error for error in errors)
    begun = [read(tmp_path, rank).steps for rank in range(3)]
    assert len({len(steps) for steps in begun}) == 1
    resumed = runs(tmp_path, 2, record, UNEVEN)
    assert "resumed from" in resumed[0].lines[0]
    for rank in resumed:
        check_same(vary(rank, divisions=[]), vary(single, steps=single.steps[len(begun[0]) :], divisions=[]))


# killed


def test_killed_and_started_again(single, tmp_path):
    """The quick one: started again by the test itself."""
    changes = UNEVEN | dict(checkpoint_minutes=0.0)
    act = dict(rank=1, step=len(single.steps) - 5, do="SIGKILL")
    errors = run_ranks(record, 2, tmp_path, changes, None, act)
    assert errors[1] == "exit code -9"
    assert "RankError: rank 0 of 2, in train" in errors[0]
    (found, _) = runs(tmp_path, 2, record, changes)
    # not from the beginning
    assert 0 < len(found.steps) < 13
    check_same(vary(found, divisions=[]), vary(single, steps=single.steps[-len(found.steps) :], divisions=[]))


def test_ranks_do_not_meet_those_of_an_earlier_start(monkeypatch):
    """In a store that still has what ranks that were killed have left there."""
    monkeypatch.setattr(distributed, "_patience", timedelta(seconds=3))
    store = dist.HashStore()

    def start(*came):
        with ThreadPoolExecutor() as pool:
            return [future.exception() or future.result() for future in [pool.submit(join, r) for r in came]]

    def join(rank):
        # late, so that the first one finds the one before
        time.sleep(rank / 2)
        found = distributed._fresh(store, rank, 2)
        found.set(str(rank), "here")
        return found

    first, second, alone = start(0, 1), start(0, 1), start(0)
    assert str(alone[0]) == "not all ranks came"
    for found in (first, second):
        assert found[0].get("1") == found[1].get("0") == b"here"
    third = start(0, 1)
    first[0].set("of", "the first")
    assert not any(found.check(["of"]) for found in (*second, *third))


KILLS = [
    (1, "start", 0),
    (1, "train A, epoch 1", 9),  # warm-up
    (0, "divide B, epoch 2", 5),
    (1, "train B, epoch 3", 9),
    (0, "validate, epoch 4", 2),
]


def torchrun(folder, *arguments, restarts=0, seconds=900):
    """Two ranks; exit code and all that was printed. Nothing is left running."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        try:
            code = process.wait(seconds)
        finally:
            # torchrun ends its ranks, and after 30 s kills them
            process.terminate()
            process.wait(120)
    return code, (folder / "said.txt").read_text()


@pytest.mark.slow
def test_killed_ranks_are_started_again_by_torchrun(single, tmp_path):
    """kill -9 in every phase, and the run ends with the numbers of one that was left alone."""
    code, said = torchrun(tmp_path, ROOT / "tests" / "killed.py", tmp_path, json.dumps(KILLS), restarts=len(KILLS))
    assert code == 0, said[-3000:]
    assert said.count("failed (exitcode: -9)") == len(KILLS), said[-3000:]
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == [1, 2, 3, 4]
    check_records(records, single.records)


# what the user sees

COMMAND = """
import os, sys
from pcsr_fast import cli, train

def fail(*args):
    raise {error}

if os.environ["RANK"] in "{ranks}":
    train.run_step = fail
sys.exit(cli.main(["train", sys.argv[1], "--preset", "sample", "--data", "sample:20", "--embedding", "16"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "error", "expected"),
    [
        ("01", "OSError('disk on fire')", ["disk on fire on rank 0 of 2"]),
        ("1", "OSError('disk on fire')", ["disk on fire on rank 1 of 2", "rank 0 of 2, in train A, epoch 1: "]),
        ("1", "os.kill(os.getpid(), 9)", ["rank 0 of 2, in train A, epoch 1: "]),
    ],
)
def test_an_error_is_said_once_and_says_where(tmp_path, ranks, error, expected):
    (tmp_path / "command.py").write_text(COMMAND.format(ranks=ranks, error=error))
    code, said = torchrun(tmp_path, tmp_path / "command.py", tmp_path / "run")
    assert code != 0
    found = [line.partition("pcsr-fast train: ")[2] for line in said.splitlines() if "pcsr-fast train: " in line]
    assert len(found) == len(expected), said
    for line, begin in zip(found, expected, strict=True):
        assert line.startswith(begin), said
    # no traceback but torchrun's own
    assert said.count("Traceback") == said.count("ChildFailedError:"), said
