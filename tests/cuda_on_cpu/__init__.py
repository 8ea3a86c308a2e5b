"""Builds .cu files for the CPU with the cuda_runtime.h beside this file, and runs Python under g++'s sanitizers."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Literal

Sanitizer = Literal["thread", "address"]

SHIM = Path(__file__).parent
CACHE = SHIM.parents[1] / ".pytest_cache" / "cuda_on_cpu"
# what a sanitizer's report makes a process return
REPORTED = 66

# two libraries in one process must not share the shared memory of their kernels: no unique symbols
FLAGS = ["-std=c++20", "-O1", "-g", "-fPIC", "-fno-gnu-unique", "-Wno-unknown-pragmas"]
SANITIZE_FLAGS = {
    None: [],
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,alignment", "-fno-sanitize-recover=alignment"],
}


def build(
    sources: Sequence[Path],
    *,
    include: Sequence[Path] = (),
    sanitize: Sanitizer | None = None,
    defines: dict[str, str | int] | None = None,
    flags: Sequence[str] = (),
) -> Path:
    """Compiles .cu and .cpp files into a shared library, or finds it in the cache; `flags` also reach the linker."""
    compile_flags = [*FLAGS, *SANITIZE_FLAGS[sanitize], f"-I{SHIM}", *(f"-I{folder}" for folder in include)]
    compile_flags += [*(f"-D{name}={value}" for name, value in (defines or {}).items()), *flags]
    CACHE.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(Path(source).resolve(), compile_flags), sources))
    library = CACHE / f"{_digest(_compiler(), *flags, *map(str, objects))}.so"
    if not library.exists():
        _produce(library, ["g++", "-shared", *SANITIZE_FLAGS[sanitize], *map(str, objects), *flags])
    return library


def sanitized_env(kind: Sanitizer) -> dict[str, str]:
    """The environment in which a Python process can load a library built with `sanitize=kind`."""
    runtime = {"thread": "libtsan.so", "address": "libasan.so"}[kind]
    # without libstdc++ from the start, the sanitizers do not find what they need to pass exceptions on
    preload = [_run(["g++", f"-print-file-name={name}"]).strip() for name in (runtime, "libstdc++.so")]
    return os.environ | {
        "LD_PRELOAD": ":".join(preload),
        "TSAN_OPTIONS": f"exitcode={REPORTED}:halt_on_error=1",
        "ASAN_OPTIONS": f"exitcode={REPORTED}:halt_on_error=1:detect_leaks=0",
        "UBSAN_OPTIONS": f"exitcode={REPORTED}:print_stacktrace=1",
        # torch and numpy are not instrumented: what their threads do to each other cannot be judged
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def run_sanitized(
    kind: Sanitizer, python_args: Sequence[str], *, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess:
    """Runs `python *python_args` under a sanitizer. A report is in `stderr` and makes the return code REPORTED."""
    command = [sys.executable, *python_args]
    if kind == "thread" and _random_address_bits() > 28:
        # g++ 12's libtsan finds its memory taken where the kernel spreads addresses further
        command = ["setarch", "-R", *command]
    return subprocess.run(
        command, env=sanitized_env(kind) | (env or {}), capture_output=True, text=True, timeout=timeout
    )


def _compile(source: Path, flags: list[str]) -> Path:
    """One object file per content of the source and of all headers that it included when last compiled."""
    stem = CACHE / _digest(_compiler(), str(source), *flags)
    headers = stem.with_suffix(".d")
    if headers.exists() and (known := _object(stem, headers)).exists():
        return known
    fresh = _temporary(stem.with_suffix(".o"))
    fresh_headers = _temporary(headers)
    _run(["g++", "-x", "c++", "-c", "-MD", "-MF", str(fresh_headers), *flags, str(source), "-o", str(fresh)])
    known = _object(stem, fresh_headers)
    # the object first: the list of headers promises it
    fresh.replace(known)
    fresh_headers.replace(headers)
    return known


def _object(stem: Path, headers: Path) -> Path:
    """The object file that belongs to the present contents of the files in a list of g++ -MD."""
    files = [Path(word) for word in headers.read_text().partition(":")[2].replace("\\\n", " ").split()]
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "gone" for file in files]
    return stem.with_name(f"{stem.name}-{_digest(*contents)}.o")


def _produce(target: Path, command: list[str]) -> None:
    """Runs a compiler that writes `target`; other processes see all of it or nothing."""
    fresh = _temporary(target)
    _run([*command, "-o", str(fresh)])
    fresh.replace(target)


def _temporary(target: Path) -> Path:
    return target.with_name(f"{target.name}.{os.getpid()}")


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout


@cache
def _compiler() -> str:
    return _run(["g++", "--version"])


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


def _random_address_bits() -> int:
    setting = Path("/proc/sys/vm/mmap_rnd_bits")
    return int(setting.read_text()) if setting.exists() else 0
