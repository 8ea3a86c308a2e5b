"""sgr: similarity of images and captions, by attention and reasoning over a small graph; all pairs or a list."""

from typing import NamedTuple

import torch
from torch import Tensor

from pcsr_fast.ops.op import Backward, Cost, Op, check, in_float32, register

# pairs that the reference computes at a time
CHUNK = 512


class SgrWeights(NamedTuple):
    """Weights of the similarity network, as torch.nn.Linear holds them; the reasoning steps are stacked.

    A bias of the keys would be constant along the softmax that follows and cancel: there is none.
    """

    w_loc: Tensor  # [S, D]
    b_loc: Tensor  # [S]
    w_glo: Tensor  # [S, D]
    b_glo: Tensor  # [S]
    w_query: Tensor  # [steps, S, S]
    b_query: Tensor  # [steps, S]
    w_key: Tensor  # [steps, S, S]
    w_graph: Tensor  # [steps, S, S]
    b_graph: Tensor  # [steps, S]
    w_score: Tensor  # [S]
    b_score: Tensor  # [1]


def sgr(
    regions: Tensor,  # [B, R, D]
    words: Tensor,  # [sum n_c, D], the words of all captions back to back
    offsets: Tensor,  # [C + 1], caption c has words offsets[c] to offsets[c + 1]
    image_globals: Tensor,  # [B, D]
    caption_globals: Tensor,  # [C, D]
    weights: SgrWeights,
    pairs: Tensor | None = None,  # [P, 2]
) -> Tensor:
    """Scores of all images and captions [B, C], or of a list of (image, caption) pairs [P], in (0, 1).

    The gradient is computed for the pairs alone whose score has one: after a triplet with hardest negatives that is
    3 B of the B^2. Activations are not stored but computed again.
    """
    w = SgrWeights(*(in_float32(x) for x in weights))
    # (E Wq' + bq) (E Wk')' = (E M + u) E' with M = Wq' Wk and u = bq Wk: one projection instead of two
    mix = w.w_query.mT @ w.w_key
    shift = (w.b_query[:, None] @ w.w_key)[:, 0]
    inputs = (in_float32(regions), in_float32(words), offsets, in_float32(image_globals), in_float32(caption_globals))
    fused = (w.w_loc, w.b_loc, w.w_glo, w.b_glo, mix, shift, w.w_graph, w.b_graph, w.w_score, w.b_score)
    scores = OP(*inputs, *fused, pairs)
    return scores if pairs is not None else scores.view(len(regions), len(offsets) - 1)


def l2(x: Tensor, dim: int = -1) -> Tensor:
    """x / (|x| + 1e-8), and 0 with gradient 0 where x is 0."""
    square = (x * x).sum(dim, keepdim=True)
    norm = torch.where(square > 0, square, 1).sqrt()
    return x * torch.where(square > 0, 1 / (norm + 1e-8), 0)


def reference(
    regions, words, offsets, image_globals, caption_globals,
    w_loc, b_loc, w_glo, b_glo, mix, shift, w_graph, b_graph, w_score, b_score,
    pairs,
) -> Tensor:  # fmt: skip
    weights = (w_loc, b_loc, w_glo, b_glo, mix, shift, w_graph, b_graph, w_score, b_score)
    _check_shapes(regions, words, offsets, image_globals, caption_globals, *weights, pairs)
    _check_values(regions, words, offsets, image_globals, caption_globals, *weights, pairs)
    if pairs is None:
        pairs = torch.cartesian_prod(torch.arange(len(regions)), torch.arange(len(offsets) - 1)).to(regions.device)
    # captions side by side, padded to the longest
    lengths = offsets.diff()
    place = torch.arange(int(lengths.max()), device=words.device)
    valid = place < lengths[:, None]
    padded = words.new_zeros(*valid.shape, words.shape[1]).masked_scatter(valid[..., None], words)

    def score(image: Tensor, caption: Tensor) -> Tensor:
        v, t, is_word = regions[image], padded[caption], valid[caption]
        attention = torch.nn.functional.leaky_relu(t @ v.mT, 0.1)  # [P, L, R]
        attention = l2(attention, dim=1)
        context = l2((9 * attention).softmax(2) @ v)  # [P, L, D]
        local = l2((context - t) ** 2 @ w_loc.T + b_loc)  # [P, L, S]
        whole = l2((image_globals[image] - caption_globals[caption]) ** 2 @ w_glo.T + b_glo)
        nodes = torch.cat([whole[:, None], local], 1)
        is_node = torch.nn.functional.pad(is_word, (1, 0), value=True)
        for m, u, wg, bg in zip(mix, shift, w_graph, b_graph, strict=True):
            edges = ((nodes @ m + u) @ nodes.mT).masked_fill(~is_node[:, None], -torch.inf).softmax(2)
            nodes = torch.relu(edges @ nodes @ wg.T + bg)
        return torch.sigmoid(nodes[:, 0] @ w_score + b_score)

    chunks = [score(*chunk.unbind(1)) for chunk in pairs.split(CHUNK)]
    return torch.cat(chunks) if chunks else regions.new_zeros(0)


# the tensors of the op in its order, but offsets and pairs
FLOATING = (
    *("regions", "words", "image_globals", "caption_globals"),
    *("w_loc", "b_loc", "w_glo", "b_glo", "mix", "shift", "graph", "bias", "w_score", "b_score"),
)


def _check_shapes(
    regions, words, offsets, image_globals, caption_globals,
    w_loc, b_loc, w_glo, b_glo, mix, shift, graph, bias, w_score, b_score,
    pairs,
) -> None:  # fmt: skip
    dtype = regions.dtype
    check(dtype in (torch.float32, torch.float64), f"sgr: regions must be float32 or float64, got {dtype}")
    check(
        regions.dim() == 3 and regions.numel() > 0,
        f"sgr: regions must be [images, regions, dim] and not empty, got {[*regions.shape]}",
    )
    check(offsets.dim() == 1 and len(offsets) >= 2, f"sgr: offsets must be [captions + 1], got {[*offsets.shape]}")
    check(mix.dim() == 3 and len(mix) >= 1, f"sgr: mix must be [steps, nodes, nodes], got {[*mix.shape]}")
    check(words.dim() == 2, f"sgr: words must be [words, dim], got {[*words.shape]}")
    check(offsets.dtype == torch.int64, f"sgr: offsets must be torch.int64, got {offsets.dtype}")
    (images, _, dim), captions, (steps, nodes) = regions.shape, len(offsets) - 1, mix.shape[:2]
    for name, tensor, shape in (
        ("words", words, [words.shape[0], dim]),
        ("image_globals", image_globals, [images, dim]),
        ("caption_globals", caption_globals, [captions, dim]),
        ("w_loc", w_loc, [nodes, dim]),
        ("b_loc", b_loc, [nodes]),
        ("w_glo", w_glo, [nodes, dim]),
        ("b_glo", b_glo, [nodes]),
        ("mix", mix, [steps, nodes, nodes]),
        ("shift", shift, [steps, nodes]),
        ("graph", graph, [steps, nodes, nodes]),
        ("bias", bias, [steps, nodes]),
        ("w_score", w_score, [nodes]),
        ("b_score", b_score, [1]),
    ):
        check(tensor.dtype == dtype, f"sgr: {name} must be {dtype}, got {tensor.dtype}")
        check([*tensor.shape] == shape, f"sgr: {name} must have shape {shape}, got {[*tensor.shape]}")
    if pairs is not None:
        check(pairs.dtype == torch.int64, f"sgr: pairs must be torch.int64, got {pairs.dtype}")
        shape = [len(pairs) if pairs.dim() else 0, 2]
        check([*pairs.shape] == shape, f"sgr: pairs must have shape {shape}, got {[*pairs.shape]}")


def _check_values(regions, words, offsets, image_globals, caption_globals, *rest) -> None:
    *weights, pairs = rest
    check(int(offsets[0]) == 0, f"sgr: offsets must start with 0, got {int(offsets[0])}")
    empty = (offsets.diff() <= 0).nonzero()
    check(not len(empty), f"sgr: caption {int(empty[0]) if len(empty) else 0} has no words")
    check(int(offsets[-1]) == len(words), f"sgr: offsets end with {int(offsets[-1])}, but there are {len(words)} words")
    if pairs is not None:
        for side, count, what in ((0, len(regions), "images"), (1, len(offsets) - 1, "captions")):
            bad = ((pairs[:, side] < 0) | (pairs[:, side] >= count)).nonzero()
            if len(bad):
                p = int(bad[0])
                raise RuntimeError(
                    f"sgr: pairs[{p}, {side}] = {int(pairs[p, side])} is out of range for {count} {what}"
                )
    for name, x in zip(FLOATING, (regions, words, image_globals, caption_globals, *weights), strict=True):
        check(not x.isnan().any(), f"sgr: {name} contain NaN")


def fake(regions, words, offsets, *rest) -> Tensor:
    _check_shapes(regions, words, offsets, *rest)
    pairs = rest[-1]
    return regions.new_empty(len(regions) * (len(offsets) - 1) if pairs is None else len(pairs))


def recompute(grad_scores, regions, words, offsets, *rest) -> tuple[Tensor, ...]:
    """Gradients by the reference on the pairs whose score has a gradient, a chunk at a time: on any device."""
    *others, pairs = rest
    wanted = grad_scores.nonzero()[:, 0]
    captions = len(offsets) - 1
    cells = torch.stack([wanted // captions, wanted % captions], 1) if pairs is None else pairs[wanted]
    leaves = [x.detach().requires_grad_() for x in (regions, words, *others)]
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in leaves]
    for cell, at in zip(cells.split(CHUNK), wanted.split(CHUNK), strict=True):
        with torch.enable_grad():
            scores = reference(*leaves[:2], offsets, *leaves[2:], cell)
        for total, grad in zip(grads, torch.autograd.grad(scores, leaves, grad_scores[at]), strict=True):
            total += grad
    return tuple(grads)


def fake_backward(grad_scores, regions, words, offsets, *rest) -> tuple[Tensor, ...]:
    tensors = (regions, words, *rest[:-1])
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


def save(inputs, outputs):
    return inputs, None


def run_backward(kernel, tensors, _, grads, needed):
    regions, words, *others = kernel(grads[0], *tensors)
    return regions, words, None, *others, None


def inputs(
    dtype: torch.dtype, generator: torch.Generator, images, captions, regions, words, dim, nodes, steps, pairs
) -> tuple:
    """words is the mean length of a caption; pairs is their number, 0 for the grid."""

    def normal(*shape):
        return torch.randn(*shape, dtype=dtype, generator=generator)

    # lengths like Flickr30K's, where 12 words and two markers are the mean and few captions are long
    spread = torch.randn(captions, generator=generator) * 0.35
    lengths = (words * spread.exp()).round().long().clamp(1, 80)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    unit = torch.nn.functional.normalize
    chosen = None
    if pairs:
        chosen = torch.stack([torch.randint(n, (pairs,), generator=generator) for n in (images, captions)], 1)
    return (
        unit(normal(images, regions, dim), dim=2),
        unit(normal(int(offsets[-1]), dim), dim=1),
        offsets,
        unit(normal(images, dim), dim=1),
        unit(normal(captions, dim), dim=1),
        normal(nodes, dim),
        0.1 * normal(nodes),
        normal(nodes, dim),
        0.1 * normal(nodes),
        normal(steps, nodes, nodes) / nodes**0.5,
        0.1 * normal(steps, nodes),
        normal(steps, nodes, nodes) / nodes**0.5,
        0.1 * normal(steps, nodes),
        normal(nodes),
        0.1 * normal(1),
        chosen,
    )


def cost(regions, words, offsets, image_globals, caption_globals, *rest) -> Cost:
    # attention, context and W_loc for every word, the wide product of the reasoning steps for every node
    *weights, pairs = rest
    (_, r, d), (steps, s) = regions.shape, weights[4].shape[:2]
    lengths = offsets.diff()
    words_scored = int(words.shape[0]) * len(regions) if pairs is None else int(lengths[pairs[:, 1]].sum())
    count = len(regions) * len(lengths) if pairs is None else len(pairs)
    nodes = words_scored + count
    products = words_scored * (2 * r * d + d * s) + count * (d * s + 2 * s * s) + (steps - 1) * nodes * 2 * s * s
    moved = sum(x.nbytes for x in (regions, words, image_globals, caption_globals, *weights)) + 4 * count
    return Cost(moved, 2 * products)


OP = register(
    Op(
        name="sgr",
        schema="(Tensor regions, Tensor words, Tensor offsets, Tensor image_globals, Tensor caption_globals, "
        "Tensor w_loc, Tensor b_loc, Tensor w_glo, Tensor b_glo, Tensor mix, Tensor shift, Tensor graph, Tensor bias, "
        "Tensor w_score, Tensor b_score, Tensor? pairs) -> Tensor",
        reference=reference,
        fake=fake,
        backward=Backward(
            schema="(Tensor grad_scores, Tensor regions, Tensor words, Tensor offsets, Tensor image_globals, "
            "Tensor caption_globals, Tensor w_loc, Tensor b_loc, Tensor w_glo, Tensor b_glo, Tensor mix, Tensor shift, "
            "Tensor graph, Tensor bias, Tensor w_score, Tensor b_score, Tensor? pairs) "
            f"-> ({', '.join(['Tensor'] * len(FLOATING))})",
            fake=fake_backward,
            save=save,
            run=run_backward,
            inputs=(0, 1, *range(3, 15)),
            outputs=1,
            anywhere=recompute,
        ),
        shapes={
            "tiny": dict(images=2, captions=3, regions=1, words=2, dim=3, nodes=2, steps=1, pairs=0),
            "odd": dict(images=5, captions=6, regions=7, words=5, dim=37, nodes=19, steps=3, pairs=0),
            "odd_square": dict(images=5, captions=5, regions=7, words=5, dim=37, nodes=19, steps=2, pairs=0),
            "odd_pairs": dict(images=5, captions=6, regions=7, words=5, dim=37, nodes=19, steps=3, pairs=11),
            "f30k_64": dict(images=64, captions=64, regions=36, words=14, dim=1024, nodes=256, steps=3, pairs=0),
            "f30k_128": dict(images=128, captions=128, regions=36, words=14, dim=1024, nodes=256, steps=3, pairs=0),
        },
        inputs=inputs,
        cost=cost,
        gpu="triton",
    )
)
