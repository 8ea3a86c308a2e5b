"""Folders as people have them: which caption belongs to which row, and files that are not what they say."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcsr_fast.data import Vocabulary, build_vocabulary, folder, noise, open_split
from pcsr_fast.data.tokens import SPECIAL, encode

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
VOCABULARY = Vocabulary({word: i for i, word in enumerate((*SPECIAL, *WORDS))})


def features(images: int, repeat: int = 1, dtype=np.float32) -> np.ndarray:
    """Row of image i is all i."""
    rows = np.repeat(np.arange(images), repeat)
    return np.broadcast_to(rows[:, None, None], (len(rows), 3, 4)).astype(dtype)


@pytest.fixture
def make(tmp_path):
    """Writes a split: its features, and captions as bytes or as one word for each number."""

    def of(split, rows, captions, ending="caps.txt", name="x_precomp"):
        home = tmp_path / name
        home.mkdir(exist_ok=True)
        np.save(home / f"{split}_ims.npy", rows)
        if not isinstance(captions, bytes):
            captions = "".join(f"{WORDS[i % 10]}\n" for i in captions).encode()
        (home / f"{split}_{ending}").write_bytes(captions)
        return home

    return of


def owners(split) -> list[float]:
    """Number of the image that each caption is paired with, read from the features."""
    return split.features[split.image_of][:, 0, 0].tolist()


def attempt(call, *args):
    """The result, or the message of a ValueError; anything else is a failure."""
    try:
        return call(*args), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("repeat", "each"),
    [(1, 5), (5, 5), (1, 1)],
    ids=["5 captions for a row", "rows repeated 5 times", "1 caption for a row"],
)
def test_captions_find_their_image(make, dtype, repeat, each):
    rows = features(10, repeat, dtype)
    home = make("train", rows, np.repeat(np.arange(10), each))
    split = open_split(home, "train", VOCABULARY)
    assert (len(split), split.images, split.regions, split.width) == (10 * each, 10, 3, 4)
    assert split.name == "x_precomp/train"
    assert split.features.dtype == dtype
    numbers = np.repeat(np.arange(10), each)
    assert owners(split) == numbers.tolist()
    assert [split.caption(n)[1] - 4 for n in range(len(split))] == numbers.tolist()
    assert [*split.texts] == [WORDS[i] for i in numbers]


@pytest.mark.parametrize("repeat", [1, 5])
def test_features_stay_on_disk(make, repeat):
    home = make("test", features(4, repeat), np.repeat(np.arange(4), 5))
    split = open_split(home, "test", VOCABULARY)
    base = split.features
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not split.features.flags.writeable


@pytest.mark.parametrize(("asked", "images"), [(2, 2), (None, 6), (1000, 6)])
@pytest.mark.parametrize("repeat", [1, 5])
def test_dev_is_cut(make, asked, images, repeat):
    for name in ("dev", "test"):
        home = make(name, features(6, repeat), np.repeat(np.arange(6), 5))
    split = open_split(home, "dev", VOCABULARY, dev_images=asked)
    assert (split.images, len(split), len(split.texts)) == (images, 5 * images, 5 * images)
    assert split.tokens.tolist() == encode([*split.texts], VOCABULARY)[0].tolist()
    assert owners(split) == np.repeat(np.arange(images), 5).tolist()
    assert open_split(home, "test", VOCABULARY, dev_images=asked).images == 6


def test_dev_is_cut_to_a_thousand(make):
    home = make("dev", features(1001), range(1001))
    assert open_split(home, "dev", VOCABULARY).images == 1000


def test_tab_separated(make):
    home = make("train", features(3), b'9\tone\n8\t"two\n7\t"th""ree"\r\n', "caps.tsv")
    split = open_split(home, "train", VOCABULARY)
    assert [*split.texts] == ["one", '"two', 'th"ree']
    assert split.image_of.tolist() == [0, 1, 2]


def test_ids(make, tmp_path):
    """Their vocabulary is a size; the variant is chosen where there are several."""
    home = make("train", features(2), b"1,7,2\n1,8,9,2\n", "caps_bpe.txt", "h5100k_precomp")
    (tmp_path / "vocab").mkdir()
    path = tmp_path / "vocab" / "now100k_precomp_vocab_bpe.json"
    path.write_text('{"word2idx": {"[PAD]": 0}, "idx2word": {"0": "[PAD]"}, "idx": 10}')
    split = open_split(home, "train")
    assert split.tokens.tolist() == [1, 7, 2, 1, 8, 9, 2]
    make("train", features(2), b"1,2\n1,2\n", "caps_bert.txt", "h5100k_precomp")
    with pytest.raises(ValueError, match=r"train_caps_bert\.txt, train_caps_bpe\.txt; name one by variant"):
        open_split(home, "train")
    assert open_split(home, "train", variant="bpe").tokens.tolist() == [1, 7, 2, 1, 8, 9, 2]
    path.write_text('{"word2idx": {}, "idx": 9}')
    with pytest.raises(ValueError, match=r"train_caps_bpe\.txt, line 2: id 9 is outside the vocabulary of 9 words"):
        open_split(home, "train", variant="bpe")
    make("dev", features(2), b"1,2\n1,2\n", "caps_bpe.txt", "h5100k_precomp")
    (home / "train_caps_bert.txt").unlink()
    with pytest.raises(ValueError, match="holds ids"):
        build_vocabulary(home)


@pytest.mark.parametrize("captions", [1, 9, 11, 49, 51, 20])
def test_other_ratios_name_both_numbers(make, captions):
    home = make("train", features(10), range(captions))
    with pytest.raises(ValueError, match=rf"train_caps\.txt has {captions} captions and .*train_ims\.npy has 10 rows"):
        open_split(home, "train", VOCABULARY)


def test_an_empty_line_is_a_caption(make):
    home = make("train", features(3), b"one\n\ntwo\n")
    split = open_split(home, "train", VOCABULARY)
    assert split.offsets.tolist() == [0, 3, 5, 8]
    # one more at the end is one too many
    home = make("train", features(3), b"one\n\ntwo\n\n")
    with pytest.raises(ValueError, match="4 captions"):
        open_split(home, "train", VOCABULARY)


def test_one_caption_per_image_is_no_repetition(make):
    """A few equal rows do not make a repeated file, nor do rows that are all the same."""
    rows = features(10)
    rows[2:6] = 7
    assert open_split(make("train", rows, range(10)), "train", VOCABULARY).images == 10
    assert open_split(make("train", features(1, 10), range(10)), "train", VOCABULARY).images == 10
    assert open_split(make("train", features(1, 7), range(7)), "train", VOCABULARY).images == 7
    with pytest.raises(ValueError, match=r"train_ims\.npy has 7 rows, not a multiple of 5"):
        open_split(make("train", features(1, 7), range(7)), "train", VOCABULARY, repeated=True)
    # a single image repeated is one
    assert open_split(make("train", features(1, 5), range(5)), "train", VOCABULARY).images == 1


@pytest.mark.parametrize(
    ("groups", "broken", "at"), [(4, 2, -1), (4, 0, -1), (2000, 777, 0)], ids=["some", "first", "outside the sample"]
)
def test_repetition_must_be_consistent(make, groups, broken, at):
    rows = features(groups, 5)
    rows[5 * broken + 3, at, at] += 1
    home = make("test", rows, range(5 * groups))
    message = rf"test_ims\.npy: rows .* are one image, rows {5 * broken} to {5 * broken + 4} are not"
    with pytest.raises(ValueError, match=message):
        open_split(home, "test", VOCABULARY)
    assert open_split(home, "test", VOCABULARY, repeated=True).images == groups
    assert open_split(home, "test", VOCABULARY, repeated=False).images == 5 * groups


def test_nan_is_equal_to_itself(make):
    rows = features(3, 5)
    rows[5:10] = np.nan
    assert open_split(make("test", rows, range(15)), "test", VOCABULARY).images == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, 3, 4)), r"<f8 \[2, 3, 4\]; expected float32 or float16"),
        (np.zeros((2, 3, 4), ">f4"), ">f4"),
        (np.zeros((2, 3, 4), np.int32), "<i4"),
        (np.zeros((2, 12), np.float32), r"\[2, 12\]; expected"),
        (np.asfortranarray(features(2)), "is in Fortran order"),
        (np.zeros((0, 3, 4), np.float32), r"is empty: <f4 \[0, 3, 4\]"),
        (np.array([[[None]]]), r"\|O"),
    ],
)
def test_other_arrays_are_named(make, rows, message):
    home = make("train", rows, range(2))
    with pytest.raises(ValueError, match=rf"train_ims\.npy .*{message}"):
        open_split(home, "train", VOCABULARY)


@settings(deadline=None)
@given(st.integers(0, 128 + 2 * 3 * 4 * 4 - 1) | st.integers(225, 300))
def test_size_must_be_that_of_the_header(tmp_path_factory, size):
    path = tmp_path_factory.mktemp("npy") / "a_ims.npy"
    np.save(path, features(2))
    whole = path.read_bytes()
    assert len(whole) == 224
    path.write_bytes((whole + bytes(100))[:size])
    expected = f"has {size} bytes, but its header, float32 .*, asks for 224" if size >= 128 else f"{size} bytes"
    with pytest.raises(ValueError, match=rf"a_ims\.npy .*{expected}"):
        folder.open_features(path)


# numpy warns of headers that Python 2 wrote
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 127), st.integers(0, 255))
def test_a_broken_header_is_an_error_or_harmless(tmp_path_factory, at, byte):
    path = tmp_path_factory.mktemp("npy") / "a_ims.npy"
    np.save(path, features(2))
    data = bytearray(path.read_bytes())
    data[at] = byte
    path.write_bytes(data)
    rows, error = attempt(folder.open_features, path)
    assert "a_ims.npy" in error if error else rows.nbytes == 96


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([b"one", b"\n", b"\r\n", b"\t", b'"', b"\xff", b"\xc3\xa9", b" ", b"'s", b"\x00"])))
@pytest.mark.parametrize("ending", ["caps.txt", "caps.tsv", "caps_bpe.txt"])
def test_any_captions(tmp_path_factory, ending, pieces):
    """One error that names a file, or as many captions as lines."""
    home = tmp_path_factory.mktemp("fuzz")
    data = b"".join(pieces)
    np.save(home / "train_ims.npy", features(1))
    (home / f"train_{ending}").write_bytes(data)
    split, error = attempt(open_split, home, "train", VOCABULARY)
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    assert f"train_{ending}" in error if error else len(split) == lines


def test_missing_files_are_named(make, tmp_path):
    home = make("train", features(2), range(2))
    with pytest.raises(FileNotFoundError, match=r"no x_precomp_vocab\.json in .*pcsr-fast vocab"):
        open_split(home, "train")
    with pytest.raises(FileNotFoundError, match=r"dev_ims\.npy"):
        open_split(home, "dev", VOCABULARY)
    (home / "train_caps.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"train_caps\.txt, train_caps\.tsv or train_caps_\*\.txt is missing"):
        open_split(home, "train", VOCABULARY)
    (home / "train_caps.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"train_caps\.txt is empty"):
        open_split(home, "train", VOCABULARY)
    (home / "train_caps.tsv").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has train_caps\.txt, train_caps\.tsv"):
        open_split(home, "train", VOCABULARY)


def test_vocabulary_is_found(make, tmp_path):
    home = make("train", features(2), range(2))
    elsewhere = tmp_path / "elsewhere"
    for place in (home, tmp_path / "vocab", tmp_path, elsewhere):
        path = place / "x_precomp_vocab.json"
        VOCABULARY.save(path)
        for where in [path, place] if place == elsewhere else [path, place, None]:
            assert open_split(home, "train", where).tokens.tolist() == [1, 4, 2, 1, 5, 2]
        path.unlink()


def test_vocabulary_is_built_from_train_and_dev(make):
    make("train", features(5), b"one two\n" * 3 + b"two three\n" * 2)
    make("test", features(4), b"nine\n" * 4)
    home = make("dev", features(4), b"one three three\n" + b"four\n" * 3)
    assert [*build_vocabulary(home).ids][4:] == ["one", "two", "three"]
    assert [*build_vocabulary(home, threshold=5).ids][4:] == ["two"]


def test_tokens_are_cached_by_content(make, tmp_path, monkeypatch):
    home, cache = make("train", features(3), b"one two\n\nthree\n"), tmp_path / "cache"
    first = open_split(home, "train", VOCABULARY, cache=cache)
    calls = []
    monkeypatch.setattr(folder, "encode", lambda *args: calls.append(args) or encode(*args))

    def again(vocabulary=VOCABULARY):
        split = open_split(home, "train", vocabulary, cache=cache)
        return split.tokens.tolist(), split.offsets.tolist()

    assert again() == (first.tokens.tolist(), first.offsets.tolist())
    assert not calls
    other = Vocabulary({**VOCABULARY.ids, "two": 14}, 15)
    assert again(other)[0][2] == 14
    assert len(calls) == 1
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    assert again() == (first.tokens.tolist(), first.offsets.tolist())
    assert len(calls) == 2
    (home / "train_caps.txt").write_bytes(b"one one\n\nthree\n")
    assert again()[0] == [1, 5, 5, 2, 1, 2, 1, 7, 2]


@pytest.mark.parametrize(("line", "other"), [(b"one\ttwo\n", "caps.tsv"), (b"1,2\n", "caps_bpe.txt")])
def test_the_cache_knows_kinds_of_captions(make, tmp_path, line, other):
    """The same bytes are other tokens in a file of another kind."""
    text, second = make("train", features(1), line), make("train", features(1), line, other, "y_precomp")
    for home in (text, second):
        expected = open_split(home, "train", VOCABULARY).tokens.tolist()
        assert open_split(home, "train", VOCABULARY, cache=tmp_path / "cache").tokens.tolist() == expected


def test_real_folder():
    """Flickr8k in the layout of this module; PCSR_DATA names the folder that holds f8k_small_precomp."""
    home = Path(os.environ.get("PCSR_DATA", "")) / "f8k_small_precomp"
    if not home.is_dir():
        pytest.skip("PCSR_DATA does not name a folder with f8k_small_precomp")
    train, dev = open_split(home, "train"), open_split(home, "dev")
    assert (len(train), train.images, train.regions, train.width) == (10_000, 2000, 36, 256)
    assert (len(dev), dev.images) == (5000, 1000)
    built = build_vocabulary(home)
    assert set(built.ids) <= set(Vocabulary.load(home / "f8k_small_precomp_vocab.json").ids)
    for ratio in (0.2, 0.4, 0.6):
        index = noise.load(home / "noise_index" / f"f8k_small_precomp_{ratio}", train.images, len(train))
        assert noise.protocol(index, train.images) == "caption"
        assert abs((train.with_noise(index).image_of != train.true_image).mean() - ratio) < 0.01
