"""Which image a refinable caption gets: one whose clean captions share its words and that both networks score high."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.special import logsumexp
from torch import Tensor

from pcsr_fast import distributed
from pcsr_fast.config import Config
from pcsr_fast.data.loader import captions_of, features_of
from pcsr_fast.data.overlap import word_weights
from pcsr_fast.data.split import Split
from pcsr_fast.evaluate import PIECE, pair_scores
from pcsr_fast.model import Network
from pcsr_fast.rematch import unit_predictions
from pcsr_fast.siblings import word_vectors

CANDIDATES = 32  # images that a caption is scored with
# evidence in log odds: of a score's logit, and of equal pseudo-labels; that of equal words is found
SCORE, LABELS = 1.5, 2.0
WORDS = np.array([0, 2, 5, 10, 15, 20, 30, 40])
CHUNK, ROWS = 2048, 128  # captions encoded at a time, and compared with all images at a time
ASKED = 512  # clean captions that tell what words are worth


def has_siblings(split: Split) -> bool:
    """Whether images have captions enough to tell which of them another caption resembles."""
    return len(split) >= 2 * split.images


def rehome(
    networks: list[Network],
    split: Split,
    belief: np.ndarray,  # [N], that the pair is clean
    clean: np.ndarray,  # bool [N]
    config: Config,
    progress: Callable[[int], None] = lambda captions: None,
) -> tuple[np.ndarray, np.ndarray]:  # int32 [N], float32 [N]
    """The image that each caption of a noisy pair fits best, and how certain that is among the candidates.

    Clean pairs keep theirs, with a certainty of 1. Ranks take turns; what they found comes together on rank 0.
    """
    images, certainty = np.zeros(len(split), np.int32), np.zeros(len(split), np.float32)
    weights = word_weights(split, networks[0].words.num_embeddings)
    known, total = image_words(split, weights, belief, np.flatnonzero(clean))
    worth = words_worth(known, total, split, weights, belief, np.flatnonzero(clean))
    for network in networks:
        network.eval()
    predictions = [_predicted_images(network, split, config) for network in networks]
    lost = np.flatnonzero(~clean)[distributed.rank() :: distributed.size()]
    for begin in range(0, len(lost), CHUNK):
        captions = lost[begin : begin + CHUNK]
        vectors = worth * word_vectors(split, weights, captions)
        labels = [_predicted_captions(network, split, captions, config) for network in networks]
        places, words = [], []
        for rows in _slices(len(captions), ROWS):
            likeness = (vectors[rows] @ known.T).toarray()
            same = sum((q[rows] @ p.T).cpu().numpy() for p, q in zip(predictions, labels, strict=True)) / len(networks)
            best = _largest(likeness + LABELS * same)
            places.append(best)
            words.append(np.take_along_axis(likeness, best, 1))
        candidates, words = np.concatenate(places), np.concatenate(words)
        scores = pair_scores(networks, split, candidates.ravel(), np.repeat(captions, candidates.shape[1]))
        evidence = SCORE * scores.logit(1e-6).view(candidates.shape).numpy() + words
        best = evidence.argmax(1)[:, None]
        images[captions] = np.take_along_axis(candidates, best, 1)[:, 0]
        certainty[captions] = 1 / np.exp(evidence - np.take_along_axis(evidence, best, 1)).sum(1)
        progress(len(captions))
    for array in (images, certainty):
        distributed.merge(array, "sum")
    images[clean], certainty[clean] = split.image_of[clean], 1
    return images, certainty


def image_words(split: Split, weights: np.ndarray, belief: np.ndarray, pairs: np.ndarray):
    """Mean word vector of each image's clean captions by belief, sparse [images, words], and their belief in all."""
    of, at = split.image_of[pairs], np.arange(len(pairs))
    total = np.bincount(of, belief[pairs], split.images)
    share = csr_array((belief[pairs] / total[of], (of, at)), shape=(split.images, len(pairs)), dtype=np.float32)
    return share @ word_vectors(split, weights, pairs), total


def words_worth(known, total, split: Split, weights: np.ndarray, belief: np.ndarray, pairs: np.ndarray) -> float:
    """Log odds for an image that all words in common are worth.

    Clean captions tell: how well words find the image of each among all, by what its other captions say. That is the
    worth of words alone; scores know part of it, and words that tell little should not speak against them, so it
    counts as much as the share of the uncertainty that words remove.
    """
    others = total[split.image_of[pairs]] - belief[pairs]
    pairs = pairs[others > 0.1]
    pairs = pairs[:: max(1, len(pairs) // ASKED)]
    if not len(pairs) or split.images < 2:
        return 0.0
    vectors, told = word_vectors(split, weights, pairs), np.zeros(len(WORDS))
    for rows in _slices(len(pairs), ROWS):
        likeness, own = (vectors[rows] @ known.T).toarray(), split.image_of[pairs[rows]]
        at = np.arange(len(own))
        # without the caption itself, whose product with itself is 1
        mine, all_of_it = belief[pairs[rows]], total[own]
        likeness[at, own] = (likeness[at, own] * all_of_it - mine) / (all_of_it - mine)
        told += [(w * likeness[at, own] - logsumexp(w * likeness, axis=1)).sum() for w in WORDS]
    told /= len(pairs)
    best = told.argmax()
    return float(WORDS[best] * (told[best] - told[0]) / math.log(split.images))


@torch.no_grad()
def _predicted_images(network: Network, split: Split, config: Config) -> Tensor:  # [images, K], unit vectors
    device = next(network.parameters()).device
    found = []
    for rows in _slices(split.images, PIECE):
        encoded = network.encode_images(features_of(split, np.arange(rows.start, rows.stop)).to(device))
        found.append(unit_predictions(network.image_logits(encoded), config))
    return torch.cat(found)


@torch.no_grad()
def _predicted_captions(network: Network, split: Split, captions: np.ndarray, config: Config) -> Tensor:  # [B, K]
    device = next(network.parameters()).device
    found = []
    for rows in _slices(len(captions), PIECE):
        encoded = network.encode_captions(*(x.to(device) for x in captions_of(split, captions[rows])))
        found.append(unit_predictions(network.caption_logits(encoded), config))
    return torch.cat(found)


def _largest(evidence: np.ndarray) -> np.ndarray:  # [B, images] -> int [B, CANDIDATES], in the order of images
    count = min(CANDIDATES, evidence.shape[1])
    return np.sort(np.argpartition(-evidence, count - 1, axis=1)[:, :count], axis=1)


def _slices(length: int, step: int) -> Iterator[slice]:
    for begin in range(0, length, step):
        yield slice(begin, min(begin + step, length))
