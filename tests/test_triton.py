"""Triton kernels in the interpreter: what the grid of all ops does not reach. Packing, chunks, long captions, types."""

import sys

import numpy as np
import pytest
import torch
from test_sgr import OP, draw_weights, sample

from bench.baselines import sgr_fused, sgr_step
from pcsr_fast import backend, sgr, triplet, use_backend
from pcsr_fast.ops.verify import copies, mismatch, results

kernels = pytest.importorskip("pcsr_fast.triton.sgr")
TRITON = OP.implementation("triton")


def close_to_reference(args, function=TRITON):
    problem = mismatch(OP, function, tuple(args), torch.float32)
    assert not problem, problem


def with_lengths(lengths, **sizes):
    args = [*sample(torch.float32, captions=len(lengths), **sizes)]
    args[2] = torch.tensor([0, *lengths]).cumsum(0)
    words = torch.randn(sum(lengths), args[0].shape[2], generator=torch.Generator().manual_seed(1))
    args[1] = torch.nn.functional.normalize(words, dim=1)
    return args


@pytest.mark.parametrize(
    ("precision", "lengths", "sizes"),
    [
        # around a block and beyond: a graph has one node more than the caption has words
        ("tf32", [1, 62, 63, 64], dict(images=1, dim=16, steps=2)),
        # sizes that tiles divide
        ("ieee", [130, 3], dict(images=1, dim=32, nodes=32)),
        # more nodes than the widest tile
        ("tf32", [5, 2], dict(images=1, dim=64, nodes=260, steps=2)),
        ("tf32", [4, 3], dict(images=2, regions=65, dim=16, steps=2)),
    ],
)
def test_sizes(monkeypatch, precision, lengths, sizes):
    monkeypatch.setattr(kernels, "precision", lambda: precision)
    close_to_reference(with_lengths(lengths, **sizes))


def test_very_many_regions_take_the_reference():
    args = sample(torch.float32, images=1, captions=2, regions=kernels.MOST_REGIONS + 1, words=2, steps=1)
    assert torch.equal(TRITON(*args), OP.reference(*args))


@pytest.mark.parametrize("pairs", [0, 9])
def test_chunks_do_not_matter(monkeypatch, pairs):
    args = sample(torch.float32, images=3, captions=4, pairs=pairs, steps=1)
    want = TRITON(*args)
    calls = []
    run = kernels.score_chunk
    monkeypatch.setattr(kernels, "score_chunk", lambda *a: calls.append(a) or run(*a))
    # two captions and two images at a time, or about three pairs
    monkeypatch.setattr(kernels, "WORKSPACE", 25 * (2 * 10 * 4 + 4 * 16 + 16) * 2)
    torch.testing.assert_close(TRITON(*args), want, rtol=1e-6, atol=1e-7)
    assert len(calls) > 1


def test_gradients_in_chunks(monkeypatch):
    args = sample(torch.float32, images=2, captions=4)
    monkeypatch.setattr(sys.modules["pcsr_fast.ops.sgr"], "CHUNK", 16)
    close_to_reference(args)


def test_gradients_of_few_pairs_alone():
    args = sample(torch.float64, images=4, captions=4)
    upstream = torch.zeros(16, dtype=torch.float64)
    upstream[[1, 6, 15]] = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    kernel = torch.ops.pcsr_triton.sgr_backward.default
    for ours, native in zip(kernel(upstream, *args), torch.ops.pcsr.sgr_backward(upstream, *args), strict=True):
        torch.testing.assert_close(ours, native)


@pytest.mark.parametrize("seed", range(20))
def test_packing(seed):
    draw = np.random.default_rng(seed)
    sizes = draw.integers(2, (20, 64, 200)[seed % 3], draw.integers(1, 300))
    starts, blocks = kernels.pack(sizes)
    taken = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)])
    assert len(np.unique(taken)) == len(taken)
    assert taken.max() < blocks * kernels.BLOCK
    short = sizes <= kernels.BLOCK
    assert np.all(starts[short] // kernels.BLOCK == (starts + sizes - 1)[short] // kernels.BLOCK)
    assert np.all(starts[~short] % kernels.BLOCK == 0)


def test_little_of_a_block_is_empty():
    offsets = OP.inputs(torch.float32, torch.Generator().manual_seed(0), **OP.shapes["f30k_128"])[2].numpy()
    layout = kernels.lay_out(np.repeat(np.arange(8), 128), np.tile(np.arange(128), 8), offsets, torch.device("cpu"))
    assert (layout.node_pair < 0).float().mean() < 0.03
    assert len(layout.row_word) / (len(layout.block_image) * kernels.BLOCK) > 0.97


def test_workspace_of_a_large_batch():
    """Without memory: what a call allocates at once stays below 0.5 GB, and nothing is as large as [B, C, L, D]."""
    args = OP.inputs(torch.float32, torch.Generator().manual_seed(0), **OP.shapes["f30k_128"])
    meta = [x.to("meta") if torch.is_tensor(x) and x.is_floating_point() else x for x in args]
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if torch.is_tensor(result) and result.is_meta and not func.is_view:
                sizes.append(result.nbytes)
            return result

    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **keywords: None

    with pytest.MonkeyPatch.context() as patch, Watch():
        for name in kernels.LAUNCH:
            patch.setattr(kernels, name, Nothing())
        run = kernels.score_chunk
        totals = []

        def counted(*chunk):
            before = len(sizes)
            scores = run(*chunk)
            totals.append(sum(sizes[before:]))
            return scores

        patch.setattr(kernels, "score_chunk", counted)
        kernels.forward(*meta[:2], args[2].numpy(), *meta[3:])
    per_call = sum(sizes) - sum(totals)
    assert len(totals) > 3
    assert max(totals) + per_call < 0.5e9
    assert max(sizes) < 0.05 * 128 * 128 * 14 * 1024 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, generator):
    regions, words, offsets, image_globals, caption_globals, *_ = sample(torch.float32)
    weights = draw_weights(21, 10, 3, generator, torch.float32)
    weights = weights._replace(**{k: 0.3 * v for k, v in weights._asdict().items()})
    half = [x.to(dtype).requires_grad_() for x in (regions, words, image_globals, caption_globals)]
    full = [x.detach().float().requires_grad_() for x in half]
    grads, scores = {}, {}
    for chosen, (v, t, v_glo, t_glo) in {"triton": half, "reference": full}.items():
        with use_backend(chosen):
            scores[chosen] = sgr(v, t, offsets, v_glo, t_glo, weights)
            grads[chosen] = torch.autograd.grad(scores[chosen].sum(), (v, t, v_glo, t_glo))
    assert scores["triton"].dtype == torch.float32
    assert not torch.equal(*scores.values())
    torch.testing.assert_close(*scores.values(), rtol=0, atol=2e-2)
    for mine, exact in zip(*grads.values(), strict=True):
        assert mine.dtype == dtype
        assert (mine.float() - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.parametrize("name", ["regions", "words", "w_loc", "mix", "b_score"])
def test_nan_comes_through(name):
    from pcsr_fast.ops.sgr import FLOATING

    args = [*copies(sample(torch.float32, images=2, captions=2))]
    place = FLOATING.index(name)
    args[place if place < 2 else place + 1].view(-1)[0] = torch.nan
    scores = TRITON(*args).view(2, 2)
    hit = {"regions": scores[0], "words": scores[:, 0]}.get(name, scores)
    assert hit.isnan().all()


def test_other_layouts_of_the_arguments():
    args = sample(torch.float32, images=3, captions=3, steps=2)
    strided = [x.mT.contiguous().mT if torch.is_tensor(x) and x.dim() > 1 else x for x in args]
    assert torch.equal(TRITON(*strided), TRITON(*args))


def test_step_with_hardest_negatives(generator):
    regions, words, offsets, image_globals, caption_globals, *_ = sample(torch.float32, images=5, captions=5)
    weights = draw_weights(21, 10, 3, generator, torch.float32)
    leaves = [x.requires_grad_() for x in (regions, words, image_globals, caption_globals, *weights)]
    grads = {}
    for chosen in ("reference", "triton"):
        with use_backend(chosen):
            scores = sgr(regions, words, offsets, image_globals, caption_globals, weights)
        grads[chosen] = torch.autograd.grad(triplet(scores, 0.2), leaves)
    for a, b in zip(*grads.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_timed_step_runs():
    """The benchmark sets the backend of sgr, but the triplet on top of it has no Triton kernel."""
    with use_backend("triton"):
        args = OP.inputs(torch.float32, torch.Generator().manual_seed(0), **OP.shapes["odd_square"])
        assert sgr_step(sgr_fused, "hardest")(*args) > 0


def test_precision_is_that_of_torch():
    before = torch.get_float32_matmul_precision()
    try:
        for setting, want in (("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")):
            torch.set_float32_matmul_precision(setting)
            assert kernels.precision() == want
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_same_bits_again():
    args = sample(torch.float32, images=3, captions=4)
    assert all(torch.equal(a, b) for a, b in zip(*(results(OP, TRITON, copies(args)) for _ in "ab"), strict=True))


def test_auto_takes_triton_on_cuda_and_says_if_it_cannot(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backend._choose.cache_clear()
    assert backend.choose("sgr", "cuda", "auto") == "triton"
    backend._choose.cache_clear()
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="sgr runs on the slow reference on cuda: triton is not installed"):
        assert backend.choose("sgr", "cuda", "auto") == "reference"
    backend._choose.cache_clear()
