"""What the compiled CUDA kernels look like: present for every architecture, and no register spilled to memory."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import pcsr_fast
from pcsr_fast import build_info
from pcsr_fast.ops import OPS


def cuobjdump() -> str:
    if tool := shutil.which("cuobjdump"):
        return tool
    triton = pytest.importorskip("triton")
    return str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


@pytest.mark.skipif(build_info()["cuda"] == "none", reason="compiled without CUDA")
def test_no_kernel_spills():
    library = Path(pcsr_fast.__file__).with_name("_ops.so")
    listing = subprocess.run([cuobjdump(), "-res-usage", library], capture_output=True, text=True, check=True).stdout
    by_arch = {}
    for part in re.split(r"^arch = sm_", listing, flags=re.MULTILINE)[1:]:
        kernels = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", part)
        by_arch.setdefault(part.split()[0], []).extend(kernels)
    wanted = {a.replace(".", "").removesuffix("+PTX") for a in build_info()["cuda_archs"].split()}
    assert wanted <= set(by_arch)
    names = {arch: {kernel[0] for kernel in kernels} for arch, kernels in by_arch.items()}
    for arch in wanted:
        for op in OPS.values():
            assert op.gpu != "cuda" or any(op.name in name for name in names[arch]), f"sm_{arch} lacks {op.name}"
        for name, _, stack, _, local in by_arch[arch]:
            assert (stack, local) == ("0", "0"), f"{name} on sm_{arch} uses memory for registers"
