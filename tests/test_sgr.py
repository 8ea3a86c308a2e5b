"""sgr: the definition, ragged captions, lists of pairs, the laws of permutation, gradients and bad input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcsr_fast import SgrWeights, sgr, sgr_mean, triplet, use_backend
from pcsr_fast.ops import OPS
from pcsr_fast.ops.verify import copies, mismatch, results

OP = OPS["sgr"]


def sample(dtype=torch.float64, seed=0, **sizes):
    sizes = dict(images=4, captions=5, regions=6, words=4, dim=21, nodes=10, steps=3, pairs=0) | sizes
    return OP.inputs(dtype, torch.Generator().manual_seed(seed), **sizes)


def draw_weights(dim, nodes, steps, generator, dtype=torch.float64):
    def normal(*shape):
        return torch.randn(*shape, dtype=dtype, generator=generator)

    step = [normal(steps, nodes, nodes), normal(steps, nodes), normal(steps, nodes, nodes)]
    graph = [normal(steps, nodes, nodes), normal(steps, nodes)]
    return SgrWeights(
        normal(nodes, dim), normal(nodes), normal(nodes, dim), normal(nodes), *step, *graph, normal(nodes), normal(1)
    )


def one_score(v, t, v_glo, t_glo, w):
    """The definition, word for word, for one image and one caption, with queries and keys."""

    def l2(x):
        return x / (x.norm() + 1e-8)

    attention = torch.nn.functional.leaky_relu(v @ t.T, 0.1)  # [R, n]
    attention = torch.stack([l2(row) for row in attention])
    context = [l2((9 * attention[:, word]).softmax(0) @ v) for word in range(len(t))]
    local = [l2(w.w_loc @ (c - word) ** 2 + w.b_loc) for c, word in zip(context, t, strict=True)]
    nodes = torch.stack([l2(w.w_glo @ (v_glo - t_glo) ** 2 + w.b_glo), *local])
    for wq, bq, wk, wg, bg in zip(w.w_query, w.b_query, w.w_key, w.w_graph, w.b_graph, strict=True):
        key_bias = torch.linspace(-1, 1, len(bq), dtype=nodes.dtype)  # cancels
        edges = ((nodes @ wq.T + bq) @ (nodes @ wk.T + key_bias).T).softmax(1)
        nodes = torch.relu(edges @ nodes @ wg.T + bg)
    return torch.sigmoid(w.w_score @ nodes[0] + w.b_score[0])


@pytest.mark.parametrize("chosen", ["reference", "native", "triton"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_definition(chosen, steps, generator):
    # triton takes the reference for float64
    dtype = torch.float32 if chosen == "triton" else torch.float64
    regions, words, offsets, image_globals, caption_globals, *_ = sample(dtype, steps=steps)
    weights = draw_weights(21, 10, steps, generator, dtype)
    want = torch.stack(
        [
            torch.stack(
                [
                    one_score(
                        regions[b], words[offsets[c] : offsets[c + 1]], image_globals[b], caption_globals[c], weights
                    )
                    for c in range(5)
                ]
            )
            for b in range(4)
        ]
    )
    with use_backend(chosen):
        got = sgr(regions, words, offsets, image_globals, caption_globals, weights)
        close = dict(rtol=1e-4, atol=1e-5) if chosen == "triton" else {}
        torch.testing.assert_close(got, want, **close)
        pairs = torch.tensor([[3, 4], [0, 0], [3, 4], [1, 2]])
        got = sgr(regions, words, offsets, image_globals, caption_globals, weights, pairs)
        torch.testing.assert_close(got, want[pairs[:, 0], pairs[:, 1]], **close)


@given(
    st.integers(1, 3), st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(1, 64), st.integers(1, 40),
    st.integers(1, 40), st.integers(1, 3), st.booleans(), st.integers(0, 100),
)  # fmt: skip
# always the same draws: in float32 a relu at its kink may fall on either side
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_sizes(images, lengths, regions, dim, nodes, steps, listed, seed):
    captions = len(lengths)
    for dtype in (torch.float32, torch.float64):
        args = [
            *sample(dtype, seed, images=images, captions=captions, regions=regions, dim=dim, nodes=nodes, steps=steps)
        ]
        args[2] = torch.tensor([0, *lengths]).cumsum(0)
        args[1] = torch.randn(sum(lengths), dim, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        if listed:
            args[-1] = torch.tensor([[images - 1, captions - 1], [0, 0], [0, captions - 1]])
        if dtype == torch.float64:
            assert not mismatch(OP, OP.implementation("native"), tuple(args), dtype)
            continue
        # few dimensions are badly conditioned: the order of the regions alone changes the reference's error fourfold
        exact, plain, got = (
            results(OP, function, copies(tuple(args), to))
            for function, to in (
                (OP.reference, torch.float64),
                (OP.reference, None),
                (OP.implementation("native"), None),
            )
        )
        for want, usual, have in zip(exact, plain, got, strict=True):
            allowed = 20 * (usual - want).abs().max() + 1e-4 * (1 + want.abs().max())
            assert (have - want).abs().max() <= allowed


@pytest.mark.parametrize("listed", [False, True])
def test_sizes_beyond_a_block(listed):
    """More of everything than a tile or a block of a product holds."""
    args = [*sample(images=10, captions=3, regions=70, dim=530, nodes=270, steps=2)]
    args[2] = torch.tensor([0, 400, 401, 420])
    args[1] = torch.randn(420, 530, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if listed:
        args[-1] = torch.tensor([[b, (7 * b) % 3] for b in range(10)] * 2)
    assert not mismatch(OP, OP.implementation("native"), tuple(args), torch.float64)


@pytest.mark.parametrize("chosen", ["reference", "native"])
@pytest.mark.parametrize("pairs", [0, 7])
def test_gradcheck(chosen, pairs):
    args = sample(images=2, captions=2, regions=3, words=2, dim=5, nodes=4, steps=2, pairs=pairs)
    leaves = [x.requires_grad_() for i, x in enumerate(args) if i in OP.backward.inputs]

    def scores(*leaves):
        return OP.implementation(chosen)(leaves[0], leaves[1], args[2], *leaves[2:], args[-1])

    assert torch.autograd.gradcheck(scores, leaves)


@pytest.mark.parametrize("chosen", ["native", "triton"])
def test_pairs_are_cells_of_the_grid(chosen, generator):
    args = sample(torch.float32, images=5, captions=7)
    grid = OP.implementation(chosen)(*args).view(5, 7)
    pairs = torch.cartesian_prod(torch.arange(5), torch.arange(7))[torch.randperm(35, generator=generator)]
    got = OP.implementation(chosen)(*args[:-1], pairs)
    torch.testing.assert_close(got, grid[pairs[:, 0], pairs[:, 1]], rtol=1e-6, atol=1e-7)
    assert len(OP.implementation(chosen)(*args[:-1], torch.empty(0, 2, dtype=torch.int64))) == 0


def test_permutations(generator):
    regions, words, offsets, image_globals, caption_globals, *rest = sample(images=5, captions=6)
    native = OP.implementation("native")
    grid = native(regions, words, offsets, image_globals, caption_globals, *rest).view(5, 6)
    rows, columns = torch.randperm(5, generator=generator), torch.randperm(6, generator=generator)
    parts = [words[offsets[c] : offsets[c + 1]] for c in columns]
    moved = torch.tensor([0, *(len(p) for p in parts)]).cumsum(0)
    got = native(regions[rows], torch.cat(parts), moved, image_globals[rows], caption_globals[columns], *rest)
    torch.testing.assert_close(got.view(5, 6), grid[rows][:, columns])
    # neither the order of the regions nor that of a caption's words matters
    turned = torch.cat([words[offsets[c] : offsets[c + 1]].flip(0) for c in range(6)])
    got = native(regions.flip(1), turned, offsets, image_globals, caption_globals, *rest)
    torch.testing.assert_close(got.view(5, 6), grid)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_matter(threads):
    args = sample(torch.float32, images=13, captions=8)
    torch.set_num_threads(threads)
    try:
        got = OP.implementation("native")(*args)
    finally:
        torch.set_num_threads(2)
    assert torch.equal(got, OP.implementation("native")(*args))


@pytest.mark.parametrize("chosen", ["reference", "native", "triton"])
def test_zero_vectors_have_finite_gradients(chosen):
    args = [*sample(torch.float32 if chosen == "triton" else torch.float64, images=2, captions=2, pairs=0)]
    args[0] = args[0].clone()
    args[0][0] = 0
    args[0][1, 2] = 0
    args[1] = args[1].clone()
    args[1][0] = 0
    args[3] = torch.zeros_like(args[3])
    args[4] = torch.zeros_like(args[4])
    args[6], args[8] = torch.zeros_like(args[6]), torch.zeros_like(args[8])
    leaves = [x.requires_grad_() for i, x in enumerate(args) if i in OP.backward.inputs]
    scores = OP.implementation(chosen)(*args)
    assert scores.isfinite().all()
    for grad in torch.autograd.grad(scores.sum(), leaves):
        assert grad.isfinite().all()


def test_triplet_of_sgr_goes_backward_through_few_pairs(monkeypatch, generator):
    regions, words, offsets, image_globals, caption_globals, *_ = sample(images=8, captions=8)
    weights = draw_weights(21, 10, 3, generator)
    leaves = [x.requires_grad_() for x in (regions, words, image_globals, caption_globals, *weights)]
    grads = {}
    for chosen in ("reference", "native"):
        with use_backend(chosen):
            loss = triplet(sgr(regions, words, offsets, image_globals, caption_globals, weights), 0.2)
            grads[chosen] = torch.autograd.grad(loss, leaves)
    for a, b in zip(*grads.values(), strict=True):
        torch.testing.assert_close(a, b)


def bad(**changes):
    names = [*OP.reference.__code__.co_varnames[:16]]
    return tuple((dict(zip(names, sample(), strict=True)) | changes).values())


@pytest.mark.parametrize("chosen", ["reference", "native", "triton"])
@pytest.mark.parametrize(
    ("match", "changes"),
    [
        (r"offsets must start with 0, got 1", {"offsets": torch.tensor([1, 2, 3, 4, 5, 6])}),
        (r"caption 1 has no words: offsets 2 and 2", {"offsets": torch.tensor([0, 2, 2, 4, 5, 6])}),
        (r"caption 2 has no words", {"offsets": torch.tensor([0, 2, 4, 3, 5, 6])}),
        (r"offsets end with 6, but there are", {"offsets": torch.tensor([0, 2, 3, 4, 5, 6])}),
        (r"offsets must be \[captions \+ 1\], got \[1\]", {"offsets": torch.tensor([0])}),
        (r"offsets must be", {"offsets": torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)}),
        (r"regions must be \[images, regions, dim\]", {"regions": torch.zeros(4, 21, dtype=torch.float64)}),
        (r"words must be", {"words": torch.zeros(22, 21)}),
        (
            r"image_globals must have shape \[4, 21\], got \[3, 21\]",
            {"image_globals": torch.zeros(3, 21, dtype=torch.float64)},
        ),
        (r"b_loc must have shape \[10\], got \[9\]", {"b_loc": torch.zeros(9, dtype=torch.float64)}),
        (r"pairs\[1, 0\] = 4 is out of range for 4 images", {"pairs": torch.tensor([[0, 0], [4, 0]])}),
        (r"pairs\[0, 1\] = -1 is out of range for 5 captions", {"pairs": torch.tensor([[0, -1]])}),
        (r"pairs must have shape \[1, 2\], got \[1, 3\]", {"pairs": torch.tensor([[0, 0, 0]])}),
        (r"regions contain NaN", {"regions": torch.full((4, 6, 21), torch.nan, dtype=torch.float64)}),
        (r"w_score contain NaN", {"w_score": torch.full((10,), torch.nan, dtype=torch.float64)}),
    ],
)
def test_bad_input(chosen, match, changes):
    with pytest.raises(RuntimeError, match=match):
        OP.implementation(chosen)(*bad(**changes))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, generator):
    regions, words, offsets, image_globals, caption_globals, *_ = sample(torch.float32)
    weights = draw_weights(21, 10, 3, generator, torch.float32)
    half = [x.to(dtype) for x in (regions, words, image_globals, caption_globals)]
    got = sgr(half[0], half[1], offsets, half[2], half[3], weights)
    assert got.dtype == torch.float32
    full = [x.float() for x in half]
    torch.testing.assert_close(got, sgr(full[0], full[1], offsets, full[2], full[3], weights))


@pytest.mark.parametrize("margin", [0.9, 0.01, 0.0])
@pytest.mark.parametrize("ids", [False, True])
def test_mean_loss_is_triplet_of_scores(margin, ids, generator):
    """In one pass or pair by pair, and with a gradient from above."""
    regions, words, offsets, image_globals, caption_globals, *_ = sample(images=12, captions=12)
    weights = draw_weights(21, 10, 3, generator)
    shared = torch.arange(12) // 2 if ids else None
    margins = margin * torch.rand(12, dtype=torch.float64, generator=generator)
    inputs = [x.requires_grad_() for x in (regions, words, image_globals, caption_globals, *weights)]
    args = (regions, words, offsets, image_globals, caption_globals, weights)
    with use_backend("native"):
        fused = sgr_mean(*args, margins, shared)
    with use_backend("reference"):
        plain = triplet(sgr(*args), margins, "mean", shared)
    both = ([loss, *torch.autograd.grad(3 * loss, inputs)] for loss in (fused, plain))
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want)


def test_mean_loss_without_gradient_and_in_half_precision():
    regions, words, offsets, image_globals, caption_globals, *_ = sample(torch.float32, images=4, captions=4)
    weights = draw_weights(21, 10, 3, torch.Generator().manual_seed(0), torch.float32)
    args = (regions, words, offsets, image_globals, caption_globals, weights)
    want = triplet(sgr(*args), 0.2, "mean")
    assert torch.equal(sgr_mean(*args), want)
    regions = regions.bfloat16().requires_grad_()
    loss = sgr_mean(regions, *args[1:])
    torch.testing.assert_close(loss.detach(), want, rtol=0.05, atol=0.02)
    assert torch.autograd.grad(loss, regions)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_mean_loss_on_any_number_of_threads(threads):
    op = OPS["sgr_mean"]
    args = op.inputs(torch.float32, torch.Generator().manual_seed(0), **op.shapes["odd"])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert not mismatch(op, op.implementation("native"), args, torch.float32)
        first, again = (op.implementation("native")(*args) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.set_num_threads(before)


def test_mean_loss_bad_input():
    *tensors, margin, ids, _ = OPS["sgr_mean"].inputs(
        torch.float32, torch.Generator().manual_seed(0), **OPS["sgr_mean"].shapes["odd"]
    )
    kernel = OPS["sgr_mean"].implementation("native")
    with pytest.raises(RuntimeError, match=r"sgr_mean: margin must have shape \[5\]"):
        kernel(*tensors, margin[:3], ids, None)
    with pytest.raises(RuntimeError, match="sgr_mean: margin is NaN"):
        kernel(*tensors, margin * torch.nan, ids, None)
    with pytest.raises(RuntimeError, match="sgr_mean: image_ids must be"):
        kernel(*tensors, margin, ids.int(), None)
    ends = tensors[2][:5]
    with pytest.raises(RuntimeError, match="5 images, but 4 captions"):
        kernel(tensors[0], tensors[1][: ends[-1]], ends, tensors[3], tensors[4][:4], *tensors[5:], margin, ids, None)
