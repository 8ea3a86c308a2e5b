"""The store: what comes out is what went in, however it was stopped, and damage is found and named."""

import contextlib
import functools
import io
import json
import pickle
import resource
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcsr_fast.data import store
from pcsr_fast.data.loader import batches
from pcsr_fast.data.sources import _members, parse_npy
from pcsr_fast.data.tokens import Vocabulary, encode

CAPTIONS = ["a dog runs", "the dog  runs\nfast", "Ein Bär, naïve", "two men", "a dog", "a man runs", "a dog runs"]


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch):
    """Its time is the disk's, and a kill does not need it."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


def regions(n, rows=2, width=3, dtype=np.float32):
    return np.random.default_rng(n).standard_normal((rows, width)).astype(dtype)


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def members(count=7, dtype=np.float32):
    for n in range(count):
        yield f"{n:04}.npy", npy(regions(n, dtype=dtype))
        yield f"{n:04}.txt", CAPTIONS[n % 7].encode()


def write_tar(path, members) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def tars(tmp_path):
    """Three tars of 7, 1 and 5 samples, with members that are none of ours among them."""
    folder = tmp_path / "tars"
    folder.mkdir()
    write_tar(folder / "a.tar", [("0000.json", b"{}"), *members(7)])
    write_tar(folder / "b.tar", [*members(1), ("0000.jpg", b"")])
    write_tar(folder / "c.tar", members(5))
    return folder


@pytest.fixture
def rows(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for stem, count in (("x", 3), ("y", 2)):
        np.save(folder / f"{stem}.npy", np.stack([regions(n) for n in range(count)]))
        lines = [f"{stem}{n}\t{CAPTIONS[n % 7].split()[0]} {k}" for n in range(count) for k in range(2)]
        # with a byte order mark, which is no part of an id
        (folder / f"{stem}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return folder


@pytest.fixture
def folder(tmp_path):
    """As Flickr30K's: dev repeats every image for each of its captions."""
    folder = tmp_path / "tiny_precomp"
    folder.mkdir()
    for split, repeat in (("train", 1), ("dev", 5)):
        features = np.stack([regions(n) for n in range(4)])
        np.save(folder / f"{split}_ims.npy", features.repeat(repeat, 0))
        (folder / f"{split}_caps.txt").write_text("".join(f"a dog runs {n}\n" for n in range(20)))
    return folder


def tree(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shard_bytes", [1, 40, 1 << 30])
def test_tars(tars, tmp_path, dtype, shard_bytes):
    store.prepare(tars, tmp_path / "s", dtype=dtype, shard_bytes=shard_bytes, threshold=2)
    split = store.open_store(tmp_path / "s", "train")
    order = [*range(7), 0, *range(5)]
    expected = np.stack([regions(n) for n in order]).astype(dtype)
    np.testing.assert_array_equal(split.features[np.arange(13)], expected)
    assert split.features.dtype == dtype
    texts = [" ".join(CAPTIONS[n].split()) for n in order]
    assert [*split.texts] == texts
    assert split.image_of.tolist() == [*range(13)]
    vocabulary = store.open_vocabulary(tmp_path / "s")
    assert vocabulary.ids == Vocabulary.build(texts, 2).ids
    for found, wanted in zip((split.tokens, split.offsets), encode(texts, vocabulary), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert np.load(tmp_path / "s/train/ids.npy")[5] == b"0005"
    assert store.verify(tmp_path / "s") == []
    # by numpy alone, as the manifest says
    entry = json.loads((tmp_path / "s/manifest.json").read_text())["splits"]["train"]
    shards = [np.load(tmp_path / "s/train" / name) for name in sorted(entry["files"]) if name.startswith("features")]
    np.testing.assert_array_equal(np.concatenate(shards), expected)


def test_rows(rows, tmp_path):
    store.prepare(rows, tmp_path / "s", "dev", dtype="float32", shard_bytes=50)
    split = store.open_store(tmp_path / "s", "dev")
    np.testing.assert_array_equal(split.features[[4, 0]], np.stack([regions(1), regions(0)]))
    assert split.image_of.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert split.texts[7] == "a 1"
    assert np.load(tmp_path / "s/dev/ids.npy").tolist() == [b"x0", b"x1", b"x2", b"y0", b"y1"]


def test_folder(folder, tmp_path):
    store.prepare(folder, tmp_path / "s", dtype="float32")
    for name in ("train", "dev"):
        split = store.open_store(tmp_path / "s", name)
        np.testing.assert_array_equal(split.features[np.arange(4)], np.stack([regions(n) for n in range(4)]))
        assert split.image_of.tolist() == [n // 5 for n in range(20)]
        assert split.texts[13] == "a dog runs 13"
    assert {"a", "dog", "runs"} <= set(store.open_vocabulary(tmp_path / "s").ids)


def test_shards_are_an_array(tars, tmp_path):
    store.prepare(tars, tmp_path / "s", shard_bytes=40)
    split = store.open_store(tmp_path / "s", "train")
    whole = split.features[np.arange(13)]
    np.testing.assert_array_equal(split.features[3], whole[3])
    np.testing.assert_array_equal(split.features[2:9][4:7][np.array([2, 0])], whole[[8, 6]])
    assert split.features[20:].shape == (0, 2, 3)
    again = pickle.loads(pickle.dumps(split.features))
    assert not again.maps
    np.testing.assert_array_equal(again[np.arange(13)], whole)
    assert [*split.texts[3:5]] == [*split.texts][3:5]
    assert split.texts[-1] == split.texts[12]
    assert split.texts[1:6:2] == [*split.texts][1:6:2]
    assert len(split.head(4)) == 4
    for bad in ([13], [-1], [[0, 99]][0]):
        with pytest.raises(IndexError, match="there are 13"):
            split.features[np.array(bad)]
    with pytest.raises(IndexError, match="step of 2"):
        split.features[::2]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_batches_of_a_store(tars, tmp_path, dtype):
    store.prepare(tars, tmp_path / "s", dtype=dtype, shard_bytes=40)
    split = store.open_store(tmp_path / "s", "train")
    whole = split.features[np.arange(13)]
    for batch in batches(split, 4, 0, 0):
        assert batch.features.dtype == torch.float32
        np.testing.assert_array_equal(batch.features.numpy(), whole[batch.images.numpy()])


def test_second_split_takes_the_vocabulary(tars, rows, tmp_path):
    store.prepare(tars, tmp_path / "s", threshold=2)
    before = (tmp_path / "s/vocab.json").read_bytes()
    store.prepare(rows, tmp_path / "s", "dev", threshold=1)
    assert (tmp_path / "s/vocab.json").read_bytes() == before
    assert store.open_store(tmp_path / "s", "dev").tokens.max() < len(store.open_vocabulary(tmp_path / "s"))
    Vocabulary({"<pad>": 0, "<start>": 1, "<end>": 2, "<unk>": 3}).save(tmp_path / "other.json")
    with pytest.raises(ValueError, match="has a vocabulary of its own"):
        store.prepare(rows, tmp_path / "s", "test", vocabulary=tmp_path / "other.json")


# a fresh process without threads, so that it may fork; each child is killed at its n-th call of any function
KILLS = """
import os, random, signal, sys, threading
from tqdm import tqdm
from pcsr_fast.data import store
os.fsync = lambda handle: None
# tqdm's own is a semaphore that forked processes share: a child killed while it has it would stop all others for ever
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0

def prepare(out, n=None):
    count = 0
    def profile(frame, event, argument):
        nonlocal count
        count += 1
        if count == n:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(profile)
    store.prepare(sys.argv[1], f"{sys.argv[2]}/{out}", dtype="float32", shard_bytes=50)
    sys.setprofile(None)
    return count

def killed(out, n):
    child = os.fork()
    if not child:
        try:
            prepare(out, n)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

prepare("imports")
calls, rng, stopped = prepare("calls"), random.Random(0), 0
for attempt in range(int(sys.argv[3])):
    # the second kill hits the run that resumes
    stopped += killed(f"out{attempt}", rng.randrange(calls)) + killed(f"out{attempt}", rng.randrange(calls))
    prepare(f"out{attempt}")
print(stopped)
"""


@pytest.mark.parametrize("kind", ["tars", "rows", "folder"])
def test_killed_and_resumed_is_the_same(kind, request, tmp_path):
    source = request.getfixturevalue(kind)
    store.prepare(source, tmp_path / "whole", dtype="float32", shard_bytes=50)
    expected, attempts = tree(tmp_path / "whole"), 8
    run = [sys.executable, "-c", KILLS, source, tmp_path, str(attempts)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100)
    assert int(done.stdout) > attempts, done.stderr
    for attempt in range(attempts):
        assert tree(tmp_path / f"out{attempt}") == expected


def test_finished_work_is_not_done_again(tars, tmp_path, monkeypatch):
    store.prepare(tars, tmp_path / "s", shard_bytes=40)
    before = tree(tmp_path / "s")
    monkeypatch.setattr(store, "_write_array", None)
    # as if killed just before its end
    (tmp_path / "s/train/unfinished").mkdir()
    (tmp_path / "s/train/unfinished/settings.json").touch()
    store.prepare(tars, tmp_path / "s", shard_bytes=40)
    assert tree(tmp_path / "s") == before


def test_what_stands_is_checked_before_going_on(tmp_path):
    """A shard that was damaged since; files half written; and regions of another shape behind the stop."""
    odd = [("c.npy", npy(regions(0, 5))), ("c.txt", b"a dog")]
    write_tar(tmp_path / "x.tar", [*good("a"), ("b.npy", b"no array"), ("b.txt", b"a"), *odd])
    prepare = functools.partial(store.prepare, tmp_path / "x.tar", tmp_path / "s", shard_bytes=1)
    with pytest.raises(ValueError, match=r"b\.npy is not"):
        prepare()
    shard = tmp_path / "s/train/features-00000.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"00000.npy has {len(whole) - 1} bytes.*, or delete .*train to begin again"):
        prepare(skip_bad=True)
    shard.write_bytes(whole)
    for name in (".manifest.json.1", "train/.tokens.npy.1", "train/unfinished/.00001.json.1"):
        (tmp_path / "s" / name).touch()
    assert prepare(skip_bad=True)["train"]["skipped"] == 2
    assert not [*(tmp_path / "s").rglob(".*")]


def test_resumed_with_other_settings_or_files(tars, tmp_path):
    bad = tars / "d.tar"
    write_tar(bad, [("z.npy", b"no array"), ("z.txt", b"a dog")])
    with pytest.raises(ValueError, match=r"d.tar: z.npy is not a .npy file"):
        store.prepare(tars, tmp_path / "s", shard_bytes=40)
    with pytest.raises(FileNotFoundError, match=r"is unfinished: run prepare again"):
        store.open_store(tmp_path / "s", "train")
    with pytest.raises(ValueError, match=r"was begun with dtype float16, now float32"):
        store.prepare(tars, tmp_path / "s", dtype="float32", shard_bytes=40)
    # what is bad can be left out after all, without beginning again
    assert store.prepare(tars, tmp_path / "s", shard_bytes=40, skip_bad=True)["train"]["skipped"] == 1
    write_tar(bad, members(1))
    with pytest.raises(ValueError, match=r"from other files, or they changed"):
        store.prepare(tars, tmp_path / "s", shard_bytes=40)


def test_two_at_once(tars, tmp_path):
    (tmp_path / "s").mkdir()
    with store._alone(tmp_path / "s"), pytest.raises(ValueError, match="another prepare is writing"):
        store.prepare(tars, tmp_path / "s")
    store.prepare(tars, tmp_path / "s")


def good(name):
    return [(f"{name}.npy", npy(regions(0))), (f"{name}.txt", b"a dog")]


BAD = {
    "no text": ([("k.npy", npy(regions(0)))], "k has no k.txt beside k.npy"),
    "no regions": ([("k.txt", b"a dog")], "k has no k.npy beside k.txt"),
    "text apart": ([("k.npy", npy(regions(0))), *good("m"), ("k.txt", b"a dog")], "k has no k.txt"),
    "not UTF-8": ([("k.npy", npy(regions(0))), ("k.txt", b"a d\xf6g")], "k.txt is not UTF-8: byte 0xf6 at 3"),
    "empty": ([("k.npy", npy(regions(0))), ("k.txt", b" \n")], "k.txt is empty"),
    "other shape": ([("k.npy", npy(regions(0, 5))), ("k.txt", b"a")], r"k.npy is \[5, 3\], those before are \[2, 3\]"),
    "flat": ([("k.npy", npy(np.zeros(3, "f4"))), ("k.txt", b"a")], r"k.npy is \[3\]; expected \[regions, width\]"),
    "truncated": ([("k.npy", npy(regions(0))[:-4]), ("k.txt", b"a")], "k.npy has 20 bytes of data, but its header"),
    "no array": ([("k.npy", b"\x93NUMPY\x01\x00v\x00{"), ("k.txt", b"a")], "k.npy is not a .npy file"),
    "integers": ([("k.npy", npy(np.zeros((2, 3), int))), ("k.txt", b"a")], "holds int64; expected float16 or float32"),
    "pickle": ([("k.npy", npy(np.array([[None]]))), ("k.txt", b"a")], "holds object"),
    "NaN": ([("k.npy", npy(np.full((2, 3), np.nan, "f4"))), ("k.txt", b"a")], "has values from nan to nan"),
    "too large": ([("k.npy", npy(np.full((2, 3), 7e4, "f4"))), ("k.txt", b"a")], "70000 .* use --dtype float32"),
    "name": ([("k\udcff.npy", npy(regions(0))), ("k\udcff.txt", b"a")], "is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_samples(case, tmp_path):
    """One error that names file and sample; or left out and counted, and all others are there."""
    bad, message = BAD[case]
    write_tar(tmp_path / "x.tar", [*good("a"), *bad, *good("z")])
    with pytest.raises(ValueError, match=f"x.tar: .*{message}.*--skip-bad"):
        store.prepare(tmp_path / "x.tar", tmp_path / "s")
    entry = store.prepare(tmp_path / "x.tar", tmp_path / "s", skip_bad=True)["train"]
    assert entry["skipped"] == (2 if case == "text apart" else 1)
    assert "x.tar" in entry["first_skipped"][0]
    ids = np.load(tmp_path / "s/train/ids.npy").tolist()
    assert (ids[0], ids[-1]) == (b"a", b"z")


@pytest.mark.parametrize("end", [0, 100, 512, 700, 1024, 1536, 2100])
def test_truncated_tar(tmp_path, end):
    """Wherever it was cut, also between two members, where tarfile sees nothing wrong."""
    write_tar(tmp_path / "x.tar", [*good("a"), *good("b")])
    whole = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "x.tar").write_bytes(whole[:end])
    with pytest.raises(ValueError, match=r"x\.tar"):
        store.prepare(tmp_path / "x.tar", tmp_path / "s")


def test_members_of_a_tar(tmp_path):
    """They are not kept, however many; the size that some tars give a folder is not that of data."""
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in "abc":
            tar.addfile(tarfile.TarInfo(name))
        end = tarfile.TarInfo("folder")
        end.type, end.size = tarfile.DIRTYPE, 1 << 20
        tar.addfile(end)
    with tarfile.open(tmp_path / "x.tar") as tar:
        assert [member.name for member in _members(tar, tmp_path / "x.tar")] == [*"abc"]
        assert not tar.members


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_damaged_tars(tmp_path_factory, data):
    """A changed byte or a cut: a clear error or, with skip_bad, a whole store of what can be used."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_tar(folder / "x.tar", members(3, np.float16))
    content = bytearray((folder / "x.tar").read_bytes()[: 3 * 2048 + 1024])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "x.tar").write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    skip_bad = data.draw(st.booleans())
    problem = None
    try:
        store.prepare(folder / "x.tar", folder / "s", skip_bad=skip_bad)
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        assert "x.tar" in problem
    else:
        assert store.verify(folder / "s") == []
        split = store.open_store(folder / "s", "train")
        assert np.isfinite(split.features[np.arange(split.images)]).all()


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 200), st.binary(min_size=1, max_size=8))
def test_parse_npy_survives_anything(noise, at, change):
    whole = npy(regions(0))
    for content in (noise, b"\x93NUMPY\x01\x00" + noise, whole[:at] + change + whole[at + len(change) :]):
        with contextlib.suppress(ValueError):
            assert parse_npy(content).dtype.kind == "f"


def test_parse_npy_orders():
    array = regions(0, 4, 5)
    for form in (array, np.asfortranarray(array), array.astype(">f4"), array.astype("f8")):
        np.testing.assert_array_equal(parse_npy(npy(form)), array)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: (s / "y.tsv").unlink(), r"y.npy has no y.tsv beside it: id <tab> caption"),
        (lambda s: (s / "y.tsv").write_text("y\ta dog\n"), r"y.tsv has 1 lines for 2 rows of .*y.npy"),
        (lambda s: (s / "y.tsv").write_bytes(b"y\ta\ny\t\xff\n"), r"y.tsv, line 2"),
        (lambda s: (s / "y.tsv").write_text("y\ta\ny\t \n"), r"y.tsv, line 2: the caption is empty"),
        (lambda s: (s / "y.npy").write_bytes((s / "y.npy").read_bytes()[:-1]), r"y.npy has 175 bytes, but"),
        (lambda s: [p.unlink() for p in s.iterdir()], "nothing to prepare in"),
        (lambda s: np.save(s / "y.npy", np.zeros((2, 9, 9), "f4")), r"y.npy, row 0 is \[9, 9\], those before are"),
    ],
)
def test_bad_rows(rows, tmp_path, change, message):
    change(rows)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        store.prepare(rows, tmp_path / "s")


def test_folder_mistakes(folder, tmp_path):
    with pytest.raises(ValueError, match=r"has no val_ims.npy; it has dev, train"):
        store.prepare(folder, tmp_path / "s", "val")
    features = np.load(folder / "train_ims.npy")
    features[2, 0, 0] = np.inf
    np.save(folder / "train_ims.npy", features)
    with pytest.raises(
        ValueError, match=r"train_ims.npy, image 2 has values from .* to inf, which float16 cannot hold$"
    ):
        store.prepare(folder, tmp_path / "s", skip_bad=True)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        store.prepare(tmp_path / "nowhere", tmp_path / "s")
    with pytest.raises(ValueError, match="float16 or float32, not int8"):
        store.prepare(folder, tmp_path / "s", dtype="int8")
    (tmp_path / "t/train").mkdir(parents=True)
    (tmp_path / "t/train/mine.txt").write_text("keep me")
    with pytest.raises(ValueError, match=r"train holds mine.txt, which is of no store"):
        store.prepare(folder, tmp_path / "t", "train")


def test_damage_is_found_and_named(tars, tmp_path):
    store.prepare(tars, tmp_path / "s", shard_bytes=40)
    files = [p for p in sorted((tmp_path / "s").rglob("*")) if p.is_file() and p.name != "manifest.json"]
    assert len(files) == 12
    for path in files:
        whole = path.read_bytes()
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 1
        path.write_bytes(changed)
        assert [line.split(":")[0] for line in store.verify(tmp_path / "s")] == [f"{path} is damaged"]
        # opening looks at sizes alone
        if path.name != "vocab.json":
            path.write_bytes(whole[:-1])
            with pytest.raises(ValueError, match=f"{path.name} has {len(whole) - 1} bytes"):
                store.open_store(tmp_path / "s", "train")
            path.unlink()
            with pytest.raises(ValueError, match=f"{path.name} is missing"):
                store.open_store(tmp_path / "s", "train")
        path.write_bytes(whole)
    assert store.verify(tmp_path / "s") == []


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("{", "manifest.json is damaged"),
        ("[]", "has format None; this version reads 1"),
        ('{"format": 2}', "has format 2; this version reads 1"),
        (None, "has no manifest.json"),
        ('{"format": 1, "splits": {"dev": {}}}', "has no split 'train'; it has dev"),
    ],
)
def test_bad_manifest(tmp_path, manifest, message):
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        store.open_store(tmp_path, "train")


def test_more_shards_than_files_may_be_open(tmp_path):
    write_tar(tmp_path / "x.tar", members(300))
    store.prepare(tmp_path / "x.tar", tmp_path / "s", shard_bytes=1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        split = store.open_store(tmp_path / "s", "train")
        assert split.features[np.arange(300)].shape == (300, 2, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_opens_without_torch(tars, tmp_path):
    store.prepare(tars, tmp_path / "s")
    script = (
        "import sys; from pcsr_fast.data.store import open_store; print(len(open_store(sys.argv[1], 'train')));"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "s"], capture_output=True, text=True)
    assert done.stdout == "13\n", done.stderr
