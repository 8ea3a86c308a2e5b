"""Batches of a split: gathered from the map into tensors, in an order that follows from seed and epoch alone."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from pcsr_fast.data.split import Split

# elements that are converted at a time
CONVERTED = 65_536


@dataclass(frozen=True, eq=False)
class Batch:
    """Pairs of one step: pair i is row i of the features and tokens offsets[i] to offsets[i + 1]."""

    features: Tensor  # [B, R, d_img]; where ranks share a batch, of this rank's rows alone
    tokens: Tensor  # int64 [sum n_c], captions back to back
    offsets: Tensor  # int64 [B + 1]
    pairs: Tensor  # int64 [B], where in the split each pair stands
    images: Tensor  # int64 [B], which image each pair has
    position: int  # batches up to and with this one: the `start` with which to go on after it

    def __len__(self) -> int:
        return len(self.pairs)


def batches(
    split: Split,
    batch_size: int,
    seed: int,
    epoch: int,
    indices: np.ndarray | None = None,  # int [n]
    start: int = 0,
    *,
    shuffle: bool = True,
    endless: bool = False,
    drop_last: bool = False,
    keep_float16: bool = False,
    device: torch.device | str = "cpu",
    workers: int = 1,
    rows: Callable[[int], slice] = slice,
    every: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """The batches of an epoch, or of the pairs in `indices` alone; `start` of them are passed over without a read.

    The order is a function of (seed, epoch), whatever the number of workers; `endless` goes over the pairs again and
    again, each pass in an order of (seed, epoch, pass). To go on where a run stopped, give the last batch's `position`
    as `start`. Workers are threads that prepare as many batches ahead; 0 prepares each when it is asked for. float16
    features become float32 unless `keep_float16`.

    Ranks that share each batch give `rows`, which of so many rows to read features of; ranks that take turns give
    `every`, (rank, ranks).
    """
    indices = np.arange(len(split)) if indices is None else _checked_indices(split, indices)
    per_pass = count_batches(len(indices), batch_size, drop_last)
    if endless and not per_pass:
        raise ValueError(f"{split.name}: {len(indices)} pairs make no batch of {batch_size} to repeat")
    if start < 0 or (start > per_pass and not endless):
        raise ValueError(f"{split.name}: start is {start}, but the epoch has {per_pass} batches")
    device = torch.device(device)
    dtype = torch.float16 if keep_float16 and split.features.dtype == np.float16 else torch.float32
    full = min(batch_size, len(indices))
    # a last batch that ranks do not share may have more rows than a part of a full one
    most = max(len(range(n)[rows(n)]) for n in range(full + 1))
    buffers = _Buffers((most, *split.features.shape[1:]), dtype, pinned=device.type == "cuda")

    def order(turn: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch, turn]).permutation(indices) if shuffle else indices

    def chosen() -> Iterator[tuple[int, np.ndarray]]:
        for turn in count(start // per_pass) if endless else range(1 if per_pass else 0):
            ordered = order(turn)
            for i in range(max(start - turn * per_pass, 0), per_pass):
                if i % every[1] == every[0]:
                    yield turn * per_pass + i + 1, ordered[i * batch_size : (i + 1) * batch_size]

    def job(position: int, pairs: np.ndarray) -> tuple:
        own = rows(len(pairs))
        return split, pairs, own, buffers.get(len(pairs[own])), position

    def prepared() -> Iterator[Batch]:
        for position, pairs in chosen():
            yield _assemble(*job(position, pairs))

    def prefetched() -> Iterator[Batch]:
        with ThreadPoolExecutor(workers, "pcsr_fast loader") as pool:
            waiting = deque()
            try:
                for position, pairs in chosen():
                    waiting.append(pool.submit(_assemble, *job(position, pairs)))
                    if len(waiting) > workers:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    ready = prefetched() if workers else prepared()
    return ready if device.type == "cpu" else (_to(batch, device) for batch in ready)


def count_batches(pairs: int, batch_size: int, drop_last: bool = False) -> int:
    """How many batches a pass over so many pairs has."""
    if batch_size < 1:
        raise ValueError(f"batch size must be at least 1, got {batch_size}")
    return pairs // batch_size if drop_last else -(-pairs // batch_size)


def captions_of(split: Split, pairs: np.ndarray) -> tuple[Tensor, Tensor]:  # int [B]
    """Tokens of these captions back to back, int64, and their offsets."""
    begin = split.offsets[pairs]
    lengths = split.offsets[pairs + 1] - begin
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    place = np.repeat(begin - offsets[:-1], lengths) + np.arange(offsets[-1])
    return torch.from_numpy(split.tokens[place].astype(np.int64)), torch.from_numpy(offsets)


def gather(features: np.ndarray, rows: np.ndarray, out: Tensor) -> Tensor:  # [images, R, d], int [B], [B, R, d]
    """Copies rows of a map into a tensor, and converts float16 to float32 on the way; most of it without the GIL."""
    target = out.numpy()
    # without a mode, take would copy into a buffer first
    take = getattr(features, "take_into", None) or (lambda r, to: np.take(features, r, axis=0, out=to, mode="clip"))
    if target.dtype == features.dtype:
        take(rows, target)
        return out
    # a few rows at a time, in cache: torch converts several times faster than numpy, but not from a read-only map
    step = max(1, CONVERTED // int(np.prod(features.shape[1:])))
    scratch = np.empty((step, *features.shape[1:]), features.dtype)
    source = torch.from_numpy(scratch)
    for i in range(0, len(rows), step):
        some = rows[i : i + step]
        take(some, scratch[: len(some)])
        out[i : i + step].copy_(source[: len(some)])
    return out


def features_of(split: Split, images: np.ndarray) -> Tensor:  # int [I] -> [I, R, d_img]
    """Features of images; one that is not finite counts as empty, as in the division."""
    found = gather(split.features, images, torch.empty(len(images), split.regions, split.width))
    return found.masked_fill_(~found.isfinite().flatten(1).all(1)[:, None, None], 0)


def _assemble(split: Split, pairs: np.ndarray, own: slice, features: Tensor, position: int) -> Batch:
    images = np.asarray(split.image_of[pairs])
    gather(split.features, images[own], features)
    captions = captions_of(split, pairs)
    return Batch(features, *captions, *map(torch.from_numpy, (pairs.astype(np.int64), images)), position)


class _Buffers:
    """Memory of batches, used again as soon as nobody holds the batch or anything computed on its memory.

    Fresh memory costs more than filling it: the kernel clears it page by page.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool):
        self.shape, self.dtype, self.pinned = shape, dtype, pinned
        self.arrays: list[np.ndarray] = []

    def get(self, rows: int) -> Tensor:
        if self.pinned:
            # torch keeps pinned memory for reuse itself
            return torch.empty(rows, *self.shape[1:], dtype=self.dtype, pin_memory=True)
        # a tensor's storage, and so every view and every graph that saved it, holds a reference to its array
        free = next((i for i in range(len(self.arrays)) if sys.getrefcount(self.arrays[i]) <= 2), None)
        if free is None:
            free = len(self.arrays)
            # numpy asks for huge pages, torch does not
            self.arrays.append(np.empty(self.shape, torch.empty(0, dtype=self.dtype).numpy().dtype))
        return torch.from_numpy(self.arrays[free])[:rows]


def _to(batch: Batch, device: torch.device) -> Batch:
    tensors = (batch.features, batch.tokens, batch.offsets, batch.pairs, batch.images)
    return Batch(*(x.to(device, non_blocking=True) for x in tensors), batch.position)


def _checked_indices(split: Split, indices: np.ndarray) -> np.ndarray:
    indices = np.asarray(indices)
    if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
        raise ValueError(f"{split.name}: indices must be a list of pairs, got {indices.dtype} {list(indices.shape)}")
    if len(indices) and (indices.min() < 0 or indices.max() >= len(split)):
        bad = indices[(indices < 0) | (indices >= len(split))][0]
        raise ValueError(f"{split.name}: there is no pair {bad}; it has {len(split)} pairs")
    return indices
