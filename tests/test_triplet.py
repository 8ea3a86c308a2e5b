"""triplet: margins of the positive pair in both directions, ties, masks, degenerate batches and the sparse gradient."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcsr_fast import adaptive_margin, triplet, triplet_pairs
from pcsr_fast.ops import OPS

OP = OPS["triplet"]
MODES = ["hardest", "mean", "per_pair"]


def brute_force(scores, margin, mode, image_ids=None, caption_ids=None):
    """The definition as a double loop over Python floats; per_pair gives a list."""
    n = len(scores)
    m = [float(margin)] * n if isinstance(margin, float) else margin.tolist()
    s = scores.tolist()

    def masked(i, j):
        return i == j or any(ids is not None and ids[i] == ids[j] for ids in (image_ids, caption_ids))

    cap = [[0.0 if masked(i, j) else max(0.0, m[i] + s[i][j] - s[i][i]) for j in range(n)] for i in range(n)]
    img = [[0.0 if masked(i, j) else max(0.0, m[j] + s[i][j] - s[j][j]) for j in range(n)] for i in range(n)]
    if mode == "hardest":
        return sum(max(row) for row in cap) + sum(max(img[i][j] for i in range(n)) for j in range(n))
    pairs = [sum(cap[i]) / n + sum(img[j][i] for j in range(n)) / n for i in range(n)]
    return pairs if mode == "per_pair" else sum(pairs)


def loss_and_grad(function, scores, margin, hardest, image_ids=None, caption_ids=None, weights=None):
    scores = scores.detach().requires_grad_()
    pair_loss = function(scores, margin, image_ids, caption_ids, hardest)[1]
    total = pair_loss.sum() if weights is None else (weights * pair_loss).sum()
    return pair_loss.detach(), torch.autograd.grad(total, scores)[0]


def test_margin_belongs_to_the_positive_pair(implementation):
    # worked by hand. Margins 0.3 and 0.1. Row 0 (margin 0.3): 0.3 + 0.5 - 0.6 = 0.2. Row 1 (margin 0.1):
    # 0.1 + 0.4 - 0.6 < 0. Column 0 (positive pair 0, margin 0.3): 0.3 + 0.4 - 0.6 = 0.1. Column 1 (positive pair 1,
    # margin 0.1): 0.1 + 0.5 - 0.6 = 0. With the margin of the row in the columns, 0.2 would stand at column 1.
    scores = torch.tensor([[0.6, 0.5], [0.4, 0.6]], dtype=torch.float64)
    margin = torch.tensor([0.3, 0.1], dtype=torch.float64)
    loss, grad = loss_and_grad(implementation(OP), scores, margin, True)
    torch.testing.assert_close(loss, torch.tensor([0.3, 0.0], dtype=torch.float64))
    # column 1 sits exactly at, or a rounding above, its hinge: its gradient is left out of the comparison
    torch.testing.assert_close(grad[:, 0], torch.tensor([-2.0, 1.0], dtype=torch.float64))
    scores[0, 1] = 0.45
    loss, grad = loss_and_grad(implementation(OP), scores, margin, True)
    torch.testing.assert_close(loss, torch.tensor([0.25, 0.0], dtype=torch.float64))
    torch.testing.assert_close(grad, torch.tensor([[-2.0, 1.0], [1.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3, 40, 300])
def test_equals_the_double_loop(implementation, mode, size, generator):
    scores = torch.rand(size, size, dtype=torch.float64, generator=generator)
    margin = torch.rand(size, dtype=torch.float64, generator=generator)
    image_ids = torch.randint(2 * size, (size,), generator=generator)
    caption_ids = torch.randint(2 * size, (size,), generator=generator)
    pairs = implementation(OP)(scores, margin, image_ids, caption_ids, mode == "hardest")[1]
    got = pairs if mode == "per_pair" else pairs.sum()
    want = torch.tensor(brute_force(scores, margin, mode, image_ids, caption_ids), dtype=torch.float64)
    torch.testing.assert_close(got, want)


@st.composite
def problems(draw):
    n = draw(st.integers(1, 6))
    # few values, so that ties and hinges at exactly zero are common
    values = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
    scores = draw(st.lists(st.lists(values, min_size=n, max_size=n), min_size=n, max_size=n))
    margin = draw(st.one_of(values.map(lambda m: [m]), st.lists(values, min_size=n, max_size=n)))
    ids = st.one_of(st.none(), st.lists(st.integers(0, 3), min_size=n, max_size=n))
    return scores, margin, draw(ids), draw(ids)


@pytest.mark.parametrize("hardest", [True, False])
@given(problems())
@settings(max_examples=80, deadline=None)
def test_any_small_batch(hardest, problem):
    from conftest import EMULATED, load_emulated

    load_emulated()
    scores, margin = (torch.tensor(x, dtype=torch.float64) for x in problem[:2])
    image_ids, caption_ids = (None if x is None else torch.tensor(x) for x in problem[2:])
    weights = torch.arange(1.0, len(scores) + 1, dtype=torch.float64)
    args = (scores, margin, hardest, image_ids, caption_ids, weights)
    want = loss_and_grad(OP.reference, *args)
    loss = brute_force(scores, margin.expand(len(scores)), "hardest" if hardest else "mean", image_ids, caption_ids)
    torch.testing.assert_close(want[0].sum(), torch.tensor(loss, dtype=torch.float64))
    for name in ("native", EMULATED):
        got = loss_and_grad(OP.implementation(name), *args)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck(implementation, mode, generator):
    scores = torch.rand(9, 9, dtype=torch.float64, generator=generator, requires_grad=True)
    margin = 0.3 * torch.rand(9, dtype=torch.float64, generator=generator)
    ids = torch.arange(9) // 2
    function = implementation(OP)
    assert torch.autograd.gradcheck(lambda s: function(s, margin, ids, None, mode == "hardest")[1], scores)


def test_ties_go_to_the_lowest_index(implementation):
    for size in (5, 70):
        scores = torch.full((size, size), 0.5)
        _, _, in_row, in_col = implementation(OP)(scores, torch.tensor([0.2]), None, None, True)
        lowest = [1] + [0] * (size - 1)
        assert in_row.tolist() == in_col.tolist() == lowest


def test_all_scores_equal(implementation):
    scores = torch.full((64, 64), 0.5)
    margin = torch.tensor([0.2])
    loss, grad = loss_and_grad(implementation(OP), scores, margin, True)
    torch.testing.assert_close(loss, torch.full((64,), 0.4))
    assert grad.sum() == 0
    loss, grad = loss_and_grad(implementation(OP), scores, torch.tensor([0.0]), True)
    assert loss.sum() == 0
    assert not grad.any()


def test_everything_masked(implementation):
    scores = torch.rand(6, 6)
    same = torch.zeros(6, dtype=torch.int64)
    for hardest in (True, False):
        loss, grad = loss_and_grad(implementation(OP), scores, torch.tensor([1.0]), hardest, caption_ids=same)
        assert loss.tolist() == [0.0] * 6
        assert not grad.any()


def test_one_negative_only(implementation):
    scores = torch.tensor([[0.5, 0.6, 0.9], [0.2, 0.5, 0.9], [0.9, 0.9, 0.5]])
    ids = torch.tensor([7, 8, 8])
    # 0 has 1 and 2 for negatives, 1 and 2 have only 0
    _, _, in_row, in_col = implementation(OP)(scores, torch.tensor([0.2]), ids, None, True)
    assert in_row.tolist() == [2, -1, 0]
    assert in_col.tolist() == [2, 0, 0]


@pytest.mark.parametrize("hardest", [True, False])
def test_permuting_the_batch_permutes_the_gradient(implementation, hardest, generator):
    scores, margin = torch.rand(50, 50, generator=generator), torch.rand(50, generator=generator)
    order = torch.randperm(50, generator=generator)
    loss, grad = loss_and_grad(implementation(OP), scores, margin, hardest)
    loss2, grad2 = loss_and_grad(implementation(OP), scores[order][:, order], margin[order], hardest)
    torch.testing.assert_close(loss2, loss[order])
    torch.testing.assert_close(grad2, grad[order][:, order])


def test_non_contiguous_scores(implementation, generator):
    scores, margin = torch.rand(80, 40, generator=generator), torch.rand(40, generator=generator)
    for view in (scores[::2], scores[:40].T):
        for hardest in (True, False):
            want = loss_and_grad(OP.reference, view.clone(), margin, hardest)
            torch.testing.assert_close(loss_and_grad(implementation(OP), view, margin, hardest), want)


@pytest.mark.parametrize("hardest", [True, False])
def test_threads_do_not_matter(hardest, generator):
    scores, margin = torch.rand(700, 700, generator=generator), torch.rand(700, generator=generator)
    ids = torch.randint(300, (700,), generator=generator)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found.append(loss_and_grad(OP.implementation("native"), scores, margin, hardest, ids))
        finally:
            torch.set_num_threads(2)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    if hardest:
        assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("margin", [0.2, torch.tensor(0.2), torch.full((30,), 0.2)])
@pytest.mark.parametrize("mode", MODES)
def test_public_function(margin, mode, generator):
    scores = torch.rand(30, 30, generator=generator, requires_grad=True)
    margin = margin.requires_grad_() if isinstance(margin, torch.Tensor) else margin
    loss = triplet(scores, margin, mode)
    want = torch.tensor(brute_force(scores, 0.2, mode))
    torch.testing.assert_close(loss, want)
    loss.sum().backward()
    assert scores.grad.any()
    # margins never carry gradient
    assert getattr(margin, "grad", None) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, generator):
    scores = torch.rand(30, 30, generator=generator).to(dtype).requires_grad_()
    loss = triplet(scores, 0.2)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, triplet(scores.float(), 0.2))
    loss.backward()
    assert scores.grad.dtype == dtype
    assert scores.grad.any()


def test_pairs_are_the_gradient(generator):
    for size in (1, 2, 5, 64):
        for scale in (1.0, 0.01):
            scores = scale * torch.rand(size, size, generator=generator).requires_grad_()
            scores = scores.detach().requires_grad_()
            ids = torch.randint(2 * size, (size,), generator=generator)
            loss, pairs, values = triplet_pairs(scores, 0.1, image_ids=ids)
            full = triplet(scores, 0.1, image_ids=ids)
            (grad,) = torch.autograd.grad(full, scores)
            dense = torch.zeros_like(grad)
            dense[pairs[:, 0], pairs[:, 1]] = values
            torch.testing.assert_close(loss, full.detach())
            assert torch.equal(dense, grad)
            assert len(pairs) == int((grad != 0).sum()) <= 3 * size


def test_adaptive_margin():
    y = torch.tensor([0.0, 0.5, 1.0], requires_grad=True)
    margin = adaptive_margin(y)
    torch.testing.assert_close(margin, torch.tensor([0.0, 0.2 * (10**0.5 - 1) / 9, 0.2]))
    assert not margin.requires_grad


@pytest.mark.parametrize("hardest", [True, False])
def test_nan(implementation, hardest):
    scores = torch.rand(70, 70)
    scores[33, 44] = float("nan")
    function = implementation(OP)
    if "emulated" in str(function):
        # CUDA does not look, but the loss tells
        loss = function(scores, torch.tensor([0.2]), None, None, hardest)[1]
        assert loss[[33, 44]].isnan().all()
        assert loss.sum().isnan()
        return
    with pytest.raises(RuntimeError, match="scores contain NaN"):
        function(scores, torch.tensor([0.2]), None, None, hardest)
    with pytest.raises(RuntimeError, match=r"margin.* is NaN"):
        function(torch.rand(3, 3), torch.tensor([float("nan")]), None, None, hardest)


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        (r"scores must be square, got \[4, 3\]", {"scores": torch.rand(4, 3)}),
        (r"scores must be square, got \[4\]", {"scores": torch.rand(4)}),
        ("scores must be float32 or float64", {"scores": torch.zeros(4, 4, dtype=torch.int64)}),
        (r"margin must have shape \[1\] or \[4\], got \[3\]", {"margin": torch.rand(3)}),
        (r"margin must have shape \[1\] or \[4\], got \[4, 1\]", {"margin": torch.rand(4, 1)}),
        ("margin must be", {"margin": torch.rand(4, dtype=torch.float64)}),
        (r"image_ids must have shape \[4\], got \[5\]", {"image_ids": torch.arange(5)}),
        ("caption_ids must be", {"caption_ids": torch.arange(4, dtype=torch.int32)}),
    ],
)
def test_bad_input(implementation, match, changes):
    args = {"scores": torch.rand(4, 4), "margin": torch.rand(4), "image_ids": None, "caption_ids": None} | changes
    with pytest.raises(RuntimeError, match=match):
        implementation(OP)(*args.values(), True)


def test_bad_mode():
    with pytest.raises(RuntimeError, match="mode must be hardest, mean or per_pair, got 'max'"):
        triplet(torch.rand(2, 2), 0.2, "max")


@pytest.mark.parametrize("mode", ["hardest", "mean"])
def test_memory_is_the_gradient(mode):
    """Forward and backward take the gradient and O(B) more."""
    script = f"""
import resource, torch
from pcsr_fast import triplet
triplet(torch.rand(64, 64, requires_grad=True), 0.2, {mode!r}).backward()
scores = torch.rand(6000, 6000, requires_grad=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
triplet(scores, 0.2, {mode!r}).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / scores.nbytes)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert float(done.stdout) < 1.1, done.stderr
