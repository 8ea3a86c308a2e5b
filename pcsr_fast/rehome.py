"""Which image a refinable caption gets: one whose clean captions speak its language and that scores high with it."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array, diags_array
from torch import Tensor

from pcsr_fast import distributed
from pcsr_fast.config import Config
from pcsr_fast.data.loader import captions_of, features_of
from pcsr_fast.data.split import Split
from pcsr_fast.evaluate import PIECE, pair_scores
from pcsr_fast.model import Network
from pcsr_fast.rematch import unit_predictions
from pcsr_fast.siblings import word_sets

CANDIDATES = 32  # images that a caption is scored with
# evidence in log odds: of the logit of a score, of equal pseudo-labels, and of words, which are not independent
SCORE, LABELS, WORDS = 1.5, 2.0, 0.5
KNOWN, SAME = 0.8, 0.3  # share of a caption's words that an image's others explain, and of those the same words
IMAGES, CAPTIONS = 1024, 4096  # compared at a time
CHUNK = 2048  # captions encoded at a time
ASKED, ASKED_AMONG = 512, 4096  # clean captions that tell what words are worth, and images among which they look


class Language(NamedTuple):
    """What words clean captions use, of each image and of those that share an image."""

    counts: csr_array  # [images, words]
    translated: csr_array  # [words, words], of a caption that has the one, share of the other in its siblings
    frequency: np.ndarray  # [words]


def has_siblings(split: Split) -> bool:
    """Whether images have captions enough to tell which of them another caption resembles."""
    return len(split) >= 2 * split.images


def rehome(
    networks: list[Network],
    split: Split,
    clean: np.ndarray,  # bool [N]
    config: Config,
    progress: Callable[[int], None] = lambda captions: None,
) -> tuple[np.ndarray, np.ndarray]:  # int32 [N], float32 [N]
    """The image that each caption of a noisy pair fits best, and how certain that is among the candidates.

    Clean pairs keep theirs, with a certainty of 1. Ranks take turns; what they found comes together on rank 0.
    """
    images, certainty = np.zeros(len(split), np.int32), np.zeros(len(split), np.float32)
    for network in networks:
        network.eval()
    lost = np.flatnonzero(~clean)[distributed.rank() :: distributed.size()]
    language = language_of(split, np.flatnonzero(clean), networks[0].words.num_embeddings)
    worth = WORDS * words_worth(language, split, np.flatnonzero(clean))
    candidates, words = find_candidates(networks, split, lost, language, worth, config) if len(lost) else (None, None)
    for rows in _slices(len(lost), CHUNK):
        captions, places = lost[rows], candidates[rows]
        scores = pair_scores(networks, split, places.ravel(), np.repeat(captions, places.shape[1]))
        evidence = SCORE * scores.logit(1e-6).view(places.shape).numpy() + words[rows]
        best = evidence.argmax(1)[:, None]
        images[captions] = np.take_along_axis(places, best, 1)[:, 0]
        certainty[captions] = 1 / np.exp(evidence - np.take_along_axis(evidence, best, 1)).sum(1)
        progress(len(captions))
    for array in (images, certainty):
        distributed.merge(array, "sum")
    images[clean], certainty[clean] = split.image_of[clean], 1
    return images, certainty


def language_of(split: Split, pairs: np.ndarray, words: int) -> Language:
    """Of the captions of clean pairs."""
    used = word_sets(split, pairs, words)
    shape = (split.images, len(pairs))
    ones = np.ones(len(pairs), np.float32)
    counts = csr_array((ones, (split.image_of[pairs], np.arange(len(pairs)))), shape=shape) @ used
    together = csr_array(counts.T @ counts - used.T @ used)
    frequency = used.sum(0) + 0.5
    return Language(counts, _shares(together), (frequency / frequency.sum()).astype(np.float32))


def word_evidence(language: Language, counts: csr_array) -> np.ndarray:  # [B, words]
    """Log odds that each word has in another caption of images with such captions, beside any caption."""
    share = _shares(counts)
    mixed = SAME * share.toarray() + (1 - SAME) * (share @ language.translated).toarray()
    return np.log1p(KNOWN * (mixed / language.frequency - 1))


def words_worth(language: Language, split: Split, pairs: np.ndarray) -> float:
    """Share of the uncertainty which image a caption belongs to that words remove: 0 if they tell nothing.

    Clean captions tell: each is looked for among ASKED_AMONG images, by what the other captions of its own say.
    """
    pairs = pairs[:: max(1, len(pairs) // ASKED)]
    own, used = split.image_of[pairs], word_sets(split, pairs, len(language.frequency))
    others = csr_array(language.counts[own] - used)
    known = others.sum(1) > 0
    among = np.unique(np.concatenate([own, np.arange(0, split.images, -(-split.images // ASKED_AMONG))]))
    if not known.any() or len(among) < 2:
        return 0.0
    mine = torch.from_numpy(used.multiply(word_evidence(language, others)).sum(1))
    everywhere = torch.full((len(pairs),), -torch.inf)
    place = np.searchsorted(among, own)
    for rows, evidence in _of_images(language._replace(counts=language.counts[among]), "cpu"):
        found = _sum_words(used, evidence)
        at = np.flatnonzero((place >= rows.start) & (place < rows.stop))
        found[at, place[at] - rows.start] = mine[at]
        everywhere = torch.logaddexp(everywhere, found.logsumexp(1))
    told = float((mine - everywhere)[known].mean())
    return max(0.0, 1 + told / math.log(len(among)))


@torch.no_grad()
def find_candidates(
    networks: list[Network], split: Split, captions: np.ndarray, language: Language, worth: float, config: Config
) -> tuple[np.ndarray, np.ndarray]:  # int [n, C], float32 [n, C]
    """Images that captions may belong to, by words and pseudo-labels, and the evidence of the words."""
    device = next(networks[0].parameters()).device
    of_images, of_captions = _predictions(networks, split, captions, config)
    used = word_sets(split, captions, len(language.frequency))
    count = min(CANDIDATES, split.images)
    best, words = torch.full((2, len(captions), count), -torch.inf, device=device)
    places = torch.zeros(len(captions), count, dtype=torch.long, device=device)
    for rows, evidence in _of_images(language, device):
        for some in _slices(len(captions), CAPTIONS):
            by_words = worth * _sum_words(used[some], evidence)
            alike = by_words + LABELS / len(networks) * (of_captions[some].float() @ of_images[rows].float().T)
            # beside the best of the images before
            at = torch.arange(rows.start, rows.stop, device=device).expand_as(alike)
            together = [torch.cat(x, 1) for x in ((best[some], alike), (places[some], at), (words[some], by_words))]
            best[some], top = together[0].topk(count)
            places[some], words[some] = (x.gather(1, top) for x in together[1:])
    return places.cpu().numpy(), words.cpu().numpy()


@torch.no_grad()
def _predictions(
    networks, split: Split, captions: np.ndarray, config: Config
) -> tuple[Tensor, Tensor]:  # [M, 2 K], [n, 2 K]
    """Unit vectors of every network beside each other: their products are sums of S_p. float16: K numbers an image."""
    device = next(networks[0].parameters()).device
    of_images, of_captions = [], []
    for rows in _slices(split.images, PIECE):
        features = features_of(split, np.arange(rows.start, rows.stop)).to(device)
        found = [unit_predictions(n.image_logits(n.encode_images(features)), config) for n in networks]
        of_images.append(torch.cat(found, 1).half())
    for rows in _slices(len(captions), PIECE):
        tokens = [x.to(device) for x in captions_of(split, captions[rows])]
        found = [unit_predictions(n.caption_logits(n.encode_captions(*tokens)), config) for n in networks]
        of_captions.append(torch.cat(found, 1).half())
    return torch.cat(of_images), torch.cat(of_captions)


def _of_images(language: Language, device) -> Iterator[tuple[slice, Tensor]]:
    """Evidence of every word for some images at a time, [words, B]."""
    for rows in _slices(language.counts.shape[0], IMAGES):
        evidence = word_evidence(language, language.counts[rows]).T
        yield rows, torch.from_numpy(np.ascontiguousarray(evidence)).to(device)


def _sum_words(used: csr_array, evidence: Tensor) -> Tensor:  # [n, words], [words, B] -> [n, B]
    words, begin = (torch.from_numpy(x.astype(np.int64)).to(evidence.device) for x in (used.indices, used.indptr[:-1]))
    return torch.nn.functional.embedding_bag(words, evidence, begin, mode="sum")


def _shares(counts: csr_array) -> csr_array:
    """Rows that sum to 1; empty ones stay so."""
    return csr_array(diags_array(1 / np.maximum(counts.sum(1), 1).astype(np.float32)) @ counts)


def _slices(length: int, step: int) -> Iterator[slice]:
    for begin in range(0, length, step):
        yield slice(begin, min(begin + step, length))
