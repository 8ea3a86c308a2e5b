"""pcsr_fast: training of image-text retrieval on noisy pairs, fast and tested.

Names are loaded when first used, so that importing the package does not import torch.
"""

from importlib import import_module
from importlib.metadata import version

_HOME = {
    **dict.fromkeys(
        (
            *("SgrWeights", "sgr", "sgr_mean"),
            *("TallyState", "tally"),
            *("triplet", "triplet_pairs", "adaptive_margin"),
            *("Agreement", "agreement", "gce", "entropy", "label_similarity"),
        ),
        "pcsr_fast.ops",
    ),
    "build_info": "pcsr_fast.backend",
    "use_backend": "pcsr_fast.backend",
}
__all__ = [*_HOME]
__version__ = version("pcsr_fast")


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'pcsr_fast' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
