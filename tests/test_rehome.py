"""New images for captions of noisy pairs: candidates, what words are worth, and how certain the choice is."""

import math

import numpy as np
import pytest
import tiny
import torch
from test_siblings import WORDS, scenes, split_of

from pcsr_fast import rehome as module
from pcsr_fast.data import noise
from pcsr_fast.data.overlap import word_weights
from pcsr_fast.evaluate import encode, pair_scores, score_matrix
from pcsr_fast.rehome import has_siblings, image_words, rehome, words_worth


def worth(split, belief=None, clean=None):
    weights = word_weights(split, WORDS)
    belief = np.ones(len(split), np.float32) if belief is None else belief
    pairs = np.arange(len(split)) if clean is None else np.flatnonzero(clean)
    known, total = image_words(split, weights, belief, pairs)
    return words_worth(known, total, split, weights, belief, pairs)


def test_pair_scores_are_those_of_the_matrix(monkeypatch):
    split, networks = tiny.split(), [tiny.network(0), tiny.network(1)]
    expected = sum(score_matrix(n, *encode(n, split)) for n in networks) / 2
    rng = np.random.default_rng(0)
    images, captions = rng.integers(0, 12, 40), rng.integers(0, 60, 40)
    for piece in (256, 5, 1):
        monkeypatch.setattr("pcsr_fast.evaluate.PIECE", piece)
        found = pair_scores(networks, split, images, captions)
        torch.testing.assert_close(found, expected[images, captions], rtol=1e-5, atol=1e-6)


def test_words_of_images():
    split = split_of([[1, 2], [1, 3], [2, 4], [5, 5]], [0, 0, 2, 2], images=3)
    weights = np.array([0, 1, 2, 3, 4, 5.0], np.float32)
    belief = np.array([0.9, 0.6, 0.8, 0.1], np.float32)
    known, total = image_words(split, weights, belief, np.array([0, 1, 2]))
    first = 0.6 * np.array([0, 1, 2, 0, 0, 0]) / math.sqrt(5) + 0.4 * np.array([0, 1, 0, 3, 0, 0]) / math.sqrt(10)
    np.testing.assert_allclose(known.toarray()[0], first, rtol=1e-6)
    assert not known.toarray()[1].any()
    np.testing.assert_allclose(known.toarray()[2], np.array([0, 0, 2, 0, 4, 0]) / math.sqrt(20), rtol=1e-6)
    np.testing.assert_allclose(total, [1.5, 0, 0.8], rtol=1e-6)


def test_what_words_are_worth():
    assert worth(scenes()) > 5
    # captions that have nothing in common with those of the same image
    rng = np.random.default_rng(0)
    random = split_of([rng.choice(WORDS, 6, replace=False) for _ in range(1000)], np.repeat(np.arange(200), 5))
    assert worth(random) < 0.2
    # an image, or a caption for each: nothing to compare with
    assert worth(split_of([[1], [2]], [0, 0])) == 0
    assert worth(split_of([[1], [2]], [0, 1])) == 0


def test_worth_leaves_the_caption_out():
    """By hand: each caption is looked for by what its image's other caption says."""
    split = split_of([[1, 2], [1, 3], [4, 5], [4, 6]], [0, 0, 1, 1])
    weights = np.ones(7, np.float32)
    belief = np.full(4, 0.5, np.float32)
    known, total = image_words(split, weights, belief, np.arange(4))
    # 1/2 with the sibling, nothing with the other image
    told = [w / 2 - math.log(math.exp(w / 2) + 1) for w in module.WORDS.tolist()]
    expected = 40 * (told[-1] - told[0]) / math.log(2)
    assert words_worth(known, total, split, weights, belief, np.arange(4)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("chunk", [2048, 7])
def test_by_formula(monkeypatch, chunk):
    """All images are candidates: the softmax of scores and words, over all."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(module, "ROWS", 3)
    split, config, networks = tiny.split(ratio=0.4), tiny.config(), [tiny.network(0), tiny.network(1)]
    rng = np.random.default_rng(0)
    clean, belief = split.image_of == split.true_image, rng.uniform(0.5, 1, 60).astype(np.float32)
    told = []
    images, certainty = rehome(networks, split, belief, clean, config, told.append)
    lost = np.flatnonzero(~clean)
    assert sum(told) == len(lost)
    weights = word_weights(split, tiny.WORDS)
    known, total = image_words(split, weights, belief, np.flatnonzero(clean))
    value = words_worth(known, total, split, weights, belief, np.flatnonzero(clean))
    scores = (sum(score_matrix(n, *encode(n, split)) for n in networks) / 2).T[lost]
    vectors = module.word_vectors(split, weights, lost)
    evidence = 1.5 * scores.double().logit().numpy() + value * (vectors @ known.T).toarray()
    share = np.exp(evidence) / np.exp(evidence).sum(1, keepdims=True)
    np.testing.assert_allclose(certainty[lost], share.max(1), rtol=1e-4)
    assert np.array_equal(images[lost], share.argmax(1))
    assert np.array_equal(images[clean], split.image_of[clean])
    assert (certainty[clean] == 1).all()
    assert (images.dtype, certainty.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("by", ["words", "labels"])
def test_candidates(monkeypatch, by):
    """With scores that say nothing, captions find their images by words; by labels they are candidates at least."""
    monkeypatch.setattr(module, "CANDIDATES", 3)
    split = scenes(60)
    split = split.with_noise(noise.draw(60, 300, 0.3, seed=1))
    clean = split.image_of == split.true_image
    asked = []

    def scores(networks, split, images, captions):
        asked.append((images, captions))
        return torch.full((len(images),), 0.5)

    monkeypatch.setattr(module, "pair_scores", scores)
    # pseudo-labels are right by construction
    classes = torch.eye(64)
    known = by == "labels"
    monkeypatch.setattr(module, "_predicted_images", lambda n, s, c: classes[:60] * known)
    monkeypatch.setattr(module, "_predicted_captions", lambda n, s, x, c: classes[split.true_image[x]] * known)
    if known:
        monkeypatch.setattr(module, "words_worth", lambda *args: 0.0)
    network = tiny.network(words=WORDS)
    images, certainty = rehome([network, network], split, np.ones(300, np.float32), clean, tiny.config())
    (candidates, captions), lost = asked[0], np.flatnonzero(~clean)
    assert np.array_equal(np.unique(captions), lost)
    among = (candidates == split.true_image[captions]).reshape(len(lost), 3).any(1)
    if known:
        assert among.all()
        np.testing.assert_allclose(certainty[lost], 1 / 3, rtol=1e-6)
    else:
        right = images[lost] == split.true_image[lost]
        assert right.mean() > 0.85
        assert certainty[lost][right].mean() > 0.5


def test_siblings_are_needed():
    assert has_siblings(split_of([[1]] * 4, [0, 0, 1, 1]))
    assert not has_siblings(split_of([[1]] * 3, [0, 0, 1]))
