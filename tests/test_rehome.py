"""New images for captions of noisy pairs: candidates, what words are worth, and how certain the choice is."""

import math

import numpy as np
import pytest
import tiny
import torch
from scipy.sparse import csr_array
from test_siblings import WORDS, scenes, split_of

from pcsr_fast import rehome as module
from pcsr_fast.data import noise
from pcsr_fast.evaluate import encode, pair_scores, score_matrix
from pcsr_fast.rehome import find_candidates, has_siblings, language_of, rehome, word_evidence, words_worth


def worth(split):
    pairs = np.arange(len(split))
    return words_worth(language_of(split, pairs, WORDS), split, pairs)


def test_pair_scores_are_those_of_the_matrix(monkeypatch):
    split, networks = tiny.split(), [tiny.network(0), tiny.network(1)]
    expected = sum(score_matrix(n, *encode(n, split)) for n in networks) / 2
    rng = np.random.default_rng(0)
    images, captions = rng.integers(0, 12, 40), rng.integers(0, 60, 40)
    for piece in (256, 5, 1):
        monkeypatch.setattr("pcsr_fast.evaluate.PIECE", piece)
        found = pair_scores(networks, split, images, captions)
        torch.testing.assert_close(found, expected[images, captions], rtol=1e-5, atol=1e-6)


def test_language_by_hand():
    # a word counts once a caption; the last caption is not clean, and image 1 has none
    split = split_of([[1, 2, 2], [1, 3], [2, 4], [5, 5]], [0, 0, 2, 2], images=3)
    language = language_of(split, np.arange(3), 6)
    assert language.counts.toarray().tolist() == [[0, 2, 1, 1, 0, 0], [0] * 6, [0, 0, 1, 0, 1, 0]]
    # of a caption that has a word, its siblings: 1 and 3 for 2, 1 and 2 for 3
    expected = np.zeros((6, 6))
    expected[1] = np.array([0, 2, 1, 1, 0, 0]) / 4
    expected[2, [1, 3]] = expected[3, [1, 2]] = 0.5
    np.testing.assert_allclose(language.translated.toarray(), expected)
    np.testing.assert_allclose(language.frequency, np.array([0.5, 2.5, 2.5, 1.5, 1.5, 0.5]) / 9, rtol=1e-6)
    # of image 2, by formula: its words are 2 and 4, of which 2 is known to go with 1 and 3
    mixed = 0.3 * np.array([0, 0, 0.5, 0, 0.5, 0]) + 0.7 * np.array([0, 0.25, 0, 0.25, 0, 0])
    odds = word_evidence(language, language.counts[[2, 1]])
    np.testing.assert_allclose(odds[0], np.log(0.8 * mixed / language.frequency + 0.2), rtol=1e-5)
    np.testing.assert_allclose(odds[1], np.log(0.2), rtol=1e-5)


def test_what_words_are_worth(monkeypatch):
    told = worth(scenes())
    assert 0.3 < told < 1
    # captions that have nothing in common with those of the same image
    rng = np.random.default_rng(0)
    random = split_of([rng.choice(WORDS, 6, replace=False) for _ in range(5000)], np.repeat(np.arange(1000), 5))
    assert worth(random) < 0.1
    # an image, or a caption for each: nothing to compare with
    assert worth(split_of([[1], [2]], [0, 0])) == 0
    assert worth(split_of([[1], [2]], [0, 1])) == 0
    # some images at a time
    monkeypatch.setattr(module, "IMAGES", 7)
    assert worth(scenes()) == pytest.approx(told, rel=1e-5)
    # few captions, looked for among their own images and some others
    monkeypatch.setattr(module, "ASKED", 100)
    monkeypatch.setattr(module, "ASKED_AMONG", 50)
    assert worth(scenes(400)) == pytest.approx(told, rel=0.1)


def test_worth_leaves_the_caption_out():
    """By hand: each caption is looked for by what its image's other caption says."""
    split = split_of([[1, 2], [1, 3], [4, 5], [4, 6]], [0, 0, 1, 1])
    language = language_of(split, np.arange(4), 7)
    told = []
    for n in range(4):
        found = []
        for image in range(2):
            counts = language.counts[[image]].toarray()
            if image == n // 2:
                counts[0, split.caption(n)] -= 1
            found.append(word_evidence(language, csr_array(counts))[0, split.caption(n)].sum())
        told.append(found[n // 2] - np.logaddexp(*found))
    assert words_worth(language, split, np.arange(4)) == pytest.approx(1 + np.mean(told) / math.log(2), rel=1e-4)


@pytest.mark.parametrize("pieces", [1000, 7])
def test_by_formula(monkeypatch, pieces):
    """All images are candidates: the softmax of scores and words, over all."""
    for name in ("CHUNK", "IMAGES", "CAPTIONS"):
        monkeypatch.setattr(module, name, pieces)
    split, config, networks = tiny.split(ratio=0.4), tiny.config(), [tiny.network(0), tiny.network(1)]
    clean = split.image_of == split.true_image
    told = []
    images, certainty = rehome(networks, split, clean, config, told.append)
    lost = np.flatnonzero(~clean)
    assert sum(told) == len(lost)
    language = language_of(split, np.flatnonzero(clean), tiny.WORDS)
    scores = (sum(score_matrix(n, *encode(n, split)) for n in networks) / 2).T[lost]
    odds = word_evidence(language, language.counts)
    words = np.array([odds[:, [*set(split.caption(n).tolist())]].sum(1) for n in lost])
    value = 0.5 * words_worth(language, split, np.flatnonzero(clean))
    assert value > 0.01
    evidence = 1.5 * scores.double().logit().numpy() + value * words
    share = np.exp(evidence) / np.exp(evidence).sum(1, keepdims=True)
    np.testing.assert_allclose(certainty[lost], share.max(1), rtol=1e-3)
    assert np.array_equal(images[lost], share.argmax(1))
    assert np.array_equal(images[clean], split.image_of[clean])
    assert (certainty[clean] == 1).all()
    assert (images.dtype, certainty.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("by", ["words", "labels"])
def test_candidates(monkeypatch, by):
    """By words or by labels, each right for most captions, from few candidates; block by block."""
    monkeypatch.setattr(module, "CANDIDATES", 3)
    monkeypatch.setattr(module, "IMAGES", 25)
    monkeypatch.setattr(module, "CAPTIONS", 16)
    split = scenes(60)
    split = split.with_noise(noise.draw(60, 300, 0.3, seed=1))
    clean = split.image_of == split.true_image
    lost = np.flatnonzero(~clean)
    classes = torch.eye(64) * (by == "labels")
    monkeypatch.setattr(module, "_predictions", lambda *args: (classes[:60], classes[split.true_image[lost]]))
    language = language_of(split, np.flatnonzero(clean), WORDS)
    worth = 0.5 if by == "words" else 0.0
    places, words = find_candidates([tiny.network(words=WORDS)], split, lost, language, worth, tiny.config())
    assert places.shape == words.shape == (len(lost), 3)
    assert all(len(set(row)) == 3 for row in places.tolist())
    among = (places == split.true_image[lost][:, None]).any(1)
    assert among.mean() > 0.85 if by == "words" else among.all()
    odds = word_evidence(language, language.counts)
    for n, row, found in zip(lost, places, words, strict=True):
        expected = worth * odds[:, [*set(split.caption(n).tolist())]].sum(1)
        np.testing.assert_allclose(found, expected[row], rtol=1e-4, atol=1e-5)
        if by == "words":
            np.testing.assert_allclose(np.sort(found), np.sort(expected)[-3:], rtol=1e-4, atol=1e-5)


def test_nothing_lost():
    split = tiny.split()
    images, certainty = rehome([tiny.network()], split, np.ones(60, bool), tiny.config())
    assert np.array_equal(images, split.image_of)
    assert (certainty == 1).all()


def test_siblings_are_needed():
    assert has_siblings(split_of([[1]] * 4, [0, 0, 1, 1]))
    assert not has_siblings(split_of([[1]] * 3, [0, 0, 1]))
