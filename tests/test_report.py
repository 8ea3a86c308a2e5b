"""The report: one page that needs nothing else, with what the log says; opened in a browser where there is one."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from pcsr_fast import cli, report
from pcsr_fast.data import store
from pcsr_fast.data.dataset import Dataset
from pcsr_fast.run import fit, open_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "<both> & more"
    run = fit(tiny.config(), Dataset("sample:10", noise=0.4), folder, report=lambda line: None)
    run.evaluate("test")
    yield run
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def page(run):
    return run.report()


def test_the_page_needs_no_other_file(run, page):
    text = page.read_text()
    rest, inlined = re.subn(r'src="data:image/png;base64,[A-Za-z0-9+/=]+"', "", text)
    assert inlined > 20
    assert not re.findall(r"src=|href=|https?:|url\(|<link|<script|@import", rest)
    assert "<both>" not in text
    assert "&lt;both&gt; &amp; more" in text


def test_figures_are_png_too(run, page):
    names = {path.name for path in page.parent.glob("*.png")}
    for name, count in dict(
        recall=2, mixture=4, split=3, division=3, consistency=2, health=3, loss=2, time=1
    ).items():  # fmt: skip
        assert {f"{name}-{k}.png" for k in range(1, count + 1)} <= names
    assert all((page.parent / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_what_it_says(run, page):
    text = page.read_text()
    best = max(run.records, key=lambda r: r["rsum"])
    assert f"<b>{best['rsum']:.1f}</b><span>best rsum on dev</span>" in text
    assert f"<b>{best['epoch']} of 4</b>" in text
    assert "<b>40 %, captions</b><span>noise</span>" in text
    test = json.loads((run.folder / "evaluation_test.json").read_text())["mean"]
    assert f"<td>test</td><td>{test['rsum']:.1f}</td><td>{test['i2t_r1']:.1f}</td>" in text
    assert "<td>embedding</td><td>16</td><td>1024</td>" in text
    assert "<td>path</td><td>sample:10</td>" in text
    split, division = run.split("train"), run.division
    for code, name in enumerate(("Clean", "Refinable", "Ambiguous")):
        part = text.partition(f"<h3>{name}</h3>")[2].partition("<h3>")[0]
        both = (division["A_subset"] == code) & (division["B_subset"] == code)
        shown = re.findall(r"<figcaption>(?:<s>)?(.*?)<", part)
        assert len(shown) == min(report.EXAMPLES, len(np.unique(split.image_of[both])))
        assert all(split.texts.index(caption) >= 0 for caption in shown)
        assert (part.count("➜") > 0) == (name == "Refinable" and both.any())
    assert len(re.findall(r'class="hit( right)?"', text)) == report.QUERIES * report.HITS
    assert text.count("<li") == report.QUERIES * report.HITS


def test_other_methods_and_comparison(run, tmp_path, capsys):
    """Without division: what is not there is left out."""
    plain = fit(tiny.config(method="sgr", epochs=1), Dataset("sample:6"), tmp_path / "sgr", report=lambda line: None)
    line = ["report", str(run.folder), "--against", str(plain.folder), "--out", str(tmp_path / "page")]
    assert cli.main(line) == 0
    assert "sgr: dev, epoch" in (tmp_path / "page" / "index.html").read_text()
    text = plain.report().read_text()
    assert "Division" not in text
    assert "Examples" not in text
    assert "none added" in text
    assert not (plain.folder / "report" / "mixture-1.png").exists()


def test_data_without_pictures(tmp_path):
    """A store whose images have names, and no test split."""
    source = tmp_path / "rows"
    source.mkdir()
    for split in ("train", "dev"):
        np.save(source / "x.npy", np.random.default_rng(0).random((12, 3, 4), np.float32))
        (source / "x.tsv").write_text("".join(f"name-{n}\ta <b> dog {n % 3}\n" for n in range(12)))
        store.prepare(source, tmp_path / "store", split, threshold=1)
    run = fit(tiny.config(epochs=1), Dataset(str(tmp_path / "store")), tmp_path / "run", report=lambda line: None)
    text = run.report().read_text()
    assert "image name-" in text
    assert "Queries from dev" in text
    assert "a &lt;b&gt; dog" in text
    assert "a true pair" not in text


def test_nothing_to_report(run, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="has no finished epoch yet: there is nothing to report"):
        report.write(replace(run, records=[]))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"matplotlib is not installed: pip install matplotlib"):
        report.write(run)


MEASURE = """<iframe id="f" src="{page}" style="width: {width}px; height: 800px; border: 0"></iframe><p id="out"></p>
<script>document.getElementById("f").onload = e => {{
  const page = e.target.contentDocument, images = [...page.images];
  const widest = Math.max(...[...page.body.children].map(x => x.getBoundingClientRect().right));
  document.getElementById("out").textContent = JSON.stringify({{
    width: page.documentElement.clientWidth, scroll: page.documentElement.scrollWidth, widest: widest,
    images: images.length, broken: images.filter(x => !x.complete || !x.naturalWidth).length,
    columns: new Set([...page.querySelectorAll(".of2 img")].map(x => x.getBoundingClientRect().left)).size}});
}}</script>"""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1200, 2)])
def test_in_a_browser(run, page, tmp_path, width, columns):
    """Nothing is wider than the screen, all pictures load, panels stand side by side only where there is room."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no chromium to open the page with")
    shutil.copy(page, tmp_path / "page.html")
    (tmp_path / "measure.html").write_text(MEASURE.format(page="page.html", width=width))
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=20000", "--window-size=1400,900"]
    done = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "measure.html").as_uri()], capture_output=True, text=True, timeout=180
    )
    found = json.loads(re.search(r'<p id="out">(.*?)</p>', done.stdout)[1])
    assert found["width"] == width
    assert found["scroll"] == width
    assert found["widest"] <= width
    assert found["images"] > 20
    assert found["broken"] == 0
    assert found["columns"] == columns


def test_a_run_is_reported_while_it_trains(run, tmp_path):
    """After the first epoch, which is warm-up: no division yet."""
    copy = tmp_path / "run"
    shutil.copytree(run.folder, copy)
    (copy / "division.npy").unlink()
    lines = (copy / "log.jsonl").read_text().splitlines()
    (copy / "log.jsonl").write_text(lines[0] + "\n")
    assert "1 of 1" in open_run(copy).report().read_text()
