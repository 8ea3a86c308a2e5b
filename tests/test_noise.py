"""Noise: both protocols, files of both lengths, and no silent redraw."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcsr_fast.data import noise
from pcsr_fast.data.files import write_whole
from pcsr_fast.data.split import Split


@given(st.integers(1, 30), st.integers(1, 5), st.floats(0, 1), st.sampled_from(noise.PROTOCOLS), st.integers(0, 2**32))
def test_draw_permutes_what_it_picks(images, each, ratio, protocol, seed):
    index = noise.draw(images, images * each, ratio, protocol=protocol, seed=seed)
    clean = np.repeat(np.arange(images), each)
    assert index.dtype == np.int64
    assert np.array_equal(np.sort(index), clean)
    units = images * (1 if protocol == "image" else each)
    moved = (index != clean).sum() // (each if protocol == "image" else 1)
    assert moved <= np.floor(ratio * units + 1e-5)
    assert noise.protocol(index, images) in (
        {"none", "image"} if protocol == "image" and each > 1 else {"none", "caption", "image"}
    )
    again = noise.draw(images, images * each, ratio, protocol=protocol, seed=seed)
    assert np.array_equal(index, again)


@pytest.mark.parametrize(("ratio", "moved"), [(0, 0), (0.58, 58), (0.2, 20), (1, 100)])
def test_as_many_as_asked_for(monkeypatch, ratio, moved):
    """Floor of the product, not of its rounding error: every picked caption is counted by reversing the picked."""

    class Reverse:
        def permutation(self, x):
            return np.arange(x) if isinstance(x, int) else x[::-1]

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Reverse())
    index = noise.draw(100, 100, ratio, seed=0)
    # the middle one of an odd number stays
    assert (index != np.arange(100)).sum() == moved - moved % 2


def test_mismatched_pairs_are_about_the_ratio():
    clean = np.repeat(np.arange(1000), 5)
    for protocol in noise.PROTOCOLS:
        index = noise.draw(1000, 5000, 0.4, protocol=protocol, seed=1)
        assert 0.39 < (index != clean).mean() <= 0.4
        assert noise.protocol(index, 1000) == protocol
        assert not np.array_equal(index, noise.draw(1000, 5000, 0.4, protocol=protocol, seed=2))


@pytest.mark.parametrize("name", ["f30k_precomp_0.2", "f30k_precomp_0.2.npy"])
def test_save_and_load(tmp_path, name):
    index = noise.draw(20, 100, 0.5, seed=0)
    assert noise.save(tmp_path / name, index).name == "f30k_precomp_0.2.npy"
    assert [path.name for path in tmp_path.iterdir()] == ["f30k_precomp_0.2.npy"]
    assert np.array_equal(noise.load(tmp_path / name, 20, 100), index)
    # what is there is used, whatever could be drawn
    assert np.array_equal(noise.load(tmp_path / name, 20, 100, draw_ratio=0.9, seed=5), index)


def test_a_file_of_images(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 0, 2], np.int32))
    index = noise.load(tmp_path / "a", 3, 6)
    assert (index.tolist(), index.dtype) == ([1, 1, 0, 0, 2, 2], np.int64)
    assert noise.protocol(index, 3) == "image"


@pytest.mark.parametrize(
    ("index", "images", "expected"),
    [
        ([0, 0, 1, 1], 2, "none"),
        ([1, 1, 0, 0], 2, "image"),
        ([0, 1, 1, 0], 2, "caption"),
        ([1, 0], 2, "caption"),
        ([0, 0, 0, 1], 2, "other"),
    ],
)
def test_protocol(index, images, expected):
    assert noise.protocol(np.array(index), images) == expected


def test_what_is_no_permutation_is_said(tmp_path):
    np.save(tmp_path / "a.npy", np.array([0, 0, 0, 1]))
    with pytest.warns(UserWarning, match=r"a\.npy is no permutation"):
        noise.load(tmp_path / "a", 2, 4)


def test_a_missing_file_is_drawn_only_if_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no noise file .*a\.npy"):
        noise.load(tmp_path / "a", 20, 100)
    index = noise.load(tmp_path / "a", 20, 100, draw_ratio=0.5, draw_protocol="image", seed=3)
    assert noise.protocol(index, 20) == "image"
    assert np.array_equal(noise.load(tmp_path / "a", 20, 100), index)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.arange(5), r"has 5 entries; expected 10 \(captions\) or 2 \(images\)"),
        (np.array([0, 2]), r"\[1\] is 2, but there are 2 images"),
        (np.array([-1, 0]), r"\[0\] is -1, but there are 2 images"),
        (np.zeros(2), r"has float64 \[2\]"),
        (np.zeros((2, 5), int), r"has int64 \[2, 5\]"),
        (np.array([None, 1]), "has pickled objects"),
    ],
)
def test_bad_files_are_named(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match=rf"a\.npy.*{message}"):
        noise.load(tmp_path / "a", 2, 10)


@given(st.integers(0, 100))
def test_a_truncated_file_is_named(tmp_path_factory, kept):
    path = noise.save(tmp_path_factory.mktemp("noise") / "a", np.arange(10))
    path.write_bytes(path.read_bytes()[: kept * 2])
    with pytest.raises(ValueError, match=rf"a\.npy .*{kept * 2} bytes"):
        noise.load(path, 10, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 10, -0.1), "ratio -0.1 is not between 0 and 1"),
        ((2, 10, 1.5), "ratio 1.5"),
        ((2, 10, float("nan")), "ratio nan"),
        ((3, 10, 0.5), "10 captions of 3 images"),
        ((0, 0, 0.5), "0 captions of 0 images"),
    ],
)
def test_bad_draws_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        noise.draw(*arguments, seed=0)
    with pytest.raises(ValueError, match="unknown noise protocol 'words'"):
        noise.draw(2, 10, 0.5, protocol="words", seed=0)


def test_a_split_with_noise():
    clean = np.repeat(np.arange(3), 2)
    split = Split("x", np.zeros((3, 1, 1)), np.zeros(12, np.int32), np.arange(7) * 2, clean, clean)
    noisy = split.with_noise(np.array([1, 1, 0, 0, 2, 2]))
    assert noisy.image_of.tolist() == [1, 1, 0, 0, 2, 2]
    assert np.array_equal(noisy.true_image, clean)
    assert np.array_equal(split.image_of, clean)
    assert len(split.head(2)) == 4
    for bad, message in [([0], r"shape \[1\] for 6"), ([3] * 6, r"image_of\[0\] is 3, but there are 3 images")]:
        with pytest.raises(ValueError, match=message):
            split.with_noise(np.array(bad))
    with pytest.raises(ValueError, match="cut first"):
        noisy.head(2)
    assert noisy.head(3) is noisy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(texts=["a"]), r"6 captions in image_of, but \{'texts': 1\}"),
        (dict(true_image=np.zeros(5, int)), r"\{'true_image': 5\}"),
        (dict(offsets=np.arange(6) * 2), r"\{'offsets': 5\}"),
        (dict(features=np.zeros((3, 1))), r"must be \[images, regions, width\], not \[3, 1\]"),
        (dict(tokens=np.zeros(11, np.int32)), "offsets run from 0 to 12, but there are 11 tokens"),
        (dict(offsets=np.arange(1, 8), tokens=np.zeros(7)), "offsets run from 1 to 7"),
        (dict(true_image=np.full(6, -1)), r"true_image\[0\] is -1"),
    ],
)
def test_parts_of_a_split_must_fit(change, message):
    clean = np.repeat(np.arange(3), 2)
    split = Split("x", np.zeros((3, 1, 1)), np.zeros(12, np.int32), np.arange(7) * 2, clean, clean)
    with pytest.raises(ValueError, match=message):
        replace(split, **change)


def test_files_are_written_whole_or_not_at_all(tmp_path):
    def fail(file):
        file.write(b"half")
        raise OSError("disk full")

    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(OSError, match="disk full"):
        write_whole(tmp_path / "a", fail)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"before")]
    # as readable for others as any new file
    (tmp_path / "plain").touch()
    write_whole(tmp_path / "a", lambda file: file.write(b"after"))
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode
