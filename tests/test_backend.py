"""The choice of a backend: availability, explicit choices that raise, and the table for people."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from pcsr_fast import backend, build_info, use_backend
from pcsr_fast.ops import OPS


def run_python(tmp_path, *args, **env):
    """A fresh interpreter, away from the source tree."""
    return subprocess.run(
        [sys.executable, *args], cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, timeout=300
    )


def test_native_runs_by_default():
    assert all(backend.choose(op, "cpu", "auto") == "native" for op in OPS)


def test_explicit_choice_raises_with_the_reason():
    with pytest.raises(RuntimeError, match="'triton' cannot run tally on cpu: tally has no triton kernel"):
        backend.choose("tally", "cpu", "triton")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"cannot run tally on cuda: (no CUDA device|.*without CUDA)"):
            backend.choose("tally", "cuda", "native")


def test_unknown_choice():
    with pytest.raises(ValueError, match="unknown backend 'fast'; choose one of"), use_backend("fast"):
        pass


def test_use_backend_is_undone():
    before = backend.current_choice()
    with contextlib.suppress(KeyError), use_backend("reference"):
        assert backend.current_choice() == "reference"
        raise KeyError
    assert backend.current_choice() == before


def test_auto_falls_back_once_and_says_so(monkeypatch):
    monkeypatch.setattr(backend, "_library_problem", "the package was not compiled")
    backend._choose.cache_clear()
    with pytest.warns(UserWarning, match="tally runs on the slow reference on cpu: the package was not compiled"):
        assert backend.choose("tally", "cpu", "auto") == "reference"
    assert backend.choose("tally", "cpu", "auto") == "reference"
    with pytest.raises(RuntimeError, match="not compiled"):
        backend.choose("tally", "cpu", "native")
    monkeypatch.undo()
    backend._choose.cache_clear()


def test_table(tmp_path):
    done = run_python(tmp_path, "-W", "error", "-m", "pcsr_fast.backend", PCSR_BACKEND="reference")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for op in OPS:
        assert [op, "native", "cpu", "available"] in [line.split() for line in lines]
    assert "chosen: reference" in lines


def test_unknown_choice_in_the_environment(tmp_path):
    done = run_python(tmp_path, "-m", "pcsr_fast.backend", PCSR_BACKEND="fast")
    assert done.returncode != 0
    assert "unknown backend 'fast'" in done.stderr


def test_build_info():
    info = build_info()
    assert set(info) == {"compiler", "instruction_sets", "cuda", "cuda_archs", "torch", "cpu"}
    assert info["cpu"] in info["instruction_sets"].split()


def test_importing_the_package_is_light(tmp_path):
    done = run_python(tmp_path, "-c", "import sys, pcsr_fast; pcsr_fast.__version__; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_unknown_name():
    import pcsr_fast

    with pytest.raises(AttributeError, match="no attribute 'talley'"):
        pcsr_fast.talley  # noqa: B018
    assert "tally" in dir(pcsr_fast)


@pytest.mark.parametrize("isa", build_info()["instruction_sets"].split())
def test_every_instruction_set_gives_the_same(tmp_path, isa):
    script = """
import torch, pcsr_fast
from pcsr_fast.ops import OPS
from pcsr_fast.ops.verify import mismatch
for op in OPS.values():
    for shape in ("tiny", "odd"):
        for dtype in op.dtypes:
            args = op.inputs(dtype, torch.Generator().manual_seed(1), **op.shapes[shape])
            problem = mismatch(op, op.implementation("native"), args, dtype)
            assert not problem, (op.name, shape, dtype, problem)
print(pcsr_fast.build_info()["cpu"])
"""
    done = run_python(tmp_path, "-c", script, PCSR_CPU=isa)
    if "not available here" in done.stderr:
        pytest.skip(f"this CPU has no {isa}")
    assert done.stdout.strip() == isa, done.stderr


def test_unknown_instruction_set(tmp_path):
    done = run_python(tmp_path, "-c", "import pcsr_fast; print(pcsr_fast.build_info())", PCSR_CPU="sse9")
    assert "PCSR_CPU=sse9: unknown; use generic, avx2 or avx512" in done.stderr
