"""Retrieval: scores of all images and captions in tiles, and how well they rank. Ties count against the model."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pcsr_fast import distributed
from pcsr_fast.data import loader
from pcsr_fast.data.split import Split
from pcsr_fast.model import Captions, Images, Network

# cells of a tile: a few thousand pairs keep every core busy, and progress visible
TILE_IMAGES, TILE_CAPTIONS = 64, 512
PIECE = 256  # images encoded at a time


@torch.no_grad()
def encode(
    network: Network, split: Split, batch: int = 256, images_of: slice | None = None, captions_of: slice | None = None
) -> tuple[Images, Captions]:
    """All images and captions of a split, or a range of each, in eval mode."""
    network.eval()
    device = next(network.parameters()).device
    images, words, whole = [], [], []
    chosen, written = images_of or slice(0, split.images), captions_of or slice(0, len(split))
    quiet = None if distributed.rank() == 0 else True
    bar = partial(tqdm, leave=False, disable=quiet, unit="batch")
    for start in bar(range(chosen.start, chosen.stop, batch), "encode images"):
        rows = np.arange(start, min(start + batch, chosen.stop))
        features = loader.gather(split.features, rows, torch.empty(len(rows), split.regions, split.width))
        images.append(network.encode_images(features.to(device)))
    for start in bar(range(written.start, written.stop, batch), "encode captions"):
        stop = min(start + batch, written.stop)
        # a copy: what a store maps cannot be written to, which torch warns of
        offsets = torch.from_numpy(np.array(split.offsets[start : stop + 1]))
        tokens = torch.from_numpy(split.tokens[int(offsets[0]) : int(offsets[-1])].astype(np.int64))
        found = network.encode_captions(tokens.to(device), (offsets - offsets[0]).to(device))
        words.append(found.words)
        whole.append(found.whole)
    ends = np.asarray(split.offsets[written.start : written.stop + 1])
    offsets = torch.from_numpy(ends - ends[0]).to(device)
    return Images(*(torch.cat(x) for x in zip(*images, strict=True))), Captions(
        torch.cat(words), offsets, torch.cat(whole)
    )


@torch.no_grad()
def pair_scores(networks: list[Network], split: Split, images: np.ndarray, captions: np.ndarray) -> Tensor:  # [P], [P]
    """Mean scores of pairs of an image and a caption, one with one; each is encoded once, images a piece at a time."""
    device = next(networks[0].parameters()).device
    some_images, row = np.unique(images, return_inverse=True)
    some_captions, column = np.unique(captions, return_inverse=True)
    tokens, offsets = (x.to(device) for x in loader.captions_of(split, some_captions))
    encoded = [network.encode_captions(tokens, offsets) for network in networks]
    order = np.argsort(row, kind="stable")
    bounds = np.searchsorted(row[order], np.arange(0, len(some_images) + PIECE, PIECE))
    scores = torch.empty(len(order))
    for piece, (begin, end) in enumerate(pairwise(bounds)):
        features = loader.features_of(split, some_images[piece * PIECE : (piece + 1) * PIECE]).to(device)
        at = order[begin:end]
        cells = torch.from_numpy(np.stack([row[at] - piece * PIECE, column[at]], 1)).to(device)
        found = [n.similarity(n.encode_images(features), c, cells) for n, c in zip(networks, encoded, strict=True)]
        scores[at] = torch.stack(found).mean(0).float().cpu()
    return scores


@torch.no_grad()
def score_matrix(
    network: Network, images: Images, captions: Captions, progress: Callable[[int], None] = lambda cells: None
) -> Tensor:  # [images, captions], on the CPU
    """Scores of all pairs, a tile at a time; progress is told the cells of each tile."""
    scores = torch.empty(len(images.whole), len(captions.whole))
    for left in range(0, len(captions.whole), TILE_CAPTIONS):
        offsets = captions.offsets[left : left + TILE_CAPTIONS + 1]
        begin, end = int(offsets[0]), int(offsets[-1])
        some = Captions(captions.words[begin:end], offsets - begin, captions.whole[left : left + TILE_CAPTIONS])
        for top in range(0, len(images.whole), TILE_IMAGES):
            tile = network.similarity(Images(*(x[top : top + TILE_IMAGES] for x in images)), some)
            scores[top : top + TILE_IMAGES, left : left + TILE_CAPTIONS] = tile.float().cpu()
            progress(tile.numel())
    return scores


def ranks(scores: Tensor, image_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # [I, C], [C] -> [I], [C]
    """Ranks from 0: of each image's best caption among all captions, and of each caption's image among all images.

    A rank is the number of wrong candidates that score as high or higher.
    """
    image_of = torch.from_numpy(np.array(image_of))
    own = scores[image_of, torch.arange(scores.shape[1])]
    # the caption's own image is among the equal ones, once
    of_captions = (scores >= own).sum(0) - 1
    best = torch.full((len(scores),), -torch.inf).scatter_reduce(0, image_of, own, "amax")
    # an image's captions that equal its best are right answers, not rivals
    right = torch.zeros(len(scores), dtype=torch.long).index_add(0, image_of, (own >= best[image_of]).long())
    of_images = (scores >= best[:, None]).sum(1) - right
    known = torch.zeros(len(scores), dtype=torch.bool)
    known[image_of] = True
    return of_images[known].numpy(), of_captions.numpy()


def recalls(scores: Tensor, image_of: np.ndarray) -> dict[str, float]:
    """R@1, 5, 10 in percent, median and mean rank (from 1) in both directions, and rsum."""
    if scores.isnan().any():
        raise ValueError("scores contain NaN: the network is broken; evaluate an earlier checkpoint")
    found = {}
    for name, rank in zip(("i2t", "t2i"), ranks(scores, image_of), strict=True):
        found |= {f"{name}_r{k}": 100.0 * float((rank < k).mean()) for k in (1, 5, 10)}
        found |= {f"{name}_median": float(np.median(rank)) + 1, f"{name}_mean": float(rank.mean()) + 1}
    found["rsum"] = sum(found[f"{name}_r{k}"] for name in ("i2t", "t2i") for k in (1, 5, 10))
    return found


def fold_recalls(scores: Tensor, image_of: np.ndarray, folds: int = 5) -> dict[str, float]:
    """Mean over folds of consecutive images with their captions: COCO's 1K figures from its 5K matrix."""
    image_of = np.asarray(image_of)
    if len(scores) % folds:
        raise ValueError(f"{len(scores)} images do not make {folds} equal folds")
    size = len(scores) // folds
    parts = []
    for start in range(0, len(scores), size):
        mine = np.flatnonzero((image_of >= start) & (image_of < start + size))
        parts.append(recalls(scores[start : start + size][:, torch.from_numpy(mine)], image_of[mine] - start))
    return {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}


def evaluate(
    networks: list[Network], split: Split, batch: int = 256, folds: int = 0, progress: Callable = lambda cells: None
) -> dict[str, dict[str, float]]:
    """Recalls of each network (A, B) and of the mean of their scores ("mean"); with folds also "fold mean".

    Each rank scores a part of the images; rank 0 ranks, and all get the result.
    """
    names = [*"AB"][: len(networks)]
    matrices = {}
    for name, network in zip(names, networks, strict=True):
        images, captions = encode(network, split, batch, distributed.part(split.images), distributed.part(len(split)))
        rows = score_matrix(network, images, _of_all_ranks(captions, split), progress)
        matrices[name] = distributed.rows_to_first(rows, split.images)
    return distributed.from_first(_figures(matrices, split, folds) if distributed.rank() == 0 else None)


def _of_all_ranks(captions: Captions, split: Split) -> Captions:
    if distributed.size() == 1 or len(split) < distributed.size():
        return captions
    counts = distributed.sizes(len(split))
    ends = np.asarray(split.offsets)
    words = np.diff(ends[np.cumsum([0, *counts])]).tolist()
    return Captions(
        distributed.gather(captions.words, words),
        torch.from_numpy(ends).to(captions.offsets.device),
        distributed.gather(captions.whole, counts),
    )


def _figures(matrices: dict[str, Tensor], split: Split, folds: int) -> dict[str, dict[str, float]]:
    matrices["mean"] = sum(matrices.values()) / len(matrices)
    found = {name: recalls(matrix, split.image_of) for name, matrix in matrices.items()}
    if folds:
        found |= {f"{name} {folds} folds": fold_recalls(m, split.image_of, folds) for name, m in matrices.items()}
    return found
