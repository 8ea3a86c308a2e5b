"""What the documentation shows runs: docstrings' examples, the README's Python and the demo."""

import doctest
import importlib
import re
import runpy

import pytest
from conftest import ROOT


@pytest.mark.parametrize("module", ["ops.tally", "ops.triplet", "ops.gce", "data.tokens"])
def test_docstrings(module):
    found = doctest.testmod(importlib.import_module(f"pcsr_fast.{module}"))
    assert found.attempted > 0
    assert found.failed == 0


def test_readme_code():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
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
