"""Settings: one clear error that names the field, and files that give back what was written."""

import dataclasses
import json

import pytest

from pcsr_fast.config import PRINTED, Config, differences, from_dict, load


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("embedding", 16.0), ("embedding", "16"), ("embedding", True), ("embedding", 0), ("classes", None),
        ("method", "pscr"), ("method", ["pcsr"]), ("precision", 16), ("mask_duplicates", 1), ("device", 0),
        ("dropout", 1.0), ("dropout", -0.1), ("dropout", float("nan")), ("learning_rate", float("inf")),
        ("learning_rate", "fast"), ("learning_rate", 0), ("alpha", True), ("clip", -1), ("gamma", 0), ("gamma", 1.01),
        ("margin_base", 1), ("batch_size", 1), ("epochs", -1), ("warmup_steps", -1), ("refinable_from", 0),
        ("subsets", "clean"), ("subsets", 5), ("subsets", ["clean", 5]), ("subsets", ["refinable"]),
        ("subsets", ["clean", "noisy"]), ("target_start", 0.95), ("target_end", 1.1), ("target_end", 0.1),
        ("controller_rate", 0), ("evaluation_negatives", 128), ("evaluation_negatives", -1), ("seed", -1),
    ],
)  # fmt: skip
def test_wrong_values(name, value):
    with pytest.raises(ValueError, match=rf"^(?!.*\n).*\b{name}\b") as caught:
        Config(**{name: value})
    shown = tuple(value) if name == "subsets" and "a choice of" in str(caught.value) else value
    assert repr(shown) in str(caught.value) or name == "target_end"


def test_bank_holds_a_batch():
    with pytest.raises(ValueError, match="bank_size must be at least batch_size, got 127"):
        Config(rematch_scope="bank", bank_size=127)
    assert Config(rematch_scope="batch", bank_size=127).bank_size == 127


def test_paper_is_one_switch():
    printed = Config(paper=True, epochs=7)
    assert {name: getattr(printed, name) for name in PRINTED} == PRINTED
    assert printed.epochs == 7
    # every entry is a deviation
    assert all(getattr(Config(), name) != value for name, value in PRINTED.items())


def test_values_take_the_type_of_their_field():
    made = Config(alpha=1, subsets=["clean", "ambiguous"], epochs=0)
    assert type(made.alpha) is float
    assert made.subsets == ("clean", "ambiguous")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.alpha = 2.0


def test_unknown_name():
    with pytest.raises(ValueError, match=r"no setting is called 'learning_rat'; there are .*learning_rate"):
        from_dict({"learning_rat": 1.0})


def toml(values: dict) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


@pytest.mark.parametrize(("suffix", "write"), [("json", json.dumps), ("toml", toml)])
def test_files(tmp_path, suffix, write):
    made = Config(method="clean", classes=32, dropout=0, subsets=("clean", "refinable"), mask_duplicates=False)
    path = tmp_path / f"run.{suffix}"
    path.write_text(write(json.loads(made.dump())))
    assert load(path) == made
    assert load(path, seed=7) == dataclasses.replace(made, seed=7)
    path.write_text(write({"gamma": 2}))
    with pytest.raises(ValueError, match=rf"run\.{suffix}: gamma must be in \(0, 1\], got 2"):
        load(path)
    path.write_text("classes = = 2")
    with pytest.raises(ValueError, match=rf"run\.{suffix}: "):
        load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=rf"run\.{suffix}: "):
        load(path)
    path.unlink()
    with pytest.raises(ValueError, match=rf"run\.{suffix}"):
        load(path)


def test_a_list_is_no_configuration(tmp_path):
    (tmp_path / "run.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"run\.json: expected names and values"):
        load(tmp_path / "run.json")


def test_differences():
    assert differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 4, "d": 5}) == [
        "b: 2 -> 4",
        "c: 3 -> None",
        "d: None -> 5",
    ]
