"""Which implementation of an op runs, and why: the native library, what is available, and the user's choice.

`auto` takes the fastest implementation that is available and falls back to the reference; any other choice, by the
environment variable PCSR_BACKEND or by `use_backend`, runs or raises. `python -m pcsr_fast.backend` prints the table.
"""

import contextlib
import functools
import importlib.util
import os
import warnings
from pathlib import Path

import torch

NAMESPACES = {"native": "pcsr", "triton": "pcsr_triton"}
CHOICES = ("auto", "reference", *NAMESPACES)

_choice = os.environ.get("PCSR_BACKEND") or "auto"


def _load_library() -> str:
    """Loads the library of torch ops; returns why it could not, or nothing."""
    library = Path(__file__).with_name("_ops.so")
    if not library.exists():
        return "the package was not compiled (run: pip install .)"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"the native library does not load: {error}"
    return ""


_library_problem = _load_library()


def build_info() -> dict[str, str]:
    """How the package was compiled: compiler, instruction sets, CUDA version and architectures, torch version."""
    from pcsr_fast import _native

    return {**_native.build_info(), "cpu": _native.cpu_isa()}


def check_choice(choice: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"unknown backend {choice!r}; choose one of {', '.join(CHOICES)}")
    return choice


def set_backend(choice: str) -> None:
    """From now on every op runs with one backend, in all threads: auto, reference, native or triton."""
    global _choice
    _choice = check_choice(choice)


@contextlib.contextmanager
def use_backend(choice: str):
    """set_backend for the length of a with block."""
    before = _choice
    set_backend(choice)
    try:
        yield
    finally:
        set_backend(before)


def why_not(op: str, backend: str, device: str) -> str:
    """Why this backend cannot run the op on this type of device, or nothing if it can."""
    if backend != "reference" and (problem := _why_no_kernel(op, backend, device)):
        return problem
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    return ""


def _why_no_kernel(op: str, backend: str, device: str) -> str:
    if backend == "native" and _library_problem:
        return _library_problem
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    name = f"{NAMESPACES[backend]}::{op}"
    if not torch._C._dispatch_has_kernel(name):
        return f"{op} has no {backend} kernel"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, device.upper()):
        if backend == "native" and device == "cuda" and build_info()["cuda"] == "none":
            return "the package was compiled without CUDA"
        return f"{op} has no {backend} kernel for {device}"
    return ""


# two functions: torch.compile takes the result of the first as a constant, but looks inside cached ones
@torch.compiler.assume_constant_result
def choose(op: str, device: str, choice: str) -> str:
    """The backend that runs the op on this type of device; a fallback is reported once."""
    return _choose(op, device, choice)


@functools.cache
def _choose(op: str, device: str, choice: str) -> str:
    if choice != "auto":
        if problem := why_not(op, check_choice(choice), device):
            raise RuntimeError(f"backend {choice!r} cannot run {op} on {device}: {problem}")
        return choice
    problems = []
    for backend in ("triton", "native") if device == "cuda" else ("native",):
        if not (problem := why_not(op, backend, device)):
            return backend
        problems.append(problem)
    warnings.warn(f"{op} runs on the slow reference on {device}: {'; '.join(problems)}", stacklevel=2)
    return "reference"


def current_choice() -> str:
    return _choice


def main() -> None:
    from pcsr_fast.ops import OPS

    rows = [
        (op, backend, device, why_not(op, backend, device) or "available")
        for op in OPS
        for backend in ("reference", *NAMESPACES)
        for device in ("cpu", "cuda")
    ]
    print(f"{'op':10}{'backend':12}{'device':8}status")
    for op, backend, device, status in rows:
        print(f"{op:10}{backend:12}{device:8}{status}")
    if not _library_problem:
        print("\n" + "\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in build_info().items()))
    print(f"chosen: {check_choice(current_choice())}")


if __name__ == "__main__":
    main()
