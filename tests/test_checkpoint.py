"""Checkpoints: whole or not at all, readable without running code, and known by their data."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from pcsr_fast import checkpoint

STATE = {"weights": [{"w": torch.arange(2000.0)}], "config": {"subsets": ("clean",)}, "tau": None, "best": float("nan")}


def failing(error):
    def save(state, file):
        file.write(b"half of it")
        raise error

    return save


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")]
)
def test_a_failed_write_keeps_the_old(tmp_path, monkeypatch, error, before):
    path = tmp_path / "last.pt"
    if before:
        checkpoint.save(STATE, path)
    monkeypatch.setattr(torch, "save", failing(error))
    kept = "before is intact" if before else "no earlier checkpoint"
    with pytest.raises(OSError, match=rf"last\.pt: cannot write the checkpoint .*{str(error)[-10:]}.*{kept}.*resume"):
        checkpoint.save({}, path)
    assert [*tmp_path.iterdir()] == [path] * before
    if before:
        assert torch.equal(checkpoint.load(path)["weights"][0]["w"], torch.arange(2000.0))


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_late_failure(tmp_path, monkeypatch, place):
    path = tmp_path / "last.pt"
    path.write_bytes(b"old")

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint.os, place, fail)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.save(STATE, path)
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_an_interrupt_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(STATE, tmp_path / "last.pt")
    assert not [*tmp_path.iterdir()]


def test_it_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    seen = []
    for name in ("fsync", "replace"):
        real = getattr(checkpoint.os, name)
        monkeypatch.setattr(checkpoint.os, name, lambda *a, real=real, name=name: (seen.append(name), real(*a))[1])
    checkpoint.save(STATE, tmp_path / "last.pt")
    assert seen == ["fsync", "replace", "fsync"]


def test_sweep(tmp_path):
    for name in (".last.pt.123", ".best.pt.7", "last.pt", "best.pt", ".hidden", "config.json"):
        (tmp_path / name).touch()
    checkpoint.sweep(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"last.pt", "best.pt", ".hidden", "config.json"}


def test_damaged_files(tmp_path):
    path = tmp_path / "last.pt"
    checkpoint.save(STATE, path)
    whole = path.read_bytes()
    damaged = [b"", b"words", b"\x80\x02", whole[:100], whole[: len(whole) // 2], whole[:-1], whole[100:]]
    # one bit in the pickle, one in a weight
    places = (whole.index(b"weights"), whole.index(torch.arange(1000.0, 1002).numpy().tobytes()))
    damaged += [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in places]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"last\.pt: cannot read the checkpoint"):
            checkpoint.load(path)
    path.unlink()
    with pytest.raises(ValueError, match=r"last\.pt: cannot read"):
        checkpoint.load(path)


def test_loading_runs_no_code(tmp_path):
    class Trap:
        def __reduce__(self):
            return print, ("ran",)

    torch.save({"a": Trap()}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="cannot read the checkpoint"):
        checkpoint.load(tmp_path / "last.pt")


def test_fingerprint():
    split = tiny.split()
    same = checkpoint.fingerprint(split)
    assert same == checkpoint.fingerprint(tiny.split())
    tokens = split.tokens.copy()
    tokens[7] += 1
    offsets = split.offsets.copy()
    offsets[3] += 1
    changes = {
        "noise": tiny.split(ratio=0.5),
        "captions": replace(split, tokens=tokens),
        "name": replace(split, name="other"),
        "regions": replace(split, features=split.features[:, :8]),
        "width": replace(split, features=split.features[:, :, :9]),
    }
    for name, other in [*changes.items(), ("captions", replace(split, offsets=offsets))]:
        found = checkpoint.fingerprint(other)
        assert [key for key in same if same[key] != found[key]] == [name]
    assert checkpoint.fingerprint(tiny.split(images=11))["images"] == 11
    assert all(type(value) in (int, str) for value in same.values())
    assert np.array_equal(split.image_of, tiny.split().image_of)
