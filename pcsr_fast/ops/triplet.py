"""triplet: the hinge between positive pairs and their negatives, with a margin of its own for every positive pair."""

from typing import Literal

import torch
from torch import Tensor

from pcsr_fast.ops.op import Backward, Cost, Op, check, in_float32, register

Mode = Literal["hardest", "mean", "per_pair"]


def triplet(
    scores: Tensor,  # [B, B]
    margin: Tensor | float = 0.2,
    mode: Mode = "hardest",
    image_ids: Tensor | None = None,  # [B]
    caption_ids: Tensor | None = None,  # [B]
    weight: Tensor | None = None,  # [B]
) -> Tensor:
    """Triplet loss of a batch whose rows are images, columns captions and positives on the diagonal.

    hardest: sum over the batch of the largest hinge in each row and in each column; mean: of their mean over the batch;
    per_pair: that mean for each pair, [B], not summed. The margin, a number or one for each positive pair [B], is that
    of the positive pair in both directions, and carries no gradient. Pairs that share an image id or a caption id are
    not each other's negatives. A weight multiplies the loss of its positive pair in both directions. Ties of the
    hardest negative go to the lowest index. NaN among the scores raises on the CPU; on CUDA, where looking would stall
    the device, it makes the loss NaN.

    >>> scores = torch.tensor([[0.9, 0.3], [0.8, 0.7]])
    >>> triplet(scores, torch.tensor([0.2, 0.1]))  # row 1: 0.1 + 0.8 - 0.7; column 0: 0.2 + 0.8 - 0.9
    tensor(0.3000)
    """
    total, pair_loss, _, _ = _run(scores, margin, mode, image_ids, caption_ids)
    if weight is not None:
        pair_loss = pair_loss * weight
        total = pair_loss.sum()
    return pair_loss if mode == "per_pair" else total


def triplet_pairs(
    scores: Tensor,  # [B, B]
    margin: Tensor | float = 0.2,
    image_ids: Tensor | None = None,  # [B]
    caption_ids: Tensor | None = None,  # [B]
) -> tuple[Tensor, Tensor, Tensor]:
    """The hardest-negative loss without a graph, and its gradient as a list: loss, pairs [P, 2], values [P].

    At most 3 B scores have a gradient: these are their cells, each once, (row, column), and none is zero.
    """
    total, _, in_row, in_col = _run(scores.detach(), margin, "hardest", image_ids, caption_ids)
    own = torch.arange(len(in_row), device=scores.device)
    column, row = in_row.long(), in_col.long()
    has_column, has_row = column >= 0, row >= 0
    # a cell that its row and its column both chose is listed by the row
    both = has_column & (row[column.clamp(min=0)] == own)
    listed_by_row = has_row & (column[row.clamp(min=0)] == own)
    cells = torch.cat([torch.stack([own, own], 1), torch.stack([own, column], 1), torch.stack([row, own], 1)])
    values = torch.cat([-(has_column.int() + has_row.int()), has_column.int() + both.int(), (has_row & ~listed_by_row)])
    kept = values != 0
    return total, cells[kept], values[kept].to(total.dtype)


@torch.no_grad()
def adaptive_margin(y: Tensor, alpha: float = 0.2, base: float = 10.0) -> Tensor:
    """Margin that grows with the belief y in [0, 1] in a pair: alpha (base^y - 1) / (base - 1). No gradient.

    >>> adaptive_margin(torch.tensor([0.0, 0.5, 1.0]))
    tensor([0.0000, 0.0481, 0.2000])
    """
    return alpha * (base**y - 1) / (base - 1)


def _run(scores, margin, mode, image_ids, caption_ids) -> tuple[Tensor, ...]:
    if mode not in ("hardest", "mean", "per_pair"):
        raise RuntimeError(f"triplet: mode must be hardest, mean or per_pair, got {mode!r}")
    scores = in_float32(scores)
    if isinstance(margin, Tensor):
        margin = margin.detach().to(scores.dtype).reshape(-1)
    else:
        margin = scores.new_full((1,), margin)
    return OP(scores, margin, image_ids, caption_ids, mode == "hardest")


def reference(
    scores: Tensor,  # [B, B]
    margin: Tensor,  # [B] or [1]
    image_ids: Tensor | None,  # [B]
    caption_ids: Tensor | None,  # [B]
    hardest: bool,
) -> tuple[Tensor, ...]:
    _check_inputs(scores, margin, image_ids, caption_ids)
    check(not scores.isnan().any(), "triplet: scores contain NaN")
    check(not margin.isnan().any(), "triplet: margin is NaN")
    batch = len(scores)
    if batch == 0:
        return scores.sum(), *fake(scores, margin, image_ids, caption_ids, hardest)[1:]
    margin = margin.expand(batch)
    positive = scores.diagonal()
    negative = ~torch.eye(batch, dtype=torch.bool, device=scores.device)
    for ids in (image_ids, caption_ids):
        if ids is not None:
            negative = negative & (ids[:, None] != ids)

    if not hardest:
        # cost_cap and cost_img of the definition
        row = torch.relu((scores - positive[:, None]) + margin[:, None]) * negative
        col = torch.relu((scores - positive) + margin) * negative
        loss = (row.sum(1) + col.sum(0)) / batch
        return loss.sum(), loss, (row > 0).sum(1).int(), (col > 0).sum(0).int()

    losses, best = [], []
    for side, others in ((scores, negative), (scores.T, negative.T)):
        at = side.detach().masked_fill(~others, -torch.inf).argmax(1)
        hinge = (side.gather(1, at[:, None])[:, 0] - positive) + margin
        active = others.any(1) & (hinge > 0)
        losses.append(torch.where(active, hinge, 0))
        best.append(torch.where(active, at, -1).int())
    loss = losses[0] + losses[1]
    return loss.sum(), loss, best[0], best[1]


def _check_inputs(scores, margin, image_ids, caption_ids) -> None:
    check(
        scores.dim() == 2 and scores.shape[0] == scores.shape[1],
        f"triplet: scores must be square, got {[*scores.shape]}",
    )
    check(
        scores.dtype in (torch.float32, torch.float64),
        f"triplet: scores must be float32 or float64, got {scores.dtype}",
    )
    batch = len(scores)
    check(margin.dtype == scores.dtype, f"triplet: margin must be {scores.dtype}, got {margin.dtype}")
    check(
        margin.dim() == 1 and len(margin) in (1, batch),
        f"triplet: margin must have shape [1] or [{batch}], got {[*margin.shape]}",
    )
    for name, ids in (("image_ids", image_ids), ("caption_ids", caption_ids)):
        if ids is not None:
            check(ids.dtype == torch.int64, f"triplet: {name} must be torch.int64, got {ids.dtype}")
            check([*ids.shape] == [batch], f"triplet: {name} must have shape [{batch}], got {[*ids.shape]}")


def fake(scores, margin, image_ids, caption_ids, hardest) -> tuple[Tensor, ...]:
    _check_inputs(scores, margin, image_ids, caption_ids)
    loss = scores.new_empty(scores.shape[0])
    in_row, in_col = (torch.empty_like(loss, dtype=torch.int32) for _ in range(2))
    return scores.new_empty(()), loss, in_row, in_col


def save(inputs, outputs):
    scores, margin, image_ids, caption_ids, hardest = inputs
    *_, in_row, in_col = outputs
    return (scores, margin, image_ids, caption_ids, in_row, in_col), hardest


def run_backward(kernel, tensors, hardest, grads, needed):
    return kernel(*grads[:2], *tensors, hardest), None, None, None, None


def inputs(dtype: torch.dtype, generator: torch.Generator, batch: int, hardest: bool) -> tuple:
    scores = torch.rand(batch, batch, dtype=dtype, generator=generator)
    margin = 0.2 * torch.rand(batch, dtype=dtype, generator=generator)
    # a few pairs share an image
    image_ids = torch.randint(4 * batch, (batch,), generator=generator)
    return scores, margin, image_ids, None, hardest


def cost(scores, margin, image_ids, caption_ids, hardest) -> Cost:
    # scores in, gradient out; a subtraction, an addition and a comparison in both directions
    return Cost(2 * scores.nbytes, 6 * scores.numel())


OP = register(
    Op(
        name="triplet",
        schema="(Tensor scores, Tensor margin, Tensor? image_ids, Tensor? caption_ids, bool hardest) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        reference=reference,
        fake=fake,
        backward=Backward(
            schema="(Tensor? grad_total, Tensor? grad_loss, Tensor scores, Tensor margin, Tensor? image_ids, "
            "Tensor? caption_ids, Tensor in_row, Tensor in_col, bool hardest) -> Tensor",
            fake=lambda grad_total, grad_loss, scores, *rest: torch.empty_like(
                scores, memory_format=torch.contiguous_format
            ),
            save=save,
            run=run_backward,
            inputs=(0,),
            outputs=2,
        ),
        shapes={
            "tiny": {"batch": 3, "hardest": True},
            "tiny_mean": {"batch": 3, "hardest": False},
            "odd": {"batch": 71, "hardest": True},
            "odd_mean": {"batch": 71, "hardest": False},
            "b128": {"batch": 128, "hardest": True},
            "b512": {"batch": 512, "hardest": True},
            "b2048": {"batch": 2048, "hardest": True},
            "b128_mean": {"batch": 128, "hardest": False},
            "b512_mean": {"batch": 512, "hardest": False},
            "b2048_mean": {"batch": 2048, "hardest": False},
        },
        inputs=inputs,
        cost=cost,
    )
)
