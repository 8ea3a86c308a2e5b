"""Runs in people's hands: train, evaluate, retrieve and audit by command, from the folder of the run alone."""

import csv
import json
import shutil

import numpy as np
import pytest
import tiny
import torch

from pcsr_fast import checkpoint, cli, search
from pcsr_fast.audit import Suggestions
from pcsr_fast.config import Config
from pcsr_fast.data import noise
from pcsr_fast.data.dataset import Dataset
from pcsr_fast.evaluate import encode, recalls, score_matrix
from pcsr_fast.presets import PRESETS, settings
from pcsr_fast.run import open_run

SMALL = """
embedding = 16
similarity = 8
reasoning_steps = 2
word_embedding = 10
classes = 8
classifier_hidden = 12
batch_size = 8
warmup_epochs = 1
warmup_steps = 0
epochs = 3
refinable_from = 2
ambiguous_from = 3
device = "cpu"
workers = 0
"""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run made by the command."""
    home = tmp_path_factory.mktemp("runs")
    (home / "small.toml").write_text(SMALL)
    line = f"train {home / 'run'} --config {home / 'small.toml'} --data sample:10 --noise 0.4 --seed 3"
    assert cli.main(line.split()) == 0
    return home / "run"


@pytest.fixture
def run(folder):
    return open_run(folder)


def printed(capsys, line: str) -> str:
    capsys.readouterr()
    code = cli.main(line.split())
    found = capsys.readouterr()
    assert (code, found.err) == (0, "")
    return found.out


def failed(capsys, line: str, code: int = 2) -> str:
    capsys.readouterr()
    assert cli.main(line.split()) == code
    found = capsys.readouterr().err
    assert found.count("\n") == 1
    return found


def test_what_train_leaves(folder, run):
    assert run.config == settings(None, folder.parent / "small.toml", seed=3)
    assert run.data == Dataset("sample:10", noise=0.4, vocabulary_path=str(folder / "vocab.json"))
    assert len(run.vocabulary) == tiny.WORDS
    assert [r["epoch"] for r in run.records] == [1, 2, 3, 4]
    record = run.records[-1]
    assert record["seconds"] == pytest.approx(sum(record[f"{p}_seconds"] for p in ("divide", "train", "validate")), 0.1)
    assert run.records[0]["divide_seconds"] < 0.05
    np.testing.assert_array_equal(run.split("train").image_of, noise.draw(10, 50, 0.4, seed=0))


def test_division_is_what_the_networks_were_trained_on(folder, run):
    saved = checkpoint.load(folder / "last.pt")
    for k, name in enumerate("AB"):
        division = saved["divisions"][k]
        np.testing.assert_array_equal(run.division[f"{name}_posterior"], division["posterior"].numpy())
        np.testing.assert_array_equal(run.division[f"{name}_subset"], division["subset"].numpy())
        _, n_max, _, n_second = saved["tallies"][k]
        pcs = (n_max - n_second).float() / saved["observations"]
        np.testing.assert_allclose(run.division[f"{name}_pcs"], pcs.numpy()[run.split("train").image_of], rtol=1e-6)
        record = run.records[-1]
        assert run.division[f"{name}_loss"].mean() == pytest.approx(record[f"{name}_loss_mean"], 1e-5)
        assert sum(record[f"{name}_loss_histogram"]) == sum(record[f"{name}_pcs_histogram"]) == 50
        mismatched = int((run.split("train").image_of != run.split("train").true_image).sum())
        assert sum(record[f"{name}_loss_histogram_mismatched"]) == mismatched
        # both networks judge
        judged = (run.division["A_loss"] + run.division["B_loss"]) / 2
        assert record[f"{name}_loss_range"] == [float(judged.min()), float(judged.max())]
        weights = [component[0] for component in record[f"{name}_mixture"]]
        assert sum(weights) == pytest.approx(1)
        assert record[f"{name}_mixture"][0][1] == record[f"{name}_mixture_low"]
    assert run.division.dtype.itemsize == 26


def test_train_goes_on_with_what_the_folder_says(folder, capsys, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    assert "resumed from" in printed(capsys, f"train {copy}")
    assert "seed: 3 -> 4" in failed(capsys, f"train {copy} --seed 4")
    assert "train data, noise" in failed(capsys, f"train {copy} --noise 0.2")
    assert open_run(copy).data.noise == 0.4
    assert "exists: choose another folder" in failed(capsys, f"train {copy} --resume never")
    assert "which data?" in failed(capsys, f"train {tmp_path / 'new'}")
    assert "sample:0: expected" in failed(capsys, f"train {tmp_path / 'new'} --data sample:0")
    assert not (tmp_path / "new").exists()


def test_evaluate(folder, run, capsys):
    out = printed(capsys, f"evaluate {folder} --json")
    found = json.loads(out)
    split = Dataset("sample:10").split("test")
    matrices = [score_matrix(n, *encode(n, split)) for n in run.networks]
    assert found["mean"] == pytest.approx(recalls(sum(matrices) / 2, split.image_of))
    assert json.loads((folder / "evaluation_test.json").read_text()) == found
    table = printed(capsys, f"evaluate {folder} --split dev --folds 2")
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["A", "B", "mean", "A", "B", "mean"]
    # the best epoch's weights, on the split that chose them
    best = max(run.records, key=lambda r: r["rsum"])
    assert f"{best['rsum']:10.1f}" in table.splitlines()[4]
    assert "the sample set has no split 'val'" in failed(capsys, f"evaluate {folder} --split val")


def test_retrieve(folder, run, capsys, monkeypatch):
    monkeypatch.setattr(search, "PIECE", 7)
    split = run.split("test")
    matrix = sum(score_matrix(n, *encode(n, split)) for n in run.networks) / 2
    found = json.loads(printed(capsys, f"retrieve {folder} --json --image 3 --top 4"))
    best = matrix[3].topk(4)
    assert [hit["score"] for hit in found["hits"]] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert found["hits"][0]["name"] == split.texts[found["hits"][0]["index"]]
    line = ["retrieve", str(folder), "--json", "--top", "4", "--text", split.texts[11], split.texts[2]]
    capsys.readouterr()
    assert cli.main(line) == 0
    hits = [json.loads(text)["hits"] for text in capsys.readouterr().out.splitlines()]
    for caption, some in zip((11, 2), hits, strict=True):
        best = matrix[:, caption].topk(4).values.tolist()
        assert [hit["score"] for hit in some] == pytest.approx(best, abs=1e-5)
    assert "1  0." in printed(capsys, f"retrieve {folder} --text two")
    assert "has no image 10; it has 10" in failed(capsys, f"retrieve {folder} --image 10")
    assert "no names; count from 0" in failed(capsys, f"retrieve {folder} --image p-1")


def rows_of(path):
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def test_audit(folder, run, capsys, tmp_path):
    printed(capsys, f"audit {folder} --out {tmp_path / 'pairs.csv'}")
    rows, split = rows_of(tmp_path / "pairs.csv"), run.split("train")
    assert [int(row["pair"]) for row in rows] == [*range(50)]
    assert [int(row["image"]) for row in rows] == split.image_of.tolist()
    assert [row["caption"] for row in rows] == list(split.texts)
    assert [int(row["known_mismatch"]) for row in rows] == (split.image_of != split.true_image).astype(int).tolist()
    for name in ("A_posterior", "B_loss", "A_pcs"):
        assert [float(row[name]) for row in rows] == pytest.approx(run.division[name].tolist(), abs=1e-6)
    names = ("clean", "refinable", "ambiguous")
    assert [row["B_subset"] for row in rows] == [names[code] for code in run.division["B_subset"]]
    clean = [row["A_subset"] == row["B_subset"] == "clean" for row in rows]
    assert any(clean)
    assert not all(clean)
    for row, fine in zip(rows, clean, strict=True):
        assert bool(row["suggested_pair"]) == (not fine)
        if not fine:
            assert clean[int(row["suggested_pair"])]
            assert row["suggested_caption"] == split.texts[int(row["suggested_pair"])]
    printed(capsys, f"audit {folder} --out {tmp_path / 'worst.csv'} --worst 7 --no-suggestions")
    worst = rows_of(tmp_path / "worst.csv")
    beliefs = [float(row["mismatch"]) for row in worst]
    assert beliefs == sorted((float(row["mismatch"]) for row in rows), reverse=True)[:7]
    assert not any(row["suggested_caption"] for row in worst)
    assert "written as .csv or .parquet" in failed(capsys, f"audit {folder} --out {tmp_path / 'pairs.txt'}")


def test_audit_in_chunks_and_as_parquet(run, tmp_path, monkeypatch):
    whole = run.audit(tmp_path / "whole.csv").read_text()
    monkeypatch.setattr("pcsr_fast.audit.CHUNK", 13)
    assert run.audit(tmp_path / "parts.csv").read_text() == whole
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(run.audit(tmp_path / "pairs.parquet")).to_pydict()
    rows = rows_of(tmp_path / "whole.csv")
    assert [*table] == [*rows[0]]
    assert [str(x) if x is not None else "" for x in table["suggested_pair"]] == [r["suggested_pair"] for r in rows]
    assert table["A_loss"] == pytest.approx([float(r["A_loss"]) for r in rows])


def test_suggestions_are_the_best_of_the_most_alike(run):
    split, division = run.split("train"), run.division
    suggest = Suggestions(run, split, division)
    noisy = np.flatnonzero((division["A_subset"] != 0) & (division["B_subset"] != 0))[:5]
    predictions = []
    for network in run.networks:
        logits = network.image_logits(network.encode_images(torch.from_numpy(split.features)))
        predictions.append(torch.nn.functional.normalize(logits.softmax(1), dim=1).detach())
    matrix = sum(score_matrix(n, *encode(n, split)) for n in run.networks) / 2
    for pair, found in zip(noisy, suggest(noisy), strict=True):
        image = split.image_of[pair]
        alike = sum(p[image] @ p[split.image_of[suggest.pairs]].T for p in predictions)
        eighth = alike.sort(descending=True).values[min(7, len(alike) - 1)]
        candidates = suggest.pairs[(alike >= eighth - 1e-6).numpy()]
        assert found in candidates
        assert matrix[image, found] >= matrix[image, candidates].sort(descending=True).values[len(candidates) // 2]


def test_an_image_that_is_not_finite_is_no_reason_to_stop(run, tmp_path, monkeypatch):
    real = Dataset.split

    def broken(self, name):
        split = real(self, name)
        split.features[3, 0, 0] = np.nan
        return split

    monkeypatch.setattr(Dataset, "split", broken)
    assert len(run.search("a two", top=10)) == 10
    assert len(run.search(3, top=4)) == 4
    assert len(rows_of(run.audit(tmp_path / "pairs.csv"))) == 50


def test_mistakes(folder, capsys, tmp_path):
    assert "is no folder of a run: it has no config.json" in failed(capsys, f"evaluate {tmp_path}")
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    (copy / "division.npy").unlink()
    assert "has made no division yet" in failed(capsys, f"audit {copy} --out {tmp_path / 'x.csv'}")
    assert "not what" in failed(capsys, f"audit {folder} --data sample:11 --out {tmp_path / 'x.csv'}")
    (copy / "best.pt").unlink()
    assert "no epoch was finished yet" in failed(capsys, f"evaluate {copy}")
    (copy / "data.json").write_text(json.dumps({"path": str(tmp_path / "gone")}))
    assert "where the data has moved to: --data" in failed(capsys, f"evaluate {copy}")
    assert printed(capsys, f"evaluate {copy} --data sample:4 --weights last").startswith("test, 4 images")


def test_training_that_diverges_ends_with_3(folder, capsys, tmp_path):
    config = folder.parent / "small.toml"
    line = f"train {tmp_path / 'run'} --config {config} --data sample:10 --learning-rate 1e30 --stop-after-bad-steps 1"
    assert "not finite" in failed(capsys, line, 3)


def test_tensorboard(folder, capsys, tmp_path, monkeypatch):
    config = folder.parent / "small.toml"
    line = f"train {tmp_path / 'run'} --config {config} --data sample:4 --epochs 1 --tensorboard"
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
        assert "TensorBoard is not installed: pip install tensorboard" in failed(capsys, line)
    pytest.importorskip("tensorboard")
    printed(capsys, line)
    assert [*(tmp_path / "run" / "tensorboard").glob("events.*")]


def test_settings(tmp_path):
    assert settings() == Config()
    assert settings("cc152k").warmup_epochs == 10
    (tmp_path / "x.toml").write_text("epochs = 7\nseed = 1\n")
    made = settings("sample", tmp_path / "x.toml", seed=2)
    assert (made.epochs, made.seed, made.embedding) == (7, 2, PRESETS["sample"]["embedding"])
    (tmp_path / "x.toml").write_text("epochs = -7\n")
    with pytest.raises(ValueError, match=r"x\.toml: epochs must be"):
        settings("sample", tmp_path / "x.toml")
    with pytest.raises(ValueError, match=r"^seed must be"):
        settings("sample", seed=-2)
    with pytest.raises(ValueError, match="no preset is called 'flickr'; there are f30k, coco"):
        settings("flickr")
    for name in PRESETS:
        assert settings(name)


def test_every_setting_is_an_option():
    parser = cli._parser()
    values = dict(embedding=7, dropout=0.25, mask_duplicates=False, method="sgr", subsets=["clean", "ambiguous"])
    line = "train r --embedding 7 --dropout 0.25 --no-mask-duplicates --method sgr --subsets clean ambiguous"
    given = vars(parser.parse_args(line.split()))
    assert {name: given[name] for name in Config.__dataclass_fields__ if name in given} == values
    helps, groups = cli._field_texts()
    assert set(groups) == set(Config.__dataclass_fields__)
    assert helps["alpha"] == "largest margin"
    assert groups["alpha"] == "losses"
    assert helps["method"].startswith("pcsr; clean: ")


def test_help_shows_examples(capsys):
    names = ("train", "evaluate", "prepare", "verify", "noise", "vocab", "retrieve", "audit", "report", "backends")
    for name in (*names, "bench"):
        with pytest.raises(SystemExit) as stopped:
            cli.main([name, "--help"])
        assert stopped.value.code == 0
        shown = capsys.readouterr().out
        assert f"examples:\n  pcsr-fast {name}" in shown.replace("PCSR_BACKEND=reference ", "")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "exit codes: 0 done; 1 a bug" in capsys.readouterr().out


def test_noise_and_vocab(tmp_path, capsys):
    line = f"noise sample:20 {tmp_path / 'n'} --ratio 0.4 --protocol image --seed 5"
    assert "n.npy: protocol image, " in printed(capsys, line)
    before = (tmp_path / "n.npy").read_bytes()
    assert "never drawn anew" in failed(capsys, line)
    assert (tmp_path / "n.npy").read_bytes() == before
    assert "protocol image" in printed(capsys, f"noise sample:20 {tmp_path / 'n.npy'}")
    assert "no noise file" in failed(capsys, f"noise sample:20 {tmp_path / 'no'}")
    home = tmp_path / "own_precomp"
    home.mkdir()
    for split in ("train", "dev"):
        (home / f"{split}_caps.txt").write_text("a dog\na cat\n")
    assert "own_precomp_vocab.json: 5 words" in printed(capsys, f"vocab {home}")
    assert "exists; choose another name" in failed(capsys, f"vocab {home}")
    assert "7 words" in printed(capsys, f"vocab {home} --threshold 1 --out {tmp_path / 'v.json'}")


def test_backends(capsys, monkeypatch):
    assert "tally" in printed(capsys, "backends")
    monkeypatch.setattr("pcsr_fast.backend._choice", "fastest")
    assert "unknown backend 'fastest'" in failed(capsys, "backends")
