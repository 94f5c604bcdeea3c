"""Reads the header of a GGUF file: its metadata and its table of tensors. Imported by both processes.

Nothing in a file is trusted: what does not fit into the file raises `GgufError`.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any, NamedTuple

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_DEPTH = 4  # of arrays in arrays
# Formats of struct by the type of a metadata value; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TOO_SHORT = "the file ends before its metadata does"


class GgufError(ValueError):
    """The file is damaged, incomplete, or of a kind that cannot be read; the message names no path."""


class GgufTensorEntry(NamedTuple):
    """A line of the table of tensors: ``shape`` in torch's order, ``offset`` in bytes from the start of the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufHeader(NamedTuple):
    """What is in front of the data, which is ``length`` bytes."""

    metadata: dict[str, Any]
    table: list[GgufTensorEntry]
    length: int


def read_header(data: mmap.mmap | bytes) -> GgufHeader:
    """The header of a file. Raises ``GgufError``."""
    return _Reader(data).header()


class _Reader:
    """Reads the values in front of the data, from ``at`` on."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self.at = 0

    def header(self) -> GgufHeader:
        """All of it. Raises GgufError for a file of another kind or version."""
        if self._take(4) != _MAGIC:
            raise GgufError("the file is not a GGUF file")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise GgufError("its version of GGUF is not 2 or 3, or it is for a machine of the other byte order")
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        self._fits(tensors, 8 + 4 + 4 + 8)
        self._fits(pairs, 8 + 4 + 1)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"), 0)
        table = [self._tensor() for _ in range(tensors)]
        return GgufHeader(metadata, table, self.at)

    def _tensor(self) -> GgufTensorEntry:
        name, dims = self._string(), self._scalar("I")
        if dims > _MAX_DIMS:
            raise GgufError("a tensor has more than 4 dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        return GgufTensorEntry(name, shape, kind, offset)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise GgufError("a value of its metadata is of an unknown type")
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner in _SCALARS:
            size = count * struct.calcsize("<" + _SCALARS[inner])
            self._fits(size, 1)
            return list(struct.unpack(f"<{count}{_SCALARS[inner]}", self._take(size)))
        self._fits(count, 8)
        if inner == _STRING:
            return self._strings(count)
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """So many strings: a vocabulary has hundreds of thousands, so there are no calls for each."""
        data, at, end, found = self._data, self.at, len(self._data), []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > end:
                raise GgufError(_TOO_SHORT)
            found.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return found

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", "replace")

    def _scalar(self, form: str) -> Any:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]

    def _fits(self, count: int, size: int) -> None:
        if count * size > len(self._data) - self.at:
            raise GgufError(_TOO_SHORT)

    def _take(self, count: int) -> bytes:
        self._fits(count, 1)
        self.at += count
        return self._data[self.at - count : self.at]
