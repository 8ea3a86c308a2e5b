"""pcsr_fast: training of image-text retrieval on noisy pairs, fast and tested.

Data, training and what comes after it: `Dataset`, `settings`, `fit`, `open_run`. The parts of the method, as the paper
names them: `sgr` (similarity), `triplet` with `adaptive_margin`, `gce`, `entropy`, `label_similarity` (S_p), `tally`.

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
    **dict.fromkeys(("build_info", "use_backend"), "pcsr_fast.backend"),
    **dict.fromkeys(("Run", "fit", "open_run"), "pcsr_fast.run"),
    "Config": "pcsr_fast.config",
    "Dataset": "pcsr_fast.data.dataset",
    "settings": "pcsr_fast.presets",
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
