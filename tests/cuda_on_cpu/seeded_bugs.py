"""Calls the kernels of seeded_bugs.cu, from a test or as a program: seeded_bugs.py library '[[kernel, bug], ...]'."""

import ctypes
import json
import sys
from pathlib import Path

import numpy as np


def floats(values) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def ints(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class Kernels:
    """The launchers of seeded_bugs.cu: each returns whether the result is right, and raises what the shim reports."""

    def __init__(self, library: Path | str):
        self.library = ctypes.CDLL(str(library))
        self.library.cushim_last_message.restype = ctypes.c_char_p
        self.library.error_string.restype = ctypes.c_char_p

    def call(self, name: str, *arguments) -> None:
        raw = [a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a for a in arguments]
        if error := getattr(self.library, name)(*raw):
            message = self.library.cushim_last_message().decode()
            assert self.library.error_string(error).decode() == message
            raise RuntimeError(message)

    def reverse_tile(self, bug: int = 0) -> bool:
        given, out = floats(range(1024)), floats(np.zeros(1024))
        self.call("run_reverse_tile", given, out, 4, 3, bug)
        return np.array_equal(out, given.reshape(4, 256)[:, ::-1].ravel())

    def rotate_warp(self, bug: int = 0) -> bool:
        given, out = floats(range(1024)), floats(np.zeros(1024))
        self.call("run_rotate_warp", given, out, 4, bug)
        return np.array_equal(out, np.roll(given.reshape(32, 32), -1, axis=1).ravel())

    def sum(self, bug: int = 0) -> bool:
        given, total = floats(range(1000)), floats([0])
        self.call("run_sum", given, total, given.size, bug)
        return total[0] == given.sum()

    def max_by_last_block(self, bug: int = 0) -> bool:
        given, partial, done, result = ints(range(1536))[::-1].copy(), ints([0] * 6), ints([0]), ints([0])
        self.call("run_max_by_last_block", given, partial, done, result, 6, bug)
        return result[0] == 1535

    def copy(self, bug: int = 0) -> bool:
        given, out = floats(range(500)), floats(np.zeros(500))
        self.call("run_copy", given, out, given.size, bug)
        return np.array_equal(out, given)

    def first_positive(self, bug: int = 0) -> bool:
        given, out = ints(np.zeros(64)), ints(np.zeros(64))
        given[[5, 12, 20, 40, 63]] = [5, 12, 20, 40, 63]
        self.call("run_first_positive", given, out, bug)
        return np.array_equal(out, np.repeat([5, 20, 40, 63], 16))


KERNELS = ["reverse_tile", "rotate_warp", "sum", "max_by_last_block", "copy", "first_positive"]


def main(library: str, cases: str) -> None:
    kernels = Kernels(library)
    for kernel, bug in json.loads(cases):
        try:
            print(getattr(kernels, kernel)(bug))
        except RuntimeError as error:
            print(str(error).split()[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
