"""Settings by the name of a data set: the paper's, and those of `make demo` for the sample set."""

from pathlib import Path

from pcsr_fast.config import Config, from_dict, read

PAPER = dict(
    embedding=1024, similarity=256, classes=256, batch_size=128, learning_rate=2e-4, decay_every=30,
    warmup_epochs=5, epochs=50, refinable_from=26, ambiguous_from=41, target_epochs=50,
)  # fmt: skip
PRESETS: dict[str, dict] = {
    "f30k": PAPER,
    "coco": PAPER,
    "cc152k": PAPER | {"warmup_epochs": 10},
    "now100k": PAPER,
    # small enough for two trainings while one waits
    "sample": dict(
        embedding=128, similarity=32, batch_size=32, learning_rate=5e-4, warmup_epochs=6, warmup_steps=0, epochs=4,
        refinable_from=2, ambiguous_from=3, target_start=0.9, target_epochs=4,
    ),
}  # fmt: skip


def settings(preset: str | None = None, file: Path | str | None = None, **changes) -> Config:
    """The configuration of a preset, changed by a TOML or JSON file, changed by names and values.

    >>> settings("cc152k", epochs=2).warmup_epochs
    10
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"no preset is called {preset!r}; there are {', '.join(PRESETS)}")
    found = PRESETS[preset] if preset else {}
    if file is None:
        return from_dict(found | changes)
    found = found | read(file)
    try:
        from_dict(found)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return from_dict(found | changes)
