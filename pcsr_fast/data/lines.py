"""Captions of a text file, one a line: where each stands is kept, the text itself stays on disk."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np

from pcsr_fast import _native


class Lines(Sequence[str]):
    """Caption n of a UTF-8 file is its line n, whatever the line holds: 16 bytes of memory a caption.

    Lines end with LF or CRLF; white space around a caption, and a byte order mark, are left out; an empty line is an
    empty caption. With `tabs`, a caption is the second column of its line and may be quoted as csv does it
    ("a ""big"" dog"); a stray quote is a character like any other and never joins lines.
    """

    def __init__(self, path: Path | str, tabs: bool = False):
        self.path, self.tabs = Path(path), tabs
        self.text = self._open()
        try:
            self.spans = _native.find_lines(self.text, tabs)  # int64 [captions, 2], bytes
        except _native.LineError as error:
            raise ValueError(f"{self.path}, {error}") from None

    def _open(self) -> mmap.mmap | bytes:
        with self.path.open("rb") as file:
            # an empty file cannot be mapped
            empty = self.path.stat().st_size == 0
            return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "text": len(self.text)}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self.text = self._open()
        if len(self.text) != state["text"]:
            raise ValueError(f"{self.path} had {state['text']} bytes when it was opened and has {len(self.text)} now")

    def __len__(self) -> int:
        return len(self.spans)

    @overload
    def __getitem__(self, n: int) -> str: ...
    @overload
    def __getitem__(self, n: slice) -> "Lines": ...
    def __getitem__(self, n):
        if isinstance(n, slice):
            part = object.__new__(Lines)
            part.__dict__ |= self.__dict__ | {"spans": np.ascontiguousarray(self.spans[n])}
            return part
        begin, end = self.spans[n]
        text = self.text[begin:end].decode()
        inner = text[1:-1]
        if self.tabs and len(text) > 1 and text[0] == text[-1] == '"' and '"' not in inner.replace('""', ""):
            return inner.replace('""', '"')
        return text
