"""A store: a data set of any size as plain .npy files and a JSON manifest, made by `prepare`, read by `open_store`.

STORE/manifest.json              sizes and SHA-256 of all files, shapes of all splits
STORE/vocab.json                 words and their ids
STORE/SPLIT/features-00000.npy   float16 or float32 [images, R, d_img], as many images in each but the last
STORE/SPLIT/tokens.npy           int32, all captions back to back; offsets.npy int64 [N + 1] says where each begins
STORE/SPLIT/image_of.npy         int64 [N], the image of each caption
STORE/SPLIT/text.npy             uint8, all captions as UTF-8; text_offsets.npy int64 [N + 1]
STORE/SPLIT/ids.npy              bytes [images], what the source calls each image, where it says
"""

import contextlib
import fcntl
import hashlib
import json
import os
import resource
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from pcsr_fast.data.files import write_whole
from pcsr_fast.data.folder import build_vocabulary, find_vocabulary, open_captions, open_split
from pcsr_fast.data.sources import Bad, Sample, find_source, read_rows, read_tar
from pcsr_fast.data.split import Split
from pcsr_fast.data.tokens import Vocabulary, encode

FORMAT = 1
SHARD_BYTES = 2 << 30
SKIPPED_LISTED = 20


class Shards:
    """Rows of many .npy files as one array [images, R, d_img]; a file is mapped when a row of it is first asked for."""

    def __init__(self, paths: list[Path], shape: tuple[int, ...], dtype: np.dtype, rows_per_shard: int, first: int = 0):
        self.paths, self.shape, self.dtype, self.rows_per_shard, self.first = paths, shape, dtype, rows_per_shard, first
        self.maps: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict:
        # a pickled map would be a copy of the data
        return {**self.__dict__, "maps": {}}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows):
        """A row as a view, several rows as a copy, or a range of rows, `a:b`, as Shards."""
        if isinstance(rows, slice):
            begin, end, step = rows.indices(len(self))
            if step != 1:
                raise IndexError(f"rows of a store are cut as a:b, not with a step of {step}")
            shape = (max(end - begin, 0), *self.shape[1:])
            return Shards(self.paths, shape, self.dtype, self.rows_per_shard, self.first + begin)
        if np.ndim(rows) == 0:
            ((shard, row),) = self._places([rows])
            return self._map(shard)[row]
        return self.take_into(rows, np.empty((len(rows), *self.shape[1:]), self.dtype))

    def take_into(self, rows: np.ndarray, out: np.ndarray) -> np.ndarray:  # int [B], [B, R, d_img]
        """Copies rows into an array; numpy lets other threads run meanwhile."""
        for i, (shard, row) in enumerate(self._places(rows)):
            out[i] = self._map(shard)[row]
        return out

    def _places(self, rows) -> Iterator[tuple[int, int]]:
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self)):
            raise IndexError(f"rows {rows.min()} to {rows.max()} asked for, there are {len(self)}")
        shard, row = np.divmod(rows + self.first, self.rows_per_shard)
        return zip(shard.tolist(), row.tolist(), strict=True)

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self.maps:
            self.maps[shard] = _open_array(self.paths[shard])
        return self.maps[shard]


class Texts(Sequence[str]):
    """Captions that stay on disk: caption n is bytes offsets[n] to offsets[n + 1] of the text."""

    def __init__(self, text: np.ndarray, offsets: np.ndarray):
        self.text, self.offsets = text, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, n):
        if isinstance(n, slice):
            begin, end, step = n.indices(len(self))
            if step != 1:
                return [self[i] for i in range(begin, end, step)]
            return Texts(self.text, self.offsets[begin : max(begin, end) + 1])
        n = range(len(self))[n]
        return self.text[self.offsets[n] : self.offsets[n + 1]].tobytes().decode()


def open_store(path: Path | str, split: str) -> Split:
    """Opens a split of a store. Nothing is read but sizes and image indices; `verify` reads everything."""
    path = Path(path)
    entry = _entry(path, split)
    folder = path / split
    for name, file in entry["files"].items():
        if problem := _size_problem(folder / name, file["bytes"]):
            raise ValueError(problem)
    shards = [folder / name for name in sorted(entry["files"]) if name.startswith("features-")]
    _allow_open_files(len(shards))
    shape = (entry["images"], entry["regions"], entry["width"])
    features = Shards(shards, shape, np.dtype(entry["dtype"]), entry["rows_per_shard"])
    names = ("tokens", "offsets", "image_of", "text", "text_offsets")
    tokens, offsets, image_of, text, ends = (_open_array(folder / f"{name}.npy") for name in names)
    return Split(f"{path.name}/{split}", features, tokens, offsets, image_of, image_of, Texts(text, ends))


def open_vocabulary(path: Path | str) -> Vocabulary:
    """The vocabulary of a store."""
    return Vocabulary.load(Path(path) / "vocab.json")


def verify(path: Path | str) -> list[str]:
    """Reads all files of a store and compares their SHA-256; returns one line for each that is damaged."""
    path = Path(path)
    manifest = _manifest(path)
    files = {path / "vocab.json": manifest["vocabulary"]}
    for name, split in manifest["splits"].items():
        files |= {path / name / file: record for file, record in split["files"].items()}
    problems = []
    with tqdm(total=sum(f["bytes"] for f in files.values()), unit="B", unit_scale=True, disable=None) as bar:
        for file, record in files.items():
            problem = _size_problem(file, record["bytes"])
            if not problem and _record(file)["sha256"] != record["sha256"]:
                problem = f"{file} is damaged: its SHA-256 is not the manifest's; copy it again"
            problems += [problem] if problem else []
            bar.update(record["bytes"])
    return problems


def prepare(
    source: Path | str,
    out: Path | str,
    split: str | None = None,
    *,
    dtype: str = "float16",
    vocabulary: Path | str | None = None,
    threshold: int = 4,
    shard_bytes: int = SHARD_BYTES,
    skip_bad: bool = False,
) -> dict[str, dict]:
    """Makes a store, or adds a split to it; a run that was stopped goes on where it was. Returns the manifest's splits.

    The source is a folder as `open_split` reads it (all its splits, or the one named), a folder of NAME.npy
    [rows, R, d] each with NAME.tsv (id <tab> caption), or a tar or a folder of tars with members KEY.npy [R, d] and
    KEY.txt; the last two make one split, `train` unless named. The vocabulary is the store's if it has one, else the
    one given, else the folder's, else the words of these captions that occur `threshold` times. A sample that cannot
    be used ends the run with an error that names it; with `skip_bad` it is left out and counted.
    """
    out = Path(out)
    if dtype not in ("float16", "float32"):
        raise ValueError(f"features are stored as float16 or float32, not {dtype}")
    kind, files = find_source(source)
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        manifest = _manifest(out) if (out / "manifest.json").exists() else {"format": FORMAT, "splits": {}}
        if manifest["splits"]:
            words = open_vocabulary(out)
            if vocabulary is not None and Vocabulary.load(vocabulary).key != words.key:
                raise ValueError(f"{out} has a vocabulary of its own, which differs from {vocabulary}; leave it out")
        else:
            words = None if vocabulary is None else Vocabulary.load(vocabulary)
        settings = {"dtype": dtype, "shard_bytes": shard_bytes}
        if kind == "folder":
            names = [path.name.removesuffix("_ims.npy") for path in files]
            if split is not None and split not in names:
                raise ValueError(f"{source} has no {split}_ims.npy; it has {', '.join(names)}")
            names = names if split is None else [split]
            words = words or _folder_vocabulary(Path(source), names[0], threshold)
            for name in names:
                _prepare_split(out, name, manifest, settings, _Folder(Path(source), name, words))
        else:
            stream = _Stream(kind, files, words, threshold, skip_bad)
            _prepare_split(out, split or "train", manifest, settings, stream)
    return manifest["splits"]


def _folder_vocabulary(folder: Path, split: str, threshold: int) -> Vocabulary:
    variant = open_captions(folder, split)[1]
    try:
        return Vocabulary.load(find_vocabulary(folder, variant, None))
    except FileNotFoundError:
        if variant:
            raise
        return build_vocabulary(folder, threshold)


class _Folder:
    """A split of a folder, whose captions are there at once; so no image can be left out."""

    skip_bad = None

    def __init__(self, folder: Path, name: str, vocabulary: Vocabulary):
        self.split = open_split(folder, name, vocabulary, dev_images=None)
        self.vocabulary = vocabulary
        self.files = [folder / f"{name}_ims.npy"]
        self.all_files = [*self.files, open_captions(folder, name)[0].path]

    def read(self, path: Path, start: int) -> Iterator[Sample]:
        for i in range(start, self.split.images):
            yield Sample("", f"{path}, image {i}", self.split.features[i], [])

    def write_captions(self, folder: Path, parts: list[Path]) -> Vocabulary:
        for name in ("tokens", "offsets", "image_of"):
            _write_array(folder / f"{name}.npy", [getattr(self.split, name)])
        _write_texts(folder, self.split.texts)
        return self.vocabulary


class _Stream:
    """Files of samples, whose captions are gathered shard by shard, and read from there again rather than kept."""

    def __init__(self, kind: str, files: list[Path], vocabulary: Vocabulary | None, threshold: int, skip_bad: bool):
        self.files, self.vocabulary, self.threshold, self.skip_bad = files, vocabulary, threshold, skip_bad
        self.read = read_tar if kind == "tars" else read_rows
        self.all_files = files if kind == "tars" else [*files, *(path.with_suffix(".tsv") for path in files)]

    def write_captions(self, folder: Path, parts: list[Path]) -> Vocabulary:
        def captions() -> Iterator[str]:
            return (text for part in parts for texts in _read_json(part)["captions"] for text in texts)

        vocabulary = self.vocabulary or Vocabulary.build(captions(), self.threshold)
        lengths = [np.zeros(1, np.int64)]

        def tokens() -> Iterator[np.ndarray]:
            for some in _chunks(captions()):
                ids, offsets = encode(some, vocabulary)
                lengths.append(np.diff(offsets))
                yield ids

        _write_array(folder / "tokens.npy", tokens())
        _write_array(folder / "offsets.npy", [np.cumsum(np.concatenate(lengths))])
        each = np.concatenate([[len(texts) for texts in _read_json(part)["captions"]] for part in parts])
        _write_array(folder / "image_of.npy", [np.repeat(np.arange(len(each)), each)])
        _write_texts(folder, captions())
        longest = max(len(i.encode()) for part in parts for i in _read_json(part)["ids"])
        ids = (np.array([i.encode() for i in _read_json(part)["ids"]], f"S{longest or 1}") for part in parts)
        _write_array(folder / "ids.npy", ids)
        return vocabulary


def _prepare_split(out: Path, name: str, manifest: dict, settings: dict, source: _Folder | _Stream) -> None:
    """Writes one split, shard by shard; what is behind the last whole shard is written again after a stop."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.all_files]
    settings = settings | {"source": hashlib.sha256(json.dumps(stats).encode()).hexdigest()}
    folder = out / name
    unfinished = folder / "unfinished"
    if name in manifest["splits"]:
        _check_settings(folder, manifest["splits"][name]["settings"], settings)
        shutil.rmtree(unfinished, ignore_errors=True)
        return
    unfinished.mkdir(parents=True, exist_ok=True)
    # what a killed run was writing
    for path in (*out.glob(".*.json.*"), *folder.glob(".*.npy.*"), *unfinished.glob(".*.json.*")):
        path.unlink()
    if (unfinished / "settings.json").exists():
        _check_settings(folder, _read_json(unfinished / "settings.json"), settings)
    elif others := [path.name for path in folder.iterdir() if path != unfinished]:
        raise ValueError(f"{folder} holds {others[0]}, which is of no store; choose another folder or empty it")
    _write_json(unfinished / "settings.json", settings)

    parts, skipped = _write_shards(folder, name, settings, source)
    vocabulary = source.write_captions(folder, parts)
    if not manifest["splits"]:
        vocabulary.save(out / "vocab.json")
        manifest["vocabulary"] = _record(out / "vocab.json")
    images, files, left_out = 0, {}, []
    for part in parts:
        record = _read_json(part)
        images += len(record["ids"])
        files[f"features-{part.stem}.npy"] = record["file"]
        left_out += record["skipped"]
    left_out += skipped
    files |= {path.name: _record(path) for path in sorted(folder.glob("*.npy")) if path.name not in files}
    manifest["splits"][name] = {
        "images": images,
        "pairs": len(_open_array(folder / "image_of.npy")),
        "tokens": len(_open_array(folder / "tokens.npy")),
        "regions": record["shape"][0],
        "width": record["shape"][1],
        "dtype": settings["dtype"],
        "rows_per_shard": record["rows"],
        "skipped": len(left_out),
        "first_skipped": left_out[:SKIPPED_LISTED],
        "settings": settings,
        "files": files,
    }
    _write_json(out / "manifest.json", manifest, indent=1)
    shutil.rmtree(unfinished)


def _write_shards(folder: Path, name: str, settings: dict, source: _Folder | _Stream) -> tuple[list[Path], list[str]]:
    """Writes the shards that are not there yet; returns a record of each, and what was left out behind the last."""
    parts: list[Path] = []
    before = {"next": (0, 0), "shape": None}
    while (part := folder / "unfinished" / f"{len(parts):05}.json").exists():
        before = _read_json(part)
        if problem := _size_problem(folder / f"features-{part.stem}.npy", before["file"]["bytes"]):
            raise ValueError(f"{problem}, or delete {folder} to begin again")
        parts.append(part)
    skipped: list[str] = []
    samples = _usable(_samples(source, *before["next"]), before["shape"], settings["dtype"], source.skip_bad, skipped)
    label = f"{name}, from shard {len(parts)}" if parts else name
    with tqdm(samples, label, unit=" images", disable=None) as samples:
        samples = iter(samples)
        while (first := next(samples, None)) is not None:
            part = folder / "unfinished" / f"{len(parts):05}.json"
            rows = max(1, settings["shard_bytes"] // first[1].nbytes)
            record = _write_shard(folder / f"features-{part.stem}.npy", chain([first], islice(samples, rows - 1)))
            _write_json(part, record | {"rows": rows, "shape": first[1].shape, "skipped": skipped})
            parts.append(part)
            skipped.clear()
    if not parts:
        raise ValueError(f"{source.files[0]}: nothing can be used" + (f": {skipped[0]}" if skipped else ""))
    return parts, skipped


def _write_shard(path: Path, samples: Iterable[tuple]) -> dict:
    ids, captions, after = [], [], None

    def regions() -> Iterator[np.ndarray]:
        nonlocal after
        for sample, array, after in samples:  # noqa: B007
            ids.append(sample.id)
            captions.append(sample.captions)
            yield array[None]

    _write_array(path, regions())
    return {"ids": ids, "captions": captions, "next": after, "file": _record(path)}


def _samples(source: _Folder | _Stream, file: int, start: int) -> Iterator[tuple[Sample | Bad, tuple[int, int]]]:
    """Samples from one position on, each with the position behind it."""
    for at in range(file, len(source.files)):
        begin = start if at == file else 0
        for n, sample in enumerate(source.read(source.files[at], begin), begin + 1):
            yield sample, (at, n)


def _usable(samples, shape, dtype: str, skip_bad: bool | None, skipped: list[str]) -> Iterator[tuple]:
    """Samples, their regions in the store's type, and the position behind them; the others are counted or raise."""
    largest = float(np.finfo(dtype).max)
    for sample, position in samples:
        why = sample.why if isinstance(sample, Bad) else _why_unusable(sample, shape, dtype, largest)
        if not why:
            shape = sample.regions.shape
            yield sample, _converted(sample.regions, dtype), position
        elif skip_bad:
            skipped.append(why)
        else:
            # captions that are there already cannot be left out
            hint = "" if skip_bad is None else " (to leave out what cannot be used: --skip-bad)"
            raise ValueError(why + hint)


def _why_unusable(sample: Sample, shape, dtype: str, largest: float) -> str:
    found = sample.regions.shape
    if len(found) != 2 or 0 in found:
        return f"{sample.where} is {list(found)}; expected [regions, width]"
    if shape is not None and [*found] != [*shape]:
        return f"{sample.where} is {list(found)}, those before are {list(shape)}; all must be alike"
    low, high = float(sample.regions.min()), float(sample.regions.max())
    # also false if one is NaN
    if -largest <= low and high <= largest:
        return ""
    remedy = "; use --dtype float32" if dtype == "float16" and np.isfinite([low, high]).all() else ""
    return f"{sample.where} has values from {low:g} to {high:g}, which {dtype} cannot hold{remedy}"


def _converted(regions: np.ndarray, dtype: str) -> np.ndarray:
    if regions.dtype == dtype:
        return regions
    # 20 times as fast as numpy at this; imported here so that a store opens without it
    import torch

    return torch.from_numpy(np.array(regions, np.float32)).to(getattr(torch, dtype)).numpy()


def _check_settings(folder: Path, before: dict, now: dict) -> None:
    for key, value in now.items():
        if before[key] != value:
            said = "from other files, or they changed" if key == "source" else f"with {key} {before[key]}, now {value}"
            raise ValueError(f"{folder} was begun {said}; give the same, choose another folder, or delete this one")


def _write_array(path: Path, blocks: Iterable[np.ndarray]) -> None:
    """A .npy file of blocks one behind the other, without having them all at once."""

    def write(file) -> None:
        rows, head = 0, None
        for block in blocks:
            if head is None:
                head = {"descr": np.lib.format.dtype_to_descr(block.dtype), "fortran_order": False}
                np.lib.format.write_array_header_1_0(file, head | {"shape": block.shape})
                tail, begin = block.shape[1:], file.tell()
            file.write(np.ascontiguousarray(block))
            rows += len(block)
        # numpy leaves room in the header for a first dimension that grows
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, head | {"shape": (rows, *tail)})
        if file.tell() != begin:
            raise RuntimeError(f"{path}: this numpy's header grew from {begin} to {file.tell()} bytes")
        file.flush()
        os.fsync(file.fileno())

    write_whole(path, write)


def _write_texts(folder: Path, texts: Iterable[str]) -> None:
    lengths = [np.zeros(1, np.int64)]

    def blocks() -> Iterator[np.ndarray]:
        for some in _chunks(texts):
            encoded = [text.encode() for text in some]
            lengths.append(np.fromiter(map(len, encoded), np.int64, len(encoded)))
            yield np.frombuffer(b"".join(encoded), np.uint8)

    _write_array(folder / "text.npy", blocks())
    _write_array(folder / "text_offsets.npy", [np.cumsum(np.concatenate(lengths))])


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(texts)
    while some := list(islice(remaining, 1 << 16)):
        yield some


def _open_array(path: Path) -> np.ndarray:
    # an empty array cannot be mapped; as a plain array, whose parts are made faster than those of a memmap
    return np.asarray(np.load(path, mmap_mode="r" if path.stat().st_size > 128 else None))


def _record(path: Path) -> dict:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _size_problem(path: Path, wanted: int) -> str:
    if not path.exists():
        return f"{path} is missing; copy it again"
    found = path.stat().st_size
    return "" if found == wanted else f"{path} has {found} bytes, the manifest says {wanted}; copy it again"


def _manifest(path: Path) -> dict:
    file = path / "manifest.json"
    if not file.exists():
        began = next(path.glob("*/unfinished"), None)
        state = f"; {began.parent} is unfinished: run prepare again" if began else ""
        raise FileNotFoundError(f"{path} is not a store: it has no manifest.json{state}")
    manifest = _read_json(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise ValueError(f"{file} has format {found}; this version reads {FORMAT}")
    return manifest


def _entry(path: Path, split: str) -> dict:
    splits = _manifest(path)["splits"]
    if split not in splits:
        raise ValueError(f"{path} has no split {split!r}; it has {', '.join(splits)}")
    return splits[split]


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _write_json(path: Path, data: dict, indent: int | None = None) -> None:
    def write(file) -> None:
        file.write(json.dumps(data, indent=indent).encode())
        file.flush()
        os.fsync(file.fileno())

    write_whole(path, write)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps a second run away from a folder; the lock goes with the process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another prepare is writing to {folder}; wait for it, or choose another folder") from None
    else:
        yield
    finally:
        os.close(handle)


def _allow_open_files(count: int) -> None:
    """A map keeps its file open: large stores need more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and count + 256 > soft:
        wanted = count + 1024
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
