"""Files that are whole: .npy whose size is what the header says, and writing all or nothing."""

import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np


def open_npy(path: Path) -> np.ndarray:
    """A read-only memory map of a .npy file, once its header and size were found to agree."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, fortran, dtype = read(file)
            start = file.tell()
    except OSError:
        raise
    # the header is Python source: a broken one raises anything from KeyError to TokenError
    except Exception as error:
        raise ValueError(f"{path} ({size} bytes) is not a .npy file: {error}") from None
    if dtype.hasobject:
        raise ValueError(f"{path} has pickled objects, {dtype.str} {list(shape)}; expected numbers")
    expected = start + math.prod(shape) * dtype.itemsize
    if size != expected:
        raise ValueError(
            f"{path} has {size} bytes, but its header, {dtype.name} {list(shape)}, asks for {expected}; copy it again"
        )
    # nothing cannot be mapped
    return (
        np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C") if size > start else np.empty(shape, dtype)
    )


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file beside its place and moves it there at the end: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        # mkstemp lets the owner alone read it
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
