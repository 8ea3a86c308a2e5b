"""Captions of one image bear each other out: which are compared, how alike they are, and what follows for belief."""

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from pcsr_fast.data import noise
from pcsr_fast.data.overlap import word_weights
from pcsr_fast.data.split import Split
from pcsr_fast.division import ranking_quality
from pcsr_fast.siblings import LEVELS, Siblings, belief_with_siblings, siblings_of, word_vectors

WORDS = 200


def split_of(captions, image_of, images=None):
    """A split without features; captions are lists of token ids."""
    image_of = np.asarray(image_of)
    images = images or image_of.max() + 1
    offsets = np.cumsum([0, *map(len, captions)])
    return Split("made", np.zeros((images, 1, 1), np.float32), np.concatenate(captions), offsets, image_of, image_of)


def scenes(images=200, seed=0):
    """Five captions an image, each of three of its six words and of three that any caption may have."""
    rng = np.random.default_rng(seed)
    captions = []
    for _ in range(images):
        own = rng.choice(np.arange(20, WORDS), 6, replace=False)
        captions += [np.concatenate([rng.choice(own, 3, replace=False), rng.integers(0, 20, 3)]) for _ in range(5)]
    return split_of(captions, np.repeat(np.arange(images), 5))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_every_two_captions_of_an_image(image_of):
    found = siblings_of(split_of([[1]] * len(image_of), image_of), 4)
    n = len(image_of)
    expected = {(i, j) for i in range(n) for j in range(i + 1, n) if image_of[i] == image_of[j]}
    pairs = [tuple(sorted(x)) for x in zip(found.first.tolist(), found.second.tolist(), strict=True)]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected


def test_levels_follow_the_words(monkeypatch):
    split = tiny.split(ratio=0.4)
    weights = word_weights(split, tiny.WORDS)
    found = siblings_of(split, tiny.WORDS)

    def vector(n):
        words = np.zeros(tiny.WORDS)
        words[[*set(split.caption(n).tolist())]] = 1
        return words * weights / max(np.linalg.norm(words * weights), 1e-9)

    likeness = [vector(a) @ vector(b) for a, b in zip(found.first, found.second, strict=True)]
    order = np.argsort(likeness)
    assert (np.diff(found.level[order].astype(int)) >= 0).all()
    assert ((found.level == 0) == (np.array(likeness) < 1e-9)).all()
    counts = np.bincount(found.level)[1:]
    assert len(counts) == LEVELS
    assert counts.max() - counts.min() <= 2 + 0.2 * counts.mean()
    np.testing.assert_allclose(
        word_vectors(split, weights, np.array([7])).toarray()[0], vector(7), rtol=1e-5, atol=1e-7
    )
    # piece by piece the same
    monkeypatch.setattr("pcsr_fast.siblings.AT_ONCE", 7)
    assert np.array_equal(siblings_of(split, tiny.WORDS).level, found.level)


def weak_belief(clean, rng):
    """Right more often than not."""
    return (1 / (1 + np.exp(-(np.where(clean, 1.0, -1.0) + 1.5 * rng.standard_normal(len(clean)))))).astype(np.float32)


@pytest.mark.parametrize("protocol", noise.PROTOCOLS)
def test_belief(protocol):
    """Captions that were moved one by one are found; where images were moved with all captions, siblings are silent."""
    split = scenes()
    split = split.with_noise(noise.draw(200, 1000, 0.4, protocol=protocol, seed=1))
    clean = split.image_of == split.true_image
    before = weak_belief(clean, np.random.default_rng(2))
    now = belief_with_siblings(siblings_of(split, WORDS), before)
    assert now.dtype == np.float32
    alone, together = (ranking_quality(x, clean) for x in (before, now))
    if protocol == "caption":
        assert together > 0.97 > 0.9 > alone
        assert ((now > 0.5) == clean).mean() > 0.9
    else:
        assert abs(together - alone) < 0.02


def test_no_siblings_no_say():
    belief = np.array([0.2, 0.9, 0.5], np.float32)
    none = siblings_of(split_of([[1, 2], [2, 3], [3]], [0, 1, 2]), 4)
    assert belief_with_siblings(none, belief) is belief
    # a caption that has none, beside some that have
    some = siblings_of(split_of([[1, 2], [1, 2], [3]], [0, 0, 1]), 4)
    assert belief_with_siblings(some, belief)[2] == pytest.approx(0.5)


def test_belief_by_hand(monkeypatch):
    monkeypatch.setattr("pcsr_fast.siblings.ROUNDS", 1)
    siblings = Siblings(np.array([0, 2]), np.array([1, 3]), np.array([3, 0], np.uint8))
    belief = np.array([0.9, 0.8, 0.3, 0.6], np.float32)
    both = np.array([0.72, 0.18])
    # one of each level, and one more in every level
    together, apart = 1 + both, 2 - both
    odds = (together / (LEVELS + 1 + both.sum())) / (apart / (LEVELS + 1 + 2 - both.sum()))
    logits = np.log(belief / (1 - belief))
    logits += np.log([0.8 * odds[0] + 0.2, 0.9 * odds[0] + 0.1, 0.6 * odds[1] + 0.4, 0.3 * odds[1] + 0.7])
    np.testing.assert_allclose(belief_with_siblings(siblings, belief), 1 / (1 + np.exp(-logits)), rtol=1e-5)
    # beliefs that are certain stay finite
    sure = belief_with_siblings(siblings, np.array([1, 1, 0, 0], np.float32))
    assert np.isfinite(sure).all()
    assert (sure[:2] > 0.99).all()
    assert (sure[2:] < 0.01).all()


def test_order_does_not_matter():
    split = scenes(40)
    split = split.with_noise(noise.draw(40, 200, 0.4, seed=1))
    rng = np.random.default_rng(3)
    order = rng.permutation(200)
    captions = [split.caption(n) for n in order]
    other = split_of(captions, split.image_of[order], 40)
    belief = weak_belief(split.image_of == split.true_image, rng)
    found = belief_with_siblings(siblings_of(split, WORDS), belief)
    again = belief_with_siblings(siblings_of(other, WORDS), belief[order])
    np.testing.assert_allclose(again, found[order], rtol=1e-4, atol=1e-6)
