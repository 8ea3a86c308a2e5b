"""Batches: what they hold, their order, going on in the middle, and that memory is not used twice at once."""

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcsr_fast.data.loader import CONVERTED, batches, count_batches, gather
from pcsr_fast.data.sample import sample_split
from pcsr_fast.data.split import Split


def make(images=7, each=3, regions=2, width=5, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, images * each)
    image_of = rng.permutation(np.repeat(np.arange(images), each))
    features = rng.standard_normal((images, regions, width)).astype(dtype)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = rng.integers(0, 99, offsets[-1]).astype(np.int32)
    return Split("made", features, tokens, offsets, image_of, np.sort(image_of))


def ids(found):
    return [batch.pairs.tolist() for batch in found]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_batches_hold_the_pairs(data):
    split = make(dtype=data.draw(st.sampled_from([np.float16, np.float32])))
    subset = data.draw(
        st.none() | st.lists(st.integers(0, len(split) - 1), unique=True).map(lambda x: np.array(x, int))
    )
    size, workers = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 3))
    drop_last, keep = data.draw(st.booleans()), data.draw(st.booleans())
    found = []
    options = dict(drop_last=drop_last, keep_float16=keep, workers=workers)
    for n, batch in enumerate(batches(split, size, 0, 1, subset, **options), 1):
        assert batch.position == n
        assert len(batch) == len(batch.images) == len(batch.features) == len(batch.offsets) - 1
        assert batch.features.dtype == (torch.float16 if keep and split.features.dtype == np.float16 else torch.float32)
        for i, pair in enumerate(batch.pairs.tolist()):
            found.append(pair)
            assert int(batch.images[i]) == split.image_of[pair]
            np.testing.assert_array_equal(batch.features[i].numpy(), split.features[split.image_of[pair]])
            words = batch.tokens[batch.offsets[i] : batch.offsets[i + 1]]
            assert words.tolist() == split.caption(pair).tolist()
    wanted = range(len(split)) if subset is None else subset.tolist()
    assert len(found) == (len(wanted) // size * size if drop_last else len(wanted))
    assert len({*found}) == len(found)
    assert {*found} <= {*wanted}


def test_order_is_of_seed_and_epoch():
    split = make(images=20)
    first = ids(batches(split, 8, 3, 4, workers=0))
    assert first == ids(batches(split, 8, 3, 4, workers=3))
    assert first != ids(batches(split, 8, 3, 5))
    assert first != ids(batches(split, 8, 4, 4))
    # a swap of seed and epoch is another order
    assert ids(batches(split, 8, 1, 2)) != ids(batches(split, 8, 2, 1))
    assert ids(batches(split, 60, 0, 0, shuffle=False)) == [[*range(60)]]


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_goes_on_where_it_stopped(endless, workers):
    split = make(images=6)
    options = dict(indices=np.arange(1, 14), endless=endless, workers=workers)
    whole = [*itertools.islice(batches(split, 4, 0, 0, **options), 11)]
    assert [batch.position for batch in whole] == [*range(1, len(whole) + 1)]
    for stop in range(len(whole)):
        start = whole[stop].position
        rest = [*itertools.islice(batches(split, 4, 0, 0, start=start, **options), len(whole) - start)]
        assert [b.position for b in rest] == [b.position for b in whole[start:]]
        assert ids(rest) == ids(whole[start:])


def test_endless_passes_differ():
    split = make(images=5)
    found = ids(itertools.islice(batches(split, 5, 0, 0, np.arange(15), endless=True), 9))
    passes = [[*itertools.chain(*found[i : i + 3])] for i in (0, 3, 6)]
    assert all(sorted(one) == [*range(15)] for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    # the first pass is that of a plain epoch
    assert found[:3] == ids(batches(split, 5, 0, 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_in_use_is_not_written(workers):
    """Whoever keeps a batch, a part of it or a graph through it finds the same values later."""
    split = make(images=30, each=1)
    weight = torch.randn(5, 4, requires_grad=True)
    parts, losses, sources = [], [], []
    for batch in batches(split, 2, 0, 0, workers=workers):
        if batch.position % 2:
            parts.append((batch.features[1, :, 2:], split.features[int(batch.images[1]), :, 2:]))
        else:
            losses.append((batch.features @ weight).sum())
            sources.append(split.features[batch.images.numpy()])
    for part, wanted in parts:
        np.testing.assert_array_equal(part.numpy(), wanted)
    (grad,) = torch.autograd.grad(sum(losses), weight)
    expected = np.stack(sources).reshape(-1, 5).sum(0)
    np.testing.assert_allclose(grad.numpy(), np.repeat(expected[:, None], 4, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_is_used_again(workers):
    split = make(images=100, each=1)
    places = set()
    for batch in batches(split, 4, 0, 0, workers=workers):
        places.add(batch.features.data_ptr())
        del batch
    assert len(places) <= workers + 2


@pytest.mark.parametrize(("regions", "width"), [(1, 3), (3, CONVERTED // 2 + 1), (1, CONVERTED)])
def test_gather_converts_rows_of_any_size(regions, width):
    features = np.random.default_rng(0).standard_normal((5, regions, width)).astype(np.float16)
    rows = np.array([4, 0, 0, 3, 1, 2, 4])
    out = gather(features, rows, torch.empty(7, regions, width))
    np.testing.assert_array_equal(out.numpy(), features[rows])


def test_an_early_end_stops_the_workers():
    before = threading.active_count()
    stream = batches(make(), 2, 0, 0, endless=True, workers=3)
    next(stream)
    assert threading.active_count() > before
    stream.close()
    assert threading.active_count() == before


def test_an_error_in_a_worker_is_raised():
    class Broken:
        shape, dtype = (7, 2, 5), np.dtype(np.float32)

        def take_into(self, rows, out):
            raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        next(batches(replace(make(), features=Broken()), 2, 0, 0, workers=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(batch_size=0), "batch size must be at least 1, got 0"),
        (dict(start=12), "start is 12, but the epoch has 11 batches"),
        (dict(start=-1, endless=True), "start is -1"),
        (dict(indices=[3, 21]), "there is no pair 21; it has 21 pairs"),
        (dict(indices=[-1]), "there is no pair -1"),
        (dict(indices=np.ones(21, bool)), "indices must be a list of pairs, got bool"),
        (dict(indices=np.zeros(0, int), endless=True), "0 pairs make no batch of 2 to repeat"),
        (dict(indices=[1], endless=True, drop_last=True), "1 pairs make no batch"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        batches(make(), **(dict(batch_size=2, seed=0, epoch=0) | arguments))


def test_count():
    assert [count_batches(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [count_batches(n, 4, drop_last=True) for n in (0, 1, 4, 5)] == [0, 0, 1, 1]


def test_sample_set():
    split = sample_split("dev", images=4)
    assert sum(len(batch) for batch in batches(split, 8, 0, 0)) == 20
