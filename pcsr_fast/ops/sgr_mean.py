"""sgr_mean: the loss of warm-up, triplet(sgr(...), mode="mean"), with its gradient in the same pass over all pairs.

At first nearly every score has a gradient, and going back through a pair right after it is scored saves doing it again:
three quarters of the work. Where fewer than two thirds have one, pairs that do are computed again, as sgr does.
"""

import torch
from torch import Tensor

from pcsr_fast import backend
from pcsr_fast.ops.op import Cost, Op, check, in_float32, register
from pcsr_fast.ops.sgr import FLOATING, SgrWeights, fuse
from pcsr_fast.ops.sgr import OP as SGR
from pcsr_fast.ops.triplet import triplet


def sgr_mean(
    regions: Tensor,  # [B, R, D]
    words: Tensor,  # [sum n_c, D]
    offsets: Tensor,  # [B + 1]
    image_globals: Tensor,  # [B, D]
    caption_globals: Tensor,  # [B, D]
    weights: SgrWeights,
    margin: Tensor | float = 0.2,
    image_ids: Tensor | None = None,  # [B]
    caption_ids: Tensor | None = None,  # [B]
) -> Tensor:
    """The same as triplet(sgr(...), margin, "mean", image_ids, caption_ids), and faster on the CPU with gradient."""
    tensors = (in_float32(x) for x in (regions, words, image_globals, caption_globals))
    return fused_loss(*tensors, *fuse(weights), offsets, margin, image_ids, caption_ids)


def fused_loss(*args) -> Tensor:
    """sgr_mean of the weights as the op takes them."""
    *tensors, offsets, margin, image_ids, caption_ids = args
    device = tensors[0].device
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    chosen = backend.choose(OP.name, device.type, backend.current_choice()) if device.type == "cpu" else "reference"
    if chosen == "reference" or not wanted or torch.compiler.is_compiling():
        scores = SGR(*tensors[:2], offsets, *tensors[2:], None).view(len(tensors[0]), -1)
        return triplet(scores, margin, "mean", image_ids, caption_ids)
    margin = torch.as_tensor(margin, dtype=tensors[0].dtype).detach().expand(len(tensors[0]))
    return _WithGradient.apply(offsets, margin, image_ids, caption_ids, *tensors)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, offsets, margin, image_ids, caption_ids, regions, words, *rest):
        kernel = OP.implementation("native")
        loss, *grads = kernel(regions, words, offsets, *rest, margin, image_ids, caption_ids)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError("sgr_mean: there is no second derivative (create_graph=True)")
        return None, None, None, None, *(x * grad for x in ctx.saved_tensors)


def reference(regions, words, offsets, *rest) -> tuple[Tensor, ...]:
    *others, margin, image_ids, caption_ids = rest
    captions = len(offsets) - 1
    check(
        captions == len(regions),
        f"sgr_mean: {len(regions)} images, but {captions} captions: pair i is image i with caption i",
    )
    leaves = [x.detach().requires_grad_() for x in (regions, words, *others)]
    with torch.enable_grad(), backend.use_backend("reference"):
        grid = SGR.reference(*leaves[:2], offsets, *leaves[2:], None).view(captions, captions)
        loss = triplet(grid, margin, "mean", image_ids, caption_ids)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def fake(regions, words, offsets, *rest) -> tuple[Tensor, ...]:
    tensors = (regions, words, *rest[:-3])
    return regions.new_empty(()), *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


def inputs(dtype: torch.dtype, generator: torch.Generator, margin: float, **sizes) -> tuple:
    *tensors, _ = SGR.inputs(dtype, generator, **sizes, pairs=0)
    batch = sizes["images"]
    # a few pairs share an image
    image_ids = torch.randint(3 * batch, (batch,), generator=generator)
    return *tensors, torch.full((batch,), margin, dtype=dtype), image_ids, None


def cost(*args) -> Cost:
    forward = SGR.cost(*args[:-3], None)
    return Cost(2 * forward.bytes, 3 * forward.flops)


SIZES = dict(images=5, captions=5, regions=7, words=5, dim=37, nodes=19, steps=3)
OP = register(
    Op(
        name="sgr_mean",
        schema="(Tensor regions, Tensor words, Tensor offsets, Tensor image_globals, Tensor caption_globals, "
        "Tensor w_loc, Tensor b_loc, Tensor w_glo, Tensor b_glo, Tensor mix, Tensor shift, Tensor graph, Tensor bias, "
        "Tensor w_score, Tensor b_score, Tensor margin, Tensor? image_ids, Tensor? caption_ids) "
        f"-> ({', '.join(['Tensor'] * (1 + len(FLOATING)))})",
        reference=reference,
        fake=fake,
        shapes={
            "tiny": SIZES | dict(images=2, captions=2, regions=1, words=2, dim=3, nodes=2, steps=1, margin=0.2),
            # with this margin all hinges are active, or few
            "odd": SIZES | dict(margin=0.9),
            "odd_few": SIZES | dict(images=9, captions=9, margin=0.001),
        },
        inputs=inputs,
        cost=cost,
        gpu=None,
    )
)
