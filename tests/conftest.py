"""Settings and fixtures of all tests: poisoned memory, two threads, and the implementations under test."""

import functools
import os
from pathlib import Path

# triton kernels run in its interpreter, on numpy, whose own threads would only get in each other's way
os.environ |= {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}

import cuda_on_cpu
import pytest
import torch

from pcsr_fast import backend
from pcsr_fast.ops import OPS
from pcsr_fast.ops.op import define

ROOT = Path(__file__).resolve().parents[1]

# every torch.empty, also inside the C++ kernels, comes filled with NaN or the largest integer
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
torch.set_num_threads(2)

# GPU kernels without a GPU: those in CUDA with their bindings compiled for the CPU, torch.ops.pcsr_emulated; those in
# Triton interpreted
EMULATED = "emulated"


@functools.cache
def load_emulated() -> None:
    """Compiles the CUDA kernels and their bindings for the CPU and gives the ops to torch."""
    home = Path(torch.__file__).parent
    library = cuda_on_cpu.build(
        [*sorted(ROOT.glob("csrc/cuda/*.cu")), *sorted(ROOT.glob("csrc/bind/*.cpp"))],
        flags=[f"-isystem{home / 'include'}", f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"],
        # set by test_cuda_kernels.py, which runs these tests again under a sanitizer
        sanitize=os.environ.get("PCSR_TEST_SANITIZE"),
        defines={"PCSR_CUDA_ON_CPU": 1, "TORCH_TARGET_VERSION": "0x020d000000000000"},
    )
    torch.ops.load_library(library)
    for op in OPS.values():
        define(op, "pcsr_emulated")


backend.NAMESPACES[EMULATED] = "pcsr_emulated"


@pytest.fixture(params=["reference", "native", EMULATED])
def implementation(request):
    """Gives the implementation of an op in each backend in turn: implementation(op)(*args)."""

    def of(op):
        if request.param != EMULATED:
            return op.implementation(request.param)
        if op.gpu is None:
            pytest.skip(f"{op.name} has no GPU kernel")
        if op.gpu == "triton":
            return op.implementation("triton")
        load_emulated()
        return op.implementation(EMULATED)

    return of


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
