"""What the documentation shows runs: docstrings' examples, Python and commands of README and docs, and the demo."""

import csv
import doctest
import importlib
import re
import shlex
from dataclasses import asdict

import numpy as np
import pytest
import tiny
import torch
from conftest import ROOT

import bench.__main__
from bench import demo
from pcsr_fast import cli
from pcsr_fast.data import noise, sample
from pcsr_fast.presets import PRESETS

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Beside a folder of the layout that the pages describe; presets and the sample set are made small."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "data" / "f30k_precomp"
    home.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        np.save(home / f"{split}_ims.npy", np.random.default_rng(0).random((20, 3, 4), np.float32))
        (home / f"{split}_caps.txt").write_text("".join(f"A dog {n % 7} .\n" for n in range(100)))
    cli.main(["vocab", str(home)])
    noise.save("noise_index/f30k_precomp_0.4", noise.draw(20, 100, 0.4, seed=0))
    few = asdict(tiny.config(epochs=1, batch_size=32))
    for name in PRESETS:
        monkeypatch.setitem(PRESETS, name, few)
    monkeypatch.setattr(sample, "IMAGES", {"train": 20, "dev": 6, "test": 6})
    yield tmp_path
    torch.set_num_threads(2)


@pytest.mark.parametrize(
    "module", ["ops.tally", "ops.triplet", "ops.gce", "data.tokens", "data.sample", "data.dataset", "presets", "run"]
)
def test_docstrings(module):
    found = doctest.testmod(importlib.import_module(f"pcsr_fast.{module}"))
    assert found.attempted > 0
    assert found.failed == 0


def blocks(page, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python(small, page):
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), {})


def test_python_is_found():
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 5


# commands that stand for a folder the reader has
READERS_OWN = ("crawl/",)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "\npcsr-fast " in "".join(blocks(page))], ids=lambda p: p.name
)
def test_commands(small, page):
    lines = [line for block in blocks(page) for line in block.splitlines() if line.startswith("pcsr-fast ")]
    assert lines
    for line in lines:
        if not any(name in line for name in READERS_OWN):
            assert cli.main(shlex.split(line, comments=True)[1:]) == 0, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names(page):
    """Links lead somewhere, and make, python -m bench and pcsr-fast know the words behind them."""
    text = page.read_text()
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile, target
    for command in re.findall(r"python -m bench (\w+)", text):
        assert command in bench.__main__.COMMANDS, command
    known = cli._parser()._subparsers._group_actions[0].choices
    for command in re.findall(r"pcsr-fast (\w+)", text):
        assert command in known, command


def test_the_front_page_has_its_two_commands():
    assert re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE) == ["demo", "test"]


def test_demo(small, capsys):
    page = demo.main(small / "demo", "sample")
    out = capsys.readouterr().out
    table = re.findall(r"^(sgr|pcsr) +([\d.]+ +){6}([\d.]+)$", out, re.MULTILINE)
    assert [row[0] for row in table] == ["sgr", "pcsr"]
    assert str(page) in out
    assert "sgr: dev" in page.read_text()
    with (small / "demo" / "pairs.csv").open(newline="") as file:
        assert len([*csv.DictReader(file)]) == 100
