"""Retrieval: ranks by hand, ties against the model, tiles and batches that change nothing."""

import numpy as np
import pytest
import tiny
import torch

from pcsr_fast import evaluate as ev
from pcsr_fast.evaluate import encode, evaluate, fold_recalls, ranks, recalls, score_matrix


def test_ranks_by_hand():
    image_of = np.array([0, 0, 1, 2])
    scores = torch.tensor(
        [
            [0.2, 0.9, 0.9, 0.1],  # best own 0.9, one rival as high
            [0.5, 0.6, 0.4, 0.8],  # three rivals
            [0.2, 0.3, 0.9, 0.7],  # one
        ]
    )
    of_images, of_captions = ranks(scores, image_of)
    assert of_images.tolist() == [1, 3, 1]
    # caption 0: image 1 is better, image 2 equal; caption 2: both as good or better
    assert of_captions.tolist() == [2, 0, 2, 1]


def by_hand(scores, image_of):
    """A sort of its own for every query, rivals first among equals."""
    images, captions = scores.shape
    own = [np.flatnonzero(image_of == i) for i in range(images)]
    t2i = [sum(scores[j, c] >= scores[image_of[c], c] for j in range(images)) - 1 for c in range(captions)]
    i2t = [
        sum(scores[i, c] >= scores[i, own[i]].max() for c in range(captions) if image_of[c] != i)
        for i in range(images)
        if len(own[i])
    ]
    return i2t, t2i


@pytest.mark.parametrize("levels", [3, 10_000])
def test_ranks_of_unequal_numbers_of_captions(levels):
    rng = np.random.default_rng(0)
    for _ in range(20):
        image_of = rng.integers(0, 6, 15)
        image_of[image_of == 3] = 2  # an image without captions is no query
        scores = rng.integers(0, levels, (6, 15)).astype(np.float32)
        of_images, of_captions = ranks(torch.from_numpy(scores), image_of)
        assert (of_images.tolist(), of_captions.tolist()) == by_hand(scores, image_of)


def test_recalls():
    image_of = np.arange(20)
    scores = torch.eye(20)
    perfect = recalls(scores, image_of)
    assert perfect["rsum"] == 600
    assert perfect["i2t_median"] == perfect["t2i_mean"] == 1
    # image 0 is found at rank 7 (from 0), its caption still first
    scores[0, 1:8] = 1
    found = recalls(scores, image_of)
    assert (found["i2t_r1"], found["i2t_r5"], found["i2t_r10"]) == (95, 95, 100)
    assert found["i2t_mean"] == pytest.approx(1 + 7 / 20)
    assert (found["t2i_r1"], found["t2i_r5"]) == (65, 100)
    names = [f"{side}_r{k}" for side in ("i2t", "t2i") for k in (1, 5, 10)]
    assert found["rsum"] == pytest.approx(sum(found[name] for name in names))


def test_a_collapsed_model_scores_zero():
    found = recalls(torch.full((100, 500), 0.5), np.repeat(np.arange(100), 5))
    assert found["rsum"] == 0
    assert found["t2i_median"] == 100
    assert found["i2t_mean"] == 496


def test_nan():
    scores = torch.eye(4)
    scores[1, 2] = torch.nan
    with pytest.raises(ValueError, match="scores contain NaN: the network is broken; evaluate an earlier"):
        recalls(scores, np.arange(4))


def test_folds():
    scores = torch.rand(20, 60, generator=torch.Generator().manual_seed(0))
    image_of = np.repeat(np.arange(20), 3)
    found = fold_recalls(scores, image_of, 5)
    parts = [recalls(scores[4 * i : 4 * i + 4, 12 * i : 12 * i + 12], np.repeat(np.arange(4), 3)) for i in range(5)]
    for name in found:
        assert found[name] == pytest.approx(np.mean([part[name] for part in parts]))
    assert found["rsum"] > recalls(scores, image_of)["rsum"]
    # captions need not stand in the order of their images
    order = np.random.default_rng(0).permutation(60)
    moved = fold_recalls(scores[:, torch.from_numpy(order)], image_of[order], 5)
    assert moved == pytest.approx(found)
    with pytest.raises(ValueError, match="20 images do not make 3 equal folds"):
        fold_recalls(scores, image_of, 3)


def test_tiles_change_nothing(monkeypatch):
    split, net = tiny.split(name="dev"), tiny.network()
    images, captions = encode(net, split)
    whole = net.similarity(images, captions).detach()
    for size in ((5, 23), (12, 59), (64, 512)):
        monkeypatch.setattr(ev, "TILE_IMAGES", size[0])
        monkeypatch.setattr(ev, "TILE_CAPTIONS", size[1])
        cells = []
        torch.testing.assert_close(score_matrix(net, images, captions, cells.append), whole, rtol=1e-4, atol=1e-4)
        assert sum(cells) == 720
        assert len(cells) == -(-12 // size[0]) * -(-60 // size[1])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_encode_in_batches(dtype):
    from dataclasses import replace

    split, net = tiny.split(name="dev"), tiny.network()
    split = replace(split, features=split.features.astype(dtype))
    net.train()
    images, captions = encode(net, split, 7)
    assert not net.training
    # once in a batch of everything
    expected = net.encode_images(torch.from_numpy(split.features.astype(np.float32)))
    for found, wanted in zip(images, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    tokens, offsets = torch.from_numpy(split.tokens.astype(np.int64)), torch.from_numpy(split.offsets)
    for found, wanted in zip(captions, net.encode_captions(tokens, offsets), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_evaluate_two_networks():
    split, networks = tiny.split(name="dev"), [tiny.network(0), tiny.network(1)]
    found = evaluate(networks, split, 7, folds=3)
    assert [*found] == ["A", "B", "mean", "A 3 folds", "B 3 folds", "mean 3 folds"]
    matrices = [score_matrix(n, *encode(n, split)) for n in networks]
    assert found["A"] == recalls(matrices[0], split.image_of)
    assert found["B"] == recalls(matrices[1], split.image_of)
    assert found["A"] != found["B"]
    assert found["mean"] == recalls((matrices[0] + matrices[1]) / 2, split.image_of)
    assert found["mean 3 folds"] == fold_recalls((matrices[0] + matrices[1]) / 2, split.image_of, 3)
    assert evaluate(networks[:1], split)["mean"] == found["A"]
