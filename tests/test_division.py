"""Division: each formula by hand, the pass over all pairs, and a controller that holds its target."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from pcsr_fast.config import Config
from pcsr_fast.data.loader import batches
from pcsr_fast.division import (
    AMBIGUOUS,
    CLEAN,
    REFINABLE,
    Division,
    Evaluation,
    clean_posterior,
    divide,
    evaluate_pairs,
    first_tau,
    health,
    is_clean,
    mixture,
    next_tau,
    pair_pcs,
    refinability,
    target_utilisation,
)
from pcsr_fast.ops import TallyState, label_similarity, tally
from pcsr_fast.rematch import Bank
from pcsr_fast.siblings import belief_with_siblings, siblings_of


def test_mixture_of_two_clusters():
    rng = np.random.default_rng(0)
    losses = np.concatenate([rng.normal(0.1, 0.01, 300), rng.normal(0.5, 0.03, 100)]).astype(np.float32)
    posterior, components = mixture(losses)
    assert posterior.dtype == np.float32
    assert (posterior[:300] > 0.99).all()
    assert (posterior[300:] < 0.01).all()
    scaled = (losses - losses.min()) / (losses.max() - losses.min())
    np.testing.assert_allclose(components[:, 0], [0.75, 0.25], atol=1e-3)
    np.testing.assert_allclose(components[:, 1], [scaled[:300].mean(), scaled[300:].mean()], atol=1e-3)
    # 5e-4 is added to the variances
    np.testing.assert_allclose(components[0, 2], np.sqrt(scaled[:300].var() + 5e-4), rtol=1e-2)
    # neither the scale nor the order of the losses matters
    np.testing.assert_allclose(mixture(7 * losses + 3)[0], posterior, atol=1e-3)
    np.testing.assert_allclose(mixture(losses[::-1])[0], posterior[::-1], atol=1e-3)
    # posterior of the components, between the clusters too
    middle = np.append(losses, np.float32(0.2))
    posterior, c = mixture(middle)
    at = (0.2 - middle.min()) / (middle.max() - middle.min())
    density = c[:, 0] / c[:, 2] * np.exp(-(((at - c[:, 1]) / c[:, 2]) ** 2) / 2)
    assert posterior[-1] == pytest.approx(density[0] / density.sum(), rel=1e-4)


def test_mixture_of_many(monkeypatch):
    """Applied piece by piece it says the same; fitted to a part, nearly."""
    rng = np.random.default_rng(0)
    losses = np.concatenate([rng.normal(0.1, 0.03, 3000), rng.normal(0.3, 0.06, 2001)]).astype(np.float32)
    rng.shuffle(losses)
    expected, components = mixture(losses)
    monkeypatch.setattr("pcsr_fast.division.FITTED", 5001)
    monkeypatch.setattr("pcsr_fast.division.AT_ONCE", 2000)
    posterior, found = mixture(losses)
    np.testing.assert_array_equal(found, components)
    np.testing.assert_allclose(posterior, expected, atol=1e-6)
    monkeypatch.setattr("pcsr_fast.division.FITTED", 5000)
    posterior, found = mixture(losses)
    assert not np.array_equal(found, components)
    np.testing.assert_allclose(found, components, atol=0.02)
    assert np.abs(posterior - expected).mean() < 0.02
    assert (posterior > 0).all()


@pytest.mark.parametrize("value", [0.0, 0.4, 1e-9])
def test_equal_losses(value):
    with pytest.raises(ValueError, match=r"all 50 pairs have the same loss .*collapsed.*warmup_steps"):
        mixture(np.full(50, value, np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_losses_that_are_not_finite(value):
    losses = np.linspace(0, 1, 50, dtype=np.float32)
    losses[[7, 9]] = value
    with pytest.raises(ValueError, match=r"the loss of pair 7 is .*, and 2 are not finite: training diverged"):
        mixture(losses)


def test_agreement_of_labels_is_evidence():
    rng = np.random.default_rng(0)
    noisy = np.arange(400) < 160
    # neither tells all pairs apart, and each errs on its own
    losses = np.where(noisy, 0.7, 0.3) + 0.15 * rng.standard_normal(400)
    likeness = np.where(noisy, 0.2, 0.7) + 0.15 * rng.standard_normal(400)
    found = Evaluation(losses.astype(np.float32), None, None, likeness.astype(np.float32), None, 0.0, 0.0)
    alone = clean_posterior(found, None, 2, Config(evidence="loss"))[0]
    assert np.array_equal(alone, mixture(found.losses)[0])
    both = clean_posterior(found, None, 2, Config())[0]
    assert ((both > 0.5) == ~noisy).mean() > 0.97 > 0.93 > ((alone > 0.5) == ~noisy).mean()
    # that of clean and of noisy pairs alike: no evidence
    random = found._replace(likeness=rng.permutation(found.likeness))
    assert ((clean_posterior(random, None, 2, Config())[0] > 0.5) == (alone > 0.5)).mean() > 0.97
    # in the first epoch, for the method clean, and where predictions are all alike, the loss decides
    flat = found._replace(likeness=np.full(400, 0.3, np.float32))
    for evaluation, epoch, config in ((found, 1, Config()), (found, 2, Config(method="clean")), (flat, 2, Config())):
        assert np.array_equal(clean_posterior(evaluation, None, epoch, config)[0], alone)


def test_siblings_are_evidence():
    """Beside losses and labels, from the first epoch on, and before the memory."""
    rng = np.random.default_rng(0)
    losses = rng.random(60).astype(np.float32)
    found = Evaluation(losses, None, None, rng.random(60).astype(np.float32), None, 0.0, 0.0)
    siblings = siblings_of(tiny.split(ratio=0.4), tiny.WORDS)
    before = rng.random(60).astype(np.float32)
    for epoch in (1, 2):
        alone = clean_posterior(found, None, epoch, Config())[0]
        expected = belief_with_siblings(siblings, alone)
        assert np.abs(expected - alone).max() > 0.01
        assert np.array_equal(clean_posterior(found, None, epoch, Config(), siblings)[0], expected)
        remembered = clean_posterior(found, before, epoch, Config(belief_memory=0.25), siblings)[0]
        np.testing.assert_allclose(remembered, 0.75 * expected + 0.25 * before, rtol=1e-5)


@pytest.mark.parametrize("method", ["clean", "pcsr"])
def test_clean_pairs_do_not_jump(method):
    """A tenth of the clean pairs has nearly no loss: the mixture alone would take the others to be noisy."""
    rng = np.random.default_rng(0)
    kind = rng.permutation(np.repeat([0, 1, 2], [120, 680, 200]))  # learnt, clean, noisy
    losses = (
        np.array([0.01, 0.5, 0.85])[kind] + np.array([0.005, 0.09, 0.03])[kind] * rng.standard_normal(1000)
    ).astype(np.float32)
    likeness = np.where(kind == 2, 0.4, 0.6) + 0.15 * rng.standard_normal(1000)
    found = Evaluation(losses, None, None, likeness.astype(np.float32), None, 0.0, 0.0)
    before = np.where(kind < 2, 0.9, 0.1).astype(np.float32)
    alone, wrong = mixture(losses)
    assert (alone > 0.5).sum() < 200
    posterior, components = clean_posterior(found, before, 5, Config(method=method))
    assert ((posterior > 0.5) == (kind < 2)).mean() > 0.95
    assert components[0, 0] > 0.6 > 0.2 > wrong[0, 0]
    assert components[0, 1] < components[1, 1]
    # half of the memory, half of what the losses say from there
    assert posterior[kind == 0].min() > 0.9
    # as printed: each epoch for itself
    assert np.array_equal(clean_posterior(found, before, 5, Config(method=method, paper=True))[0], alone)
    # where losses and belief agree, nothing is fitted again
    few = np.where(kind == 0, 0.9, 0.1).astype(np.float32)
    assert np.allclose(clean_posterior(found, few, 5, Config(method="clean"))[0], (alone + few) / 2)


def test_is_clean():
    assert is_clean(np.array([0.2, 0.5, 0.51, 0.9])).tolist() == [False, False, True, True]
    # all clean: the 1 % with the smallest posterior become noisy
    posterior = np.linspace(0.6, 1, 300)[np.random.default_rng(0).permutation(300)]
    assert sorted(posterior[~is_clean(posterior)]) == sorted(posterior)[:3]
    # fewer than two clean: the 1 % with the largest stay clean, and never fewer than two
    posterior = posterior - 0.6
    assert sorted(posterior[is_clean(posterior)]) == sorted(posterior)[-3:]
    posterior[5] = 0.6
    assert is_clean(posterior).sum() == 3
    assert is_clean(np.array([0.1, 0.3, 0.2])).tolist() == [False, True, True]
    assert is_clean(np.array([0.9, 0.8, 0.7])).tolist() == [True, True, False]
    # two are enough
    assert is_clean(np.array([0.6, 0.8, *[0.1] * 300])).sum() == 2


def test_doubt():
    """Held back: so many times the noisy pairs that the posteriors expect among the clean ones, the least certain."""
    posterior = np.random.default_rng(0).permutation(np.linspace(0.81, 1, 20)).astype(np.float32)
    posterior = np.concatenate([posterior, np.full(20, 0.2, np.float32)])
    # 20 pass, and 0.19 + 0.18 + ... + 0 = 1.9 noisy ones are expected among them
    for doubt, kept in ((0.0, 20), (1.0, 18), (2.0, 16), (4.0, 12), (9.0, 10)):
        assert sorted(posterior[is_clean(posterior, doubt)]) == sorted(posterior)[-kept:]
    # equal ones stay together, and the certain ones are never held back
    assert is_clean(np.array([1.0] * 7 + [0.9] * 5 + [0.1] * 3), 2.0).sum() == 12
    assert is_clean(np.array([1.0] * 7 + [0.9] * 5 + [0.1] * 3), 99.0).sum() == 7
    assert is_clean(np.array([1.0] * 7 + [0.1] * 3), 99.0).sum() == 7
    # no fewer than two are clean
    assert is_clean(np.array([0.6, *[0.1] * 30]), 9.0).sum() == 2
    assert (divide(posterior, posterior, None, 1, tiny.config(doubt=2.0)).subset == CLEAN).sum() == 16


def test_belief_remembers_the_epoch_before():
    rng = np.random.default_rng(0)
    losses = np.concatenate([rng.normal(0.1, 0.03, 300), rng.normal(0.3, 0.06, 200)]).astype(np.float32)
    found = Evaluation(losses, None, None, np.zeros(500, np.float32), None, 0.0, 0.0)
    now = clean_posterior(found, None, 2, Config())[0]
    before = rng.random(500).astype(np.float32)
    remembered = clean_posterior(found, before, 2, Config(belief_memory=0.25))[0]
    np.testing.assert_allclose(remembered, 0.25 * before + 0.75 * now, atol=1e-6)
    assert remembered.dtype == np.float32
    assert np.array_equal(clean_posterior(found, before, 2, Config(belief_memory=0.0))[0], now)


def test_target_utilisation():
    c = tiny.config(target_start=0.4, target_end=0.9, target_epochs=50)
    assert [target_utilisation(t, c) for t in (0, 1, 25, 50, 70)] == pytest.approx([0.4, 0.41, 0.65, 0.9, 0.9])


def test_first_tau():
    pcs = np.array([5.0, 1, 3, 2, 4, 9, 8, 7, 6, 0], np.float32)
    for target, tau in ((0.4, 6.0), (0.1, 9.0), (1.0, 0.0), (0.0, 9.0)):
        assert first_tau(pcs, target) == tau
        assert (pcs >= tau).mean() == max(target, 0.1)
    assert first_tau(pcs[:0], 0.4) == 0


def test_next_tau():
    c = tiny.config(controller_gain=0.2, controller_rate=0.7)
    # too few refinable pairs: tau falls to 0.3 * 0.5 + 0.7 * (0.5 - 0.2 * (0.6 - 0.4))
    assert next_tau(0.5, 0.4, 0.6, c) == pytest.approx(0.472)
    assert next_tau(0.5, 0.8, 0.6, c) == pytest.approx(0.528)
    assert next_tau(0.5, 0.6, 0.6, c) == pytest.approx(0.5)


POSTERIOR = np.array([0.9, 0.8, 0.1, 0.2, 0.3, 0.1, 0.4], np.float32)
PCS = np.array([0.0, 1.0, 0.9, 0.7, 0.5, 0.3, 0.1], np.float32)
STAGES = dict(refinable_from=26, target_start=0.4, target_end=0.9, target_epochs=50, threshold="controller")


def test_before_the_refinable_stage_the_controller_idles():
    for tau in (None, 0.2):
        found = divide(POSTERIOR, PCS, tau, 25, tiny.config(**STAGES))
        assert found.tau is None
        assert found.pairs(CLEAN).tolist() == [0, 1]
        assert len(found.pairs(REFINABLE)) + len(found.pairs(AMBIGUOUS)) == 5


def test_first_use_of_tau():
    found = divide(POSTERIOR, PCS, None, 26, tiny.config(**STAGES))
    # the target is 0.66 of 5 noisy pairs, 3
    assert found.tau == pytest.approx(0.5)
    assert found.utilisation == pytest.approx(0.6)
    assert found.subset.tolist() == [CLEAN, CLEAN, REFINABLE, REFINABLE, REFINABLE, AMBIGUOUS, AMBIGUOUS]
    assert found.subset.dtype == np.uint8


def test_tau_moves_before_it_divides():
    # with the tau before, 1 of 5 is refinable; 0.71 - 0.7 * 0.2 * (0.67 - 0.2) = 0.6442 takes a second
    found = divide(POSTERIOR, PCS, 0.71, 27, tiny.config(**STAGES))
    assert found.utilisation == pytest.approx(0.2)
    assert found.tau == pytest.approx(0.6442)
    assert found.pairs(REFINABLE).tolist() == [2, 3]
    quantile = divide(POSTERIOR, PCS, 0.71, 27, tiny.config(**STAGES | {"threshold": "quantile"}))
    assert quantile.tau == pytest.approx(0.5)
    assert quantile.pairs(REFINABLE).tolist() == [2, 3, 4]
    assert quantile.utilisation == pytest.approx(0.6)


@pytest.mark.parametrize(("treatment", "subset"), [("refinable", REFINABLE), ("ambiguous", AMBIGUOUS)])
def test_one_treatment_for_all(treatment, subset):
    for epoch in (1, 26, 50):
        found = divide(POSTERIOR, PCS, None, epoch, tiny.config(**STAGES, noisy_treatment=treatment))
        assert found.subset.tolist() == [CLEAN, CLEAN, *[subset] * 5]


def test_pcs_of_pairs():
    split = replace(tiny.split(images=3), image_of=np.repeat([2, 0, 1], 5))
    state = TallyState.zeros(3, 8)
    for labels in ([1, 2, 3], [1, 2, 4], [1, 5, 5], [1, 2, 5]):
        tally(torch.tensor(labels), torch.arange(3), state)
    counts = pair_pcs(state, split, 4, tiny.config(pcs="counts"))
    assert counts[::5].tolist() == [1, 4, 2]  # of images 2, 0 and 1: 2-1, 4-0, 3-1
    assert pair_pcs(state, split, 4, tiny.config(pcs="share"))[::5].tolist() == [0.25, 1, 0.5]


def test_what_is_refinable():
    pcs, match = np.float32([0.2, 0.4, 0.6]), np.float32([0.8, 0.1, 0.3])
    expected = {"consistency": [0.2, 0.4, 0.6], "match": [0.8, 0.1, 0.3], "both": [0.5, 0.25, 0.45]}
    for name, values in expected.items():
        np.testing.assert_allclose(refinability(pcs, match, tiny.config(refinable_by=name)), values)
        assert np.array_equal(refinability(pcs, 0 * match, tiny.config(refinable_by=name)), pcs)


@torch.no_grad()
def test_the_pass_says_how_well_an_image_can_be_matched():
    split, c = tiny.split(ratio=0.4), tiny.config()
    net, bank = tiny.network(), Bank.empty(c, "cpu")
    order = [*batches(split, 8, 3, 1, workers=0)]
    state = TallyState.zeros(split.images, 8)
    # a bank that nothing was put into yet
    assert not evaluate_pairs(net, split, order, state, c, bank).match.any()
    bank.put(*torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)), torch.arange(5), c)
    found = evaluate_pairs(net, split, order, state, c, bank)
    for b in order:
        likeness = bank.match(net.image_logits(net.encode_images(b.features)), c)[1]
        np.testing.assert_allclose(found.match[b.images.numpy()], likeness, rtol=1e-4)
    assert found.match.std() > 0


@pytest.mark.parametrize("pcs", ["share", "counts"])
def test_the_controller_tracks_its_target(pcs):
    """PCS of 4,000 images over 50 epochs whose labels become steadier and then less so."""
    rng = np.random.default_rng(0)
    c = tiny.config(
        epochs=50, pcs=pcs, controller_gain=0.2 if pcs == "share" else 5.0, **(STAGES | {"refinable_from": 10})
    )
    images, classes = 4000, 8
    state = TallyState.zeros(images, classes)
    steady = rng.beta(2, 2, images)
    posterior = np.repeat(np.float32([0.9, 0.1]), images // 2)
    split = replace(tiny.split(), image_of=np.arange(images), true_image=np.arange(images),
                    offsets=np.arange(images + 1), tokens=np.zeros(images, np.int32), texts=None,
                    features=np.zeros((images, 1, 1), np.float32))  # fmt: skip
    tau, far = None, []
    for epoch in range(1, 51):
        drift = 0.2 * np.sin(epoch / 8)
        labels = np.where(rng.random(images) < np.clip(steady + drift, 0, 1), 0, rng.integers(0, classes, images))
        tally(torch.from_numpy(labels), torch.arange(images), state)
        found = divide(posterior, pair_pcs(state, split, epoch, c), tau, epoch, c)
        assert (found.tau is None) == (epoch < 10)
        tau = found.tau
        if epoch >= 10:
            share = len(found.pairs(REFINABLE)) / (images // 2)
            far.append(abs(share - target_utilisation(epoch, c)))
    assert np.mean(far) < 0.1
    assert max(far) < 0.25


def run_pass(split, size=8, net=None, state=None, **changes):
    c = tiny.config(batch_size=size, **changes)
    net = tiny.network(**changes) if net is None else net
    state = TallyState.zeros(split.images, c.classes) if state is None else state
    return evaluate_pairs(net, split, batches(split, size, 3, 1, workers=0), state, c), state, net


@torch.no_grad()
@pytest.mark.parametrize("mask", [True, False])
def test_losses_of_pairs(mask):
    split = tiny.split(ratio=0.4)
    found, _, net = run_pass(split, mask_duplicates=mask, likeness_temperature=1.0)
    seen = 0
    for b in batches(split, 8, 3, 1, workers=0):
        images, captions = net.encode_images(b.features), net.encode_captions(b.tokens, b.offsets)
        s, n = net.similarity(images, captions).numpy(), len(b)
        p, q = net.image_logits(images), net.caption_logits(captions)
        for i, pair in enumerate(b.pairs.tolist()):
            others = [j for j in range(n) if j != i and not (mask and b.images[i] == b.images[j])]
            rows = sum(max(0, 0.2 + s[i, j] - s[i, i]) for j in others) / n
            columns = sum(max(0, 0.2 + s[j, i] - s[i, i]) for j in others) / n
            scale = 1 if n == 8 else n / (n - 1) * 7 / 8
            assert found.losses[pair] == pytest.approx(scale * (rows + columns), abs=1e-5)
            assert found.caption_labels[pair] == int(q[i].argmax())
            assert found.image_labels[split.image_of[pair]] == int(p[i].argmax())
            assert found.likeness[pair] == pytest.approx(float(label_similarity(p, q)[i]), abs=1e-5)
            seen += 1
    assert seen == 60


@pytest.mark.parametrize("size", [2, 7, 59, 60, 128])
def test_every_image_counts_once(size):
    split = tiny.split(ratio=0.4)
    net = tiny.network()
    state = TallyState.zeros(split.images, 8)
    for turn in (1, 2, 3):
        found, _, _ = run_pass(split, size, net, state)
        counts = state.counts.numpy().astype(int)
        assert (counts.sum(1) == turn).all()
        assert (counts[np.arange(12), found.image_labels] == turn).all()
    assert not net.training


def test_an_image_without_pairs():
    split = tiny.split()
    split = split.with_noise(np.where(split.image_of == 4, 5, split.image_of))
    found, state, _ = run_pass(split)
    assert found.image_labels[4] == -1
    assert int(state.counts[4].sum()) == 0
    assert (np.delete(found.image_labels, 4) >= 0).all()


@torch.no_grad()
@pytest.mark.parametrize("mask", [True, False])
def test_fewer_negatives(mask):
    split, net = tiny.split(images=24, ratio=0.4), tiny.network()
    whole, _, _ = run_pass(split, 40, net, mask_duplicates=mask)
    all_but_one, _, _ = run_pass(split, 40, net, mask_duplicates=mask, evaluation_negatives=39)
    np.testing.assert_allclose(all_but_one.losses, whole.losses, atol=1e-6)
    few, _, _ = run_pass(split, 40, net, mask_duplicates=mask, evaluation_negatives=12)
    b = next(batches(split, 40, 3, 1, workers=0))
    s = net.similarity(net.encode_images(b.features), net.encode_captions(b.tokens, b.offsets)).numpy()
    for i, pair in enumerate(b.pairs.tolist()):
        # twelve captions for the image, and for the caption the twelve images to which it is one of them
        rows = [(i, j % 40) for j in range(i + 1, i + 13)]
        columns = [(j % 40, i) for j in range(i - 12, i)]
        cells = [(r, c) for r, c in rows + columns if not (mask and b.images[r] == b.images[c])]
        expected = sum(max(0, 0.2 + s[cell] - s[i, i]) for cell in cells) / 12 * 39 / 40
        assert few.losses[pair] == pytest.approx(expected, abs=1e-5)
    assert whole.losses.std() > 0.01
    assert np.corrcoef(few.losses, whole.losses)[0, 1] > 0.9
    assert few.losses.mean() == pytest.approx(whole.losses.mean(), rel=0.1)


def test_features_that_are_not_finite():
    split = tiny.split()
    split.features[3, 2, 1] = np.nan
    split.features[7] = np.inf
    with pytest.warns(UserWarning, match=r"sample/train: features are not finite, of images 3, 7"):
        found, _, _ = run_pass(split)
    bad = np.isin(split.image_of, (3, 7))
    assert np.isfinite(found.losses).all()
    assert (found.losses[bad] == found.losses[~bad].max()).all()
    assert np.isfinite([found.sharpness, found.random_likeness]).all()


def test_health_by_hand():
    split = replace(tiny.split(images=4), image_of=np.repeat([1, 0, 2, 3], 5))
    labels = np.repeat(np.int32([0, 2, 2, 5]), 5)  # of the captions
    found = Evaluation(np.linspace(0, 1, 20, dtype=np.float32), np.int32([2, 0, 2, -1]), labels, None, None, 0.5, 0.25)
    # images 1, 0, 2, 3 have labels 0, 2, 2, -1: all but the last five pairs agree
    subset = np.uint8([CLEAN] * 12 + [REFINABLE] * 5 + [AMBIGUOUS] * 3)
    posterior = np.linspace(1, 0, 20, dtype=np.float32)
    figures = health(found, Division(posterior, subset, 0.5, 0.4), split, tiny.config())
    expected = {
        "classes_in_use": 2, "largest_class": 2 / 3, "mean_max_probability": 0.5, "random_likeness": 0.25,
        "agreement": 0.75, "loss_mean": 0.5, "agreement_clean": 1.0, "agreement_noisy": 3 / 8,
        "clean_pairs": 12, "refinable_pairs": 5, "ambiguous_pairs": 3,
        # the first ten are mismatched, so 2 of 12 are rightly clean, of 10; the order is upside down
        "split_precision": 2 / 12, "split_recall": 2 / 10, "split_auc": 0.0,
    }  # fmt: skip
    assert figures == pytest.approx(expected)
    without = health(found, Division(posterior, subset, 0.5, 0.4), tiny.split(images=4), tiny.config())
    assert "split_auc" not in without


def test_sharpness_and_likeness():
    split = tiny.split()
    found, _, net = run_pass(split, 60)
    with torch.no_grad():
        p = net.image_logits(net.encode_images(torch.from_numpy(split.features)))
    # every image five times
    assert found.sharpness == pytest.approx(float(p.softmax(1).amax(1).mean()), abs=1e-5)
    assert 0 < found.random_likeness <= 1


def test_small_last_batch():
    """Its losses compare with those of whole batches, and a pair without a negative is in the middle."""
    split = tiny.split()
    found, _, net = run_pass(split, size=8)
    order = [batch.pairs.numpy() for batch in batches(split, 8, 3, 1, workers=0)]
    assert len(order[-1]) == 4
    alone, *_ = run_pass(split, size=4, net=net)
    own = [batch.pairs.numpy() for batch in batches(split, 4, 3, 1, workers=0)]
    np.testing.assert_array_equal(own[-1], order[-1])
    # the same four pairs, once as a whole batch of four and once as the rest of eights
    np.testing.assert_allclose(found.losses[order[-1]], alone.losses[order[-1]] * (4 / 3) * (7 / 8), rtol=1e-5)
    single, *_ = run_pass(split, size=59, net=net)
    last = [batch.pairs.numpy() for batch in batches(split, 59, 3, 1, workers=0)][-1]
    assert len(last) == 1
    assert single.losses[last[0]] == np.median(np.delete(single.losses, last))
