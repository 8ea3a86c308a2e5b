"""A tiny run for tests of the trainer: networks of a few dimensions on a dozen scenes of the sample set."""

from dataclasses import replace

import numpy as np
import torch

from pcsr_fast.config import Config
from pcsr_fast.data import noise
from pcsr_fast.data.loader import batches
from pcsr_fast.data.sample import sample_split, sample_vocabulary
from pcsr_fast.evaluate import encode
from pcsr_fast.model import Network

WORDS = len(sample_vocabulary())
CONFIG = Config(
    embedding=16, similarity=8, reasoning_steps=2, word_embedding=10, classes=8, classifier_hidden=12, batch_size=8,
    warmup_epochs=1, warmup_steps=0, epochs=3, refinable_from=2, ambiguous_from=3, device="cpu", workers=0,
)  # fmt: skip


def config(**changes) -> Config:
    return replace(CONFIG, **changes)


def split(images=12, ratio=0.0, name="train"):
    """Scenes of the sample set; captions are mixed up by `ratio`."""
    plain = sample_split(name, images)
    return plain.with_noise(noise.draw(images, len(plain), ratio, seed=1))


def network(seed=0, regions=9, width=70, words=WORDS, **changes) -> Network:
    """In eval mode, with batch norms that are not the identity and biases that are not zero."""
    torch.manual_seed(seed)
    made = Network(config(**changes), regions, width, words)
    for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
        if tensor.is_floating_point() and (name.endswith(("bias", "running_mean")) or "b_" in name):
            torch.nn.init.normal_(tensor, std=0.3)
        elif name.endswith("running_var"):
            torch.nn.init.uniform_(tensor, 0.5, 2)
    with torch.no_grad():
        made.similarity.b_graph.abs_()
        if width == 70:
            # scores of the sample set that differ: logits with mean 0 and deviation 2
            logits = made.similarity(*encode(made, split())).logit()
            scale = 2 / logits.std()
            made.similarity.w_score.mul_(scale)
            made.similarity.b_score.sub_(logits.mean()).mul_(scale)
    return made.eval()


def batch(of, pairs):
    """These pairs of a split, in order."""
    return next(batches(of, len(pairs), 0, 0, np.asarray(pairs), shuffle=False, workers=0))
