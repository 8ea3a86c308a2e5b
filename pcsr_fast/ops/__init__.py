"""The ops, one module each; importing this registers them all."""

from pcsr_fast.ops.gce import Agreement, agreement, entropy, gce, label_similarity
from pcsr_fast.ops.op import OPS, Op
from pcsr_fast.ops.sgr import SgrWeights, sgr
from pcsr_fast.ops.sgr_mean import sgr_mean
from pcsr_fast.ops.tally import TallyState, tally
from pcsr_fast.ops.triplet import adaptive_margin, triplet, triplet_pairs

__all__ = [
    "OPS",
    "Agreement",
    "Op",
    "SgrWeights",
    "TallyState",
    "adaptive_margin",
    "agreement",
    "entropy",
    "gce",
    "label_similarity",
    "sgr",
    "sgr_mean",
    "tally",
    "triplet",
    "triplet_pairs",
]
