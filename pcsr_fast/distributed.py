"""Many processes that train as one: who has which rows, collectives with gradient, errors that name rank and phase.

A batch is cut into as many parts as there are ranks. Each rank encodes its part; captions, scores and logits are
gathered, and every rank computes the loss of the whole batch from the same numbers. So dL/dx is known on the rank that
has x, a rank's gradients are its share of a sum, and adding them over ranks gives those of a single process.
"""

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

_control: dist.ProcessGroup | None = None  # for tensors on the host
_phase = "start"
_patience = timedelta(minutes=30)


class RankError(RuntimeError):
    """Another rank did not come, or is gone."""


def start(device: str, minutes: float) -> torch.device:
    """Joins the ranks that torchrun started, if it did, and returns this rank's device."""
    global _control, _patience
    wanted = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not dist.is_initialized():
        return wanted
    _patience = timedelta(minutes=minutes)
    on_gpu = wanted.type == "cuda"
    if on_gpu:
        wanted = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(wanted)
    if not dist.is_initialized():
        with _waiting("joining"):
            store, own, ranks = next(dist.rendezvous("env://", timeout=_patience))
            store.set_timeout(_patience)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                timeout=_patience,
                store=_fresh(store, own, ranks),
                rank=own,
                world_size=ranks,
            )
    _control = dist.new_group(backend="gloo", timeout=_patience)
    phase("start")
    return wanted


def _fresh(store: dist.Store, own: int, ranks: int) -> dist.Store:
    """A part of the store that these very processes share.

    torchrun keeps one store over restarts. Under fixed names a rank finds where those stood that were killed, and
    waits for them; restarts are counted by each machine for itself, so the count is no name either. So every process
    draws a name, and they share the part that all of them have named after the same processes.
    """
    store.set(f"pcsr_fast/{own}", uuid.uuid4().hex)
    seen, end = set(), time.monotonic() + _patience.total_seconds()
    while time.monotonic() < end:
        named = store.multi_get([f"pcsr_fast/{r}" for r in range(ranks)])
        name = hashlib.sha256(b"".join(named)).hexdigest()
        # a name with one that was killed is never named by all
        if store.add(name, int(name not in seen)) == ranks:
            return dist.PrefixStore(name, store)
        seen.add(name)
        time.sleep(0.1)
    raise RuntimeError("not all ranks came")


def finish() -> None:
    global _control
    if _control is not None:
        _control = None
        dist.destroy_process_group()


def size() -> int:
    return 1 if _control is None else dist.get_world_size()


def rank() -> int:
    return 0 if _control is None else dist.get_rank()


def phase(name: str) -> None:
    """Ranks meet here; from now on errors name this phase. Which ranks do not come is said by rank 0."""
    global _phase
    _phase = name
    if _control is not None:
        with _waiting("begin"):
            dist.monitored_barrier(_control, _patience, wait_all_ranks=True)


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        # while joining, only the environment knows
        own, ranks = (rank(), size()) if _control else (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
        raise RankError(
            f"rank {own} of {ranks}, in {_phase}: {what} failed after {time.monotonic() - began:.0f} s of at most "
            f"{_patience.total_seconds():.0f} s (wait_minutes); another rank hangs or has ended, see its own error: "
            f"{str(error).splitlines()[0]}"
        ) from error


# who has what


def sizes(rows: int) -> list[int]:
    """How many of so many rows each rank has, in order."""
    return [rows // size() + (r < rows % size()) for r in range(size())]


def part(rows: int, least: int = 1) -> slice:
    """The rows of this rank; all of them where ranks would not have `least` each."""
    if rows < least * size():
        return slice(0, rows)
    counts = sizes(rows)
    begin = sum(counts[: rank()])
    return slice(begin, begin + counts[rank()])


# on the host


def agreed(flag: bool) -> bool:
    """Whether it is so on any rank."""
    if _control is None:
        return flag
    found = torch.tensor([float(flag)])
    with _waiting("agreeing"):
        dist.all_reduce(found, dist.ReduceOp.MAX, _control)
    return bool(found)


def from_first(value: Any) -> Any:
    """Rank 0's value, on every rank: small things."""
    if _control is None:
        return value
    box = [value]
    with _waiting("broadcast"):
        dist.broadcast_object_list(box, 0, _control)
    return box[0]


def array_from_first(array: np.ndarray | None, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Rank 0's array; the other ranks need none."""
    if _control is None:
        return array
    found = torch.from_numpy(np.ascontiguousarray(array) if rank() == 0 else np.empty(shape, dtype))
    with _waiting("broadcast"):
        dist.broadcast(found, 0, _control)
    return found.numpy()


def merge(array: np.ndarray, by: str) -> None:
    """Sum or max over ranks, into rank 0's array; the other ranks' are used up."""
    if _control is not None:
        with _waiting("merge"):
            dist.reduce(torch.from_numpy(array), 0, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[by], _control)


def rows_to_first(x: Tensor, rows: int) -> Tensor:  # [part(rows), ...], on the host
    """The rows of all ranks, on rank 0; the other ranks keep theirs."""
    if _control is None or rows < size():
        return x
    counts = sizes(rows)
    most = max(counts)
    found = x.new_empty(most * size(), *x.shape[1:]) if rank() == 0 else None
    with _waiting("gather"):
        dist.gather(_filled(x, most), None if found is None else [*found.split(most)], 0, _control)
    return x if found is None else _joined(found, counts)


# on the device


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, counts: list[int], same: bool) -> Tensor:
        ctx.counts, ctx.same = counts, same
        return _gather(x, counts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        begin = sum(ctx.counts[: rank()])
        if ctx.same:
            return grad[begin : begin + ctx.counts[rank()]], None, None
        # as many rows for each rank, those of the smaller ones filled up
        most = max(ctx.counts)
        parts = [_filled(x, most) for x in grad.split(ctx.counts)]
        own = grad.new_empty(most, *grad.shape[1:])
        with _waiting("reduce_scatter"):
            dist.reduce_scatter_single(own, torch.cat(parts))
        return own[: ctx.counts[rank()]], None, None


def gather(x: Tensor, counts: list[int], same: bool = False) -> Tensor:  # [counts[rank], ...] -> [sum counts, ...]
    """The rows of all ranks. With `same`, all ranks do the same with them, and each has the gradient already.

    Otherwise a rank uses them in its own way, and the gradients of all ranks are added.
    """
    return _Gather.apply(x, counts, same)


def _gather(x: Tensor, counts: list[int]) -> Tensor:
    most = max(counts)
    found = x.new_empty(most * len(counts), *x.shape[1:])
    with _waiting("all_gather"):
        dist.all_gather_single(found, _filled(x.detach(), most))
    return _joined(found, counts)


def _joined(found: Tensor, counts: list[int]) -> Tensor:
    """Without what the smaller parts were filled up with."""
    most = max(counts)
    if most == min(counts):
        return found
    return torch.cat([found[r * most : r * most + n] for r, n in enumerate(counts)])


def _filled(x: Tensor, rows: int) -> Tensor:
    return x.contiguous() if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        found = x.detach().clone()
        with _waiting("all_reduce"):
            dist.all_reduce(found)
        return found

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        # every rank has the gradient of the sum
        return grad


def sum_gradients(network: nn.Module, shared: bool) -> None:
    """Adds the gradients of all ranks; of a batch that was not shared every rank has them whole, and rank 0's count."""
    if _control is None:
        return
    grads = [p.grad for p in network.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    if not shared and rank() > 0:
        flat.zero_()
    with _waiting("all_reduce of gradients"):
        dist.all_reduce(flat)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


class BatchNorm(nn.BatchNorm1d):
    """Batch norm whose batch are the rows of all ranks while `counts` says how many each has."""

    counts: list[int] | None = None

    def forward(self, x: Tensor) -> Tensor:  # [B, C] or [B, C, L]
        return super().forward(x) if self.counts is None or not self.training else self.over_ranks(x)

    @torch.compiler.disable
    def over_ranks(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        others = [d for d in range(x.dim()) if d != 1]
        own = wide.mean(others)
        squares = (wide - _along(own, x)).square().sum(others)
        means, squares = gather(torch.stack([own, squares])[None], [1] * size()).unbind(1)  # [ranks, C]
        each = x.shape[2] if x.dim() == 3 else 1
        n = torch.tensor([rows * each for rows in self.counts], device=x.device, dtype=wide.dtype)[:, None]
        count = sum(self.counts) * each
        mean = (n * means).sum(0) / count
        variance = (squares + n * (means - mean).square()).sum(0) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            unbiased = variance * (count / max(count - 1, 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        found = (wide - _along(mean, x)) * _along((variance + self.eps).rsqrt(), x)
        if self.affine:
            found = found * _along(self.weight, x) + _along(self.bias, x)
        return found.to(x.dtype)


def _along(channels: Tensor, x: Tensor) -> Tensor:
    return channels if x.dim() == 2 else channels[:, None]


class Shared:
    """A network for a batch that the ranks share: encodes this rank's rows, and gives logits and scores of all rows."""

    def __init__(self, network: nn.Module, batch: int):
        self.network, self.counts, self.rows = network, sizes(batch), part(batch)
        self.norms = [module for module in network.modules() if isinstance(module, BatchNorm)]

    @property
    def classifier(self) -> nn.Module:
        return self.network.classifier

    @contextmanager
    def together(self) -> Iterator[None]:
        """Batch norms take the rows of all ranks as their batch."""
        for norm in self.norms:
            norm.counts = self.counts
        try:
            yield
        finally:
            for norm in self.norms:
                norm.counts = None

    def encode_images(self, features: Tensor):  # of this rank's rows
        with self.together():
            return self.network.encode_images(features)

    def encode_captions(self, tokens: Tensor, offsets: Tensor):
        """Of the tokens of all rows, those of this rank's."""
        self.offsets = offsets
        own = offsets[self.rows.start : self.rows.stop + 1]
        return self.network.encode_captions(tokens[int(own[0]) : int(own[-1])], own - own[0])

    def image_logits(self, images) -> Tensor:  # [B, K]
        with self.together():
            return gather(self.network.image_logits(images), self.counts, same=True)

    def caption_logits(self, captions) -> Tensor:  # [B, K]
        with self.together():
            return gather(self.network.caption_logits(captions), self.counts, same=True)

    def similarity(self, images, captions) -> Tensor:  # [B, B]
        """This rank scores its images with the captions of all."""
        ends = self.offsets.tolist()
        words = [ends[stop] - ends[start] for start, stop in pairwise([0, *accumulate(self.counts)])]
        everyone = captions._replace(
            words=gather(captions.words, words),
            offsets=self.offsets,
            whole=gather(captions.whole, self.counts),
        )
        shape = (len(images.whole), sum(self.counts))
        scores = _or_nan(lambda: self.network.similarity(images, everyone), captions.whole, shape)
        return gather(scores, self.counts, same=True)

    def sum(self, loss: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Of the ranks' losses of their own rows."""
        total = _Sum.apply(_or_nan(loss, like, ()))
        if total.device.type == "cpu" and total.isnan():
            raise RuntimeError("NaN in the loss of a rank")
        return total


def _or_nan(compute: Callable[[], Tensor], like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """On the CPU ops raise where they see NaN; one rank alone must not leave the others waiting."""
    try:
        return compute()
    except RuntimeError as error:
        if "NaN" not in str(error):
            raise
        return like.new_full(shape, torch.nan)


def shared(network: nn.Module, batch: int, least: int = 1) -> nn.Module | Shared:
    """The network as it is for one rank, and where ranks would not have `least` rows each: then each has them all."""
    return network if size() == 1 or batch < least * size() else Shared(network, batch)
