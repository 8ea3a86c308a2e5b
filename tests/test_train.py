"""The trainer: same seed same weights, resumed or not; which loss runs when; NaN; losses by formula; convergence."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from conftest import ROOT

from pcsr_fast import checkpoint, use_backend
from pcsr_fast import train as module
from pcsr_fast.data.loader import captions_of
from pcsr_fast.data.overlap import word_weights
from pcsr_fast.division import AMBIGUOUS, CLEAN, REFINABLE, Division, Evaluation, mixture
from pcsr_fast.ops import adaptive_margin
from pcsr_fast.rematch import Bank
from pcsr_fast.train import (
    TrainingError,
    ambiguous_loss,
    clean_loss,
    contrast,
    learning_rate,
    negatives,
    new_state,
    plain_loss,
    refinable_loss,
    run_step,
    stage_name,
    train,
    train_epoch,
    warmup_epochs,
)

# differ from run to run
CLOCK = ("seconds", "divide_seconds", "train_seconds", "validate_seconds", "memory_gb", "pairs_per_second")
LOSSES = ("plain_loss", "clean_loss", "refinable_loss", "ambiguous_loss")


def run(folder, train_split=None, dev=None, resume="auto", report=lambda line: None, **changes):
    train_split = tiny.split(8, 0.4) if train_split is None else train_split
    dev = tiny.split(6, name="dev") if dev is None else dev
    return train(tiny.config(**changes), train_split, dev, tiny.WORDS, folder, resume, report)


def same(a, b) -> bool:
    """Bitwise, through lists and dicts."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k not in CLOCK)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def last(folder) -> dict:
    return checkpoint.load(folder / "last.pt")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors of a few numbers only wait for a second thread."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run through all stages, with a copy of the checkpoint after every step."""
    folder = tmp_path_factory.mktemp("whole")
    copies = []
    real = checkpoint.save

    def save(state, path):
        real(state, path)
        if path.name == "last.pt":
            copies.append(shutil.copy(path, folder / f"copy{len(copies)}.pt"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        record = run(folder, checkpoint_minutes=0)
    saved = [checkpoint.load(copy) for copy in copies]
    return SimpleNamespace(folder=folder, copies=copies, saved=saved, record=record, last=saved[-1])


def test_a_seed_gives_one_result(whole, tmp_path):
    record = run(tmp_path / "again", workers=2)
    assert same(record, whole.record)
    assert same(last(tmp_path / "again") | {"config": 0}, whole.last | {"config": 0})
    logs = [(f / "log.jsonl").read_text().splitlines() for f in (whole.folder, tmp_path / "again")]
    assert same(*([json.loads(line) for line in log] for log in logs))
    run(tmp_path / "other", seed=1, epochs=0)
    other = last(tmp_path / "other")
    assert not same(other["networks"], next(s for s in whole.saved if s["epoch"] == 1)["networks"])


def test_the_two_networks_differ():
    state = new_state(tiny.config(), tiny.split(), tiny.WORDS, "cpu")
    assert not torch.equal(*(n.image.weight for n in state.networks))


def test_what_a_run_leaves(whole):
    split = tiny.split(8, 0.4)
    assert np.array_equal(np.load(whole.folder / "noise.npy"), split.image_of)
    assert json.loads((whole.folder / "config.json").read_text())["classes"] == 8
    lines = (whole.folder / "log.jsonl").read_text().splitlines()
    # strict: NaN is no JSON
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [r["epoch"] for r in records] == [1, 2, 3, 4]
    stages = ["warm-up", "clean", "clean + refinable", "clean + refinable + ambiguous"]
    assert [r["stage"] for r in records] == stages
    assert records[1]["A_tau"] is None
    assert records[2]["A_tau"] is not None
    best = checkpoint.load(whole.folder / "best.pt")
    assert best["record"]["rsum"] == max(r["rsum"] for r in records) == whole.record["rsum"]
    # labels count from the second epoch after warm-up
    assert whole.last["observations"] == 2
    for counts, n_max, _, _ in whole.last["tallies"]:
        assert (counts.sum(1) == 2).all()
        assert (n_max >= 1).all()
    assert not [*whole.folder.glob(".*")]


def check_resume(whole, folder, at, count):
    """The next checkpoints after resuming from one are those that followed it."""
    shutil.copy(whole.copies[at], folder / "last.pt")
    seen, real = [], checkpoint.save
    expected = whole.saved[at + 1 :][:count]

    def save(state, path):
        real(state, path)
        if path.name == "last.pt":
            seen.append(checkpoint.load(path))
            if len(seen) == count:
                raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        try:
            run(folder, resume="must", checkpoint_minutes=0)
        except KeyboardInterrupt:
            assert len(seen) == count
    assert len(seen) == len(expected)
    assert same(seen, expected), at


def test_resume(whole, tmp_path):
    """In every stage, in either network and between epochs; once to the end."""
    places = {(s["epoch"], s["network"], s["phase"]): at for at, s in enumerate(whole.saved)}
    assert len(places) == 3 * 3 + 3
    check_resume(whole, tmp_path, 7, 1000)
    for at in [*places.values()][1::2]:
        check_resume(whole, tmp_path, at - 1, 2)


@pytest.mark.slow
def test_resume_at_every_step(whole, tmp_path):
    for at in range(len(whole.saved)):
        check_resume(whole, tmp_path, at, 1000)


def test_resume_of_a_finished_run(whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path / "run")
    (tmp_path / "run" / ".last.pt.999").touch()
    assert run(tmp_path / "run", checkpoint_minutes=5) == whole.record
    assert not (tmp_path / "run" / ".last.pt.999").exists()
    with pytest.raises(FileExistsError, match=r"last\.pt exists: choose another folder"):
        run(tmp_path / "run", resume="never")
    with pytest.raises(FileNotFoundError, match=r"last\.pt does not exist: there is nothing to resume"):
        run(tmp_path / "empty", resume="must")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_step_and_saves(whole, tmp_path, monkeypatch, number):
    before = signal.getsignal(number)
    real, calls = module.run_step, []

    def step(*args):
        calls.append(1)
        if len(calls) == 14:
            os.kill(os.getpid(), number)
        real(*args)

    monkeypatch.setattr(module, "run_step", step)
    with pytest.raises(KeyboardInterrupt, match=r"everything is saved in .*last\.pt"):
        run(tmp_path)
    assert len(calls) in (14, 15, 16)
    assert signal.getsignal(number) == before
    monkeypatch.undo()
    if number == signal.SIGINT:
        return
    run(tmp_path)
    assert same(last(tmp_path) | {"config": 0}, whole.last | {"config": 0})


SCRIPT = """
import sys
sys.path[:0] = sys.argv[2:]
import conftest, tiny, torch
torch.set_num_threads(1)
from pcsr_fast.train import train
train(tiny.config(checkpoint_minutes=0), tiny.split(8, 0.4), tiny.split(6, name="dev"), tiny.WORDS, sys.argv[1])
"""


@pytest.mark.slow
def test_kill(whole, tmp_path):
    """Killed at random moments, resumed each time: the same weights as if nothing had happened."""
    rng, kills = random.Random(0), 0
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(ROOT), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = False
    while not done:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        before, begin = _stamp(tmp_path), time.monotonic()
        # from the first checkpoint of this process on, so that every round gets further
        while process.poll() is None and _stamp(tmp_path) == before and time.monotonic() - begin < 120:
            time.sleep(0.01)
        try:
            process.wait(rng.uniform(0, 0.1) if kills < 8 else 300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
            continue
        assert process.returncode == 0
        done = True
    # a machine that does all in less than four times 0.1 s would end sooner
    assert kills >= 3
    assert same(last(tmp_path) | {"config": 0}, whole.last | {"config": 0})
    assert not [*tmp_path.glob(".*.pt.*")]


def _stamp(folder):
    path = folder / "last.pt"
    return path.stat().st_mtime_ns if path.exists() else 0


def test_another_configuration_is_not_resumed(whole, tmp_path):
    shutil.copy(whole.folder / "last.pt", tmp_path / "last.pt")
    with pytest.raises(
        ValueError, match=r"last\.pt was made with other settings or data: alpha: 0\.2 -> 0\.3; seed: 0"
    ):
        run(tmp_path, alpha=0.3, seed=2)
    with pytest.raises(ValueError, match=r"train data, noise: \d+ -> \d+$"):
        run(tmp_path, tiny.split(8, 0.2))
    with pytest.raises(ValueError, match=r"dev data, .*images: 6 -> 5"):
        run(tmp_path, dev=tiny.split(5, name="dev"))
    with pytest.raises(ValueError, match=rf"words in the vocabulary: {tiny.WORDS} -> {tiny.WORDS + 1}"):
        train(tiny.config(), tiny.split(8, 0.4), tiny.split(6, name="dev"), tiny.WORDS + 1, tmp_path)
    free = dict(workers=1, log_every=3, checkpoint_minutes=1, evaluation_batch=9, stop_after_bad_steps=2)
    assert run(tmp_path, **free) == whole.record
    shutil.copy(whole.folder / "best.pt", tmp_path / "last.pt")
    with pytest.raises(ValueError, match="holds weights alone"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(train_split=replace(tiny.split(), features=np.zeros((12, 8, 70), np.float32))),
            "regions .* 8 in .* 9 in",
        ),
        (dict(train_split=replace(tiny.split(), tokens=tiny.split().tokens + 90)), "token id .* vocabulary has"),
    ],
)
def test_data_that_do_not_fit(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "new", **change)
    assert not (tmp_path / "new").exists()


# non-finite values


def test_one_bad_image_is_passed_over(tmp_path):
    split = tiny.split(8, 0.4)
    split.features[3, 0, 0] = np.nan
    lines = []
    with pytest.warns(UserWarning, match="features are not finite, of images 3"):
        run(tmp_path, split, report=lines.append)
    saved = last(tmp_path)
    for network in saved["networks"]:
        assert all(x.isfinite().all() for x in network.values())
    records = saved["records"]
    bad = int((split.image_of == 3).sum())
    assert 1 <= records[0]["A_all_bad_steps"] <= bad
    assert records[0]["A_all_steps"] + records[0]["A_all_bad_steps"] == 5
    assert all(np.isfinite(v) for r in records for v in r.values() if isinstance(v, float))
    assert any("steps were not finite and were skipped" in line for line in lines)
    assert records[-1]["epoch"] == 4
    # training went on
    assert not torch.equal(saved["networks"][0]["image.weight"], new_state(
        tiny.config(), split, tiny.WORDS, "cpu").networks[0].image.weight)  # fmt: skip


def test_a_bad_step_changes_nothing_but_its_count():
    split, config = tiny.split(), tiny.config()
    state = new_state(config, split, tiny.WORDS, "cpu")
    network = state.networks[0]
    good = tiny.batch(split, range(8))
    run_step(state, "all", config, plain_loss, network, good, "mean", 0, config)
    before = {name: x.clone() for name, x in network.state_dict().items()}
    moments = [{k: v.clone() for k, v in s.items()} for s in state.optimizers[0].state.values()]

    def overflow(network, batch):
        loss = plain_loss(network, batch, "mean", 0, config)
        return loss | {"loss": loss["loss"] * torch.inf}

    def nan(network, batch):
        raise RuntimeError("sgr: regions contain NaN")

    for n, loss in enumerate((overflow, nan, overflow), 1):
        run_step(state, "all", config, loss, network, good)
        assert int(state.bad_streak) == n
        assert same(before, dict(network.state_dict()))
        assert same(moments, [*map(dict, state.optimizers[0].state.values())])
    assert module.means(state.sums)["A_all_bad_steps"] == 3
    assert module.means(state.sums)["A_all_steps"] == 1
    assert np.isfinite([*module.means(state.sums).values()]).all()
    run_step(state, "all", config, plain_loss, network, good, "mean", 0, config)
    assert int(state.bad_streak) == 0
    assert not same(before, dict(network.state_dict()))
    with pytest.raises(RuntimeError, match="out of memory"):
        run_step(state, "all", config, lambda: exec('raise RuntimeError("out of memory")'))


@pytest.mark.parametrize("log_every", [1, 50])
def test_nan_everywhere(tmp_path, log_every):
    split = tiny.split()
    split.features[:] = np.nan
    message = r"not finite in {} steps in a row \(epoch 1, network A\); {}; lower learning_rate, or look for NaN"
    streak = 7 if log_every == 1 else 8  # the epoch is shorter than log_every
    options = dict(stop_after_bad_steps=7, log_every=log_every)
    with pytest.raises(TrainingError, match=message.format(streak, "nothing was saved before")):
        run(tmp_path, split, **options)
    with pytest.raises(TrainingError, match=message.format(streak, r"the last good state is in .*last\.pt")):
        run(tmp_path, split, checkpoint_minutes=0, **options)


def test_a_bad_clean_step_leaves_nothing_to_match(monkeypatch, tmp_path):
    split, config = tiny.split(), tiny.config(epochs=1, refinable_from=1, rematch="caption", rematch_scope="batch")
    state = divided(config, split)
    bad = iter([True, False, True, False, False])
    real = clean_loss

    def sometimes(*args):
        found = real(*args) if not next(bad) else None
        if found is None:
            args[3].forget(args[5])
            raise RuntimeError("sgr: regions contain NaN")
        return found

    monkeypatch.setattr(module, "clean_loss", sometimes)
    for _ in train_epoch(state, split, 1, config, "cpu"):
        pass
    found = module.means(state.sums)
    assert (found["A_clean_bad_steps"], found["A_clean_steps"], found["A_refinable_steps"]) == (2, 2, 2)


# stages


def divided(config, split, subset=None):
    """A state whose divisions are made by hand: halves clean and refinable."""
    state = new_state(config, split, tiny.WORDS, "cpu")
    n = len(split)
    subset = np.where(np.arange(n) < 32, CLEAN, REFINABLE).astype(np.uint8) if subset is None else subset
    posterior = np.linspace(1, 0, n, dtype=np.float32)
    state.divisions = [Division(posterior, subset, 0.5, 0.5) for _ in range(2)]
    return state


@pytest.fixture
def spy(monkeypatch):
    """Counts the calls of each loss, by network in turn, and keeps their arguments."""
    calls = []
    for name in LOSSES:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, name=name: (calls.append((name, a)), real(*a))[1])
    return calls


def names(calls):
    return {name for name, _ in calls}


def test_stages(tmp_path, spy, monkeypatch):
    at = {}
    real = module.train_epoch

    def epoch(state, split, number, *rest):
        start = len(spy)
        yield from real(state, split, number, *rest)
        at.setdefault(number, []).append([name for name, _ in spy[start:]])

    monkeypatch.setattr(module, "train_epoch", epoch)
    run(tmp_path, warmup_steps=7, paper=True)  # 5 steps an epoch, so 2 epochs
    assert [*at] == [-1, 0, 1, 2, 3]
    for number in (-1, 0):
        assert at[number] == [["plain_loss"] * 5] * 2
    assert all(set(found) == {"clean_loss"} for found in at[1])
    assert all(set(found) <= {"clean_loss", "refinable_loss"} for found in at[2])
    assert "refinable_loss" in {name for found in at[2] for name in found}
    assert {name for found in at[3] for name in found} >= {"clean_loss", "ambiguous_loss"}
    modes = {a[2] for name, a in spy if name == "plain_loss"}
    assert modes == {"mean"}
    # one refinable and one ambiguous batch follow each clean one
    for found in at[3]:
        kinds = list(dict.fromkeys(found))
        assert found == kinds * (len(found) // len(kinds))


def test_warmup_counts_steps():
    config = tiny.config(warmup_epochs=5, warmup_steps=1500, batch_size=128)
    assert warmup_epochs(config, 145_000) == 5
    assert warmup_epochs(config, 3000) == 63  # 24 steps an epoch
    assert warmup_epochs(tiny.config(warmup_epochs=0), 60) == 0
    assert stage_name(0, config) == "warm-up"
    assert stage_name(1, tiny.config(method="sgr")) == "all pairs"


def test_a_network_trains_on_the_division_of_the_other():
    split, config = tiny.split(), tiny.config()
    subsets = [np.where(np.arange(60) % 2 == k, 0, 2).astype(np.uint8) for k in range(2)]
    for k in range(2):
        state = divided(config, split)
        state.network = k
        state.divisions = [replace(state.divisions[j], subset=subsets[j]) for j in range(2)]
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                module,
                "clean_loss",
                lambda n, b, *a, seen=seen: (seen.extend(b.pairs.tolist()), clean_loss(n, b, *a))[1],
            )
            for _ in train_epoch(state, split, 1, config, "cpu"):
                pass
        assert sorted(seen) == state.divisions[1 - k].pairs(CLEAN).tolist()


def test_captions_with_a_new_image_are_trained_among_the_clean():
    split, config = tiny.split(), tiny.config(refinable_from=1)
    state = divided(config, split, np.repeat([CLEAN, REFINABLE, AMBIGUOUS], 20).astype(np.uint8))
    images = np.where(np.arange(60) < 20, split.image_of, 11 - split.image_of).astype(np.int32)
    state.divisions[1] = replace(state.divisions[1], images=images, certainty=np.ones(60, np.float32))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "clean_loss", lambda n, b, *a: (seen.append(b), clean_loss(n, b, *a))[1])
        for _ in train_epoch(state, split, 1, config, "cpu"):
            pass
    pairs = torch.cat([b.pairs for b in seen]).numpy()
    assert sorted(pairs) == [*range(40)]
    assert np.array_equal(torch.cat([b.images for b in seen]).numpy(), images[pairs])
    for b in seen:
        torch.testing.assert_close(b.features, torch.from_numpy(split.features[b.images.numpy()]))
    assert state.banks[0] is None
    assert "A_refinable_steps" not in module.means(state.sums)


def test_new_images_of_a_run(tmp_path):
    """Found in the stage in which they are trained on, for all captions of noisy pairs, and told by figures."""
    split = tiny.split(ratio=0.4)
    run(tmp_path, split)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert ["A_refinable_certainty" in record for record in records] == [False, False, True, True]
    for division in last(tmp_path)["divisions"]:
        clean = division["subset"].numpy() == CLEAN
        images, certainty = division["images"].numpy(), division["certainty"].numpy()
        assert np.array_equal(images[clean], split.image_of[clean])
        assert (certainty[clean] == 1).all()
        assert (certainty[~clean] < 1).all()
        assert (certainty > 0).all()
        # those of the highest certainty are refinable
        refinable = division["subset"].numpy() == REFINABLE
        assert certainty[refinable].min() >= certainty[~clean & ~refinable].max(initial=0)
        right = (images == split.true_image)[refinable].mean()
        assert records[-1]["A_refinable_right"] == pytest.approx(right)
    # an image a caption: nothing tells which image another caption fits, and images get captions
    alone = replace(
        split, **{name: getattr(split, name)[::5] for name in ("image_of", "true_image", "texts")}, **cut(split)
    )
    run(tmp_path / "alone", alone)
    assert last(tmp_path / "alone")["divisions"][0]["images"] is None
    assert last(tmp_path / "alone")["banks"][0] is not None


def test_each_network_keeps_the_images_of_its_clean_pairs():
    split, subset = tiny.split(), np.arange(60).astype(np.uint8) % 3
    division = Division(np.ones(60, np.float32), subset, 0.5, 0.5)
    images, certainty = np.full(60, 11, np.int32), np.full(60, 0.25, np.float32)
    found = module.with_new_images(division, images, certainty, split)
    clean = subset == CLEAN
    assert np.array_equal(found.images, np.where(clean, split.image_of, 11))
    assert np.array_equal(found.certainty, np.where(clean, 1, 0.25))
    assert (found.images.dtype, found.certainty.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("judges", ["other", "both"])
def test_every_noisy_pair_is_looked_for(judges, monkeypatch):
    """Also those that one network alone calls noisy."""
    split, config = tiny.split(ratio=0.4), tiny.config(judges=judges, refinable_from=1, doubt=0.0)
    beliefs = [(np.linspace(0, 1, 60, dtype=np.float32), None), (np.linspace(1, 0, 60, dtype=np.float32) ** 2, None)]
    seen = []
    monkeypatch.setattr(module, "rehome", lambda networks, split, clean, *rest: seen.append(clean))
    beliefs = beliefs[: 1 if judges == "both" else 2]
    module.new_images(new_state(config, split, tiny.WORDS, "cpu"), beliefs, split, 1, config)
    assert np.array_equal(seen[0], np.all([belief > 0.5 for belief, _ in beliefs], 0))


def test_siblings_of_a_run(tmp_path):
    """They are compared for pcsr alone, and once."""
    with pytest.MonkeyPatch.context() as patch:
        seen, real = [], module.siblings_of
        patch.setattr(module, "siblings_of", lambda *args: (seen.append(args), real(*args))[1])
        for k, changes in enumerate((dict(siblings=False), dict(method="clean"), dict(method="sgr"), dict(paper=True))):
            run(tmp_path / str(k), tiny.split(ratio=0.4), **changes)
        assert not seen
        run(tmp_path / "on", tiny.split(ratio=0.4))
        assert len(seen) == 1


def cut(split):
    """Every fifth caption."""
    captions = [split.caption(n) for n in range(0, len(split), 5)]
    return dict(tokens=np.concatenate(captions), offsets=np.cumsum([0, *map(len, captions)]))


@pytest.mark.parametrize(
    ("changes", "losses"),
    [
        (dict(), {"clean_loss", "ambiguous_loss"}),
        (dict(rematch="caption"), {"clean_loss", "refinable_loss", "ambiguous_loss"}),
        (dict(subsets=("clean",)), {"clean_loss"}),
        (dict(subsets=("clean", "refinable"), rematch="caption"), {"clean_loss", "refinable_loss"}),
        (dict(subsets=("clean", "ambiguous")), {"clean_loss", "ambiguous_loss"}),
        (dict(noisy_treatment="refinable", rematch="caption"), {"clean_loss", "refinable_loss"}),
        (dict(noisy_treatment="refinable"), {"clean_loss"}),
        (dict(noisy_treatment="ambiguous"), {"clean_loss", "ambiguous_loss"}),
        (dict(method="clean"), {"clean_loss"}),
        (dict(method="sgr"), {"plain_loss"}),
        (dict(clean_margin="posterior", threshold="quantile", pcs="counts"), None),
        (dict(clean_margin="agreement", mask_duplicates=False, evaluation_negatives=3), None),
        (dict(rematch="caption", bank_size=24, negatives_ramp=True), None),
        (dict(classifier_input="pooled"), None),
        (dict(assignment="balanced", assignment_queue=20, classifier_gradient=True), None),
        (dict(paper=True), {"clean_loss", "refinable_loss", "ambiguous_loss"}),
    ],
    ids=str,
)
def test_switches_run(tmp_path, spy, monkeypatch, changes, losses):
    # after one epoch all images would be as consistent
    monkeypatch.setattr(module, "pair_pcs", lambda state, split, *_: np.random.default_rng(0).random(len(split)))
    found = run(tmp_path, warmup_epochs=0, epochs=1, refinable_from=1, ambiguous_from=1, **changes)
    if losses:
        assert names(spy) == losses
    if changes.get("method") == "sgr":
        assert {a[2] for _, a in spy} == {"hardest"}
        assert "A_clean_pairs" not in found
    weights = [last(tmp_path)["networks"][k]["classifier.hidden.weight"] for k in range(2)]
    start = new_state(tiny.config(**changes), tiny.split(), tiny.WORDS, "cpu")
    for weight, network in zip(weights, start.networks, strict=True):
        # sgr and clean have no use for the classifier
        assert torch.equal(weight, network.classifier.hidden.weight) == (changes.get("method") in ("sgr", "clean"))


def test_both_networks_judge():
    rng = np.random.default_rng(0)
    config = tiny.config(judges="other", siblings=False)
    split = tiny.split()
    labels, none = np.zeros(60, np.int32), np.zeros(60, np.float32)
    losses = np.where(rng.random((2, 60)) < 0.5, 0.1, 0.6).astype(np.float32)
    found = [Evaluation(x, labels[:12], labels, none, none[:12], 0, 0) for x in losses]
    own = [mixture(x.losses)[0] for x in found]
    state = new_state(config, split, tiny.WORDS, "cpu")

    def decide(epoch, config):
        return module.decide(
            state, found, *module.believe(state, found, split, epoch, config), None, split, epoch, config
        )

    told = decide(1, config)
    assert all(np.array_equal(d.posterior, x) for d, x in zip(state.divisions, own, strict=True))
    together = mixture(losses.mean(0))[0]
    both = replace(config, judges="both", belief_memory=0.25)
    decide(2, both)
    # each network's belief of the epoch before was its own; what both say together is remembered as of the first
    assert all(np.allclose(d.posterior, 0.25 * own[0] + 0.75 * together) for d in state.divisions)
    decide(2, replace(both, belief_memory=0.0))
    assert all(np.allclose(d.posterior, together) for d in state.divisions)
    # the other's word counts: the two do not agree on all
    assert (told[0]["subset"] != told[1]["subset"]).any()
    assert (state.divisions[0].subset != told[0]["subset"]).any()


def test_subsets_too_small_are_skipped(spy):
    split, config = tiny.split(), tiny.config(refinable_from=1, ambiguous_from=1)
    # 17 clean pairs: two batches of 8, and one pair left over; one refinable pair; 9 ambiguous: 8 and 1
    subset = np.full(60, 9, np.uint8)
    subset[:17], subset[17], subset[18:27] = 0, 1, 2
    state = divided(config, split, subset)
    steps = sum(1 for _ in train_epoch(state, split, 1, config, "cpu"))
    assert steps == state.step == 3
    assert [name for name, _ in spy] == ["clean_loss", "ambiguous_loss", "clean_loss"]
    plain = replace(split, image_of=split.image_of[:9], true_image=split.true_image[:9], offsets=split.offsets[:10],
                    tokens=split.tokens[: split.offsets[9]], texts=None)  # fmt: skip
    state = new_state(config, plain, tiny.WORDS, "cpu")
    assert sum(1 for _ in train_epoch(state, plain, 0, config, "cpu")) == 2
    assert [name for name, _ in spy[3:]] == ["plain_loss"]


@pytest.mark.parametrize("changes", [dict(), dict(method="sgr"), dict(classes=4, classifier_input="regions")], ids=str)
def test_a_shared_warmup_is_the_same(tmp_path, changes):
    plan = dict(warmup_epochs=2, epochs=1, refinable_from=1)
    run(tmp_path / "whole", **plan, **changes)
    run(tmp_path / "warmup", **plan | dict(epochs=0), method="sgr")
    split, dev = tiny.split(8, 0.4), tiny.split(6, name="dev")
    config = tiny.config(**plan, **changes)
    train(config, split, dev, tiny.WORDS, tmp_path / "rest", report=lambda s: None, warmed=tmp_path / "warmup")
    whole, rest = last(tmp_path / "whole"), last(tmp_path / "rest")
    assert same(whole["networks"], rest["networks"])
    assert same(whole["optimizers"], rest["optimizers"])
    assert [r["epoch"] for r in rest["records"]] == [1, 2, 3]
    assert whole["best"] == rest["best"]
    assert (tmp_path / "rest" / "best.pt").exists()


def test_another_warmup_is_refused(tmp_path):
    run(tmp_path / "warmup", epochs=0, method="sgr", warmup_epochs=1)
    split, dev = tiny.split(8, 0.4), tiny.split(6, name="dev")

    def begin(warmed, split=split, **changes):
        config = tiny.config(**dict(warmup_epochs=1) | changes)
        train(config, split, dev, tiny.WORDS, tmp_path / "new", report=lambda s: None, warmed=warmed)

    with pytest.raises(ValueError, match="other settings or data: seed: 0 -> 1"):
        begin(tmp_path / "warmup", seed=1)
    with pytest.raises(ValueError, match="train data, noise"):
        begin(tmp_path / "warmup", split=tiny.split(8, 0.2))
    with pytest.raises(FileNotFoundError, match="train with epochs=0 first"):
        begin(tmp_path / "nowhere")
    run(tmp_path / "over", warmup_epochs=1, epochs=1)
    with pytest.raises(ValueError, match="stands in epoch 3, not at the end of 1 epochs"):
        begin(tmp_path / "over")


def test_labels_count_from_the_second_epoch(tmp_path):
    for first, counted in ((1, 3), (2, 2)):
        run(tmp_path / str(first), warmup_epochs=0, epochs=3, tally_from=first)
        saved = last(tmp_path / str(first))
        assert saved["observations"] == counted
        counts = saved["tallies"][0][0]
        assert (counts.sum(1) == counted).all()


def test_clipping_keeps_the_weight_of_a_step():
    network, config = tiny.network(), tiny.config()
    head, rest = module.parameters(network)
    # the classifier has no gradient in warm-up
    for x in rest:
        x.grad = torch.ones_like(x)
    norm = module.clip_gradients(network, config, torch.tensor(0.25))
    assert norm.item() == pytest.approx(sum(x.numel() for x in rest) ** 0.5, rel=1e-4)
    assert torch.cat([x.grad.flatten() for x in rest]).norm().item() == pytest.approx(0.25 * config.clip, rel=1e-3)
    # apart: the classifier's norm does not slow the rest, and its own step has its full length
    for x in (*head, *rest):
        x.grad = torch.full_like(x, 100.0 if any(x is y for y in head) else 1.0)
    module.clip_gradients(network, config, torch.tensor(0.25))
    lengths = [torch.cat([x.grad.flatten() for x in group]).norm().item() for group in (head, rest)]
    assert lengths == pytest.approx([config.clip, 0.25 * config.clip], rel=1e-3)


# losses


def by_formula(scores, margin, images=None, captions=None, weight=None):
    """Sum of hardest hinges over rows and columns, with loops."""
    weight = torch.ones(len(scores)) if weight is None else weight
    n, total = len(scores), 0.0
    for i in range(n):
        rivals = [
            j for j in range(n)
            if j != i and (images is None or (images[i] != images[j] and captions[i] != captions[j]))
        ]  # fmt: skip
        for other in ([scores[i, j] for j in rivals], [scores[j, i] for j in rivals]):
            if other:
                total = total + weight[i] * torch.relu(margin[i] + torch.stack(other).max() - scores[i, i])
    return total


def margin_of(y, alpha=0.2, base=10.0):
    return (alpha * (base**y - 1) / (base - 1)).detach()


def cosine(p, q):
    return (p * q).sum(-1) / (p.norm(dim=-1) * q.norm(dim=-1))


def entropy_of(p):
    mean = p.mean(0).clamp(min=1e-8)
    return -(mean * mean.log()).sum()


def gradients(loss, network):
    found = torch.autograd.grad(loss, [*network.parameters()], allow_unused=True)
    return {name: g for (name, _), g in zip(network.named_parameters(), found, strict=True) if g is not None}


def check(parts, expected, network):
    torch.testing.assert_close(parts["loss"], expected, rtol=1e-4, atol=1e-5)
    want, got = gradients(expected, network), gradients(parts["loss"], network)
    assert want.keys() == got.keys()
    norm = sum(g.square().sum() for g in want.values()).sqrt()
    assert norm > 0.1
    for name in want:
        assert (want[name] - got[name]).norm() < 1e-3 * norm, name


LAMBDAS = dict(lambda_triplet=0.7, lambda_ce=1.3, lambda_gce=0.9, lambda_entropy=3.0)
PAIRS = [0, 1, 7, 13, 22, 31, 40, 55]  # the first two share an image


def encoded(network, b):
    images, captions = network.encode_images(b.features), network.encode_captions(b.tokens, b.offsets)
    p, q = network.image_logits(images).softmax(1), network.caption_logits(captions).softmax(1)
    return network.similarity(images, captions), p, q


@pytest.mark.parametrize("mode", ["mean", "hardest"])
@pytest.mark.parametrize("mask", [True, False])
def test_plain_loss(mode, mask):
    network, b, config = tiny.network(), tiny.batch(tiny.split(), PAIRS), tiny.config(mask_duplicates=mask)
    scores, _, _ = encoded(network, b)
    ids = (b.images, b.pairs) if mask else (None, None)
    expected = by_formula(scores, torch.full((8,), 0.2), *ids)
    if mode == "mean":
        away = (b.images[:, None] != b.images) if mask else ~torch.eye(8, dtype=bool)
        own = scores.diagonal()
        expected = ((torch.relu(0.2 + scores - own[:, None]) + torch.relu(0.2 + scores - own)) * away).sum() / 8
    check(plain_loss(network, b, mode, 0, config), expected, network)


# the losses as printed, and as they are by default
FORMS = {
    "printed": dict(both_sides=False, assignment="argmax", likeness_temperature=1.0, noisy_weight="one",
                    classifier_gradient=True, negatives_ramp=False, rematch_by="images"),
    "default": dict(negatives_ramp=False),
}  # fmt: skip


def formed(form, **changes):
    """A network whose classes are used unevenly, and its configuration."""
    network = tiny.network(**FORMS[form])
    with torch.no_grad():
        network.classifier.output.weight.mul_(0.05)
        network.classifier.output.bias.copy_(torch.linspace(0, 0.02, 8))
    return network, tiny.config(**FORMS[form], **changes)


def sharp(p, config):
    """The softmax that S_p is taken of."""
    return (p.log() / config.likeness_temperature).softmax(1)


def label(p, config):
    """The class that each prediction stands for; centred: after one batch."""
    mean = torch.full_like(p[0], 1 / p.shape[1]).lerp(p.mean(0), 0.01)
    return (p / mean if config.assignment == "centred" else p).argmax(1)


def both(config, image, caption):
    return image + caption if config.both_sides else image


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize("margin", ["one", "posterior", "agreement"])
def test_clean_loss(margin, form, moved):
    """Also with captions among them that have a new image: those count as much as it is certain."""
    (network, config), split = formed(form, clean_margin=margin, **LAMBDAS), tiny.split()
    b, bank = tiny.batch(split, PAIRS), Bank.empty(config, "cpu")
    posterior = np.random.default_rng(0).random(60).astype(np.float32)
    subset = np.where(np.arange(60) % 3 == 1, REFINABLE, CLEAN).astype(np.uint8)
    certainty = np.where(subset == CLEAN, 1, 0.3 + posterior / 2).astype(np.float32)
    division = Division(posterior, subset, None, 0.0, certainty=certainty if moved else None)
    scores, p, q = encoded(network, b)
    likeness = cosine(sharp(p, config), sharp(q, config))
    y = dict(one=torch.ones(8), posterior=torch.from_numpy(posterior[PAIRS]), agreement=likeness)[margin]
    weight = torch.ones(8)
    if moved:
        y = torch.where(torch.from_numpy(subset[PAIRS] == CLEAN), y, torch.from_numpy(certainty[PAIRS]))
        weight = torch.from_numpy(certainty[PAIRS]) if form == "default" else weight
    rows = torch.arange(8)
    ce = both(config, -p[rows, label(q, config)].log().mean(), -q[rows, label(p, config)].log().mean())
    triplet = by_formula(scores, margin_of(y), b.images, b.pairs, weight)
    parts = clean_loss(network, b, division, bank, 1, config)
    check(parts, 0.7 * triplet + 1.3 * ce - 3.0 * both(config, entropy_of(p), entropy_of(q)), network)
    torch.testing.assert_close(parts["ce"], ce, rtol=1e-4, atol=1e-5)
    assert bank.pairs[:8].tolist() == PAIRS
    # the method clean: the triplet alone
    alone = clean_loss(
        network, b, replace(division, certainty=None), None, 1, replace(config, method="clean", clean_margin="one")
    )
    scores, _, _ = encoded(network, b)
    check(alone, 0.7 * by_formula(scores, torch.full((8,), 0.2), b.images, b.pairs), network)


@pytest.mark.parametrize("form", [*FORMS])
def test_ambiguous_loss(form):
    network, config = formed(form, gamma=0.6, **LAMBDAS)
    b = tiny.batch(tiny.split(), PAIRS)
    scores, p, q = encoded(network, b)
    rows = torch.arange(8)
    gce = ((1 - p[rows, label(q, config)] ** 0.6) / 0.6 + (1 - q[rows, label(p, config)] ** 0.6) / 0.6).mean()
    y = cosine(sharp(p, config), sharp(q, config)).detach()
    weight = y if form == "default" else torch.ones(8)
    triplet = by_formula(scores, margin_of(y), b.images, b.pairs, weight)
    expected = 0.7 * triplet + 0.9 * gce - 3.0 * both(config, entropy_of(p), entropy_of(q))
    check(ambiguous_loss(network, b, None, None, None, 1, config), expected, network)


@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize("mask", [True, False])
def test_refinable_loss(mask, form):
    network, split = tiny.network(**FORMS[form]), tiny.split()
    config = tiny.config(mask_duplicates=mask, **FORMS[form])
    clean, b = tiny.batch(split, [3, 14, 29, 37, 48, 58]), tiny.batch(split, PAIRS)
    with torch.no_grad():
        # predictions that differ
        hidden = network.classifier.hidden(network.encode_images(b.features).regions).relu().mean(1)
        network.classifier.image_norm.running_mean.copy_(hidden.mean(0))
        network.classifier.image_norm.running_var.copy_(hidden.var(0) + 1e-4)
    bank = Bank.empty(config, "cpu")
    _, theirs, _ = encoded(network, clean)
    # of any captions
    captions = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).softmax(1)
    bank.put(theirs.log(), captions.log(), clean.pairs, config)
    images = network.encode_images(b.features)
    p = network.image_logits(images).softmax(1)
    similar = torch.stack([cosine(x, sharp(theirs, config)) for x in sharp(p, config)])
    if form == "default":
        similar = similar * torch.stack([cosine(x, sharp(captions, config)) for x in sharp(p, config)])
    likeness, at = similar.max(1)
    matched = clean.pairs[at]
    assert len(set(matched.tolist())) > 1
    tokens, offsets = captions_of(split, matched.numpy())
    scores = network.similarity(images, network.encode_captions(tokens, offsets))
    ids = (b.images, matched) if mask else (None, None)
    weight = likeness.detach() if form == "default" else torch.ones(8)
    parts = refinable_loss(network, b, split, bank, word_weights(split, tiny.WORDS), 1, config)
    check(parts, by_formula(scores, margin_of(likeness), *ids, weight), network)
    # the share of the words of each new caption that its image's own captions have, by weight
    weights, shares = word_weights(split, tiny.WORDS), []
    for image, pair in zip(b.images.tolist(), matched.tolist(), strict=True):
        own = {t for c in np.flatnonzero(split.true_image == image) for t in split.caption(c).tolist()}
        new = split.caption(pair).tolist()
        shares.append(sum(weights[t] for t in new if t in own) / sum(weights[t] for t in new))
    assert parts["overlap"].item() == pytest.approx(np.mean(shares), rel=1e-5)


def test_a_detached_classifier_trains_alone():
    b = tiny.batch(tiny.split(), PAIRS)
    for joint in (False, True):
        network = tiny.network(classifier_gradient=joint)
        _, p, q = encoded(network, b)
        touched = {name.split(".")[0] for name in gradients((p * q).sum(), network)}
        assert (touched == {"classifier"}) != joint


def test_the_ramp_of_negatives():
    config = tiny.config(negatives_ramp=True, batch_size=20)
    assert [negatives(epoch, config) for epoch in (-1, 0, 1, 2, 3, 4)] == [20, 20, 8, 16, 20, 20]
    assert negatives(1, tiny.config(negatives_ramp=False)) == 8
    network, b = tiny.network(), tiny.batch(tiny.split(), [*range(0, 60, 6)])
    scores, _, _ = encoded(network, b)
    images, captions = network.encode_images(b.features), network.encode_captions(b.tokens, b.offsets)
    margin = torch.linspace(0, 0.2, 10)
    found = contrast(network, images, captions, margin, "hardest", b.images, b.pairs, 1, config)
    groups = [slice(0, 8), slice(8, 10)]
    expected = sum(by_formula(scores[g, g], margin[g], b.images[g], b.pairs[g]) for g in groups)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    whole = contrast(network, images, captions, margin, "hardest", b.images, b.pairs, 4, config)
    torch.testing.assert_close(whole, by_formula(scores, margin, b.images, b.pairs), rtol=1e-4, atol=1e-5)


def test_margins_and_targets_carry_no_gradient():
    y = torch.rand(4, requires_grad=True)
    assert not adaptive_margin(y).requires_grad


# the optimiser


def test_adam_anew_after_warmup(whole):
    steps = {}
    for s in whole.saved:
        key = (s["epoch"], s["phase"], s["network"], s["step"])
        steps[key] = [{int(x["step"]) for x in o["state"].values()} for o in s["optimizers"]]
    assert steps[0, "train", 0, 3] == [{3}, set()]
    assert steps[1, "divide", 0, 0] == [{5}, {5}]
    assert steps[1, "train", 0, 1][0] == {1}
    # and only then
    assert min(steps[2, "train", 0, 1][0]) >= 2


def test_learning_rate(monkeypatch):
    config = tiny.config(learning_rate=1e-3, decay=0.1, decay_every=2)
    assert [learning_rate(e, config) for e in range(-1, 6)] == pytest.approx([1e-3] * 4 + [1e-4] * 2 + [1e-5])
    split = tiny.split()
    state = divided(config, split)
    next(train_epoch(state, split, 3, config, "cpu"))
    assert state.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-4)


def test_the_gradient_is_clipped():
    split, b = tiny.split(), tiny.batch(tiny.split(), PAIRS)
    for clip, expected in ((0.01, 0.01), (1e9, None)):
        config = tiny.config(clip=clip)
        state = new_state(config, split, tiny.WORDS, "cpu")
        run_step(state, "all", config, plain_loss, state.networks[0], b, "hardest", 1, config)
        grads = [p.grad for p in state.networks[0].parameters() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in grads]).norm())
        logged = module.means(state.sums)["A_all_gradient_norm"]
        assert logged > 0.02
        assert norm == pytest.approx(expected or logged, rel=1e-3)


# all of it


def test_backends_give_the_same_curve(tmp_path):
    curves = {}
    for backend in ("reference", "native"):
        split, config = tiny.split(), tiny.config()
        state = new_state(config, split, tiny.WORDS, "cpu")
        curve = []
        with use_backend(backend):
            for _ in train_epoch(state, split, 0, config, "cpu"):
                curve.append(float(state.sums["A_all"]["loss"]))
        curves[backend] = curve
    assert len(curve) == 8
    assert curves["reference"] == pytest.approx(curves["native"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sgr", "pcsr"])
def test_convergence(tmp_path, method):
    split = tiny.split(60)
    options = dict(embedding=64, similarity=32, word_embedding=32, batch_size=32, learning_rate=2e-3, dropout=0.1)
    schedule = dict(warmup_epochs=15, epochs=10, refinable_from=4, ambiguous_from=7)
    # learns its own training pairs
    found = run(tmp_path, split, split, method=method, **options, **schedule)
    chance = 2 * 100 * (1 + 5 + 10) / 60
    assert found["rsum"] > 4 * chance
