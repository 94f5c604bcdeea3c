"""The format of segment files: writing, reading and checking one file with the KV of a range of tokens and the states
at its checkpoints.

``magic, u32 header length, u32 format, 16 bytes of checksum | header (msgpack) | zeros to 64 | payload``, all of it
little-endian. In the payload the tensors lie in the order of the header, each at a multiple of 64, with zeros between.
Everything is verified when it is read, sizes before anything is allocated: the result is what was written, or a
CorruptFile.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Meta

from cache.memory.codec import Codec
from cache.segments import segment_codec as codecs
from cache.whole_files import NAME, CorruptFile, open_file, read_at, read_into, write_file

MAGIC = b"\x93wtKV\r\n\x1a"
FORMAT = 1
LIMIT_TOKENS = 1 << 24
_PREFIX = struct.Struct("<8sII16s")
_ENCODED = re.compile(r"[0-9]+\.(key|value)")  # indexer keys and states are small, and stay exact
_LIMIT_HEADER = 256 << 20
_LIMIT_ELEMENTS = 1 << 60
_ALIGN = 64

_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Count = Annotated[int, Meta(ge=0)]
Hash = Annotated[bytes, Meta(min_length=16, max_length=16)]
_PAGED = r"(0|[1-9][0-9]{0,5})\.(key|value|index)\Z"
_STATE = r"(state|checkpoint\.(0|[1-9][0-9]{0,9}))\."


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor: ``dtype`` and ``shape`` as written and read by callers; ``offset`` and ``nbytes`` of its encoded
    bytes in the payload, and their ``checksum`` (xxh3, 128 bits). ``codec`` is EXACT if the header's codec does not
    apply.
    """

    name: Annotated[str, Meta(pattern=f"^({_PAGED}|{_STATE})")]
    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    codec: Codec
    offset: Count
    nbytes: Count
    checksum: Hash

    @property
    def paged(self) -> bool:
        """Whether its first dimension is the tokens of the range."""
        return self.name[0].isdigit()


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a segment file. ``write`` fills in ``tensors`` and ``payload``.

    ``tokens`` (int32) and ``mask`` (a flag per token) are those of the range ``[first, stop)`` of the timeline;
    ``before`` and ``after`` are ``timeline_hash`` of ``[0, first)`` and ``[0, stop)``. ``parent``, "folder/name", holds
    the range before it; it may be None only if ``first`` is 0. ``facts``: numbers and flags of the states.
    """

    fingerprint: str  # of the model, and of all that its KV depends on
    tenant: str
    session: str
    named: bool
    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    sequence: Count
    parent: Annotated[str, Meta(pattern=rf"^{NAME}/{NAME}\Z")] | None
    first: Count
    stop: Count
    tokens: bytes
    mask: bytes
    before: Hash
    after: Hash
    long: bool
    private: bool
    orphan: bool = False  # its session was deleted: only what others go on from is left
    created: float
    codec: Codec = Codec.EXACT
    facts: dict[Annotated[str, Meta(pattern=f"^{_STATE}")], bool | int | float | str | None] = {}
    tensors: Annotated[tuple[TensorEntry, ...], Meta(max_length=1 << 17)] = ()
    payload: Count = 0

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return _align(_PREFIX.size + len(msgspec.msgpack.encode(self))) + self.payload


_decoder = msgspec.msgpack.Decoder(Header)


def timeline_hash(tokens: bytes, mask: bytes) -> bytes:
    """A 16-byte hash of a timeline: int32 token ids, and one flag byte for each."""
    hashed = xxhash.xxh3_128(b"timeline" + len(tokens).to_bytes(8, "little"))
    hashed.update(tokens)
    hashed.update(mask)
    return hashed.digest()


def check(header: Header, **fields: object) -> None:
    """Raises CorruptFile, naming the field, unless the fields of ``header`` have these values: ``check(header,
    tenant=..., session=...)``.
    """
    for name, value in fields.items():
        if getattr(header, name) != value:
            raise CorruptFile(f"another {name}")


def write(folder: Path, name: str, header: Header, tensors: Mapping[str, torch.Tensor]) -> Header:
    """Write a segment file; it is on stable storage when this returns. Returns the header as written.

    ``tensors`` (CPU): ``"<layer>.key"``, ``"<layer>.value"``, ``"<layer>.index"`` of shape ``[stop - first, ...]``,
    ``"state.<path>"`` and ``"checkpoint.<length>.<path>"`` of any shape. Keys and values are encoded with
    ``header.codec``, other tensors are stored exactly. Tensors must not change meanwhile: contiguous ones are not
    copied. Raises OSError if the file system refuses (then no file is left), ValueError if readers would reject the
    file.
    """
    entries: list[TensorEntry] = []
    raw: list[memoryview] = []
    offset = 0
    for path, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{path} has a dtype that no segment holds")
        codec = codecs.choose_codec(tensor, header.codec) if _ENCODED.fullmatch(path) else Codec.EXACT
        data = codecs.encode(tensor, codec).numpy().data
        digest = xxhash.xxh3_128_digest(data)
        entries.append(TensorEntry(path, _NAMES[tensor.dtype], tuple(tensor.shape), codec, offset, len(data), digest))
        raw.append(data)
        offset = _align(offset + len(data))
    header = msgspec.structs.replace(header, tensors=tuple(entries), payload=offset)
    encoded = msgspec.msgpack.encode(header)
    try:
        _parse(encoded, LIMIT_TOKENS)
    except CorruptFile as doubt:
        raise ValueError(f"not a segment: {doubt.reason}") from None
    write_file(folder, name, _chunks(encoded, raw))
    return header


def read_header(folder: Path, name: str, *, limit_tokens: int = LIMIT_TOKENS) -> Header:
    """The header of a segment, verified; the payload is not read. Raises CorruptFile or OSError."""
    with SegmentReader(folder, name, limit_tokens=limit_tokens) as reader:
        return reader.header


class SegmentReader:
    """An open segment file: ``header`` is verified by the constructor, each tensor when it is read."""

    def __init__(self, folder: Path, name: str, *, limit_tokens: int = LIMIT_TOKENS) -> None:
        """Raises CorruptFile or OSError. ``limit_tokens``: a longer timeline counts as corrupt."""
        self._fd = open_file(folder, name)
        try:
            self.header, self._payload = _header(self._fd, limit_tokens)
        except BaseException:
            os.close(self._fd)
            raise
        self._entries = {entry.name: entry for entry in self.header.tensors}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def read(self, name: str) -> torch.Tensor:
        """A tensor in memory of its own, with the dtype and shape that it was written with. Raises CorruptFile if it is
        missing or damaged, or OSError.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise CorruptFile("a tensor is missing")
        raw = torch.empty(_align(entry.nbytes), dtype=torch.uint8)
        view = raw.numpy().data
        read_into(self._fd, view, self._payload + entry.offset)
        if xxhash.xxh3_128_digest(view[: entry.nbytes]) != entry.checksum or any(view[entry.nbytes :]):
            raise CorruptFile("a tensor is damaged")
        raw = raw[: entry.nbytes]
        if entry.dtype == "bool" and bool((raw > 1).any()):
            raise CorruptFile("a flag is neither true nor false")
        return codecs.decode(raw, entry.shape, _DTYPES[entry.dtype], entry.codec)


def _align(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _chunks(encoded: bytes, raw: list[memoryview]) -> Iterator[bytes | memoryview]:
    """The parts of the file in order; the tensors' memory is not copied."""
    start = _PREFIX.pack(MAGIC, len(encoded), FORMAT, xxhash.xxh3_128_digest(encoded)) + encoded
    yield start.ljust(_align(len(start)), b"\0")
    for data in raw:
        yield data
        yield bytes(_align(len(data)) - len(data))


def _header(fd: int, limit_tokens: int) -> tuple[Header, int]:
    """The verified header, and the offset of the payload."""
    size = os.fstat(fd).st_size
    if size < _PREFIX.size:
        raise CorruptFile("shorter than it was")
    magic, length, version, digest = _PREFIX.unpack(read_at(fd, _PREFIX.size, 0))
    if magic != MAGIC:
        raise CorruptFile("not a segment")
    if version != FORMAT:
        raise CorruptFile("another format")
    payload = _align(_PREFIX.size + length)
    if length > _LIMIT_HEADER or payload > size:
        raise CorruptFile("a header longer than the file")
    encoded = read_at(fd, payload - _PREFIX.size, _PREFIX.size)
    if any(encoded[length:]):
        raise CorruptFile("a damaged header")
    del encoded[length:]
    if xxhash.xxh3_128_digest(encoded) != digest:
        raise CorruptFile("a damaged header")
    header = _parse(encoded, limit_tokens)
    if payload + header.payload != size:
        raise CorruptFile("another size than it had")
    return header, payload


def _parse(encoded: bytes | bytearray, limit_tokens: int) -> Header:
    """The decoded header; raises CorruptFile unless encoding it again gives the same bytes."""
    try:
        header = _decoder.decode(encoded)
    except (ValueError, RecursionError):
        raise CorruptFile("a malformed header") from None
    if msgspec.msgpack.encode(header) != encoded:
        raise CorruptFile("a malformed header")
    _verify_range(header, limit_tokens)
    _verify_layout(header)
    return header


def _verify_range(header: Header, limit_tokens: int) -> None:
    count = header.stop - header.first
    if count < 0 or header.stop > limit_tokens or (header.first > 0 and header.parent is None):
        raise CorruptFile("an impossible token range")
    if len(header.tokens) != 4 * count or len(header.mask) != count:
        raise CorruptFile("tokens that are not of its range")
    if header.mask.translate(None, b"\0\1") or (np.frombuffer(header.tokens, "<i4") < 0).any():
        raise CorruptFile("tokens that cannot be")
    for name in (*(entry.name for entry in header.tensors), *header.facts):
        if name.startswith("checkpoint.") and int(name.split(".")[1]) > header.stop:
            raise CorruptFile("a checkpoint beyond its range")


def _verify_layout(header: Header) -> None:
    """Every tensor lies where ``write`` puts it, so none overlaps another or leaves the payload."""
    offset = 0
    for entry in header.tensors:
        _verify_entry(entry, header)
        if entry.offset != offset:
            raise CorruptFile("a tensor in another place")
        offset = _align(offset + entry.nbytes)
    if offset != header.payload or len({entry.name for entry in header.tensors}) != len(header.tensors):
        raise CorruptFile("tensors that do not fill the file")


def _verify_entry(entry: TensorEntry, header: Header) -> None:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None or prod(max(size, 1) for size in entry.shape) > _LIMIT_ELEMENTS:
        raise CorruptFile("a tensor that cannot be")
    if entry.paged and (not entry.shape or entry.shape[0] != header.stop - header.first):
        raise CorruptFile("a tensor that is not of its range")
    if entry.codec is not Codec.EXACT:
        wanted = entry.codec is header.codec and _ENCODED.fullmatch(entry.name)
        if not wanted or not codecs.encodable(entry.shape, dtype, entry.codec):
            raise CorruptFile("a tensor in another codec")
    if entry.nbytes != codecs.encoded_bytes(entry.shape, dtype, entry.codec):
        raise CorruptFile("a tensor of another size")


def lengths_of(names: Iterable[str]) -> tuple[int, ...]:
    """The lengths at which a file holds states, from its tensors' and facts' names."""
    return tuple(sorted({int(name.split(".")[1]) for name in names if name.startswith("checkpoint.")}))
