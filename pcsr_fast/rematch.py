"""Which caption a refinable image gets: that of the clean pair whose pseudo-labels are most like its own."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pcsr_fast.config import Config


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
