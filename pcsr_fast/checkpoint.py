"""Checkpoints: written under a temporary name, synced and renamed; a crash leaves the old one or the new one."""

import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from pcsr_fast.data.split import Split


def save(state: dict, path: Path) -> None:
    """Tensors, numbers, strings, lists and dicts; nothing else, so that loading runs no code."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # torch reports a full disk as a RuntimeError
        if not isinstance(error, OSError | RuntimeError):
            raise
        kept = "the checkpoint before is intact" if path.exists() else "there is no earlier checkpoint"
        raise OSError(f"{path}: cannot write the checkpoint ({error}); {kept}; free space and resume") from error


def sweep(folder: Path) -> None:
    """Removes what a run that was killed while it saved has left behind."""
    for temporary in folder.glob(".*.pt.*"):
        temporary.unlink(missing_ok=True)


def load(path: Path, mapped: bool = False) -> dict:
    """Reads and checks all of it; mapped: tensors stay in the file until they are used, unchecked."""
    try:
        # torch does not look at the checksums of its own archive
        with zipfile.ZipFile(path) as archive:
            if not mapped and (damaged := archive.testzip()):
                raise ValueError(f"{damaged} is damaged")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    # a damaged file raises anything from EOFError to KeyError
    except Exception as error:
        raise ValueError(f"{path}: cannot read the checkpoint, copy it again or start anew: {error}") from error


def fingerprint(split: Split) -> dict[str, int | str]:
    """What must be the same for a run to go on."""
    return {
        "name": split.name,
        "images": split.images,
        "pairs": len(split),
        "regions": split.regions,
        "width": split.width,
        "captions": _checksum(split.tokens) ^ _checksum(split.offsets),
        "noise": _checksum(split.image_of),
    }


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data)
