"""The ops, one module each; importing this registers them all."""

from pcsr_fast.ops.op import OPS, Op
from pcsr_fast.ops.tally import TallyState, tally

__all__ = ["OPS", "Op", "TallyState", "tally"]
