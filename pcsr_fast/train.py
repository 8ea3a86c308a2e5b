"""The whole training, read top to bottom: warm-up, division, three stages, validation, checkpoints.

Two networks, A and B, take turns: each is trained on the division that the other has made; which pairs are clean, both
say. Everything random is a function of the seed and of the place in the schedule, so a run that is resumed goes on
as if it had not stopped.
"""

import dataclasses
import json
import math
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pcsr_fast import checkpoint, distributed
from pcsr_fast.config import SUBSETS, Config, differences
from pcsr_fast.data.loader import Batch, batches, captions_of, count_batches
from pcsr_fast.data.overlap import overlap, word_weights
from pcsr_fast.data.split import Split
from pcsr_fast.distributed import Shared
from pcsr_fast.division import (
    AMBIGUOUS,
    CLEAN,
    REFINABLE,
    Division,
    Evaluation,
    clean_posterior,
    divide,
    evaluate_pairs,
    health,
    is_clean,
    likeness_of,
    pair_pcs,
    refinability,
    target_utilisation,
)
from pcsr_fast.evaluate import evaluate
from pcsr_fast.model import Captions, Images, Network
from pcsr_fast.ops import Agreement, TallyState, adaptive_margin, agreement, entropy, triplet
from pcsr_fast.rehome import has_siblings, rehome
from pcsr_fast.rematch import Bank
from pcsr_fast.run import distributions, write_division
from pcsr_fast.siblings import Siblings, siblings_of

NAMES = ("A", "B")
# streams of random numbers, apart from each other
INIT, ORDER, STEP, PASS = range(4)


class TrainingError(RuntimeError):
    """Training cannot go on; the message says what was seen and what to do."""


@dataclass
class State:
    """Where a run stands: all that a checkpoint holds. An epoch is divide, train A, train B, validate."""

    networks: list[Network]
    optimizers: list[torch.optim.Optimizer]
    tallies: list[TallyState]
    divisions: list[Division | None]
    epoch: int = 0  # from 0, with warm-up
    phase: str = "divide"
    network: int = 0  # which one trains
    step: int = 0  # batches that it has done in this epoch
    observations: int = 0  # epochs in the tally
    sums: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # of losses in this epoch, by network and subset
    figures: list[dict[str, float]] = field(default_factory=lambda: [{}, {}])
    best: float = -1.0
    best_epoch: int = -1
    bad_streak: Tensor | None = None
    banks: list[Bank | None] = field(default_factory=lambda: [None, None])
    siblings: Siblings | None = None  # follows from the data, and is not saved


def train(
    config: Config,
    train_split: Split,
    dev_split: Split,
    words: int,
    run: Path | str,
    resume: str = "auto",
    report: Callable[[str], None] = print,
    warmed: Path | str | None = None,
    on_epoch: Callable[[dict], None] = lambda record: None,
) -> dict[str, float]:
    """Trains two networks and returns the record of the best epoch on dev.

    The folder gets `config.json`, `log.jsonl` with a record for every epoch, `last.pt` and `best.pt`, `noise.npy`,
    the image of every caption as trained on, and `division.npy`, what the last division said of every pair. `words` is
    the size of the vocabulary. resume: auto goes on from `last.pt` if it is there, must demands it, never refuses to
    overwrite it. `report` gets lines to read, `on_epoch` every new record. `warmed` is the folder of a run that stands
    at the end of the same warm-up (epochs=0): a new run begins there, and ends as if it had done it itself. Under
    torchrun all ranks train together, each returns the record, and rank 0 alone writes, reports and calls on_epoch.
    """
    run = Path(run)
    check_data(config, train_split, dev_split, words)
    device = distributed.start(config.device, config.wait_minutes)
    try:
        found = _train(config, train_split, dev_split, words, run, resume, report, warmed, on_epoch, device)
    except Exception as error:
        if distributed.size() > 1:
            error.add_note(f"on rank {distributed.rank()} of {distributed.size()}")
        raise
    distributed.finish()
    return found


def _train(config, train_split, dev_split, words, run, resume, report, warmed, on_epoch, device) -> dict[str, float]:
    """What every rank does; rank 0 alone writes and reports."""
    first = distributed.rank() == 0
    report = report if first else lambda line: None
    check_ranks(config)
    run.mkdir(parents=True, exist_ok=True)
    last = run / "last.pt"
    if resume not in ("auto", "must", "never"):
        raise ValueError(f"resume must be auto, must or never, got {resume!r}")
    if last.exists() and resume == "never":
        raise FileExistsError(f"{last} exists: choose another folder, or resume the run in it")
    if resume == "must" and not last.exists():
        raise FileNotFoundError(f"{last} does not exist: there is nothing to resume")
    state = new_state(config, train_split, words, device)
    identity = {"train": checkpoint.fingerprint(train_split), "dev": checkpoint.fingerprint(dev_split), "words": words}
    records: list[dict] = []
    if last.exists():
        records = restore(state, checkpoint.load(last, mapped=not first), config, identity, last)
        report(f"resumed from {last}: epoch {state.epoch + 1}, {state.phase}, step {state.step}")
    elif warmed is not None:
        records = take_warmup(state, Path(warmed), config, identity, warmup_epochs(config, len(train_split)))
    if first and not last.exists():
        if warmed is not None:
            shutil.copyfile(Path(warmed) / "best.pt", run / "best.pt")
        (run / "config.json").write_text(config.dump())
        np.save(run / "noise.npy", train_split.image_of)
    place = (state.epoch, state.phase, state.network, state.step)
    if (others := distributed.from_first(place)) != place:
        raise ValueError(
            f"rank 0 is at {others} (epoch, phase, network, step), rank {distributed.rank()} at {place}: "
            f"{last} must be in a folder that all machines share"
        )
    if first:
        write_records(run / "log.jsonl", records)
        checkpoint.sweep(run)

    saved_at = time.monotonic()

    def save(force: bool = False) -> None:
        nonlocal saved_at
        if not first:
            return
        if force or time.monotonic() - saved_at > 60 * config.checkpoint_minutes:
            checkpoint.save(pack(state, config, identity, records), last)
            saved_at = time.monotonic()

    warmup = warmup_epochs(config, len(train_split))
    with interruptible() as interrupted:

        def stop_if_asked() -> None:
            if distributed.agreed(interrupted()):
                save(force=True)
                raise KeyboardInterrupt(f"stopped; everything is saved in {last}")

        while state.epoch < warmup + config.epochs:
            started = time.monotonic()
            epoch = state.epoch + 1 - warmup  # from 1 after warm-up
            if epoch == 1 and state.phase == "divide":
                # Adam starts anew after warm-up
                state.optimizers = [new_optimizer(n, config) for n in state.networks]
            if epoch > 0 and config.method != "sgr" and state.phase == "divide":
                told = divide_both(state, train_split, epoch, config, device)
                if first:
                    write_division(run, told)
            divided = time.monotonic()
            state.phase = "train" if state.phase == "divide" else state.phase
            stop_if_asked()
            while state.phase == "train":
                distributed.phase(f"train {NAMES[state.network]}, epoch {state.epoch + 1}")
                for _ in train_epoch(state, train_split, epoch, config, device):
                    check_steps(state, config, last)
                    save()
                    stop_if_asked()
                check_steps(state, config, last, now=True)
                state.network, state.step = state.network + 1, 0
                if state.network == len(state.networks):
                    state.network, state.phase = 0, "validate"
            trained = time.monotonic()
            distributed.phase(f"validate, epoch {state.epoch + 1}")
            with progress(None, 2 * dev_split.images * len(dev_split), "validate", unit="pair") as bar:
                found = evaluate(state.networks, dev_split, config.evaluation_batch, progress=bar.update)
            record = {
                "epoch": state.epoch + 1,
                "stage": stage_name(epoch, config),
                "rsum": found["mean"]["rsum"],
                **{f"dev_{name}_{key}": value for name, figures in found.items() for key, value in figures.items()},
                **{f"{NAMES[k]}_{key}": value for k in range(2) for key, value in state.figures[k].items()},
                **means(state.sums),
                "pairs_per_second": pairs_per_second(state.sums, started, config),
                "learning_rate": learning_rate(epoch, config),
                "divide_seconds": divided - started,
                "train_seconds": trained - divided,
                "validate_seconds": time.monotonic() - trained,
                "seconds": time.monotonic() - started,
                **memory(device),
            }
            records.append(record)
            if record["rsum"] > state.best:
                state.best, state.best_epoch = record["rsum"], state.epoch + 1
                if first:
                    checkpoint.save(weights(state, config, identity, record), run / "best.pt")
            state.epoch, state.phase, state.sums, state.figures = state.epoch + 1, "divide", {}, [{}, {}]
            save(force=True)
            if first:
                write_records(run / "log.jsonl", records)
                on_epoch(record)
            report(epoch_line(record, warmup + config.epochs, state))
            for warning in warnings_of(record, config):
                report(f"warning: {warning}")
            stop_if_asked()
    return next(r for r in records if r["epoch"] == state.best_epoch)


def check_ranks(config: Config) -> None:
    ranks, least = distributed.size(), least_rows(config)
    if config.batch_size < least * ranks:
        raise ValueError(
            f"batch_size is {config.batch_size}, that of all ranks together, but there are {ranks} ranks and negatives "
            f"is {config.negatives}: give at least {least * ranks}, or start fewer ranks"
        )


def least_rows(config: Config) -> int:
    """How many rows each rank must have for a batch to be shared: among its own alone a pair needs a negative."""
    return 2 if config.negatives == "local" else 1


def check_data(config: Config, train_split: Split, dev_split: Split, words: int) -> None:
    if warmup_epochs(config, len(train_split)) + config.epochs == 0:
        raise ValueError("warmup_epochs, warmup_steps and epochs are all 0: there is nothing to train")
    if len(train_split) < 2:
        raise ValueError(f"{train_split.name} has {len(train_split)} pairs, training needs at least 2")
    for name in ("regions", "width"):
        ours, theirs = getattr(train_split, name), getattr(dev_split, name)
        if ours != theirs:
            raise ValueError(f"{name} of features: {ours} in {train_split.name}, but {theirs} in {dev_split.name}")
    for split in (train_split, dev_split):
        top = int(split.tokens.max())
        if top >= words:
            raise ValueError(f"{split.name} has the token id {top}, but the vocabulary has {words} words")


# the schedule


def warmup_epochs(config: Config, pairs: int) -> int:
    """As configured, and as many as give warmup_steps steps."""
    return max(config.warmup_epochs, math.ceil(config.warmup_steps / count_batches(pairs, config.batch_size)))


def stage_name(epoch: int, config: Config) -> str:
    """epoch is counted from 1 after warm-up."""
    if epoch < 1:
        return "warm-up"
    return "all pairs" if config.method == "sgr" else " + ".join(stage_subsets(epoch, config))


def stage_subsets(epoch: int, config: Config) -> list[str]:
    begin = {"clean": 1, "refinable": config.refinable_from, "ambiguous": config.ambiguous_from}
    wanted = ("clean",) if config.method == "clean" else config.subsets
    return [name for name in begin if name in wanted and epoch >= begin[name]]


def learning_rate(epoch: int, config: Config) -> float:
    return config.learning_rate * config.decay ** (max(epoch - 1, 0) // config.decay_every)


def negatives(epoch: int, config: Config) -> int:
    """How many pairs hardest negatives are chosen among: all, or 8, 16, 32, ... in the first epochs."""
    return min(2 ** (epoch + 2), config.batch_size) if config.negatives_ramp and epoch > 0 else config.batch_size


def seed_of(config: Config, *place: int) -> int:
    return int(np.random.SeedSequence([config.seed, *place]).generate_state(1)[0])


# the parts of an epoch


def divide_both(state: State, split: Split, epoch: int, config: Config, device) -> list[dict[str, np.ndarray]]:
    """Evaluation pass of all ranks; mixture, tally and threshold on rank 0; for both networks.

    Rank 0 gets what each network says of every pair.
    """
    if epoch == config.tally_from:
        state.observations = 0
        for tensor in (x for tally in state.tallies for x in tally):
            tensor.zero_()
    state.observations += 1
    found = []
    for k, network in enumerate(state.networks):
        distributed.phase(f"divide {NAMES[k]}, epoch {state.epoch + 1}")
        order = batches(
            split, config.batch_size, seed_of(config, PASS, k), state.epoch, device=device, workers=config.workers,
            every=(distributed.rank(), distributed.size()),
        )  # fmt: skip
        total = math.ceil(count_batches(len(split), config.batch_size) / distributed.size())
        shown = progress(order, total, f"evaluate {NAMES[k]}")
        found.append(evaluate_pairs(network, split, shown, state.tallies[k], config, state.banks[k]))
    first = distributed.rank() == 0
    judges, beliefs = believe(state, found, split, epoch, config) if first else (None, None)
    homes = new_images(state, beliefs, split, epoch, config)
    told = decide(state, found, judges, beliefs, homes, split, epoch, config) if first else []
    for k in range(len(NAMES)):
        state.divisions[k] = same_division(state.divisions[k], len(split), homes is not None)
        state.figures[k] = distributed.from_first(state.figures[k])
    return told


def believe(
    state: State, found: list[Evaluation], split: Split, epoch: int, config: Config
) -> tuple[list[Evaluation], list[tuple[np.ndarray, np.ndarray]]]:
    """Who judges, each network for itself or one of both, and for each judge the belief and the mixture."""
    judges = found
    if config.judges == "both":
        mean = {name: sum(getattr(x, name) for x in found) / len(found) for name in ("losses", "likeness", "match")}
        judges = [found[0]._replace(**mean)]
    before = [division.posterior if division else None for division in state.divisions]
    if config.siblings and config.method == "pcsr" and state.siblings is None:
        state.siblings = siblings_of(split, state.networks[0].words.num_embeddings)
    return judges, [clean_posterior(judge, before[k], epoch, config, state.siblings) for k, judge in enumerate(judges)]


def new_images(
    state: State, beliefs: list[tuple[np.ndarray, np.ndarray]] | None, split: Split, epoch: int, config: Config
) -> tuple[np.ndarray, np.ndarray] | None:  # int32 [N], float32 [N]
    """What captions of noisy pairs fit, in the stages where that is trained on; found by all ranks, for rank 0."""
    if not (moves_captions(split, config) and "refinable" in stage_subsets(epoch, config)):
        return None
    # whatever one of the judges calls noisy
    clean = np.all([is_clean(posterior, config.doubt) for posterior, _ in beliefs], 0) if beliefs else None
    clean = distributed.array_from_first(clean, (len(split),), bool)
    distributed.phase(f"new images, epoch {state.epoch + 1}")
    with progress(None, math.ceil((~clean).sum() / distributed.size()), "new images", unit="caption") as bar:
        return rehome(state.networks, split, clean, config, bar.update)


def moves_captions(split: Split, config: Config) -> bool:
    """Whether a refinable pair gets a new image, not a new caption."""
    return config.rematch == "image" and config.method == "pcsr" and has_siblings(split)


def decide(
    state: State,
    found: list[Evaluation],
    judges: list[Evaluation],
    beliefs: list[tuple[np.ndarray, np.ndarray]],
    homes: tuple[np.ndarray, np.ndarray] | None,
    split: Split,
    epoch: int,
    config: Config,
) -> list[dict[str, np.ndarray]]:
    """The division of each network, and its figures; returns what they say of every pair."""
    told = []
    for k, own in enumerate(found):
        judge, (posterior, components) = judges[k % len(judges)], beliefs[k % len(judges)]
        pcs = pair_pcs(state.tallies[k], split, state.observations, config)
        tau = state.divisions[k].tau if state.divisions[k] else None
        score = refinability(pcs, judge.match[split.image_of], config) if homes is None else homes[1]
        division = divide(posterior, score, tau, epoch, config)
        if homes is not None:
            division = with_new_images(division, *homes, split)
        state.divisions[k] = division
        state.figures[k] = (
            health(own, division, split, config)
            | new_image_figures(division, split, state.networks[k].words.num_embeddings)
            | {
                "mixture_low": float(components[0, 1]),
                "mixture_high": float(components[1, 1]),
                "tau": division.tau,
                "utilisation": division.utilisation,
                "target": target_utilisation(epoch, config),
                "pcs_mean": float(pcs.mean()),
                **distributions(judge.losses, pcs, components, split.image_of != split.true_image),
            }
        )
        told.append({"loss": own.losses, "posterior": posterior, "pcs": pcs, "subset": division.subset})
    return told


def with_new_images(division: Division, images: np.ndarray, certainty: np.ndarray, split: Split) -> Division:
    """Clean pairs keep their images: those that this network calls so, which may be more than both do."""
    clean = division.subset == CLEAN
    return dataclasses.replace(
        division,
        images=np.where(clean, split.image_of, images).astype(np.int32),
        certainty=np.where(clean, np.float32(1), certainty),
    )


def new_image_figures(division: Division, split: Split, words: int) -> dict[str, float]:
    """How certain new images are; where noise is known, how many are right, and what words they have in common."""
    figures: dict[str, float] = {}
    if division.images is None:
        return figures
    known = not np.array_equal(split.image_of, split.true_image)
    weights = word_weights(split, words) if known else None
    for name, code in (("refinable", REFINABLE), ("ambiguous", AMBIGUOUS)):
        if not len(pairs := division.pairs(code)):
            continue
        images = division.images[pairs]
        figures[f"{name}_certainty"] = float(division.certainty[pairs].mean())
        if known:
            figures[f"{name}_overlap"] = float(overlap(split, weights, images, pairs).mean())
            figures[f"{name}_right"] = float((images == split.true_image[pairs]).mean())
    return figures


def same_division(own: Division | None, pairs: int, moved: bool) -> Division:
    """Rank 0's, on every rank."""
    if distributed.size() == 1:
        return own
    own = own if distributed.rank() == 0 else Division(None, None, None, 0.0)
    kinds = {"posterior": np.float32, "subset": np.uint8}
    kinds |= {"images": np.int32, "certainty": np.float32} if moved else {}
    arrays = {name: distributed.array_from_first(getattr(own, name), (pairs,), kind) for name, kind in kinds.items()}
    tau, utilisation = distributed.from_first((own.tau, own.utilisation))
    return Division(tau=tau, utilisation=utilisation, **arrays)


def train_epoch(state: State, split: Split, epoch: int, config: Config, device) -> Iterator[None]:
    """One network's epoch from where it stands; yields where it can be saved, after each batch of the main loader."""
    k, network, optimizer = state.network, state.networks[state.network], state.optimizers[state.network]
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(epoch, config) * group["rate"]
    divided = epoch > 0 and config.method != "sgr"
    division = state.divisions[1 - k] if divided else None

    def rows(batch: int) -> slice:
        return distributed.part(batch, least_rows(config))

    def view(batch: Batch) -> Network | Shared:
        return distributed.shared(network, len(batch), least_rows(config))

    def loader(source: Split, subset: int, indices, **options) -> Iterator[Batch]:
        return batches(
            source, config.batch_size, seed_of(config, ORDER, k, subset), state.epoch, indices,
            state.step, device=device, workers=config.workers, rows=rows, **options,
        )  # fmt: skip

    chosen, moved = division.pairs(CLEAN) if divided else None, split
    if divided and division.images is not None:
        # captions that have a new image are trained among the clean pairs
        chosen, moved = np.flatnonzero(division.subset != AMBIGUOUS), split.with_noise(division.images)
    main = loader(moved, CLEAN, chosen)
    total = count_batches(len(split) if chosen is None else len(chosen), config.batch_size)
    others = {}
    if divided:
        for name, subset in (("refinable", REFINABLE), ("ambiguous", AMBIGUOUS)):
            pairs = division.pairs(subset)
            among_clean = subset == REFINABLE and moves_captions(split, config)
            if name in stage_subsets(epoch, config) and not among_clean and len(pairs) >= 2:
                others[subset] = loader(split, subset, pairs, endless=True)
    if divided and state.banks[k] is None and not moves_captions(split, config):
        state.banks[k] = Bank.empty(config, device)
    bank = state.banks[k]
    if bank is not None and not state.step:
        bank.keep(division.subset == CLEAN)
    # where the noise is known, so is what a new caption has in common with the right ones
    known = bank is not None and not np.array_equal(split.image_of, split.true_image)
    weights = word_weights(split, network.words.num_embeddings) if known else None

    for batch in progress(main, total, f"train {NAMES[k]}", state.step):
        # a single pair left over has no negative
        if len(batch) >= 2 and not divided:
            run_step(
                state, "all", config, plain_loss, view(batch), batch, "mean" if epoch < 1 else "hardest", epoch, config
            )
        elif len(batch) >= 2:
            run_step(state, "clean", config, clean_loss, view(batch), batch, division, bank, epoch, config)
            for subset, source in others.items():
                other = next(source)
                # a clean step that was not finite leaves nothing to match with
                if len(other) < 2 or (subset == REFINABLE and not bank.filled):
                    continue
                loss = refinable_loss if subset == REFINABLE else ambiguous_loss
                run_step(state, SUBSETS[subset], config, loss, view(other), other, split, bank, weights, epoch, config)
        state.step = batch.position
        yield


def run_step(state: State, subset: str, config: Config, loss: Callable[..., dict[str, Tensor]], *args) -> None:
    """Forward, backward, clip and Adam; a step whose loss or gradient is not finite changes nothing but its count.

    Nothing is copied to the host: the optimiser skips by a flag on the device.
    """
    network, optimizer = state.networks[state.network], state.optimizers[state.network]
    network.train()
    # dropout follows from the place in the schedule
    place = (state.epoch, state.network, state.step, ("all", *SUBSETS).index(subset))
    # and, where ranks share a batch, from the rank
    shared = any(isinstance(x, Shared) for x in args)
    torch.manual_seed(seed_of(config, STEP, *place, *([distributed.rank()] if shared else [])))
    kept = [x.clone() for x in network.buffers()]
    optimizer.zero_grad(set_to_none=True)
    device = next(network.parameters()).device
    parts: dict[str, Tensor] = {}
    failed = False
    try:
        with torch.autocast("cuda", torch.bfloat16, enabled=config.precision == "bf16" and device.type == "cuda"):
            parts = loss(*args)
        parts["loss"].backward()
    except RuntimeError as error:
        # on the CPU the ops look at what they are given, and say so
        if "NaN" not in str(error):
            raise
        failed = True
    if device.type == "cpu" and distributed.agreed(failed):
        norm, bad = torch.tensor(torch.nan, device=device), torch.ones((), device=device)
    else:
        distributed.sum_gradients(network, shared)
        norm = clip_gradients(network, config, parts.get("weight"))
        bad = (~norm.isfinite()).float()
        optimizer.found_inf = bad
        optimizer.step()
    for buffer, old in zip(network.buffers(), kept, strict=True):
        buffer.copy_(torch.where(bad.bool(), old, buffer))
    state.bad_streak = (bad if state.bad_streak is None else state.bad_streak + bad) * bad
    sums = state.sums.setdefault(f"{NAMES[state.network]}_{subset}", {})
    parts |= {"gradient_norm": norm, "steps": 1 - bad, "bad_steps": bad}
    for name, value in parts.items():
        value = value.detach().float()
        value = value if name == "bad_steps" else torch.where(bad.bool(), 0, value)
        sums[name] = sums[name] + value if name in sums else value.clone()


def clip_gradients(network: Network, config: Config, weight: Tensor | None) -> Tensor:
    """Norm of the gradient, which is then clipped; the limit shrinks with the mean weight of the batch's pairs.

    Nearly every step is clipped, so a weight inside the loss would change nothing but the direction. A classifier that
    is trained apart is clipped apart, or its norm would slow the rest.
    """
    head, rest = parameters(network)
    groups = [head + rest] if config.classifier_gradient else [rest, head]
    # of parameters without a gradient the norm would be a zero on the host
    groups = [known for group in groups if (known := [x for x in group if x.grad is not None])]
    norms = [torch.nn.utils.clip_grad_norm_(group, config.clip) for group in groups]
    if weight is not None:
        for x in groups[0]:
            x.grad.mul_(weight.detach())
    return torch.stack(norms).max()


# the losses of a step; "loss" is differentiated, the rest is logged


def encode_batch(network: Network, batch: Batch) -> tuple[Images, Captions]:
    return network.encode_images(batch.features), network.encode_captions(batch.tokens, batch.offsets)


def contrast(network, images, captions, margin, mode, image_ids, caption_ids, epoch, config, weight=None) -> Tensor:
    """Triplet loss of a batch, in groups of fewer pairs while the ramp of negatives lasts."""
    if not config.mask_duplicates:
        image_ids = caption_ids = None
    if isinstance(network, Shared):
        return shared_contrast(network, images, captions, margin, mode, image_ids, caption_ids, epoch, config, weight)
    if mode == "mean":
        return network.similarity.mean_loss(images, captions, margin, image_ids, caption_ids)
    size, group = len(images.whole), negatives(epoch, config)
    if group >= size:
        return triplet(network.similarity(images, captions), margin, mode, image_ids, caption_ids, weight)
    total = 0.0
    for start in range(0, size, group):
        rows = slice(start, min(start + group, size))
        offsets = captions.offsets[start : rows.stop + 1]
        some = Captions(captions.words[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0], captions.whole[rows])
        own = (None if x is None else x[rows] for x in (image_ids, caption_ids, weight))
        part = margin[rows] if isinstance(margin, Tensor) else margin
        total = total + triplet(network.similarity(Images(*(x[rows] for x in images)), some), part, mode, *own)
    return total


def shared_contrast(network, images, captions, margin, mode, image_ids, caption_ids, epoch, config, weight) -> Tensor:
    """The same where ranks share the batch: images and captions are this rank's, the rest is of all."""
    own = (margin, image_ids, caption_ids, weight)
    if config.negatives == "local":
        margin, *ids, weight = (x[network.rows] if isinstance(x, Tensor) else x for x in own)
        return network.sum(
            lambda: contrast(network.network, images, captions, margin, mode, *ids, epoch, config, weight),
            captions.whole,
        )
    scores = network.similarity(images, captions)
    group = len(scores) if mode == "mean" else negatives(epoch, config)
    total = 0.0
    for start in range(0, len(scores), group):
        rows = slice(start, start + group)
        part, *ids = (x[rows] if isinstance(x, Tensor) else x for x in own)
        total = total + triplet(scores[rows, rows], part, mode, *ids)
    return total


def plain_loss(network: Network, batch: Batch, mode: str, epoch: int, config: Config) -> dict[str, Tensor]:
    """All pairs alike: warm-up (mean of negatives) and the baseline sgr (hardest negatives)."""
    images, captions = encode_batch(network, batch)
    loss = contrast(network, images, captions, config.alpha, mode, batch.images, batch.pairs, epoch, config)
    return {"loss": loss, "triplet": loss / len(batch)}


def clean_loss(
    network: Network, batch: Batch, division: Division, bank: Bank | None, epoch: int, config: Config
) -> dict[str, Tensor]:
    """Of clean pairs, and of captions with a new image, which count as much as it is certain."""

    def of_batch(values: np.ndarray) -> Tensor:  # [N] -> [B]
        return torch.from_numpy(values[batch.pairs.cpu().numpy()]).to(batch.pairs.device)

    if bank is not None:
        bank.forget(config)
    images, captions = encode_batch(network, batch)
    classified = config.method == "pcsr"
    p, q = (network.image_logits(images), network.caption_logits(captions)) if classified else (None, None)
    y: Tensor | None = None
    if config.clean_margin == "posterior":
        y = of_batch(division.posterior)
    elif config.clean_margin == "agreement" and classified:
        y = likeness_of(p, q, config)
    weight = None
    if division.certainty is not None:
        certainty = of_batch(division.certainty)
        y = certainty if y is None else torch.where(of_batch(division.subset) == CLEAN, y, certainty)
        weight = noisy_weight(certainty, config)
    margin = config.alpha if y is None else adaptive_margin(y, config.alpha, config.margin_base)
    loss = contrast(network, images, captions, margin, "hardest", batch.images, batch.pairs, epoch, config, weight)
    parts = {"triplet": loss / len(batch)}
    loss = config.lambda_triplet * loss
    if classified:
        found = pseudo_agreement(network, p, q, 0.0)
        # as printed, the image's prediction alone follows the caption's label
        parts["ce"] = (found.image_loss + found.text_loss if config.both_sides else found.image_loss).mean()
        parts["entropy"] = mean_entropy(found, config)
        loss = loss + config.lambda_ce * parts["ce"] - config.lambda_entropy * parts["entropy"]
        if bank is not None:
            bank.put(p, q, batch.pairs, config)
    return {"loss": loss} | parts


def refinable_loss(
    network: Network, batch: Batch, split: Split, bank: Bank, weights: np.ndarray | None, epoch: int, config: Config
) -> dict[str, Tensor]:
    """Images keep, captions change: each image trains with the caption of the clean image that is most like it."""
    images = network.encode_images(batch.features)
    pairs, likeness = bank.match(network.image_logits(images), config)
    # which captions to read is the one thing the host must know
    tokens, offsets = (x.to(batch.pairs.device) for x in captions_of(split, pairs.cpu().numpy()))
    captions = network.encode_captions(tokens, offsets)
    margin = adaptive_margin(likeness, config.alpha, config.margin_base)
    loss = contrast(
        network, images, captions, margin, "hardest", batch.images, pairs, epoch, config, noisy_weight(likeness, config)
    )
    parts = {"loss": loss, "triplet": loss / len(batch), "likeness": likeness.mean(), "margin": margin.mean()}
    return parts | step_weight(likeness, config) | mean_overlap(split, weights, batch.images, pairs)


def ambiguous_loss(
    network: Network,
    batch: Batch,
    split: Split,
    bank: Bank | None,
    weights: np.ndarray | None,
    epoch: int,
    config: Config,
) -> dict[str, Tensor]:
    images, captions = encode_batch(network, batch)
    p, q = network.image_logits(images), network.caption_logits(captions)
    likeness = likeness_of(p, q, config)
    margin = adaptive_margin(likeness, config.alpha, config.margin_base)
    loss = contrast(
        network, images, captions, margin, "hardest", batch.images, batch.pairs, epoch, config,
        noisy_weight(likeness, config),
    )  # fmt: skip
    found = pseudo_agreement(network, p, q, config.gamma)
    parts = {
        "triplet": loss / len(batch),
        "gce": (found.image_loss + found.text_loss).mean(),
        "entropy": mean_entropy(found, config),
        "likeness": likeness.mean(),
        "margin": margin.mean(),
    }
    loss = config.lambda_triplet * loss + config.lambda_gce * parts["gce"] - config.lambda_entropy * parts["entropy"]
    # what they would get if they were refined
    compared = {}
    if weights is not None and bank is not None and bank.filled:
        compared = mean_overlap(split, weights, batch.images, bank.match(p, config)[0])
    return {"loss": loss} | parts | step_weight(likeness, config) | compared


def mean_overlap(split: Split, weights: np.ndarray | None, images: Tensor, pairs: Tensor) -> dict[str, Tensor]:
    """Of captions that images are matched with, with the images' own; nothing where the noise is not known."""
    if weights is None:
        return {}
    found = overlap(split, weights, images.cpu().numpy(), pairs.cpu().numpy())
    return {"overlap": torch.tensor(found.mean(), device=pairs.device)}


def pseudo_agreement(network: Network, p: Tensor, q: Tensor, gamma: float) -> Agreement:  # [B, K]
    """As agreement, but each side's labels are those that its Balance assigns."""
    balance = network.classifier
    found = agreement(p, balance.caption_balance(q), gamma)
    if balance.image_balance.assignment == "argmax":
        return found
    other = agreement(balance.image_balance(p), q, gamma)
    return found._replace(text_loss=other.text_loss, text_mean=other.text_mean)


def mean_entropy(found: Agreement, config: Config) -> Tensor:
    """Entropy of the mean prediction: of images, and with both_sides of captions, too."""
    return entropy(found.image_mean) + (entropy(found.text_mean) if config.both_sides else 0.0)


def noisy_weight(likeness: Tensor, config: Config) -> Tensor | None:  # [B]
    """How much a pair that is not clean counts in the triplet."""
    return likeness if config.noisy_weight == "likeness" else None


def step_weight(likeness: Tensor, config: Config) -> dict[str, Tensor]:
    """How much a step on such pairs counts beside a clean one; nothing: as much."""
    return {"weight": likeness.mean()} if config.noisy_weight == "likeness" else {}


# building, saving and restoring


def new_state(config: Config, split: Split, words: int, device) -> State:
    networks = []
    for k in range(len(NAMES)):
        torch.manual_seed(seed_of(config, INIT, k))
        network = Network(config, split.regions, split.width, words).to(device)
        if config.compile:
            network.encode_images = torch.compile(network.encode_images)
            network.encode_captions = torch.compile(network.encode_captions)
        networks.append(network)
    # a count never exceeds the number of epochs
    kind = torch.uint8 if config.epochs < 256 else torch.int16
    # rank 0 counts for all
    images = split.images if distributed.rank() == 0 else 0
    tallies = [TallyState.zeros(images, config.classes, kind) for _ in NAMES]
    return State(networks, [new_optimizer(n, config) for n in networks], tallies, [None, None])


def new_optimizer(network: Network, config: Config) -> torch.optim.Adam:
    head, rest = parameters(network)
    groups = [{"params": rest, "rate": 1.0}, {"params": head, "rate": config.classifier_rate}]
    return torch.optim.Adam(groups, lr=config.learning_rate, fused=True)


def parameters(network: Network) -> tuple[list[Tensor], list[Tensor]]:
    """Those of the pseudo-classifier, and the rest."""
    head = [*network.classifier.parameters()]
    return head, [x for name, x in network.named_parameters() if not name.startswith("classifier.")]


def weights(state: State, config: Config, identity: dict, record: dict) -> dict:
    """What evaluation needs: both networks, and what they were trained with."""
    return {
        "networks": [n.state_dict() for n in state.networks],
        "config": dataclasses.asdict(config),
        "data": identity,
        "record": record,
        "versions": {"pcsr_fast": version("pcsr_fast"), "torch": str(torch.__version__)},
    }


def pack(state: State, config: Config, identity: dict, records: list[dict]) -> dict:
    divisions = [
        d and {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in vars(d).items()}
        for d in state.divisions
    ]
    plain = ("epoch", "phase", "network", "step", "observations", "sums", "figures", "best", "best_epoch", "bad_streak")
    return weights(state, config, identity, {}) | {
        "optimizers": [o.state_dict() for o in state.optimizers],
        "tallies": [list(t) for t in state.tallies],
        "divisions": divisions,
        "banks": [bank and dict(vars(bank)) for bank in state.banks],
        "records": records,
        **{name: getattr(state, name) for name in plain},
    }


# settings that warm-up depends on
WARMUP = {
    *("seed", "embedding", "similarity", "reasoning_steps", "word_embedding", "dropout", "alpha", "mask_duplicates"),
    *("warmup_epochs", "warmup_steps", "batch_size", "learning_rate", "clip", "precision", "compile"),
}
# settings that change nothing, or, as the device, rounding alone; compiled dropout draws other numbers
FREE = {
    *("device", "workers", "log_every", "checkpoint_minutes", "evaluation_batch", "stop_after_bad_steps"),
    "wait_minutes",
}


def restore(state: State, saved: dict, config: Config, identity: dict, path: Path) -> list[dict]:
    """Fills the state, and returns the records of earlier epochs."""
    if "optimizers" not in saved:
        raise ValueError(f"{path} holds weights alone: they can be evaluated, but training cannot go on from them")
    check_same(saved, config, identity, path, {field.name for field in dataclasses.fields(Config)} - FREE)
    for network, found in zip(state.networks, saved["networks"], strict=True):
        network.load_state_dict(found)
    for optimizer, found in zip(state.optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(found)
    for tally, found in zip(state.tallies, saved["tallies"], strict=True) if distributed.rank() == 0 else ():
        for tensor, value in zip(tally, found, strict=True):
            tensor.copy_(value)
    device = next(state.networks[0].parameters()).device
    state.divisions = [
        d and Division(**{name: x.numpy() if isinstance(x, Tensor) else x for name, x in d.items()})
        for d in saved["divisions"]
    ]
    for k, found in enumerate(saved["banks"]):
        state.banks[k] = found and Bank(**{n: x.to(device) if isinstance(x, Tensor) else x for n, x in found.items()})
    for name in ("epoch", "phase", "network", "step", "observations", "figures", "best", "best_epoch"):
        setattr(state, name, saved[name])
    state.sums = {group: {k: v.to(device) for k, v in parts.items()} for group, parts in saved["sums"].items()}
    state.bad_streak = None if saved["bad_streak"] is None else saved["bad_streak"].to(device)
    return saved["records"]


def take_warmup(state: State, run: Path, config: Config, identity: dict, warmup: int) -> list[dict]:
    """Weights at the end of another run's warm-up, and its records. The classifier has not been trained by then."""
    path = run / "last.pt"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: train with epochs=0 first, which is warm-up alone")
    saved = checkpoint.load(path)
    check_same(saved, config, identity, path, WARMUP)
    if (saved["epoch"], saved["phase"]) != (warmup, "divide"):
        raise ValueError(f"{path} stands in epoch {saved['epoch'] + 1}, not at the end of {warmup} epochs of warm-up")
    for network, found in zip(state.networks, saved["networks"], strict=True):
        own = {name: value for name, value in network.state_dict().items() if name.startswith("classifier")}
        network.load_state_dict({k: v for k, v in found.items() if not k.startswith("classifier")} | own)
    state.epoch, state.best, state.best_epoch = saved["epoch"], saved["best"], saved["best_epoch"]
    return saved["records"]


def check_same(saved: dict, config: Config, identity: dict, path: Path, settings: set[str]) -> None:
    """Raises if a checkpoint differs in any of these settings, or in its data."""
    now = dataclasses.asdict(config)
    changed = differences(*({k: _plain(v) for k, v in c.items() if k in settings} for c in (saved["config"], now)))
    for name in ("train", "dev"):
        changed += [f"{name} data, {line}" for line in differences(saved["data"][name], identity[name])]
    if saved["data"]["words"] != identity["words"]:
        changed.append(f"words in the vocabulary: {saved['data']['words']} -> {identity['words']}")
    if changed:
        raise ValueError(f"{path} was made with other settings or data: " + "; ".join(changed))


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


# what is reported


def check_steps(state: State, config: Config, last: Path, now: bool = False) -> None:
    """Every log_every steps, and now: one look at the device."""
    if (state.step % config.log_every and not now) or state.bad_streak is None:
        return
    if (streak := int(state.bad_streak)) >= config.stop_after_bad_steps:
        saved = f"the last good state is in {last}" if last.exists() else "nothing was saved before"
        raise TrainingError(
            f"loss or gradient was not finite in {streak} steps in a row (epoch {state.epoch + 1}, network "
            f"{NAMES[state.network]}); {saved}; lower learning_rate, or look for NaN in the features"
        )


def means(sums: dict[str, dict[str, Tensor]]) -> dict[str, float]:
    """Means over the steps, and their counts."""
    found = {}
    for group, parts in sums.items():
        # one copy from the device for each group
        values = dict(zip(parts, torch.stack([*parts.values()]).tolist(), strict=True))
        for name, value in values.items():
            counted = name in ("steps", "bad_steps")
            found[f"{group}_{name}"] = int(value) if counted else value / max(values["steps"], 1)
    return found


def pairs_per_second(sums: dict[str, dict[str, Tensor]], started: float, config: Config) -> float:
    """Of training and division together, since the epoch began or was resumed."""
    steps = sum(float(parts["steps"]) for parts in sums.values())
    return steps * config.batch_size / (time.monotonic() - started)


def epoch_line(record: dict, epochs: int, state: State) -> str:
    sizes = ""
    if "A_clean_pairs" in record:
        parts = (f"{record[f'A_{name}_pairs']} {name}" for name in ("clean", "refinable", "ambiguous"))
        sizes = f", {', '.join(parts)}"
    return (
        f"epoch {record['epoch']}/{epochs} ({record['stage']}): dev rsum {record['rsum']:.1f}"
        f" (best {state.best:.1f} in epoch {state.best_epoch}){sizes}, {record['seconds']:.0f} s"
        + (f", about {left:.0f} min left" if (left := (epochs - record["epoch"]) * record["seconds"] / 60) >= 1 else "")
    )


def warnings_of(record: dict, config: Config) -> list[str]:
    """Degenerate training, by name."""
    found = []
    for name in NAMES:
        if record.get(f"{name}_classes_in_use") == 1:
            found.append(f"network {name} gives every image the same pseudo-label")
        if record.get(f"{name}_clean_pairs", 2) < 2:
            found.append(f"network {name} finds no clean pairs")
        if abs(record.get(f"{name}_mixture_high", 1.0) - record.get(f"{name}_mixture_low", 0.0)) < 0.02:
            found.append(
                f"network {name}: both components of the mixture have the same mean; losses do not tell pairs apart"
            )
        loss = record.get(f"{name}_{'all' if config.method == 'sgr' else 'clean'}_triplet", 0.0)
        if record["stage"] != "warm-up" and abs(loss - 2 * config.alpha) < 0.04 * config.alpha:
            found.append(f"network {name}: the triplet loss stands at twice alpha: scores have collapsed to one value")
        if skipped := sum(v for key, v in record.items() if key.startswith(name) and key.endswith("_bad_steps")):
            found.append(f"network {name}: {skipped} steps were not finite and were skipped")
    return found


def memory(device: torch.device) -> dict[str, float]:
    if device.type == "cuda":
        return {"memory_gb": torch.cuda.max_memory_allocated(device) / 1e9}
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return {"memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e9}


def write_records(path: Path, records: list[dict]) -> None:
    """All records again: after a resume, epochs that were lost are gone from the log too."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
    temporary.replace(path)


def progress(iterable, total: int, what: str, done: int = 0, unit: str = "batch"):
    quiet = None if distributed.rank() == 0 else True
    return tqdm(iterable, what, total, initial=done, leave=False, disable=quiet, unit=unit)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM wait for the end of a step, where the run can be saved; a second one does not."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handle(number, frame):
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
