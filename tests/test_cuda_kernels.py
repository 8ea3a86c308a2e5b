"""Every CUDA kernel again, emulated: in the other schedules, as a race check and as a memory check."""

import os
import subprocess
import sys

import cuda_on_cpu
import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow

PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", str(ROOT / "tests"), "-k"]
# all that runs kernels, but for tests of torch.compile and of argument checks, which would only repeat themselves
KERNELS = "emulated and not sgr and not compile and not opcheck and not wrong_shapes and not bad_input"
# every kernel, with many blocks, repeated ids, ties and faults; a sanitizer makes the rest too slow
SANITIZED = "emulated and not sgr and (value or large_batch or overflow or ties or nan or masked)"


def summary(done: subprocess.CompletedProcess) -> str:
    return done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("schedule", ["reverse", "random"])
def test_other_schedules(schedule):
    env = os.environ | {"CUSHIM_ORDER": schedule}
    done = subprocess.run([sys.executable, *PYTEST, KERNELS], env=env, capture_output=True, text=True)
    assert done.returncode == 0, summary(done)


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_sanitized(sanitizer):
    done = cuda_on_cpu.run_sanitized(
        sanitizer, [*PYTEST, SANITIZED], env={"PCSR_TEST_SANITIZE": sanitizer}, timeout=900
    )
    assert done.returncode == 0, summary(done)
