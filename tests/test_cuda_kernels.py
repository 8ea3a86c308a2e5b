"""Every CUDA kernel again, emulated: in the other schedules, as a race check and as a memory check."""

import os
import subprocess
import sys

import cuda_on_cpu
import pytest
from conftest import ROOT

# what runs the kernels; tests of torch.compile and of argument checks would only repeat themselves
TESTS = [
    "-q",
    "-p",
    "no:cacheprovider",
    str(ROOT / "tests"),
    "-k",
    "emulated and not compile and not opcheck and not wrong_shapes",
]


def summary(done: subprocess.CompletedProcess) -> str:
    return done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("schedule", ["reverse", "random"])
def test_other_schedules(schedule):
    env = os.environ | {"CUSHIM_ORDER": schedule}
    done = subprocess.run([sys.executable, "-m", "pytest", *TESTS], env=env, capture_output=True, text=True)
    assert done.returncode == 0, summary(done)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_sanitized(sanitizer):
    done = cuda_on_cpu.run_sanitized(
        sanitizer, ["-m", "pytest", *TESTS], env={"PCSR_TEST_SANITIZE": sanitizer}, timeout=900
    )
    assert done.returncode == 0, summary(done)
