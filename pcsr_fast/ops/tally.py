"""tally: counts the pseudo-label of each image and keeps its two largest counts, so that PCS costs nothing."""

from typing import NamedTuple

import torch
from torch import Tensor

from pcsr_fast.ops.op import Cost, Op, check, in_float32, register

COUNT_TYPES = (torch.uint8, torch.int16, torch.int32)


class TallyState(NamedTuple):
    """Pseudo-label counts of every image. With uint8 counts an image takes K + 6 bytes."""

    counts: Tensor  # [N_img, K]
    n_max: Tensor  # [N_img], the largest count
    argmax: Tensor  # [N_img], the lowest class that has it
    n_second: Tensor  # [N_img], the second order statistic: equal to n_max on a tie

    @classmethod
    def zeros(
        cls, images: int, classes: int, dtype: torch.dtype = torch.uint8, device: torch.device | str | None = None
    ) -> "TallyState":
        if dtype not in COUNT_TYPES:
            raise ValueError(f"counts must be uint8, int16 or int32, got {dtype}")
        return cls(
            torch.zeros(images, classes, dtype=dtype, device=device),
            torch.zeros(images, dtype=dtype, device=device),
            torch.zeros(images, dtype=torch.int32, device=device),
            torch.zeros(images, dtype=dtype, device=device),
        )

    def pcs(self) -> Tensor:
        """Pseudo-label consistency score of every image, n_max - n_second: [N_img]."""
        return self.n_max - self.n_second


def tally(votes: Tensor, ids: Tensor, state: TallyState) -> Tensor:
    """Counts one pseudo-label for each row's image, in place, and returns the labels [B].

    votes are logits [B, K], whose argmax is the label (ties: the lowest class), or int64 labels [B]; ids [B] are the
    int64 image indices, and one that stands twice counts twice. An id or label out of range, a NaN among the logits
    or a count that would overflow raises, and nothing is counted. On CUDA the call waits for the stream to tell.

    >>> state = TallyState.zeros(images=2, classes=3)
    >>> tally(torch.tensor([2, 2, 0]), torch.tensor([0, 0, 1]), state)
    tensor([2, 2, 0])
    >>> state.pcs()
    tensor([2, 1], dtype=torch.uint8)
    """
    return OP(in_float32(votes.detach()), ids, *state)


def reference(votes: Tensor, ids: Tensor, counts: Tensor, n_max: Tensor, argmax: Tensor, n_second: Tensor) -> Tensor:
    _check_shapes(votes, ids, counts, n_max, argmax, n_second)
    images, classes = counts.shape
    bad = (ids < 0) | (ids >= images)
    check(not bad.any(), f"tally: ids{_first(bad, ids)} is out of range for {images} images")
    bad = (argmax[ids] < 0) | (argmax[ids] >= classes)
    check(not bad.any(), "tally: argmax of an image is not a class; start from a state of zeros")
    if votes.dim() == 1:
        bad = (votes < 0) | (votes >= classes)
        check(not bad.any(), f"tally: labels{_first(bad, votes)} is out of range for {classes} classes")
        labels = votes.clone()
    else:
        bad = votes.isnan().any(1)
        check(not bad.any(), f"tally: logits{_first(bad)} contain NaN; nothing was counted")
        labels = votes.argmax(1)

    cells, times = torch.unique(ids * classes + labels, return_counts=True)
    new = counts.view(-1)[cells].long() + times
    bad = new > torch.iinfo(counts.dtype).max
    check(not bad.any(), f"tally: a count would overflow {counts.dtype}; nothing was counted; use a wider type")
    counts.view(-1)[cells] = new.to(counts.dtype)

    touched = ids.unique()
    top = counts[touched].sort(1, descending=True).values
    n_max[touched] = top[:, 0]
    n_second[touched] = top[:, 1] if classes > 1 else 0
    argmax[touched] = counts[touched].argmax(1).int()
    return labels


def _first(bad: Tensor, values: Tensor | None = None) -> str:
    """[row] = value of the first bad row, for a message."""
    if not bad.any():
        return ""
    row = int(bad.nonzero()[0])
    return f"[{row}]" if values is None else f"[{row}] = {int(values[row])}"


def _check_shapes(votes, ids, counts, n_max, argmax, n_second) -> None:
    check(counts.dim() == 2 and counts.shape[1] >= 1, f"tally: counts must be [images, classes], got {[*counts.shape]}")
    check(counts.dtype in COUNT_TYPES, f"tally: counts must be uint8, int16 or int32, got {counts.dtype}")
    batch = len(votes) if votes.dim() else 0
    if votes.dtype == torch.int64:
        expected = [("labels", votes, [batch], votes.dtype)]
    else:
        check(
            votes.dtype in (torch.float32, torch.float64),
            f"tally: votes must be float32 or float64 logits, or int64 labels, got {votes.dtype}",
        )
        expected = [("logits", votes, [batch, counts.shape[1]], votes.dtype)]
    expected += [
        ("ids", ids, [batch], torch.int64),
        ("n_max", n_max, [len(counts)], counts.dtype),
        ("argmax", argmax, [len(counts)], torch.int32),
        ("n_second", n_second, [len(counts)], counts.dtype),
    ]
    for name, tensor, shape, dtype in expected:
        check(tensor.dtype == dtype, f"tally: {name} must be {dtype}, got {tensor.dtype}")
        check([*tensor.shape] == shape, f"tally: {name} must have shape {shape}, got {[*tensor.shape]}")
        check(tensor.device == votes.device, "tally: every tensor must be on the same device as the first argument")
    for tensor in (counts, n_max, argmax, n_second):
        check(
            tensor.is_contiguous(),
            "tally: counts, n_max, argmax and n_second must be contiguous: they are updated in place",
        )


def fake(votes: Tensor, ids: Tensor, counts: Tensor, n_max: Tensor, argmax: Tensor, n_second: Tensor) -> Tensor:
    _check_shapes(votes, ids, counts, n_max, argmax, n_second)
    return torch.empty_like(ids)


def inputs(dtype: torch.dtype, generator: torch.Generator, batch: int, classes: int, images: int) -> tuple:
    logits = torch.randn(batch, classes, dtype=dtype, generator=generator)
    ids = torch.randint(images, (batch,), generator=generator)
    return logits, ids, *TallyState.zeros(images, classes)


def cost(votes, ids, counts, n_max, argmax, n_second) -> Cost:
    state = sum(2 * t.element_size() for t in (counts, n_max, argmax, n_second))
    return Cost(votes.nbytes + 2 * ids.nbytes + len(ids) * state, votes.numel())


OP = register(
    Op(
        name="tally",
        schema="(Tensor votes, Tensor ids, Tensor(a!) counts, Tensor(b!) n_max, Tensor(c!) argmax, "
        "Tensor(d!) n_second) -> Tensor",
        reference=reference,
        fake=fake,
        shapes={
            "tiny": {"batch": 3, "classes": 2, "images": 2},
            "odd": {"batch": 67, "classes": 45, "images": 19},
            "f30k": {"batch": 128, "classes": 256, "images": 29_000},
            "cc": {"batch": 4096, "classes": 256, "images": 3_300_000},
        },
        inputs=inputs,
        cost=cost,
    )
)
