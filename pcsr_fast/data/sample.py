"""A sample set without a download: grids of handwritten digits, and captions that say what is where.

A scene is a grid of 3 x 3 cells, two to four of which hold a digit: one of scikit-learn's 1,797 scans of 8 x 8 pixels.
Each split has scans of its own, so that a model meets unknown handwriting in dev and test. A region is a cell, empty
or not; its feature is its 64 pixels, in 0..1, and one-hot codes of its row and column. The five captions of a scene
describe it in five ways, and none says everything, so captions of similar scenes can be mistaken.
"""

import functools

import numpy as np

from pcsr_fast.data.split import Split
from pcsr_fast.data.tokens import SPECIAL, Vocabulary, encode

IMAGES = {"train": 800, "dev": 150, "test": 200}
CAPTIONS = 5
GRID = 3
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLACES = ("top left", "top", "top right", "left", "middle", "right", "bottom left", "bottom", "bottom right")
COUNTS = ("no", "a", "two", "three", "four")
RELATIONS = ("above", "below", "left of", "right of")
OTHER_WORDS = "an and digit digits in is of picture shows the there with , :"


def sample_split(name: str, images: int | None = None, seed: int = 0) -> Split:
    """A split of the sample set: train, dev or test. Scene i is the same for every number of images.

    >>> split = sample_split("dev", images=2)
    >>> split.features.shape, len(split), split.texts[0]
    ((2, 9, 70), 10, 'a two in the right and an eight in the bottom')
    """
    usual = IMAGES[_checked(name)]
    images = usual if images is None else images
    if images < 1:
        raise ValueError(f"sample {name}: {images} images asked for, at least 1 needed")
    scenes = [_scene(name, i, seed) for i in range(images)]
    texts = [text for _, _, captions in scenes for text in captions]
    tokens, offsets = encode(texts, sample_vocabulary())
    image_of = np.repeat(np.arange(images), CAPTIONS)
    features = _features(np.stack([pixels for _, pixels, _ in scenes]))
    return Split(f"sample/{name}", features, tokens, offsets, image_of, image_of, texts)


@functools.cache
def sample_vocabulary() -> Vocabulary:
    """All words that captions of the sample set have, in any split and with any seed."""
    phrases = (*DIGITS, *(_plural(digit) for digit in DIGITS), *PLACES, *COUNTS[1:], *RELATIONS, OTHER_WORDS)
    known = dict.fromkeys((*SPECIAL, *" ".join(phrases).split()))
    return Vocabulary({word: i for i, word in enumerate(known)})


def draw(name: str, image: int, seed: int = 0, scale: int = 8) -> np.ndarray:
    """The picture of an image id, dark ink on white: uint8 [24 scale + 2, 24 scale + 2], with lines between cells."""
    _, pixels, _ = _scene(_checked(name), image, seed)
    cells = 255 - (pixels.reshape(GRID, GRID, 8, 8) * 255).astype(np.uint8)
    cells = cells.repeat(scale, 2).repeat(scale, 3)
    lined = np.pad(cells, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=160)
    side = GRID * (8 * scale + 1)
    return lined.transpose(0, 2, 1, 3).reshape(side, side)[:-1, :-1]


def _checked(name: str) -> str:
    if name not in IMAGES:
        raise ValueError(f"the sample set has no split {name!r}; choose one of {', '.join(IMAGES)}")
    return name


@functools.cache
def _scans() -> dict[str, list[np.ndarray]]:
    """Scans of each split by digit: [scans, 64] in 0..1; three of five in train, one each in dev and test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = (data.data / 16).astype(np.float32)
    fifth = np.arange(len(pixels)) * 5 // len(pixels)
    members = {"train": fifth < 3, "dev": fifth == 3, "test": fifth == 4}
    return {name: [pixels[chosen & (data.target == d)] for d in range(10)] for name, chosen in members.items()}


def _scene(name: str, image: int, seed: int) -> tuple[dict[int, int], np.ndarray, list[str]]:
    """What a scene shows, {cell: digit}, its pixels [9, 64] and its captions."""
    rng = np.random.default_rng([seed, [*IMAGES].index(name), image])
    cells = np.sort(rng.choice(GRID * GRID, rng.integers(2, 5), replace=False)).tolist()
    shown = {cell: int(rng.integers(10)) for cell in cells}
    pixels = np.zeros((GRID * GRID, 64), np.float32)
    for cell, digit in shown.items():
        scans = _scans()[name][digit]
        pixels[cell] = scans[rng.integers(len(scans))]
    return shown, pixels, [phrase(shown, rng) for phrase in PHRASES]


def _features(pixels: np.ndarray) -> np.ndarray:  # [images, 9, 64] -> [images, 9, 70]
    row, column = np.divmod(np.arange(GRID * GRID), GRID)
    place = np.concatenate([np.eye(GRID)[row], np.eye(GRID)[column]], 1).astype(np.float32)
    return np.concatenate([pixels, np.broadcast_to(place, (len(pixels), *place.shape))], 2)


def _counted(digit: str, count: int = 1) -> str:
    if count == 1:
        return ("an " if digit == "eight" else "a ") + digit
    return f"{COUNTS[count]} {_plural(digit)}"


def _plural(digit: str) -> str:
    return digit + ("es" if digit == "six" else "s")


def _some(shown: dict[int, int], rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Digit and place of some cells of a scene, in a random order."""
    cells = rng.permutation([*shown])[:count].tolist()
    return [(DIGITS[shown[cell]], PLACES[cell]) for cell in cells]


def _two_places(shown, rng) -> str:
    (first, here), (second, there) = _some(shown, rng, 2)
    return f"{_counted(first)} in the {here} and {_counted(second)} in the {there}"


def _places(shown, rng) -> str:
    listed = " , ".join(f"{digit} {place}" for digit, place in _some(shown, rng, 3))
    return f"the picture shows {listed}"


def _tally(shown, rng) -> str:
    counts = {digit: [*shown.values()].count(digit) for digit in rng.permutation([*shown.values()]).tolist()}
    return "there is " + " and ".join(_counted(DIGITS[digit], count) for digit, count in counts.items())


def _number(shown, rng) -> str:
    digit, place = _some(shown, rng, 1)[0]
    return f"{COUNTS[len(shown)]} digits : the {place} digit is {_counted(digit)}"


def _relation(shown, rng) -> str:
    cells = rng.permutation([*shown])[:2]
    (row, column), (other_row, other_column) = (divmod(int(cell), GRID) for cell in cells)
    relations = [row < other_row, row > other_row, column < other_column, column > other_column]
    relation = RELATIONS[rng.choice(np.flatnonzero(relations))]
    first, second = (DIGITS[shown[int(cell)]] for cell in cells)
    return f"{_counted(first)} {relation} {_counted(second)} with {COUNTS[len(shown)]} digits in the picture"


PHRASES = (_two_places, _places, _tally, _number, _relation)
