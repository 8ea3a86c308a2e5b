"""What a refinable pair is trained as: its image with a caption of a clean pair, or its caption with another image.

As printed, an image gets the caption of the clean image whose pseudo-labels are most like its own, from a bank that
training fills (Bank). Or a caption gets, once a division, the image that fits it best (best_images): pseudo-labels
choose candidates, the similarity of both networks decides.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pcsr_fast.config import Config
from pcsr_fast.data.loader import captions_of, features_of
from pcsr_fast.data.split import Split
from pcsr_fast.model import Images, Network

CAPTIONS = 256  # that images are looked for at a time


def unit_predictions(logits: Tensor, config: Config) -> Tensor:  # [B, K]
    """Their products are S_p."""
    return torch.nn.functional.normalize((logits.detach() / config.likeness_temperature).softmax(1), dim=1)


@dataclass
class Bank:
    """Predictions of clean images that refinable ones are matched with: of this step, or a ring of recent ones."""

    predictions: Tensor  # [M, K], unit vectors
    captions: Tensor  # [M, K], those of their captions
    pairs: Tensor  # [M], whose captions they are; -1 where there is none yet
    place: int = 0
    filled: int = 0  # how many there are, at least where this is 0

    @classmethod
    def empty(cls, config: Config, device) -> "Bank":
        size = config.batch_size if config.rematch_scope == "batch" else config.bank_size
        none, unknown = torch.full((size,), -1, device=device), torch.zeros(size, config.classes, device=device)
        return cls(unknown, unknown.clone(), none)

    def forget(self, config: Config) -> None:
        """Before a clean step: a bank of one step drops those of the step before."""
        if config.rematch_scope == "batch":
            self.place = self.filled = 0
            self.pairs.fill_(-1)

    def keep(self, clean: np.ndarray) -> None:  # bool [N]
        """Drops pairs that are not clean any more."""
        known = torch.from_numpy(clean).to(self.pairs.device)[self.pairs]
        self.pairs.masked_fill_(~known, -1)
        self.filled = int((self.pairs >= 0).sum())

    @torch.no_grad()
    def put(self, p: Tensor, q: Tensor, pairs: Tensor, config: Config) -> None:  # [B, K], [B, K], [B]
        at = (torch.arange(len(pairs), device=pairs.device) + self.place) % len(self.pairs)
        self.predictions[at], self.captions[at] = unit_predictions(p, config), unit_predictions(q, config)
        self.pairs[at] = pairs
        self.place = (self.place + len(pairs)) % len(self.pairs)
        self.filled = min(self.filled + len(pairs), len(self.pairs))

    @torch.no_grad()
    def match(self, logits: Tensor, config: Config) -> tuple[Tensor, Tensor]:  # [B, K] -> [B], [B]
        """The pair most like each image, and how alike: S_p of both images, times S_p of the image and the caption."""
        own = unit_predictions(logits, config)
        similar = own @ self.predictions.T
        if config.rematch_by == "both":
            similar = similar * (own @ self.captions.T)
        # on CUDA a step that was not finite has put NaN here
        similar = similar.masked_fill((self.pairs < 0) | similar.isnan(), -torch.inf)
        likeness, at = similar.max(1)
        return self.pairs[at], likeness.clamp(0, 1)


@torch.no_grad()
def best_images(
    networks: list[Network],
    split: Split,
    pairs: np.ndarray,  # int [P], whose captions
    images: np.ndarray,  # int [M], candidates
    config: Config,
    device: torch.device,
    shown: Callable[[range], Iterable[int]] = lambda starts: starts,
) -> tuple[np.ndarray, np.ndarray]:  # int64 [P], float32 [P]
    """The image that fits each caption best, and S_p of both, the mean of all networks."""
    best, likeness = np.empty(len(pairs), np.int64), np.empty(len(pairs), np.float32)
    encoded, predictions = zip(*(_encoded(network, split, images, config, device) for network in networks), strict=True)
    count = min(config.rematch_candidates, len(images))
    for start in shown(range(0, len(pairs), CAPTIONS)):
        rows = slice(start, start + CAPTIONS)
        tokens, offsets = (x.to(device) for x in captions_of(split, pairs[rows]))
        captions = [network.encode_captions(tokens, offsets) for network in networks]
        own = [unit_predictions(n.caption_logits(c), config) for n, c in zip(networks, captions, strict=True)]
        alike = sum(q @ p.T for q, p in zip(own, predictions, strict=True)) / len(networks)
        likely = alike.topk(count, dim=1).indices
        # each candidate once, however many captions it is one for
        some, place = likely.unique(return_inverse=True)
        column = torch.arange(len(likely), device=device)[:, None].expand_as(likely)
        cells = torch.stack([place, column], 2).flatten(0, 1)
        scores = sum(
            network.similarity(Images(*(x[some] for x in known)), words, cells)
            for network, known, words in zip(networks, encoded, captions, strict=True)
        )
        chosen = likely.gather(1, scores.view_as(likely).argmax(1, keepdim=True))
        best[rows], likeness[rows] = images[chosen[:, 0].cpu().numpy()], alike.gather(1, chosen)[:, 0].cpu().numpy()
    return best, likeness


def _encoded(network: Network, split: Split, images: np.ndarray, config: Config, device) -> tuple[Images, Tensor]:
    """Images and their predictions, [M, K], unit vectors."""
    network.eval()
    parts = []
    for start in range(0, len(images), config.evaluation_batch):
        some = features_of(split, images[start : start + config.evaluation_batch])
        parts.append(network.encode_images(some.to(device)))
    found = Images(*(torch.cat(x) for x in zip(*parts, strict=True)))
    return found, torch.cat([unit_predictions(network.image_logits(part), config) for part in parts])
