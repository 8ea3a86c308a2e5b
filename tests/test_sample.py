"""The sample set: deterministic, scans of the splits apart, captions that are true and in the vocabulary."""

import doctest
import re
from collections import Counter

import numpy as np
import pytest

from pcsr_fast.data import sample
from pcsr_fast.data.tokens import UNK


def test_docstring():
    found = doctest.testmod(sample)
    assert (found.attempted, found.failed) == (2, 0)


@pytest.mark.parametrize("name", ["train", "dev", "test"])
def test_scenes_do_not_depend_on_their_number(name):
    few, many = sample.sample_split(name, images=3), sample.sample_split(name, images=9)
    assert len(few) == 15
    np.testing.assert_array_equal(few.features, many.features[:3])
    assert few.texts == many.texts[:15]
    assert sample.sample_split(name, images=3, seed=1).texts != few.texts


def test_every_word_is_known():
    for name in sample.IMAGES:
        split = sample.sample_split(name)
        assert UNK not in split.tokens
        assert split.offsets[1] - split.offsets[0] == len(split.texts[0].split()) + 2
    used = {word for name in sample.IMAGES for text in sample.sample_split(name).texts for word in text.split()}
    unused = set(sample.sample_vocabulary().ids) - used - set(sample.SPECIAL)
    assert not unused


def test_scans_are_apart():
    rows = {name: {scan.tobytes() for digit in digits for scan in digit} for name, digits in sample._scans().items()}
    assert min(map(len, rows.values())) > 350
    assert not rows["train"] & rows["test"]
    assert not rows["train"] & rows["dev"]
    assert not rows["dev"] & rows["test"]
    assert all(len(digit) > 30 for digits in sample._scans().values() for digit in digits)


HOLDS = {
    "above": lambda a, b: a // 3 < b // 3,
    "below": lambda a, b: a // 3 > b // 3,
    "left of": lambda a, b: a % 3 < b % 3,
    "right of": lambda a, b: a % 3 > b % 3,
}


def test_captions_are_true():
    for i in range(50):
        shown, pixels, captions = sample._scene("test", i, 0)
        assert [*np.flatnonzero(pixels.any(1))] == sorted(shown)
        two, places, tally, number, relation = captions
        words = {sample.PLACES[cell]: sample.DIGITS[digit] for cell, digit in shown.items()}
        said = [part.split(" ", 1)[1].split(" in the ") for part in two.split(" and ")]
        assert all(words[place] == digit for digit, place in said)
        said = [part.split(" ", 1) for part in places.removeprefix("the picture shows ").split(" , ")]
        assert all(words[place] == digit for digit, place in said)
        counted = [sample._counted(sample.DIGITS[digit], count) for digit, count in Counter(shown.values()).items()]
        assert sorted(tally.removeprefix("there is ").split(" and ")) == sorted(counted)
        count, place, digit = re.fullmatch(r"(\w+) digits : the (.+) digit is an? (\w+)", number).groups()
        assert (sample.COUNTS.index(count), words[place]) == (len(shown), digit)
        first, how, second = re.match(r"an? (\w+) (.+) an? (\w+) with", relation).groups()
        assert any(
            (words[sample.PLACES[a]], words[sample.PLACES[b]]) == (first, second) and HOLDS[how](a, b)
            for a in shown
            for b in shown
        )
        assert sample.COUNTS.index(relation.split(" with ")[1].split()[0]) == len(shown)


def test_features_come_from_pixels_and_place():
    split = sample.sample_split("test", images=40)
    blank = {}
    for i in range(40):
        shown, _, _ = sample._scene("test", i, 0)
        for cell in set(range(9)) - set(shown):
            np.testing.assert_array_equal(blank.setdefault(cell, split.features[i, cell]), split.features[i, cell])
    # an empty cell says where it is
    assert len({value.tobytes() for value in blank.values()}) == 9


def test_draw():
    picture = sample.draw("dev", 0, scale=4)
    assert (picture.dtype, picture.shape) == (np.uint8, (98, 98))
    shown, pixels, _ = sample._scene("dev", 0, 0)
    cell = next(iter(shown))
    row, column = (33 * k for k in divmod(cell, 3))
    inside = picture[row : row + 32 : 4, column : column + 32 : 4]
    np.testing.assert_array_equal(inside, 255 - (pixels[cell].reshape(8, 8) * 255).astype(np.uint8))


def test_mistakes():
    with pytest.raises(ValueError, match=r"no split 'val'; choose one of train, dev, test"):
        sample.sample_split("val")
    with pytest.raises(ValueError, match="0 images asked for"):
        sample.sample_split("dev", images=0)
