"""Captions to ids: words against NLTK, lines against Python, and text that is broken or extreme."""

import itertools
import json
import pickle
import re
import sys
import threading
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.tokenize import NLTKWordTokenizer

from pcsr_fast.data.lines import Lines
from pcsr_fast.data.tokens import END, SPECIAL, START, UNK, Vocabulary, encode, parse_ids, words

VOCABULARY = Vocabulary({word: i for i, word in enumerate((*SPECIAL, "a", "dog", ".", "''"))})


def oracle(caption: str) -> list[str]:
    return NLTKWordTokenizer().tokenize(caption.lower())


# characters and words that some rule of the tokenizer looks at, and their neighbours
PIECES = [
    *"ab st'\"`.,:;?!-*()[]{}<> \t\n\r\x0b\x1c\x85\xa0«»“”‘’„‒–—―…@#$%&19_/",
    *"ſıİKÅΣσςé\u0301\u200d²Ⅳⓐ٣中😀",
    *("cannot", "gonna", "gotta", "gimme", "lemme", "wanna", "d'ye", "more'n", "'tis", "'twas", "CANNOT", "gımme"),
    *("n't", "'ll", "'re", "'ve", "'s", "'m", "'d", "'n", "''", "``", "--", "...", "  ", " ", "the dog", "'tiſ"),
]


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=10).map("".join))
def test_words_are_those_of_nltk(caption):
    assert words(caption) == oracle(caption)


def test_every_pair_of_pieces():
    """What chance would rarely put side by side: where a caption begins, inside a word, and behind the last."""
    captions = [f"{a}{b} x{a}{b}y z{a}{b}" for a, b in itertools.product(PIECES, repeat=2)]
    assert len(captions) > 9000
    assert [(c, words(c)) for c in captions] == [(c, oracle(c)) for c in captions]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20))
def test_words_of_any_text(caption):
    # the newest letters are unknown to Python's tables and known to those behind NLTK
    if all(unicodedata.category(c) != "Cn" for c in caption):
        assert words(caption) == oracle(caption)


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("A man's dog can't run, isn't it?", "a man 's dog ca n't run , is n't it ?"),
        ('"Stop", he said ("now").', "`` stop '' , he said ( `` now '' ) ."),
        ("It's 3,000.50 -- or 5:30...", "it 's 3,000.50 -- or 5:30 ..."),
        ("D'ye wanna (gonna) more'n cannot'tis", "d 'ye wan na ( gon na ) more 'n can not 't is"),
        ("wanna", "wan na"),
        ("e.g. the end.)  ", "e.g. the end . )"),
        ("rock 'n' roll 'hello' dogs'", "rock 'n ' roll ' hello ' dogs '"),
        ("ΟΔΟΣ ΣΑΣ. İ K.", "οδος σας. i\u0307 k ."),
        ("", ""),
        (" \u3000\t", ""),
    ],
)
def test_words_by_example(caption, expected):
    assert words(caption) == expected.split() == oracle(caption)


def test_every_character():
    """Lower case, space, digit and letter by letter, beside the characters that ask for it."""
    blocks = [
        (0, 0x3400),
        (0xA000, 0xAC00),
        (0xF900, 0x10000),
        (0x10000, 0x11000),
        (0x1D400, 0x1D800),
        (0x1E900, 0x1FB00),
    ]
    known = [chr(i) for block in blocks for i in range(*block) if unicodedata.category(chr(i)) not in ("Cn", "Cs")]
    assert len(known) > 15_000
    for begin in range(0, len(known), 500):
        caption = " x ".join(f"A{c}B '{c} {c}'s {c}'a ,{c} can{c} {c}cannot" for c in known[begin : begin + 500])
        assert words(caption) == oracle(caption)


@given(st.text(alphabet="ΑΣσς .'a\u0301:-", max_size=12))
def test_final_sigma(text):
    """It depends on its neighbours; without apostrophes and stops words are what str.split gives."""
    text = re.sub(r"[.':-]", "\u00b7", text)
    assert words(text) == text.lower().split()


def test_encode_is_one_flat_array():
    captions = ["A dog.", "", "a cat", "DOG " * 3]
    tokens, offsets = encode(captions, VOCABULARY)
    assert (tokens.dtype, offsets.dtype) == (np.int32, np.int64)
    expected = [[START, *(VOCABULARY.ids.get(w, UNK) for w in oracle(caption)), END] for caption in captions]
    assert [tokens[a:b].tolist() for a, b in itertools.pairwise(offsets)] == expected
    # no words: start and end alone, and no row moves
    assert expected[1] == [START, END]
    tokens, offsets = encode([], VOCABULARY)
    assert (tokens.tolist(), offsets.tolist()) == ([], [0])


@pytest.mark.parametrize("piece", ["a", "'", '"', ".", ",:", " ", "--", "é", "'s ", "Σ", "cannot", "\u0301'", "``"])
def test_a_million_characters(piece):
    """Every rule is linear: this ends."""
    caption = (piece * (1_000_000 // len(piece)))[:1_000_000]
    tokens, offsets = encode([caption, "a dog"], VOCABULARY)
    assert tokens[offsets[1] :].tolist() == [START, 4, 5, END]


def test_surrogates_are_named():
    with pytest.raises(ValueError, match=r"caption 1: character 2 is '\\udcff'"):
        encode(["fine", "a \udcff"], VOCABULARY)


def test_encoding_releases_the_interpreter():
    captions = ["A man's dog can't run, isn't it?"] * 50_000
    begun, done = threading.Event(), []

    def run():
        begun.set()
        encode(captions, VOCABULARY)
        done.append(True)

    encode(captions[:10], VOCABULARY)
    interval = sys.getswitchinterval()
    # a thread that does not let go on its own keeps the others out
    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
        assert not done
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def write(path, data):
    path.write_bytes(data)
    return path


def lines_in_python(data: bytes) -> list[str]:
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [line.strip(b" \t\r\v\f").decode() for line in (lines if lines[-1] else lines[:-1])]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\n\nb\n", ["a", "", "b"]),
        (b"a\r\n\r\n b \r\n", ["a", "", "b"]),
        (b"no end", ["no end"]),
        (b"\xef\xbb\xbfmark\n", ["mark"]),
        (b"a\rb\n\x00\n", ["a\rb", "\x00"]),
        ("é \u2028 中\n".encode(), ["é \u2028 中"]),
    ],
)
def test_lines(tmp_path, data, expected):
    lines = Lines(write(tmp_path / "a", data))
    assert [*lines] == expected == lines_in_python(data)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"\xc3\xa9", b"\xff", b"\xc3", b"\xed\xa0\x80", b" ", b"\xe2"])))
def test_lines_of_any_bytes(tmp_path_factory, pieces):
    """A line for a line, or an error that names the file and the line."""
    data = b"".join(pieces)
    path = write(tmp_path_factory.mktemp("lines") / "caps.txt", data)
    try:
        expected = lines_in_python(data)
    except UnicodeDecodeError:
        with pytest.raises(ValueError, match=r"caps\.txt, line \d+: byte \d+ is not UTF-8") as error:
            Lines(path)
        (number,) = re.findall(r"line (\d+)", str(error.value))
        with pytest.raises(UnicodeDecodeError):
            data.removeprefix(b"\xef\xbb\xbf").split(b"\n")[int(number) - 1].decode()
    else:
        assert [*Lines(path)] == expected


@given(st.binary(max_size=40))
def test_utf8_is_checked_as_python_does(tmp_path_factory, data):
    path = write(tmp_path_factory.mktemp("utf8") / "a", b"12345678" + data.replace(b"\n", b""))
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        with pytest.raises(ValueError, match="is not UTF-8"):
            Lines(path)
    else:
        assert len(Lines(path)) == 1


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("a dog", "a dog"),
        ('"a ""big"" dog"', 'a "big" dog'),
        ('"quoted"', "quoted"),
        ('""', ""),
        ('"', '"'),
        ('"stray', '"stray'),
        ('say "a" or "b"', 'say "a" or "b"'),
        ('"a" or "b"', '"a" or "b"'),
        ('"""', '"""'),
        ("a\tthird", "a"),
        ("", ""),
        (" a\r", "a"),
    ],
)
def test_tab_separated_columns(tmp_path, column, expected):
    """A stray quote never joins lines, so no row moves; ids may be anything."""
    lines = Lines(write(tmp_path / "a.tsv", f'"7\t{column}\nb\tnext "line\n'.encode()), tabs=True)
    assert [*lines] == [expected, 'next "line']
    for a, b in zip(encode(lines, VOCABULARY), encode([*lines], VOCABULARY), strict=True):
        assert np.array_equal(a, b)


def test_a_line_without_tab_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"a\.tsv, line 2: no tab"):
        Lines(write(tmp_path / "a.tsv", b'1\t"a\ndog"\n'), tabs=True)


def test_lines_are_cut_and_pickled(tmp_path):
    lines = Lines(write(tmp_path / "a", b"a\ndog\n.\n"))
    assert [*lines[1:]] == ["dog", "."]
    assert np.array_equal(encode(lines[::2], VOCABULARY)[0], encode(["a", "."], VOCABULARY)[0])
    packed = pickle.dumps(lines[1:])
    assert [*pickle.loads(packed)] == ["dog", "."]
    write(tmp_path / "a", b"a\n")
    with pytest.raises(ValueError, match=r"had 8 bytes when it was opened and has 2"):
        pickle.loads(packed)


def test_ids(tmp_path):
    lines = Lines(write(tmp_path / "a", b"1,7,2\n\n[1, 0, 2]\r\n 5 , 6\n"))
    tokens, offsets = parse_ids(lines, 8)
    assert tokens.tolist() == [1, 7, 2, START, END, 1, 0, 2, 5, 6]
    assert offsets.tolist() == [0, 3, 5, 8, 10]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("8", "id 8 is outside the vocabulary of 8 words"),
        ("-1", "id -1 is outside"),
        ("1,,2", "'' is not an id"),
        ("1,2,", "'' is not an id"),
        ("a dog", "'a dog' is not an id"),
        ("1.5", "'1.5' is not an id"),
        ("99999999999999999999", "'9+' is not an id"),
        ("[1,2", r"'\[1' is not an id"),
        ("x" + "é" * 30, "'xé{19}' is not an id"),
    ],
)
def test_bad_ids_are_named(tmp_path, line, message):
    lines = Lines(write(tmp_path / "a.txt", f"1\n{line}\n".encode()))
    with pytest.raises(ValueError, match=rf"a\.txt, line 2: {message}"):
        parse_ids(lines, 8)


def test_vocabulary_is_built_saved_and_read(tmp_path):
    captions = ["The dog, the CAT", "the dog's", "<unk> < unk"] * 2
    vocabulary = Vocabulary.build(captions, threshold=3)
    assert [*vocabulary.ids] == [*SPECIAL, "the", "dog", "<", "unk"]
    vocabulary.save(tmp_path / "v.json")
    data = json.loads((tmp_path / "v.json").read_text())
    assert data["idx"] == len(vocabulary) == 8
    assert data["idx2word"]["4"] == "the"
    again = Vocabulary.load(tmp_path / "v.json")
    assert again.ids == vocabulary.ids
    assert again.words == [*SPECIAL, "the", "dog", "<", "unk"]
    assert again.key == vocabulary.key != VOCABULARY.key
    assert len(Vocabulary.build([], 4)) == 4


@given(st.lists(st.text(alphabet="ab c.é", max_size=8), max_size=30), st.integers(1, 4))
def test_vocabulary_counts(captions, threshold):
    counts = {}
    for word in (word for caption in captions for word in oracle(caption)):
        counts[word] = counts.get(word, 0) + 1
    expected = [word for word, count in counts.items() if count >= threshold]
    assert [*Vocabulary.build(captions, threshold).ids][4:] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[1]", "expected .*word2idx"),
        ('{"word2idx": {"a": 0}}', "expected .*word2idx"),
        ('{"word2idx": {"a": 5}, "idx": 5}', "id 5 of 'a' is not a number below the size 5"),
        ('{"word2idx": {"a": "x"}, "idx": 5}', "id 'x' of 'a'"),
        ('{"word2idx": {"a": 1, "b": 1}, "idx": 5}', "2 words share 1 ids"),
        ('{"word2idx": {"a": 1}, "idx2word": {"2": "a"}, "idx": 5}', "idx2word says 2 is 'a', word2idx says 1"),
    ],
)
def test_bad_vocabularies_are_named(tmp_path, text, message):
    path = tmp_path / "v.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"v\.json.*{message}"):
        Vocabulary.load(path)


def test_special_words_have_their_ids():
    with pytest.raises(ValueError, match="<start> must have id 1, but has 2"):
        encode(["a"], Vocabulary({"<pad>": 0, "<start>": 2, "a": 1}))
