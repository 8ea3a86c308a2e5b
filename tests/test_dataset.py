"""Data sets by their path: three kinds open alike, noise goes into train alone, and JSON gives back what was saved."""

import doctest
import json

import numpy as np
import pytest

from pcsr_fast.data import dataset, noise, store
from pcsr_fast.data.dataset import Dataset, load


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "own_precomp"
    home.mkdir()
    for split, images in (("train", 6), ("dev", 4), ("test", 3)):
        features = np.random.default_rng(images).random((images, 2, 4), np.float32)
        np.save(home / f"{split}_ims.npy", features)
        (home / f"{split}_caps.txt").write_text("".join(f"a dog {n}\n" for n in range(5 * images)))
    (home / "own_precomp_vocab.json").write_text(
        json.dumps({"word2idx": {"<pad>": 0, "<start>": 1, "<end>": 2, "<unk>": 3, "dog": 4}, "idx": 5})
    )
    return home


def test_docstring():
    found = doctest.testmod(dataset)
    assert (found.attempted, found.failed) == (3, 0)


def test_a_folder_and_its_store_are_alike(folder, tmp_path):
    store.prepare(folder, tmp_path / "store", dtype="float32")
    plain, stored = (Dataset(str(path), noise=0.5, dev_images=2) for path in (folder, tmp_path / "store"))
    assert (plain.is_store, stored.is_store) == (False, True)
    assert plain.vocabulary.key == stored.vocabulary.key
    for name, images in (("train", 6), ("dev", 2), ("test", 3)):
        a, b = plain.split(name), stored.split(name)
        assert a.images == b.images == images
        for part in ("tokens", "offsets", "image_of", "true_image"):
            np.testing.assert_array_equal(getattr(a, part), getattr(b, part))
        np.testing.assert_array_equal(a.features[np.arange(images)], b.features[np.arange(images)])
        assert (a.image_of != a.true_image).any() == (name == "train")


def test_noise_of_a_file(folder, tmp_path):
    index = noise.draw(6, 30, 0.5, protocol="image", seed=3)
    noise.save(tmp_path / "mine", index)
    np.testing.assert_array_equal(Dataset(str(folder), noise=str(tmp_path / "mine")).split("train").image_of, index)
    drawn = Dataset(str(folder), noise=0.5, noise_protocol="image", noise_seed=3).split("train")
    np.testing.assert_array_equal(drawn.image_of, index)


def test_what_is_saved_can_be_opened_from_anywhere(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    made = Dataset(folder.name, noise=0.25, dev_images=None, repeated=False)
    made.save(tmp_path / "data.json")
    monkeypatch.chdir("/")
    again = load(tmp_path / "data.json", noise_seed=None)
    assert (again.path, again.noise, again.dev_images, again.repeated) == (str(folder.resolve()), 0.25, None, False)
    assert load(tmp_path / "data.json", path="sample:3").split("dev").images == 3
    Dataset("sample:3").save(tmp_path / "data.json")
    assert load(tmp_path / "data.json") == Dataset("sample:3")


def test_names_of_images(tmp_path):
    source = tmp_path / "rows"
    source.mkdir()
    np.save(source / "x.npy", np.ones((2, 3, 4), np.float16))
    (source / "x.tsv").write_text("p-1\ta dog\np-2\ta cat\n")
    store.prepare(source, tmp_path / "store")
    names = Dataset(str(tmp_path / "store")).image_names("train")
    assert (len(names), names[1], names.index("p-2")) == (2, "p-2", 1)
    with pytest.raises(ValueError, match="no image is called 'p-3'; the first is 'p-1'"):
        names.index("p-3")
    assert Dataset("sample").image_names("train") is None


def test_mistakes(tmp_path):
    for path in ("sample:", "sample:0", "sample:many", "sample:-1"):
        with pytest.raises(ValueError, match=f"{path}: expected sample, or sample:NUMBER"):
            Dataset(path)
    with pytest.raises(FileNotFoundError, match=r"no is no folder; name a folder of features, a store, or: sample"):
        Dataset(str(tmp_path / "no"))
    with pytest.raises(FileNotFoundError, match=r"has neither manifest\.json"):
        Dataset(str(tmp_path)).split("train")
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(ValueError, match=r"data\.json is damaged"):
        load(tmp_path / "data.json")
    (tmp_path / "data.json").write_text(json.dumps({"path": str(tmp_path / "gone"), "from_the_future": 1}))
    with pytest.raises(FileNotFoundError, match=r"gone is no folder.*where the data has moved to: --data FOLDER"):
        load(tmp_path / "data.json")
