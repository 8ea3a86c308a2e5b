"""Every choice of a training run in one flat record, checked when it is made, read from and written to TOML or JSON."""

import dataclasses
import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

SUBSETS = ("clean", "refinable", "ambiguous")
# the method as the paper prints it, where our defaults differ
PRINTED = dict(
    classifier_input="regions", classifier_gradient=True, classifier_norm=False, classifier_rate=1.0,
    assignment="argmax", both_sides=False, likeness_temperature=1.0, noisy_weight="one", evidence="loss",
    siblings=False, judges="other", belief_memory=0.0, doubt=0.0, refinable_by="consistency", threshold="controller",
    tally_from=1, rematch="caption", rematch_scope="batch", rematch_by="images", negatives_ramp=False,
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Settings of a run; sizes and schedule are the paper's on Flickr30K, and PRINTED says where the method differs."""

    # method: pcsr; clean: the division, and clean pairs alone; sgr: all pairs, no division
    method: Literal["pcsr", "clean", "sgr"] = "pcsr"
    seed: int = 0
    paper: bool = False  # as printed: sets everything in PRINTED

    # network
    embedding: int = 1024  # D
    similarity: int = 256  # S
    reasoning_steps: int = 3
    word_embedding: int = 300
    dropout: float = 0.4
    classes: int = 256  # K, pseudo-classes
    classifier_hidden: int = 256
    # what the pseudo-classifier sees: every region or word, their mean taken behind its first layer; all in their
    # slots, as printed; or the global vector
    classifier_input: Literal["set", "regions", "pooled"] = "set"
    classifier_gradient: bool = False  # its losses train the encoders, too
    classifier_norm: bool = True  # its hidden vectors standardised, each modality by itself

    # losses
    alpha: float = 0.2  # largest margin
    margin_base: float = 10.0  # m0
    gamma: float = 0.7  # of gce
    lambda_triplet: float = 1.0
    lambda_ce: float = 1.0
    lambda_gce: float = 1.0
    lambda_entropy: float = 10.0
    assignment: Literal["argmax", "centred", "balanced"] = "centred"  # of pseudo-labels that are trained on
    assignment_queue: int = 1024  # recent predictions that balanced looks at
    both_sides: bool = True  # cross entropy and entropy of captions' predictions too, not of images' alone
    likeness_temperature: float = 0.5  # of the softmax in S_p; below 1 predictions differ more
    noisy_weight: Literal["one", "likeness"] = (
        "likeness"  # of a refinable or ambiguous pair's triplet: y, as its margin
    )
    clean_margin: Literal["one", "posterior", "agreement"] = "one"
    mask_duplicates: bool = True

    # division
    evidence: Literal["loss", "both"] = "both"  # of the mixture: the loss; or S_p too, once the classifier was trained
    siblings: bool = True  # words that an image's captions share are evidence that they are clean
    judges: Literal["other", "both"] = "both"  # who says which pairs a network trains on: the other one, as printed
    belief_memory: float = 0.5  # how much the belief of the epoch before counts in that of this one; 0 as printed
    # of pairs believed clean, how many are held back: this many times those that the mixture expects to be noisy
    doubt: float = 5.0
    subsets: tuple[str, ...] = SUBSETS  # ablation: which are trained on
    noisy_treatment: Literal["split", "refinable", "ambiguous"] = "split"  # ablation: one treatment for all noisy pairs
    # of what is refinable: follows the target step by step, as printed, or meets it in every epoch
    threshold: Literal["controller", "quantile"] = "quantile"
    pcs: Literal["share", "counts"] = "share"  # divided by the number of observations, or as printed
    refinable_by: Literal["consistency", "match", "both"] = "match"  # PCS, as printed; the match's S_p; their mean
    tally_from: int = 2  # epoch after warm-up from which labels count: before it, the classifier knows nothing
    target_start: float = 0.4  # of lambda_target, rising to target_end over target_epochs
    target_end: float = 0.9
    target_epochs: int = 50
    controller_gain: float = 0.2  # k
    controller_rate: float = 0.7  # beta
    evaluation_negatives: int = 0  # each pair's negatives in the evaluation pass; 0: the whole batch
    # what a refinable pair gets: the caption of a clean pair, as printed; or, where images have several captions, the
    # image that its caption fits best: then it is trained among the clean pairs
    rematch: Literal["caption", "image"] = "image"
    rematch_scope: Literal["batch", "bank"] = "bank"  # of captions
    bank_size: int = 4096
    rematch_by: Literal["images", "both"] = "both"  # S_p of both images; times that of the image and the new caption

    # schedule
    warmup_epochs: int = 5
    warmup_steps: int = 1500  # warm-up lasts at least this many
    epochs: int = 50  # after warm-up
    refinable_from: int = 26  # first epoch of the stage, counted after warm-up
    ambiguous_from: int = 41
    # among the whole batch, or, with many ranks, among each rank's part of it
    negatives: Literal["global", "local"] = "global"
    negatives_ramp: bool = True  # hardest negatives among 8, 16, 32, ... pairs in the first epochs
    batch_size: int = 128  # of all ranks together
    learning_rate: float = 2e-4
    classifier_rate: float = 5.0  # learning rate of the pseudo-classifier, in those of the rest
    decay_every: int = 30
    decay: float = 0.1
    clip: float = 2.0

    # running
    device: str = "auto"
    precision: Literal["float32", "bf16"] = "float32"  # bf16: autocast on CUDA
    compile: bool = False  # torch.compile of the encoders
    workers: int = 1
    log_every: int = 50  # steps between lines of progress and checks for non-finite losses
    checkpoint_minutes: float = 10.0
    evaluation_batch: int = 256  # images or captions encoded at a time
    stop_after_bad_steps: int = 20  # non-finite in a row
    wait_minutes: float = 30.0  # longest wait for another rank

    def __post_init__(self):
        if self.paper is True:
            for name, value in PRINTED.items():
                object.__setattr__(self, name, value)
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name)))
        unknown = set(self.subsets) - set(SUBSETS)
        self._require(not unknown and "clean" in self.subsets, "subsets", f"a choice of {SUBSETS} with clean")
        for name in (
            *("embedding", "similarity", "reasoning_steps", "word_embedding", "classes", "classifier_hidden"),
            *(
                "assignment_queue",
                "bank_size",
                "epochs",
                "warmup_epochs",
                "tally_from",
                "refinable_from",
                "ambiguous_from",
            ),
            *("target_epochs", "decay_every", "log_every", "evaluation_batch", "stop_after_bad_steps"),
        ):
            least = 0 if name in ("epochs", "warmup_epochs") else 1
            self._require(getattr(self, name) >= least, name, f"at least {least}")
        self._require(self.batch_size >= 2, "batch_size", "at least 2: a pair needs a negative")
        self._require(0 <= self.dropout < 1, "dropout", "in [0, 1)")
        self._require(0 < self.gamma <= 1, "gamma", "in (0, 1]")
        self._require(self.margin_base > 1, "margin_base", "above 1")
        self._require(0 < self.controller_rate <= 1, "controller_rate", "in (0, 1]")
        self._require(0 <= self.target_start <= self.target_end <= 1, "target_start", "in [0, target_end <= 1]")
        for name in ("alpha", "learning_rate", "classifier_rate", "clip", "decay", "likeness_temperature"):
            self._require(getattr(self, name) > 0, name, "above 0")
        self._require(self.wait_minutes > 0, "wait_minutes", "above 0")
        self._require(0 <= self.belief_memory < 1, "belief_memory", "in [0, 1)")
        for name in ("evaluation_negatives", "warmup_steps", "doubt", "workers", "seed", "checkpoint_minutes"):
            self._require(getattr(self, name) >= 0, name, "at least 0")
        self._require(self.evaluation_negatives < self.batch_size, "evaluation_negatives", "below batch_size")
        enough = self.rematch_scope == "batch" or self.bank_size >= self.batch_size
        self._require(enough, "bank_size", "at least batch_size")

    def _require(self, condition: bool, name: str, rule: str) -> None:
        if not condition:
            raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)


def load(path: Path | str, **changes) -> Config:
    """The configuration in a TOML or JSON file, with changes."""
    found = read(path)
    try:
        return from_dict(found | changes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read(path: Path | str) -> dict:
    """Names and values in a TOML or JSON file."""
    path = Path(path)
    try:
        text = path.read_text()
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected names and values, got {found!r}")
    return found


def from_dict(values: dict) -> Config:
    known = {field.name for field in dataclasses.fields(Config)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"no setting is called {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return Config(**values)


def differences(old: dict, new: dict) -> list[str]:
    """One line for each setting that differs."""
    names = sorted(set(old) | set(new))
    return [f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in names if old.get(name) != new.get(name)]


def _checked(field: dataclasses.Field, value):
    """The value in the type of its field, or an error that names both."""
    kind = field.type
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{field.name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
            raise ValueError(f"{field.name} must be a list of names, got {value!r}")
        return tuple(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{field.name} must be {kind.__name__}, got {value!r}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{field.name} must be finite, got {value!r}")
    return value
