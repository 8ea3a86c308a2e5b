"""What the captions of one image say of each other: those that share rare words were written for the same picture."""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from pcsr_fast.data.loader import captions_of
from pcsr_fast.data.overlap import word_weights
from pcsr_fast.data.split import Split

LEVELS = 16  # of likeness, beside none at all
AT_ONCE = 65_536  # pairs of captions that are compared at a time
ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Siblings:
    """Every two captions that are paired with the same image, and how alike their words are."""

    first: np.ndarray  # int32 [P]
    second: np.ndarray  # int32 [P]
    level: np.ndarray  # uint8 [P]: 0 without a common word, then 1 to LEVELS, each as frequent as the others


def siblings_of(split: Split, words: int) -> Siblings:
    """None where every image has one caption; 9 bytes for every two captions of an image."""
    first, second = _same_image(split.image_of)
    weights = word_weights(split, words)
    likeness = np.empty(len(first), np.float32)
    for begin in range(0, len(first), AT_ONCE):
        rows = slice(begin, begin + AT_ONCE)
        likeness[rows] = _products(*(word_vectors(split, weights, x[rows]) for x in (first, second)))
    shared = likeness > 0
    steps = np.quantile(likeness[shared], np.arange(1, LEVELS) / LEVELS) if shared.any() else []
    level = np.where(shared, 1 + np.searchsorted(steps, likeness), 0).astype(np.uint8)
    return Siblings(first, second, level)


def belief_with_siblings(siblings: Siblings, belief: np.ndarray) -> np.ndarray:  # float32 [N]
    """Belief that pairs are clean, given also how alike an image's captions are.

    Two clean captions of an image are alike, others are not, if noise has moved captions one by one: how much so, the
    pairs of captions tell that are believed to be both clean, beside all others. Where noise has moved images with all
    their captions, both are equally alike, and siblings have no say.
    """
    if not len(siblings.first):
        return belief
    now = belief.astype(np.float64).clip(1e-9, 1 - 1e-9)
    prior = np.log(now) - np.log1p(-now)
    for _ in range(ROUNDS):
        told = np.zeros(len(belief))
        both = now[siblings.first] * now[siblings.second]
        together, apart = (np.bincount(siblings.level, x, LEVELS + 1) + 1 for x in (both, 1 - both))
        odds = ((together / together.sum()) / (apart / apart.sum()))[siblings.level]
        for own, other in ((siblings.first, siblings.second), (siblings.second, siblings.first)):
            told += np.bincount(own, np.log1p(now[other] * (odds - 1)), len(belief))
        now = 1 / (1 + np.exp(-prior - told))
    return now.astype(np.float32)


def word_vectors(split: Split, weights: np.ndarray, captions: np.ndarray) -> csr_array:  # [words], int [B]
    """Unit vectors of the words in captions, [B, words]; rare words count most."""
    found = word_sets(split, captions, len(weights))
    found.data = weights[found.indices]
    length = np.sqrt(found.multiply(found).sum(1)).clip(1e-9)
    found.data /= np.repeat(length, np.diff(found.indptr)).astype(np.float32)
    return found


def word_sets(split: Split, captions: np.ndarray, words: int) -> csr_array:  # int [B]
    """1 for each word that a caption has, however often, [B, words]."""
    tokens, offsets = (x.numpy() for x in captions_of(split, captions))
    found = csr_array((np.ones(len(tokens), np.float32), tokens, offsets), shape=(len(captions), words))
    found.sum_duplicates()
    found.data[:] = 1
    return found


def _products(left, right) -> np.ndarray:  # sparse [B, words] -> [B]
    return left.multiply(right).sum(1)


def _same_image(image_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # int32 [P], int32 [P]
    order = np.argsort(image_of, kind="stable").astype(np.int32)
    images = image_of[order]
    found = [(order[:0], order[:0])]
    for apart in range(1, len(order)):
        same = np.flatnonzero(images[apart:] == images[:-apart])
        if not len(same):
            break
        found.append((order[same], order[same + apart]))
    first, second = zip(*found, strict=True)
    return np.concatenate(first), np.concatenate(second)
