"""Retrieval with a trained run: scores of a few queries against a split, in pieces; memory is a score per item."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pcsr_fast.data.loader import captions_of, features_of
from pcsr_fast.data.split import Split
from pcsr_fast.data.tokens import encode
from pcsr_fast.model import Network
from pcsr_fast.run import Run

PIECE = 256


class Hit(NamedTuple):
    """An image or a caption that was found."""

    index: int  # its place in the split
    score: float  # mean of both networks
    name: str  # what the source calls the image, or the caption's text


def find_images(run: Run, texts: list[str], split: str = "test", top: int = 10) -> list[list[Hit]]:
    """For each text the images of a split that fit best, best first."""
    data = run.split(split)
    tokens, offsets = (torch.from_numpy(x) for x in encode(texts, run.vocabulary))
    names = run.data.image_names(split)
    scores = image_scores(run.networks, data, tokens.long(), offsets)
    return [_best(scores[:, c], top, lambda i: names[i] if names else f"image {i}") for c in range(len(texts))]


def find_captions(run: Run, images: list[int], split: str = "test", top: int = 10) -> list[list[Hit]]:
    """For each image, by its place in the split, the captions that fit best, best first."""
    data = run.split(split)
    for image in images:
        if not 0 <= image < data.images:
            raise ValueError(f"{data.name} has no image {image}; it has {data.images}, counted from 0")
    scores = caption_scores(run.networks, data, np.asarray(images))
    return [_best(row, top, lambda n: caption_text(run, data, n)) for row in scores]


def caption_text(run: Run, split: Split, n: int) -> str:
    """The caption as written, or its words where only ids are known."""
    if split.texts is not None and (text := split.texts[n]) and not text.replace(",", "").isdigit():
        return text
    return " ".join(run.vocabulary.words[i] for i in split.caption(n)[1:-1])


@torch.no_grad()
def image_scores(networks: list[Network], split: Split, tokens: Tensor, offsets: Tensor) -> Tensor:  # [images, C]
    device = next(networks[0].parameters()).device
    captions = [network.encode_captions(tokens.to(device), offsets.to(device)) for network in networks]
    scores = torch.empty(split.images, len(offsets) - 1)
    for rows, features in pieces_of_images(split, np.arange(split.images)):
        found = [n.similarity(n.encode_images(features.to(device)), c) for n, c in zip(networks, captions, strict=True)]
        scores[rows] = torch.stack(found).mean(0).float().cpu()
    return scores


@torch.no_grad()
def caption_scores(networks: list[Network], split: Split, images: np.ndarray) -> Tensor:  # int [I] -> [I, N]
    device = next(networks[0].parameters()).device
    features = features_of(split, images).to(device)
    encoded = [network.encode_images(features) for network in networks]
    scores = torch.empty(len(images), len(split))
    for start in tqdm(range(0, len(split), PIECE), "captions", leave=False, disable=None, unit="batch"):
        pairs = np.arange(start, min(start + PIECE, len(split)))
        tokens, offsets = (x.to(device) for x in captions_of(split, pairs))
        found = [n.similarity(e, n.encode_captions(tokens, offsets)) for n, e in zip(networks, encoded, strict=True)]
        scores[:, start : start + len(pairs)] = torch.stack(found).mean(0).float().cpu()
    return scores


def pieces_of_images(split: Split, images: np.ndarray, what: str = "images") -> Iterator[tuple[slice, Tensor]]:
    """Features of images, some at a time, and where in `images` they stand."""
    for start in tqdm(range(0, len(images), PIECE), what, leave=False, disable=None, unit="batch"):
        rows = images[start : start + PIECE]
        yield slice(start, start + len(rows)), features_of(split, rows)


def _best(scores: Tensor, top: int, name) -> list[Hit]:  # [items]
    values, places = scores.topk(min(top, len(scores)))
    return [Hit(i, score, name(i)) for i, score in zip(places.tolist(), values.tolist(), strict=True)]
