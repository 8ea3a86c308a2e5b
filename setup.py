"""Builds the package: hands over to CMake, and asks pip for torch only where none is installed.

Also the build backend that pyproject.toml names: it is setuptools' own, plus the rule about torch. Builds are
isolated, but torch is large and the headers of the installed one are the right ones, so it is looked up outside.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.build_meta import *  # noqa: F403
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def find_torch() -> Path | None:
    """Folder of the torch that this interpreter imports, without importing it; None where there is none."""
    probe = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    # pip's isolated environment hides the installed packages behind these two; -P keeps the project's folder out
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    found = subprocess.run([sys.executable, "-P", "-c", probe], env=env, capture_output=True, text=True, check=True)
    if folder := found.stdout.strip():
        return Path(folder)
    # asked for by get_requires_for_build_wheel, so it is inside the isolated environment
    found = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip()) if found.stdout.strip() else None


def get_requires_for_build_wheel(config_settings=None):
    return [] if find_torch() else ["torch>=2.13"]


get_requires_for_build_editable = get_requires_for_build_wheel


class CMakeBuild(build_ext):
    def run(self):
        torch = find_torch()
        if torch is None:
            sys.exit("pcsr_fast: torch is not installed; run: pip install 'torch>=2.13'")
        import pybind11

        target = ROOT / "pcsr_fast" if self.inplace else Path(self.build_lib).resolve() / "pcsr_fast"
        # kept between builds, so that only what changed is compiled again
        build = ROOT / "build" / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
            *(f"-DTORCH_DIR={torch}", f"-DPython_EXECUTABLE={sys.executable}"),
            *(f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DCMAKE_INSTALL_PREFIX={target}"),
        ]
        # a build folder remembers the ninja of an isolated environment that is gone
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--parallel", jobs], check=True)
        subprocess.run(["cmake", "--install", str(build), "--strip"], check=True)


# build tools import this file as a module and run it as a script
if __name__ == "__main__":
    setup(ext_modules=[Extension("pcsr_fast._native", sources=[])], cmdclass={"build_ext": CMakeBuild})
