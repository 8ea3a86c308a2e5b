"""The command: what it prints, and that a mistake is one line on stderr and 2."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

from pcsr_fast import cli
from pcsr_fast.data import store


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    np.save(folder / "x.npy", np.ones((2, 3, 4), np.float16))
    (folder / "x.tsv").write_text("1\ta dog\n2\ta cat\n")
    return folder


def test_prepare(source, tmp_path, capsys):
    out = tmp_path / "store"
    assert cli.main(["prepare", str(source), str(out), "--verify"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"train: 2 images of 3 x 4 float16, 2 captions\n{out}: all files are whole\n"
    # quiet where nobody watches
    assert printed.err == ""
    (out / "train/tokens.npy").write_bytes(b"damaged")
    assert cli.main(["verify", str(out)]) == 2
    assert "tokens.npy has 7 bytes" in capsys.readouterr().err


def test_options_arrive(source, tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr("pcsr_fast.data.store.prepare", lambda *args, **options: given.update(options, args=args) or {})
    line = "prepare in out --split dev --dtype float32 --vocabulary v.json --threshold 2 --shard-mb 3 --skip-bad"
    assert cli.main(line.split()) == 0
    assert given == dict(
        args=("in", "out", "dev"), dtype="float32", vocabulary="v.json", threshold=2, shard_bytes=3 << 20, skip_bad=True
    )


def test_defaults_are_those_of_the_function(monkeypatch):
    given, wanted = {}, inspect.signature(store.prepare).parameters
    monkeypatch.setattr(store, "prepare", lambda *args, **options: given.update(options) or {})
    assert cli.main(["prepare", "in", "out"]) == 0
    assert given == {name: wanted[name].default for name in given}
    assert len(given) == 5


def test_skipped_samples_are_said(source, tmp_path, capsys):
    (source / "x.tsv").write_text("1\ta dog\n2\t\n")
    assert cli.main(["prepare", str(source), str(tmp_path / "out"), "--skip-bad"]) == 0
    assert capsys.readouterr().out == "train: 1 images of 3 x 4 float16, 1 captions, 1 skipped (see manifest.json)\n"


def test_interrupted(monkeypatch, capsys):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "prepare", stop)
    assert cli.main(["prepare", "in", "out"]) == 130
    assert capsys.readouterr().err == "pcsr-fast prepare: stopped\n"


def test_mistakes_are_one_line(tmp_path, capsys):
    assert cli.main(["prepare", str(tmp_path / "no"), str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"pcsr-fast prepare: {tmp_path}/no does not exist\n"
    with pytest.raises(FileNotFoundError):
        cli.main(["prepare", str(tmp_path / "no"), str(tmp_path / "out"), "--debug"])


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["prepare"], ["prepare", "a", "b", "--dtype", "int8"]])
def test_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: pcsr-fast" in capsys.readouterr().err


def test_module(source, tmp_path):
    run = [sys.executable, "-m", "pcsr_fast", "prepare", source, tmp_path / "out"]
    assert subprocess.run(run, check=True, capture_output=True, text=True).stdout.startswith("train: 2 images")
    done = subprocess.run([*run, "--dtype", "float32"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
