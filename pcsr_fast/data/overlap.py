"""How much a caption says of what an image's own captions say: the measure of refinement where noise is known."""

import numpy as np

from pcsr_fast.data.loader import captions_of
from pcsr_fast.data.split import Split


def word_weights(split: Split, words: int) -> np.ndarray:  # float32 [words]
    """log(captions / occurrences), 0 for words as frequent as captions: "dog" counts, "a" and <start> do not."""
    counts = np.bincount(split.tokens, minlength=words)
    return np.log(len(split) / counts.clip(1, len(split))).astype(np.float32)


def overlap(split: Split, weights: np.ndarray, images: np.ndarray, pairs: np.ndarray) -> np.ndarray:  # int [B] -> [B]
    """Share of the words of caption `pairs[i]` that are among those written for image `images[i]`, by weight."""
    mine, offsets = (x.numpy() for x in captions_of(split, pairs))
    row = np.repeat(np.arange(len(pairs)), np.diff(offsets))
    # captions are image-major: those written for an image follow each other
    first, last = (np.searchsorted(split.true_image, images, side) for side in ("left", "right"))
    begin, lengths = split.offsets[first], split.offsets[last] - split.offsets[first]
    place = np.repeat(begin - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
    theirs = np.repeat(np.arange(len(images)), lengths) * len(weights) + split.tokens[place]
    found = np.isin(row * len(weights) + mine, theirs)
    total = np.bincount(row, weights[mine], len(pairs))
    return np.bincount(row, weights[mine] * found, len(pairs)) / np.maximum(total, 1e-9)
