"""What the documentation shows runs: docstrings' examples, the README's Python and the demo."""

import doctest
import importlib
import re
import runpy

import numpy as np
import pytest
from conftest import ROOT

from pcsr_fast.data import noise


@pytest.mark.parametrize("module", ["ops.tally", "ops.triplet", "ops.gce", "data.tokens", "data.sample"])
def test_docstrings(module):
    found = doctest.testmod(importlib.import_module(f"pcsr_fast.{module}"))
    assert found.attempted > 0
    assert found.failed == 0


def test_readme_code(tmp_path, monkeypatch):
    """Beside a folder of the layout that the README describes."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "data" / "f30k_precomp"
    home.mkdir(parents=True)
    for split in ("train", "dev"):
        np.save(home / f"{split}_ims.npy", np.zeros((200, 3, 4), np.float32))
        (home / f"{split}_caps.txt").write_text("A dog .\n" * 1000)
    noise.save("noise_index/f30k_precomp_0.4", noise.draw(200, 1000, 0.4, seed=0))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    for code in blocks:
        exec(compile(code, "README.md", "exec"), {})


def test_readme_names_existing_files():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^make (\w+)", text, re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in targets)


def test_demo(capsys):
    runpy.run_path(str(ROOT / "bench" / "demo.py"), run_name="__main__")
    assert "PCS" in capsys.readouterr().out
