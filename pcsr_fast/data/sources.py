"""What a store is made from, image by image: rows of .npy files with a table of captions, or WebDataset tars."""

import tarfile
from collections.abc import Iterator
from io import BytesIO
from itertools import groupby, islice
from math import prod
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from pcsr_fast.data.folder import open_features
from pcsr_fast.data.lines import Lines


class Sample(NamedTuple):
    id: str
    where: str  # for messages
    regions: np.ndarray  # [R, d_img]
    captions: list[str]


class Bad(NamedTuple):
    """A sample that cannot be used, and why; the ones behind it may be good."""

    why: str


def find_source(source: Path | str) -> tuple[str, list[Path]]:
    """The kind of a source, `folder`, `rows` or `tars`, and the files that hold its features, in order."""
    source = Path(source)
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist")
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    if folder := [path for path in files if path.name.endswith("_ims.npy")]:
        return "folder", folder
    if tars := [path for path in files if path.suffix == ".tar"]:
        return "tars", tars
    if rows := [path for path in files if path.suffix == ".npy"]:
        for path in rows:
            if not path.with_suffix(".tsv").exists():
                raise FileNotFoundError(f"{path} has no {path.with_suffix('.tsv').name} beside it: id <tab> caption")
            # before hours of work, not after
            open_features(path)
        return "rows", rows
    raise ValueError(
        f"nothing to prepare in {source}: expected *_ims.npy with *_caps.txt or .tsv, "
        "*.npy each with a .tsv (id <tab> caption), or *.tar with KEY.npy and KEY.txt"
    )


def read_rows(path: Path, start: int) -> Iterator[Sample | Bad]:
    """Rows of a .npy [rows, R, d] and the lines of the .tsv of the same name: as many for each row, 1 or more."""
    # parts of a plain array are made faster than those of a memmap
    rows = np.asarray(open_features(path))
    table = Lines(path.with_suffix(".tsv"), tabs=True)
    each, rest = divmod(len(table), len(rows))
    if rest or not each:
        raise ValueError(f"{table.path} has {len(table)} lines for {len(rows)} rows of {path}; expected a multiple")
    for i in range(start, len(rows)):
        lines = range(i * each, (i + 1) * each)
        captions = [table[n] for n in lines]
        if not all(captions):
            yield Bad(f"{table.path}, line {lines[captions.index('')] + 1}: the caption is empty")
            continue
        begin = int(table.spans[lines[0], 0])
        line = table.text[table.text.rfind(b"\n", 0, begin) + 1 : begin]
        yield Sample(line.split(b"\t")[0].decode().strip("\ufeff "), f"{path}, row {i}", rows[i], captions)


def read_tar(path: Path, start: int) -> Iterator[Sample | Bad]:
    """Samples of a tar: members KEY.npy [R, d] and KEY.txt that stand together, with any others of that key."""
    try:
        with tarfile.open(path, "r:") as tar:
            groups = groupby(_members(tar, path), key=lambda member: _key_and_kind(member.name)[0])
            # a group must be walked through before the next
            keyed = ((key, {_key_and_kind(m.name)[1]: m for m in members}) for key, members in groups)
            for key, members in islice(keyed, start, None):
                yield _tar_sample(tar, path, key, members)
    # a truncated member, a header that is none; OSError has its own message
    except (tarfile.TarError, EOFError) as error:
        yield Bad(f"{path} is not a whole, uncompressed tar: {error}")


def _members(tar: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    end = 0
    while (member := tar.next()) is not None:
        # or the list of members would grow with the archive
        tar.members.clear()
        end = member.offset_data + (0 if member.isdir() else -(-member.size // 512) * 512)
        if member.isfile():
            yield member
    # tarfile takes a missing end for the end
    if path.stat().st_size < end + 512:
        raise tarfile.ReadError("it breaks off without an end mark")


def _key_and_kind(name: str) -> tuple[str, str]:
    """a/b.c.npy -> a/b and c.npy, as WebDataset divides names."""
    path = PurePosixPath(name)
    stem, _, kind = path.name.partition(".")
    return str(path.parent / stem), kind


def _tar_sample(tar: tarfile.TarFile, path: Path, key: str, members: dict[str, tarfile.TarInfo]) -> Sample | Bad:
    # what tarfile makes of bytes that are not
    if any("\udc80" <= character <= "\udcff" for character in key):
        return Bad(f"{path}: the name {key!r} is not UTF-8")
    for kind in ("npy", "txt"):
        if kind not in members:
            return Bad(f"{path}: {key} has no {key}.{kind} beside {', '.join(m.name for m in members.values())}")
    try:
        regions = parse_npy(tar.extractfile(members["npy"]).read())
    except ValueError as error:
        return Bad(f"{path}: {key}.npy {error}")
    try:
        caption = " ".join(tar.extractfile(members["txt"]).read().decode("utf-8-sig").split())
    except UnicodeDecodeError as error:
        return Bad(f"{path}: {key}.txt is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}")
    if not caption:
        return Bad(f"{path}: {key}.txt is empty")
    return Sample(key, f"{path}: {key}.npy", regions, [caption])


def parse_npy(data: bytes) -> np.ndarray:
    """The array of a .npy file in memory; ValueError for anything else, whatever its bytes say."""
    file = BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file)
    # a damaged header can raise almost anything from inside numpy
    except Exception as error:
        raise ValueError(f"is not a .npy file ({type(error).__name__}: {error})") from None
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise ValueError(f"holds {dtype}; expected float16 or float32")
    wanted, found = prod(shape) * dtype.itemsize, len(data) - file.tell()
    if wanted != found:
        raise ValueError(f"has {found} bytes of data, but its header, {dtype} {list(shape)}, asks for {wanted}")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
