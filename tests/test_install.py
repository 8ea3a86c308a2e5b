"""`pip install .` as a user runs it: an isolated build that re-uses the installed torch, here without CUDA."""

import os
import runpy
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_pip_install_without_cuda(tmp_path):
    source, target = tmp_path / "source", tmp_path / "site"
    ignore = shutil.ignore_patterns(".*", "build", "*.so", "*.egg-info", "__pycache__", "results")
    shutil.copytree(ROOT, source, ignore=ignore)
    pip = [sys.executable, "-m", "pip", "install", "--no-compile", "--no-deps", "--target", str(target), str(source)]
    done = subprocess.run(pip, env=os.environ | {"FORCE_CUDA": "0"}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    script = (
        "import torch, pcsr_fast as pf; state = pf.TallyState.zeros(2, 3);"
        "pf.tally(torch.tensor([2]), torch.tensor([1]), state);"
        "print(pf.__file__, pf.build_info()['cuda'], state.pcs().tolist())"
    )
    env = os.environ | {"PYTHONPATH": str(target), "PCSR_BACKEND": "native"}
    done = subprocess.run([sys.executable, "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [str(target / "pcsr_fast" / "__init__.py"), "none", "[0,", "1]"], done.stderr


def test_torch_is_asked_for_only_where_it_is_absent():
    backend = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    assert backend["find_torch"]().name == "torch"
    assert backend["get_requires_for_build_wheel"]() == []
    backend["get_requires_for_build_wheel"].__globals__["find_torch"] = lambda: None
    assert backend["get_requires_for_build_wheel"]() == ["torch>=2.13"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FORCE_CUDA": "1", "PATH": "{tools}"}, "FORCE_CUDA=1, but no nvcc was found"),
        ({"TORCH_CUDA_ARCH_LIST": "eight"}, "TORCH_CUDA_ARCH_LIST: cannot read 'eight'"),
        ({}, "install torch>=2.13 first"),
    ],
)
def test_configuration_errors(tmp_path, environment, message):
    """CMake stops with the reason; no compiler runs."""
    torch = "" if not environment else os.path.dirname(__import__("torch").__file__)
    if "TORCH_CUDA_ARCH_LIST" in environment and not shutil.which("nvcc"):
        pytest.skip("no nvcc")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("cmake", "ninja", "g++", "gcc", "c++", "cc", "as", "ld", "uname", "sh"):
        if found := shutil.which(tool, path=os.path.dirname(sys.executable) + ":" + os.environ["PATH"]):
            (tools / tool).symlink_to(found)
    environment = {k: v.format(tools=tools) for k, v in environment.items()}
    configure = ["cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", f"-DTORCH_DIR={torch}"]
    env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"} | environment
    env.pop("CUDACXX", None)
    done = subprocess.run(configure, env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr.replace("\n ", "")
