"""Every GPU kernel compiled for every architecture, in a process of its own, and what must be true of the result."""

import csv
import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("triton")

from bench import gpu_static
from pcsr_fast.triton.sgr import LAUNCH

GOOD = {
    **{"what": "triton kernel", "kernel": "align", "types": "bf16", "arch": 120, "registers": 255, "stack": 0},
    **{"shared": 99 << 10, "tensor_ops_in_loop": "HMMA", "wide_loads_in_loop": "LDGSTS"},
}


CASES = [("tf32", gpu_static.SHAPE), *((t, gpu_static.SHAPE) for t in gpu_static.TYPES if t != "tf32"), ("tf32", "odd")]


@pytest.mark.slow
@pytest.mark.parametrize(("types", "shape"), CASES)
def test_kernels_compile(types, shape):
    # without a device to run on, and without the interpreter that the other tests use
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.gpu_static", "--no-save", "--types", types, "--shape", shape]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("what=triton kernel")]
    assert len(rows) == len(gpu_static.LIMITS) * (len(LAUNCH) - (types == "ieee"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"stack": 8}, "align (bf16) on sm_120 keeps 8 bytes of registers in memory"),
        ({"shared": (99 << 10) + 1}, "needs 101377 bytes of shared memory, there are 101376"),
        ({"tensor_ops_in_loop": ""}, "has no tensor-core operation in a loop"),
        ({"wide_loads_in_loop": ""}, "has no 128-bit load in a loop"),
    ],
)
def test_problems_are_found(change, problem):
    assert not gpu_static.problems(GOOD)
    (found,) = gpu_static.problems(GOOD | change)
    assert problem in found


def test_only_loops_count():
    code = """
        /*0000*/                   LDG.E.128 R4, [R2] ;
.L_x_1:
        /*0010*/              @!P0 HMMA.1688.F32.TF32 R4, R8, R9, R4 ;
        /*0020*/               @P1 BRA `(.L_x_1) ;
        /*0030*/                   BRA `(.L_x_2) ;
        /*0040*/                   FFMA R1, R1, R1, R1 ;
.L_x_2:
        /*0050*/                   EXIT ;
"""
    assert gpu_static.loops(code) == {"HMMA.1688.F32.TF32", "BRA"}


def test_occupancy():
    # 8 warps of 255 registers take 65,536, all that there are; 128 registers leave room for two blocks
    assert gpu_static.occupancy(80, 255, 0, 8) == 8 / 64
    assert gpu_static.occupancy(80, 128, 0, 8) == 16 / 64
    assert gpu_static.occupancy(120, 32, 60 << 10, 8) == 8 / 48


def test_recorded_figures_are_complete():
    with (ROOT / "bench/results/gpu_static.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    compiled = {(r["kernel"], r["types"], int(r["arch"])) for r in rows if r["what"] == "triton kernel"}
    # with ieee there is no fused step of reasoning
    wanted = {
        (k, t, a) for k in LAUNCH for t in gpu_static.TYPES for a in gpu_static.LIMITS if (k, t) != ("reason", "ieee")
    }
    assert compiled == wanted
    for row in rows:
        assert row["stack"] in ("0", "")
    assert sum(r["what"] == "computed, not measured" for r in rows) == 4
