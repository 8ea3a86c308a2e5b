"""tally: counts, ties, duplicates, overflow and every bad input, on all implementations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcsr_fast import TallyState, tally, use_backend
from pcsr_fast.ops import OPS
from pcsr_fast.ops.tally import COUNT_TYPES

OP = OPS["tally"]


def clone(state):
    return TallyState(*(t.clone() for t in state))


def assert_same(state, other):
    for name, a, b in zip(TallyState._fields, state, other, strict=True):
        assert torch.equal(a, b), name


def assert_consistent(state):
    """The small tensors are what a scan of the counts finds."""
    top = state.counts.long().sort(1, descending=True).values
    assert torch.equal(state.n_max.long(), top[:, 0])
    assert torch.equal(state.n_second.long(), top[:, 1] if top.shape[1] > 1 else torch.zeros_like(top[:, 0]))
    assert torch.equal(state.argmax.long(), state.counts.long().argmax(1))
    assert torch.equal(state.pcs(), state.n_max - state.n_second)


@pytest.mark.parametrize("count_type", COUNT_TYPES, ids=str)
def test_worked_example(implementation, count_type):
    state = TallyState.zeros(3, 4, count_type)
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, -1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0], [0.0, 3.0, 0.0, 0.0]])
    labels = implementation(OP)(logits, torch.tensor([1, 1, 0, 1]), *state)
    assert labels.tolist() == [1, 0, 3, 1]
    assert state.counts.tolist() == [[0, 0, 0, 1], [1, 2, 0, 0], [0, 0, 0, 0]]
    assert state.n_max.tolist() == [1, 2, 0]
    assert state.argmax.tolist() == [3, 1, 0]
    assert state.n_second.tolist() == [0, 1, 0]


batches = st.integers(1, 5).flatmap(
    lambda classes: st.tuples(
        st.just(classes),
        st.lists(
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, classes - 1)), max_size=12), min_size=1, max_size=6
        ),
    )
)


@pytest.mark.parametrize("count_type", COUNT_TYPES, ids=str)
@given(batches)
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_batches(count_type, drawn):
    from conftest import EMULATED, load_emulated

    load_emulated()
    classes, sequence = drawn
    for name in ("reference", "native", EMULATED):
        state = TallyState.zeros(4, classes, count_type)
        counted = torch.zeros(4, classes, dtype=torch.int64)
        for batch in sequence:
            ids = torch.tensor([i for i, _ in batch], dtype=torch.int64)
            labels = torch.tensor([c for _, c in batch], dtype=torch.int64)
            assert torch.equal(OP.implementation(name)(labels, ids, *state), labels)
            for i, c in batch:
                counted[i, c] += 1
            assert torch.equal(state.counts.long(), counted)
            assert_consistent(state)


def test_a_large_batch_with_many_repeats(implementation, generator):
    # large enough for several threads and blocks; every image stands in it dozens of times
    state = TallyState.zeros(50, 7, torch.int16)
    for _ in range(3):
        logits = torch.randn(3000, 7, generator=generator)
        ids = torch.randint(50, (3000,), generator=generator)
        before = state.counts.clone()
        implementation(OP)(logits, ids, *state)
        added = torch.zeros(50, 7, dtype=torch.int64).index_put_(
            (ids, logits.argmax(1)), torch.tensor(1), accumulate=True
        )
        assert torch.equal(state.counts.long(), before + added)
        assert_consistent(state)


def test_order_of_the_batch_does_not_matter(implementation, generator):
    labels = torch.randint(5, (200,), generator=generator)
    ids = torch.randint(9, (200,), generator=generator)
    order = torch.randperm(200, generator=generator)
    state, permuted = TallyState.zeros(9, 5), TallyState.zeros(9, 5)
    implementation(OP)(labels, ids, *state)
    implementation(OP)(labels[order], ids[order], *permuted)
    assert_same(state, permuted)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_matter(threads, generator):
    logits, ids = torch.randn(5000, 300, generator=generator), torch.randint(100, (5000,), generator=generator)
    state, want = TallyState.zeros(100, 300), TallyState.zeros(100, 300)
    OP.reference(logits, ids, *want)
    torch.set_num_threads(threads)
    try:
        OP.implementation("native")(logits, ids, *state)
    finally:
        torch.set_num_threads(2)
    assert_same(state, want)


@pytest.mark.parametrize("classes", [1, 2, 31, 32, 33, 64, 127, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_argmax_of_special_rows(implementation, classes, dtype, generator):
    inf = float("inf")
    rows = torch.randn(8, classes, dtype=dtype, generator=generator)
    rows[0] = 0.0
    rows[1] = -inf
    rows[2] = inf
    rows[3, classes // 2 :] = rows[3].max() + 1
    rows[4, -1] = inf
    rows[5] = -0.0
    rows[5, -1] = 0.0
    labels = implementation(OP)(rows, torch.zeros(8, dtype=torch.int64), *TallyState.zeros(1, classes))
    assert labels.tolist() == [int((row == row.max()).nonzero()[0]) for row in rows]


def test_empty_batch(implementation):
    state = TallyState.zeros(2, 3)
    assert len(implementation(OP)(torch.empty(0, 3), torch.empty(0, dtype=torch.int64), *state)) == 0
    assert_same(state, TallyState.zeros(2, 3))


def test_views_are_read_right(implementation, generator):
    logits = torch.randn(40, 6, generator=generator)
    ids = torch.randint(3, (20,), generator=generator)
    state, want = TallyState.zeros(3, 6), TallyState.zeros(3, 6)
    OP.reference(logits[::2].contiguous(), ids, *want)
    implementation(OP)(logits[::2], ids.repeat_interleave(2)[::2], *state)
    assert_same(state, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chosen", ["reference", "native"])
def test_half_precision_and_grad(chosen, dtype, generator):
    logits = torch.randn(20, 9, generator=generator).to(dtype).requires_grad_()
    state = TallyState.zeros(5, 9)
    with use_backend(chosen):
        labels = tally(logits, torch.arange(20) % 5, state)
    assert torch.equal(labels, logits.argmax(1))
    assert not labels.requires_grad


def fails(implementation, match, votes, ids, state):
    """The call raises and leaves the state as it was."""
    before = clone(state)
    with pytest.raises(RuntimeError, match=match):
        implementation(OP)(votes, ids, *state)
    assert_same(state, before)


@pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**40)])
def test_id_out_of_range(implementation, bad, generator):
    ids = torch.randint(4, (300,), generator=generator)
    ids[217] = bad
    fails(implementation, rf"ids\[217\] = {bad} is out of range for 4 images", torch.randn(300, 5), ids, filled())


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_label_out_of_range(implementation, bad, generator):
    labels = torch.randint(5, (300,), generator=generator)
    labels[3] = bad
    ids = torch.randint(4, (300,), generator=generator)
    fails(implementation, rf"labels\[3\] = {bad} is out of range for 5 classes", labels, ids, filled())


@pytest.mark.parametrize("column", range(5))
def test_nan_logits(implementation, column):
    logits = torch.randn(300, 5)
    logits[100, column] = float("nan")
    fails(implementation, r"logits\[100\] contain NaN", logits, torch.arange(300) % 4, filled())


def filled(count_type=torch.uint8):
    """A state of 4 images and 5 classes in use."""
    state = TallyState.zeros(4, 5, count_type)
    OP.reference(torch.arange(60) % 5 % 3, torch.arange(60) % 4, *state)
    return state


@pytest.mark.parametrize("count_type", COUNT_TYPES, ids=str)
def test_overflow(implementation, count_type):
    state = filled(count_type)
    largest = torch.iinfo(count_type).max
    state.counts[2, 1] = state.n_max[2] = largest - 2
    state.argmax[2] = 1
    state.n_second[2] = state.counts[2].sort(descending=True).values[1]
    # two more fit, three do not; other images in the batch stay uncounted too
    ids = torch.arange(2000) % 2
    ids[[5, 700, 1500]] = 2
    labels = torch.arange(2000) % 5
    if count_type == torch.uint8:
        ids[3:] = torch.where(ids[3:] == 2, 2, -1)
        keep = ids >= 0
        ids, labels = ids[keep], labels[keep]
    labels[ids == 2] = 1
    fails(implementation, "would overflow.*nothing was counted", labels, ids, state)
    drop = int((ids == 2).nonzero()[0])
    ids[drop] = 0
    implementation(OP)(labels, ids, *state)
    assert int(state.n_max[2]) == int(state.counts[2, 1]) == largest


def test_damaged_state(implementation):
    for bad in (-1, -5, 5):
        state = filled()
        state.argmax[1] = bad
        fails(implementation, "is not a class", torch.arange(4) % 5, torch.arange(4), state)


@pytest.mark.parametrize(
    ("match", "votes", "ids", "state"),
    [
        ("counts must be .images, classes., got .4.", None, None, {"counts": torch.zeros(4, dtype=torch.uint8)}),
        ("counts must be uint8, int16 or int32", None, None, {"counts": torch.zeros(4, 5)}),
        ("logits must have shape .3, 5., got .3, 6.", torch.zeros(3, 6), None, {}),
        ("logits must have shape .3, 5., got .3.", torch.zeros(3), None, {}),
        ("labels must have shape .3., got .3, 5.", torch.zeros(3, 5, dtype=torch.int64), None, {}),
        ("votes must be float32 or float64 logits, or int64 labels", torch.zeros(3, dtype=torch.int32), None, {}),
        ("ids must have shape .3., got .2.", None, torch.zeros(2, dtype=torch.int64), {}),
        ("ids must be .*, got", None, torch.zeros(3, dtype=torch.int32), {}),
        ("n_max must have shape .4., got .3.", None, None, {"n_max": torch.zeros(3, dtype=torch.uint8)}),
        ("n_second must have shape .4., got .3.", None, None, {"n_second": torch.zeros(3, dtype=torch.uint8)}),
        ("argmax must have shape .4., got .3.", None, None, {"argmax": torch.zeros(3, dtype=torch.int32)}),
        ("n_max must be .*, got", None, None, {"n_max": torch.zeros(4, dtype=torch.int16)}),
        ("n_second must be .*, got", None, None, {"n_second": torch.zeros(4, dtype=torch.int16)}),
        ("argmax must be .*, got", None, None, {"argmax": torch.zeros(4, dtype=torch.int64)}),
        ("must be contiguous", None, None, {"counts": torch.zeros(5, 4, dtype=torch.uint8).t()}),
        ("same device", None, torch.zeros(3, dtype=torch.int64, device="meta"), {}),
    ],
)
def test_wrong_shapes_and_types(implementation, match, votes, ids, state):
    votes = torch.zeros(3, 5) if votes is None else votes
    ids = torch.zeros(3, dtype=torch.int64) if ids is None else ids
    with pytest.raises(RuntimeError, match=match):
        implementation(OP)(votes, ids, *filled()._replace(**state))


def test_state_of_the_wrong_type():
    with pytest.raises(ValueError, match="uint8, int16 or int32"):
        TallyState.zeros(2, 2, torch.int64)


def test_memory_at_three_million_images():
    images, classes = 3_300_000, 256
    state = TallyState.zeros(images, classes)
    assert sum(t.nbytes for t in state) == images * (classes + 6)
    ids = torch.tensor([0, images - 1, images - 1])
    tally(torch.tensor([255, 255, 255]), ids, state)
    assert state.pcs()[ids].tolist() == [1, 2, 2]
    assert int(state.counts[-1, -1]) == 2
