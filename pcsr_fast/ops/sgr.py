"""sgr: similarity of images and captions, by attention and reasoning over a small graph; all pairs or a list."""

from typing import NamedTuple

import torch
from torch import Tensor

from pcsr_fast import backend
from pcsr_fast.ops.op import Backward, Cost, Op, check, in_float32, register

# words, with padding, that the reference and the gradient in plain torch compute at a time
CHUNK = 8192
HALF = (torch.float16, torch.bfloat16)


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

    Half precision is computed in float32, but by Triton if that is what runs: then everything is taken in the type of
    the regions, and products are summed in float32. Scores are never in half precision.
    """
    floating = (regions, words, image_globals, caption_globals, *fuse(weights))
    if regions.dtype in HALF and backend.choose("sgr", regions.device.type, backend.current_choice()) == "triton":
        floating = tuple(x.to(regions.dtype) for x in floating)
    else:
        floating = tuple(in_float32(x) for x in floating)
    scores = OP(*floating[:2], offsets, *floating[2:], pairs)
    return scores if pairs is not None else scores.view(len(regions), len(offsets) - 1)


def fuse(weights: SgrWeights) -> tuple[Tensor, ...]:
    """The weights that the op takes: (E Wq' + bq) (E Wk')' = (E M + u) E' with M = Wq' Wk and u = bq Wk."""
    w = SgrWeights(*(in_float32(x) for x in weights))
    mix = w.w_query.mT @ w.w_key
    shift = (w.b_query[:, None] @ w.w_key)[:, 0]
    return w.w_loc, w.b_loc, w.w_glo, w.b_glo, mix, shift, w.w_graph, w.b_graph, w.w_score, w.b_score


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
    floating = (regions, words, image_globals, caption_globals)
    weights = (w_loc, b_loc, w_glo, b_glo, mix, shift, w_graph, b_graph, w_score, b_score)
    _check_shapes(regions, words, offsets, image_globals, caption_globals, *weights, pairs)
    _check_indices(regions, words, offsets, pairs)
    for name, x in zip(FLOATING, (*floating, *weights), strict=True):
        check(not x.isnan().any(), f"sgr: {name} contain NaN")
    if pairs is None:
        pairs = torch.cartesian_prod(torch.arange(len(regions)), torch.arange(len(offsets) - 1))
    offsets, pairs = offsets.to(regions.device), pairs.to(regions.device)
    longest = int(offsets.diff().max())
    chunks = [_score(*floating, *weights, offsets, longest, part) for part in pairs.split(max(1, CHUNK // longest))]
    return torch.cat(chunks) if chunks else regions.new_zeros(0)


def _score(
    regions, words, image_globals, caption_globals,
    w_loc, b_loc, w_glo, b_glo, mix, shift, w_graph, b_graph, w_score, b_score,
    offsets, longest, pairs,
) -> Tensor:  # fmt: skip
    image, caption = pairs.unbind(1)
    # captions side by side, padded to the longest by their last word
    first, last = offsets[caption, None], offsets[caption + 1, None] - 1
    place = torch.arange(longest, device=words.device)
    is_word = first + place <= last
    v, t = regions[image], torch.where(is_word[..., None], words[torch.minimum(first + place, last)], 0)
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


# the tensors of the op in its order, but offsets and pairs
FLOATING = (
    *("regions", "words", "image_globals", "caption_globals"),
    *("w_loc", "b_loc", "w_glo", "b_glo", "mix", "shift", "graph", "bias", "w_score", "b_score"),
)


def _check_shapes(
    regions, words, offsets, image_globals, caption_globals,
    w_loc, b_loc, w_glo, b_glo, mix, shift, graph, bias, w_score, b_score,
    pairs, half=False,
) -> None:  # fmt: skip
    dtype = regions.dtype
    known = dtype in (torch.float32, torch.float64, *(HALF if half else ()))
    check(known, f"sgr: regions must be float32 or float64, got {dtype}")
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


def _check_indices(regions, words, offsets, pairs) -> tuple[Tensor, Tensor | None]:
    """Checks offsets and pairs on the host, and returns them there: the only wait for the device."""
    offsets = offsets.cpu()
    check(int(offsets[0]) == 0, f"sgr: offsets must start with 0, got {int(offsets[0])}")
    for c in (offsets.diff() <= 0).nonzero()[:1].flatten().tolist():
        raise RuntimeError(f"sgr: caption {c} has no words: offsets {int(offsets[c])} and {int(offsets[c + 1])}")
    check(int(offsets[-1]) == len(words), f"sgr: offsets end with {int(offsets[-1])}, but there are {len(words)} words")
    if pairs is None:
        return offsets, None
    pairs = pairs.cpu()
    counts = torch.tensor([len(regions), len(offsets) - 1])
    for p, side in ((pairs < 0) | (pairs >= counts)).nonzero()[:1].tolist():
        what = f"{int(counts[side])} {'captions' if side else 'images'}"
        raise RuntimeError(f"sgr: pairs[{p}, {side}] = {int(pairs[p, side])} is out of range for {what}")
    return offsets, pairs


def fake(regions, words, offsets, *rest) -> Tensor:
    _check_shapes(regions, words, offsets, *rest, half=True)
    pairs = rest[-1]
    count = len(regions) * (len(offsets) - 1) if pairs is None else len(pairs)
    return regions.new_empty(count, dtype=torch.float32 if regions.dtype in HALF else regions.dtype)


def on_triton(regions, words, offsets, image_globals, caption_globals, *rest) -> Tensor:
    """Scores on a GPU. Shapes, offsets and pairs are checked on the host; NaN is not looked for and gives NaN scores.

    Offsets and pairs may be given on the host already: then nothing waits for the device. float64 and images of very
    many regions take the reference.
    """
    # not at the top: triton is optional and slow to import
    from pcsr_fast.triton import sgr as kernels

    *weights, pairs = rest
    floating = (regions, words, image_globals, caption_globals, *weights)
    _check_shapes(regions, words, offsets, image_globals, caption_globals, *rest, half=True)
    for name, x in zip(FLOATING, floating, strict=True):
        check(x.device == regions.device, f"sgr: {name} must be on the same device as the first argument")
    if regions.dtype == torch.float64 or regions.shape[1] > kernels.MOST_REGIONS:
        full = [in_float32(x) for x in floating]
        return reference(*full[:2], offsets, *full[2:], pairs)
    offsets, pairs = _check_indices(regions, words, offsets, pairs)
    with torch.cuda.device_of(regions):
        return kernels.forward(*floating[:2], offsets.numpy(), *floating[2:], pairs if pairs is None else pairs.numpy())


def recompute(grad_scores, regions, words, offsets, *rest) -> tuple[Tensor, ...]:
    """Gradients of the pairs whose score has one, in plain torch: memory is that of a chunk of CHUNK words.

    Pairs are taken in the order of their captions' lengths, so that a chunk has little padding. Sums are in float32 and
    always in the same order: indexing's own gradient, unlike that of index_select, uses no atomics on a GPU.
    """
    *others, pairs = rest
    _check_shapes(regions, words, offsets, *rest, half=True)
    _check_indices(regions, words, offsets, pairs)
    captions = len(offsets) - 1
    offsets = offsets.to(regions.device)
    wanted = grad_scores.nonzero()[:, 0]
    if pairs is None:
        cells = torch.stack([wanted // captions, wanted % captions], 1)
    else:
        cells = pairs.to(regions.device)[wanted]
    lengths, order = offsets.diff()[cells[:, 1]].sort(descending=True, stable=True)
    cells, upstream, lengths = cells[order], grad_scores[wanted[order]], lengths.tolist()
    leaves = [in_float32(x.detach()).requires_grad_() for x in (regions, words, *others)]
    return tuple(grad.to(regions.dtype) for grad in _gradients(leaves, offsets, cells, lengths, upstream))


def _gradients(
    leaves: list[Tensor], offsets: Tensor, cells: Tensor, lengths: list[int], upstream: Tensor
) -> list[Tensor]:
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in leaves]
    at = 0
    while at < len(lengths):
        part = slice(at, at + max(1, CHUNK // lengths[at]))
        with torch.enable_grad():
            scores = _score(*leaves, offsets, lengths[at], cells[part])
        for total, grad in zip(grads, torch.autograd.grad(scores, leaves, upstream[part]), strict=True):
            total += grad
        at = part.stop
    return grads


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
        triton=on_triton,
    )
)
