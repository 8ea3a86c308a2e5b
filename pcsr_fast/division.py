"""Which pairs are clean, refinable or ambiguous: evaluation pass, mixture of losses, consistency of pseudo-labels."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcsr_fast import distributed
from pcsr_fast.config import Config
from pcsr_fast.data.loader import Batch
from pcsr_fast.data.split import Split
from pcsr_fast.model import Network
from pcsr_fast.ops import TallyState, label_similarity, tally, triplet
from pcsr_fast.rematch import Bank
from pcsr_fast.siblings import Siblings, belief_with_siblings

CLEAN, REFINABLE, AMBIGUOUS = range(3)
# up to so many losses the mixture is fitted to all, 78 MB in scikit-learn: MS-COCO has 566,435
FITTED = 600_000
# of more, to a part of them that has at most so many; and it is applied to so many at a time
AT_ONCE = 200_000
REGULARISED = 5e-4  # added to variances


class Evaluation(NamedTuple):
    """What the evaluation pass of one network says of every pair, and how healthy its pseudo-labels are."""

    losses: np.ndarray  # float32 [N]
    image_labels: np.ndarray  # int32 [N_img], -1 for an image without a pair
    caption_labels: np.ndarray  # int32 [N]
    likeness: np.ndarray  # float32 [N], S_p of image and caption
    match: np.ndarray  # float32 [N_img], how alike the clean pair in the bank is that is most like the image
    sharpness: float  # mean largest probability of the images' predictions
    random_likeness: float  # mean S_p of images with others: far below 1 if predictions tell images apart


@dataclass(frozen=True, eq=False)
class Division:
    """The subset of every pair, by one network; the other trains on it."""

    posterior: np.ndarray  # float32 [N], belief that the pair is clean
    subset: np.ndarray  # uint8 [N]: CLEAN, REFINABLE or AMBIGUOUS
    tau: float | None  # threshold of PCS, None before its first use
    utilisation: float  # lambda: share of noisy pairs that the tau of the epoch before would refine
    # where captions get new images: int32 [N], and float32 [N], how certain that is, 1 for clean pairs
    images: np.ndarray | None = None
    certainty: np.ndarray | None = None

    def pairs(self, subset: int) -> np.ndarray:
        return np.flatnonzero(self.subset == subset)


@torch.no_grad()
def evaluate_pairs(
    network: Network,
    split: Split,
    batches: Iterable[Batch],
    state: TallyState,
    config: Config,
    bank: Bank | None = None,
) -> Evaluation | None:
    """One pass in eval mode: the loss of every pair, and one count in the tally for every image.

    A pair that is alone in the last batch gets the median loss. Pairs of images whose features are not finite get the
    largest loss: they are noisy, and no reason to stop. Ranks give the batches they have taken in turn; what they found
    comes together on rank 0, and the others get None.
    """
    network.eval()
    losses, likeness = np.zeros((2, len(split)), np.float32)
    image_labels = np.full(split.images, -1, np.int32)
    match = np.zeros(split.images, np.float32)
    caption_labels = np.zeros(len(split), np.int32)
    alone, broken = np.zeros((2, len(split)), np.uint8)
    sharp, near = [], []
    for batch in batches:
        unusable = ~batch.features.isfinite().flatten(1).all(1)
        images = network.encode_images(batch.features.masked_fill(unusable[:, None, None], 0))
        captions = network.encode_captions(batch.tokens, batch.offsets)
        pair_losses = _pair_losses(network, images, captions, batch, config)
        if 1 < (size := len(batch)) < config.batch_size:
            # the mean over a batch counts the pair itself, which weighs more in a small last one
            pair_losses = pair_losses * (size / (size - 1) * (config.batch_size - 1) / config.batch_size)
        p, q = network.image_logits(images), network.caption_logits(captions)
        pairs = batch.pairs.cpu().numpy()
        losses[pairs] = pair_losses.float().cpu().numpy()
        likeness[pairs] = likeness_of(p, q, config).cpu().numpy()
        caption_labels[pairs] = q.argmax(1).cpu().numpy()
        image_labels[batch.images.cpu().numpy()] = p.argmax(1).cpu().numpy()
        if bank is not None and bank.filled:
            match[batch.images.cpu().numpy()] = bank.match(p, config)[1].cpu().numpy()
        alone[pairs] = size == 1
        broken[pairs] = unusable.cpu().numpy()
        sharp.append(p.softmax(1).amax(1).mean())
        near.append(likeness_of(p, p.roll(1, 0), config).mean())
    # the last batch may be small and count too much; these are figures to look at
    figures = np.array([len(sharp), *(float(torch.stack(x).sum()) if x else 0.0 for x in (sharp, near))])
    for array in (losses, likeness, figures):
        distributed.merge(array, "sum")
    for array in (image_labels, match, caption_labels, alone, broken):
        distributed.merge(array, "max")
    if distributed.rank() > 0:
        return None
    known = np.flatnonzero(image_labels >= 0)
    tally(torch.from_numpy(image_labels[known].astype(np.int64)), torch.from_numpy(known), state)
    # without a negative, neither good nor bad
    if alone.any():
        losses[alone > 0] = np.median(losses[alone == 0]) if len(losses) > 1 else 0
    if len(bad := np.flatnonzero(broken)):
        names = ", ".join(map(str, np.unique(split.image_of[bad])[:5]))
        warnings.warn(
            f"{split.name}: features are not finite, of images {names}; pairs are noisy: {len(bad)}", stacklevel=2
        )
        losses[bad] = losses[broken == 0].max(initial=0)
    return Evaluation(losses, image_labels, caption_labels, likeness, match, *(figures[1:] / figures[0]).tolist())


def likeness_of(logits: Tensor, others: Tensor, config: Config) -> Tensor:  # [B, K], [B, K] -> [B]
    """S_p, of predictions made as sharp as configured."""
    return label_similarity(logits / config.likeness_temperature, others / config.likeness_temperature)


def _pair_losses(network, images, captions, batch: Batch, config: Config) -> Tensor:  # [B]
    ids = (batch.images, batch.pairs) if config.mask_duplicates else (None, None)
    size, count = len(batch), config.evaluation_negatives
    if not count or count >= size - 1:
        return triplet(network.similarity(images, captions), config.alpha, "per_pair", *ids)
    # pair i against the next `count` pairs: cell (i, i + s) is a negative of image i and of caption i + s
    own = torch.arange(size, device=batch.pairs.device)
    shifts = torch.arange(1, count + 1, device=own.device)
    other = (own[:, None] + shifts) % size
    cells = torch.cat(
        [torch.stack([own, own], 1), torch.stack([own[:, None].expand_as(other), other], 2).flatten(0, 1)]
    )
    scores = network.similarity(images, captions, cells)
    positive, negative = scores[:size], scores[size:].view(size, count)
    wanted = (
        batch.images[:, None] != batch.images[other] if config.mask_duplicates else torch.ones_like(other, dtype=bool)
    )
    row = (config.alpha + negative - positive[:, None]).relu() * wanted
    column = (config.alpha + negative - positive[other]).relu() * wanted
    total = row.sum(1).index_add(0, other.flatten(), column.flatten())
    # as if the mean over the batch had been estimated from these
    return total * ((size - 1) / (size * count))


def mixture(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # [N] -> [N], [2, 3]
    """Posterior of the component with the smaller mean; weight, mean and deviation of both, on the scaled losses."""
    if not np.isfinite(losses).all():
        bad = np.flatnonzero(~np.isfinite(losses))
        raise ValueError(
            f"the loss of pair {bad[0]} is {losses[bad[0]]}, and {len(bad)} are not finite: training diverged"
        )
    low, high = losses.min(), losses.max()
    if high - low < 1e-6 * max(abs(high), 1e-6):
        raise ValueError(
            f"all {len(losses)} pairs have the same loss {low:.6g}: training collapsed, nothing tells pairs apart; "
            "train longer before the division (warmup_steps) or with negatives_ramp"
        )
    return _clean_component(*_fitted([losses], random_state=0))


def mixture_from(belief: np.ndarray, columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:  # -> [N], [2, 3]
    """As mixture, of losses and what else is given, fitted from where a belief that pairs are clean stands.

    Columns are independent within a component. One that does not tell pairs apart has the same mean in both, and no
    say; an equal say for each would halve the clean pairs when, as of S_p, predictions are poor.
    """
    scaled = np.stack([(x - x.min()) / np.ptp(x) for x in columns], 1)
    weights = np.stack([belief, 1 - belief])
    share = weights.mean(1, dtype=np.float64)[:, None] + 1e-9
    means, squares = (weights @ x / len(x) / share for x in (scaled, scaled**2))
    variances = np.maximum(squares - means**2, 0) + REGULARISED
    start = dict(weights_init=share[:, 0] / share.sum(), means_init=means, precisions_init=1 / variances)
    return _clean_component(*_fitted(columns, **start))


def _clean_component(model, posterior) -> tuple[np.ndarray, np.ndarray]:  # [N], [2, 3]
    order = np.argsort(model.means_[:, 0])
    components = np.stack([model.weights_, model.means_[:, 0], np.sqrt(model.covariances_[:, 0])], 1)[order]
    return posterior(order[0]), components


def _fitted(columns: list[np.ndarray], **start):
    """A mixture of two Gaussians of the scaled columns, and what gives the posterior of one of them.

    Of more than FITTED pairs it is fitted to every nth, AT_ONCE at most.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    ranges, pairs = [(x.min(), np.ptp(x)) for x in columns], len(columns[0])

    def scaled(rows: slice) -> np.ndarray:
        found = [(x[rows] - low) / width for x, (low, width) in zip(columns, ranges, strict=True)]
        return np.stack(found, 1).astype(np.float64)

    every = 1 if pairs <= FITTED else -(-pairs // AT_ONCE)
    model = GaussianMixture(2, covariance_type="diag", max_iter=10, tol=1e-2, reg_covar=REGULARISED, **start)
    with warnings.catch_warnings():
        # ten rounds are the definition, whether they suffice or not
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(scaled(slice(None, None, every)))

    def posterior(component: int) -> np.ndarray:  # [N]
        found = np.empty(pairs, np.float32)
        for begin in range(0, pairs, AT_ONCE):
            rows = slice(begin, begin + AT_ONCE)
            found[rows] = model.predict_proba(scaled(rows))[:, component]
        return found

    return model, posterior


def clean_posterior(
    found: Evaluation, before: np.ndarray | None, epoch: int, config: Config, siblings: Siblings | None = None
) -> tuple[np.ndarray, np.ndarray]:  # [N], [2, 3]
    """Belief that a pair is clean, given that of the epoch before, and the mixture of losses.

    Where image and caption predict the same pseudo-labels, they match: evidence beside the loss, once the classifier
    was trained, which begins in the first epoch. So are words that an image's captions share, from the beginning.
    """
    remembered = before is not None and config.belief_memory > 0
    posterior, components = mixture(found.losses)
    if remembered and _jumped(before, posterior):
        again = mixture_from(before, [found.losses])
        # losses that do not bear out the belief speak for themselves
        posterior, components = (posterior, components) if _jumped(before, again[0]) else again
    if config.evidence == "both" and config.method == "pcsr" and epoch > 1 and np.ptp(found.likeness) > 0.01:
        posterior = mixture_from(posterior, [found.losses, 1 - found.likeness])[0]
    if siblings is not None:
        posterior = belief_with_siblings(siblings, posterior)
    if remembered:
        posterior += np.float32(config.belief_memory) * (before - posterior)
    return posterior, components


def _jumped(before: np.ndarray, now: np.ndarray) -> bool:  # [N], [N]
    """Of the pairs that either calls clean, less than half are so by both.

    Losses may have three peaks: clean pairs that a network has learnt, clean ones that it has not, and noisy ones.
    Which two of them the mixture takes together can change from one epoch to the next.
    """
    before, now = before > 0.5, now > 0.5
    return 2 * (before & now).sum() < (before | now).sum()


def is_clean(posterior: np.ndarray, doubt: float = 0.0) -> np.ndarray:  # bool [N]
    """w > 0.5; never all pairs and never fewer than two: then the 1 % at the end of the scale change sides.

    Noisy pairs that were learnt by heart pass, many more than the mixture expects: doubt times as many as it expects,
    those with the smallest w, are held back; at most half.
    """
    clean = posterior > 0.5
    passed = posterior[clean]
    held = min(round(doubt * float((1 - passed).sum(dtype=np.float64))), len(passed) // 2)
    if held:
        clean &= posterior >= np.partition(passed, held)[held]
    some = max(1, round(0.01 * len(posterior)))
    if clean.all():
        clean[np.argsort(posterior, kind="stable")[:some]] = False
    elif clean.sum() < 2:
        clean[np.argsort(-posterior, kind="stable")[: max(2, some)]] = True
    return clean


def target_utilisation(epoch: int, config: Config) -> float:
    """lambda_target in an epoch after warm-up, counted from 1."""
    done = min(epoch / config.target_epochs, 1.0)
    return config.target_start + (config.target_end - config.target_start) * done


def first_tau(pcs: np.ndarray, target: float) -> float:
    """The quantile of PCS among noisy pairs at which lambda is the target."""
    if not len(pcs):
        return 0.0
    return float(np.sort(pcs)[::-1][min(len(pcs) - 1, max(0, round(target * len(pcs)) - 1))])


def next_tau(tau: float, utilisation: float, target: float, config: Config) -> float:
    aim = tau - config.controller_gain * (target - utilisation)
    return (1 - config.controller_rate) * tau + config.controller_rate * aim


def divide(
    posterior: np.ndarray,  # [N]
    pcs: np.ndarray,  # [N], of each pair's image, or what refinability makes of it
    tau: float | None,
    epoch: int,
    config: Config,
) -> Division:
    """Subsets of an epoch after warm-up, counted from 1; the controller idles before the refinable stage."""
    noisy = ~is_clean(posterior, config.doubt)
    if config.noisy_treatment != "split":
        subset = np.where(noisy, REFINABLE if config.noisy_treatment == "refinable" else AMBIGUOUS, CLEAN)
        return Division(posterior, subset.astype(np.uint8), None, 1.0)
    scores, target = pcs[noisy], target_utilisation(epoch, config)
    if epoch < config.refinable_from:
        tau, utilisation = None, 0.0
        limit = first_tau(scores, target)
    else:
        if tau is None or config.threshold == "quantile":
            limit = tau = first_tau(scores, target)
            utilisation = float((scores >= tau).mean()) if len(scores) else 0.0
        else:
            utilisation = float((scores >= tau).mean()) if len(scores) else 0.0
            limit = tau = next_tau(tau, utilisation, target, config)
    subset = np.where(noisy, np.where(pcs >= limit, REFINABLE, AMBIGUOUS), CLEAN)
    return Division(posterior, subset.astype(np.uint8), tau, utilisation)


def pair_pcs(state: TallyState, split: Split, observations: int, config: Config) -> np.ndarray:  # float32 [N]
    """Consistency of each pair's image."""
    pcs = state.pcs().cpu().numpy().astype(np.float32)
    return (pcs / max(observations, 1) if config.pcs == "share" else pcs)[split.image_of]


def refinability(pcs: np.ndarray, match: np.ndarray, config: Config) -> np.ndarray:  # [N], [N] -> [N]
    """What is compared with tau: the consistency of a pair's image, how alike its match in the bank is, or both."""
    # before the first epoch of clean pairs there is no match
    if config.refinable_by == "consistency" or not match.any():
        return pcs
    return match if config.refinable_by == "match" else (pcs + match) / 2


def health(found: Evaluation, division: Division | None, split: Split, config: Config) -> dict[str, float]:
    """Figures of an epoch: are pseudo-labels in use and sharp, and is the split right where noise is known."""
    labels = found.image_labels[found.image_labels >= 0]
    counts = np.bincount(labels, minlength=config.classes)
    agree = found.image_labels[split.image_of] == found.caption_labels
    figures = {
        "classes_in_use": int((counts > 0).sum()),
        "largest_class": float(counts.max() / max(len(labels), 1)),
        "mean_max_probability": found.sharpness,
        "random_likeness": found.random_likeness,
        "agreement": float(agree.mean()),
        "loss_mean": float(found.losses.mean()),
    }
    noisy = split.image_of != split.true_image
    if division is not None:
        clean = division.subset == CLEAN
        figures |= {"agreement_clean": _mean(agree[clean]), "agreement_noisy": _mean(agree[~clean])}
        figures |= {
            f"{name}_pairs": int((division.subset == code).sum())
            for code, name in enumerate(("clean", "refinable", "ambiguous"))
        }
        if noisy.any():
            right = clean & ~noisy
            figures |= {
                "split_precision": float(right.sum() / max(clean.sum(), 1)),
                "split_recall": float(right.sum() / max((~noisy).sum(), 1)),
                "split_auc": ranking_quality(division.posterior, ~noisy),
            }
    return figures


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def ranking_quality(score: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(positive, score)) if 0 < positive.sum() < len(positive) else float("nan")
