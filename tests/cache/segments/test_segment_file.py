"""A segment gives back what was written, or a CorruptFile: for every dtype, every shape, and a thousand kinds of
damage.
"""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash

from cache import whole_files
from cache.memory.codec import Codec
from cache.segments import segment_file
from cache.segments.segment_file import Header, SegmentReader, check, read_header, timeline_hash, write
from cache.whole_files import CorruptFile

COUNT = 5  # tokens of the segments here
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]
Tensors = dict[str, torch.Tensor]


def header(codec: Codec = Codec.EXACT, first: int = 10, **changes: Any) -> Header:
    tokens = struct.pack(f"<{COUNT}i", *range(100, 100 + COUNT))
    known = Header(
        fingerprint="a model",
        tenant="a tenant",
        session="sitzung-ü",
        named=True,
        id="0123456789abcdef" * 2,
        sequence=7,
        parent=f"{'ab' * 16}/{6:016x}-{'cd' * 16}.kv" if first else None,
        first=first,
        stop=first + COUNT,
        tokens=tokens,
        mask=b"\1\1\0\1\1",
        before=timeline_hash(b"before", b""),
        after=timeline_hash(tokens, b"\1\1\0\1\1"),
        long=False,
        private=True,
        created=1.5,
        codec=codec,
        facts={"state.seen": 3, "state.rate": 0.5, "state.on": True, "state.": None, "checkpoint.3.name": "x"},
    )
    return msgspec.structs.replace(known, **changes)


def some_tensors(seed: int = 1) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for layer in (0, 3, 11):
        found[f"{layer}.key"] = torch.randn(COUNT, 2, 16, generator=rng).bfloat16()
        found[f"{layer}.value"] = torch.randn(COUNT, 2, 12, generator=rng)
    found["3.index"] = torch.randn(COUNT, 1, 7, generator=rng).half()
    found["11.value"][2, 1, 3] = float("nan")
    found["state.layers.0.conv"] = torch.randn(1, 4, 3, generator=rng)
    found["checkpoint.12.layers.0.conv"] = torch.randn(1, 4, 3, generator=rng)
    found["state.on"] = torch.tensor(True)
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def load(folder: Path, **known: object) -> Tensors:
    """All that ``a.kv`` holds."""
    with SegmentReader(folder, "a.kv") as reader:
        assert reader.header == read_header(folder, "a.kv")
        check(reader.header, **known)
        return {path: reader.read(path) for path in reader.names}


def assert_equal(left: Tensors, right: Tensors) -> None:
    assert list(left) == list(right)
    for path in left:
        assert (left[path].dtype, left[path].shape) == (right[path].dtype, right[path].shape), path
        assert raw(left[path]) == raw(right[path]), path


# -- what was written is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    size = COUNT * 3 * 8 * dtype.itemsize
    data = torch.tensor(list(random.Random(2).randbytes(size)), dtype=torch.uint8).view(dtype)
    tensors = {"0.key": data.view(COUNT, 3, 8), "state.x": data[:1].view(()), "checkpoint.10.y": data[:0].view(0, 4)}
    wanted = {path: tensor.clone() for path, tensor in tensors.items()}
    write(tmp_path, "a.kv", header(), tensors)
    assert_equal(load(tmp_path), wanted)


@pytest.mark.parametrize("codec", list(Codec))
def test_odd_shapes_come_back(tmp_path: Path, codec: Codec) -> None:
    tensors = {
        "0.key": torch.arange(COUNT * 2 * 3.0).double().view(2, 3, COUNT).permute(2, 0, 1),  # not contiguous
        "0.value": torch.zeros(COUNT, 0, 4),
        "1.key": torch.ones(COUNT),
        "1.index": torch.arange(COUNT * 6).view(COUNT, 6)[:, ::2],
        "state.": torch.tensor(3.5),
        "state.flags": torch.tensor([True, False]).expand(3, 2),
        "state.none": torch.zeros(4, 0, 2, dtype=torch.bool),
        "checkpoint.0.deep": torch.ones((1,) * 12),
        "checkpoint.15.odd name\n": torch.zeros(1, dtype=torch.int8),
    }
    written = write(tmp_path, "a.kv", header(codec), tensors)
    assert_equal(load(tmp_path), tensors)
    assert written == read_header(tmp_path, "a.kv")
    assert written.size == (tmp_path / "a.kv").stat().st_size


@pytest.mark.parametrize("first", [0, 10])
def test_the_header_comes_back(tmp_path: Path, first: int) -> None:
    given = header(first=first)
    write(tmp_path, "a.kv", given, {})
    assert read_header(tmp_path, "a.kv") == given
    empty = header(stop=10, tokens=b"", mask=b"")
    write(tmp_path, "b.kv", empty, {"state.x": torch.ones(2)})
    assert read_header(tmp_path, "b.kv").stop == 10


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP8])
def test_only_finite_keys_and_values_are_compressed(tmp_path: Path, codec: Codec) -> None:
    tensors = some_tensors()
    tensors["state.key"] = torch.randn(COUNT, 2, 16)
    written = write(tmp_path, "a.kv", header(codec), tensors)
    codecs = {entry.name: entry.codec for entry in written.tensors}
    lossy = {"0.key", "0.value", "3.key", "3.value", "11.key"}  # 11.value is not finite
    assert codecs == {path: codec if path in lossy else Codec.EXACT for path in tensors}
    read = load(tmp_path)
    assert_equal(
        {p: t for p, t in read.items() if p not in lossy}, {p: t for p, t in tensors.items() if p not in lossy}
    )
    for path in lossy:
        assert (read[path].dtype, read[path].shape) == (tensors[path].dtype, tensors[path].shape)
        assert not torch.equal(read[path], tensors[path])
        assert torch.allclose(read[path].float(), tensors[path].float(), rtol=0.07, atol=0.02)


def test_a_tensor_is_read_alone(tmp_path: Path) -> None:
    tensors = some_tensors()
    written = write(tmp_path, "a.kv", header(), tensors)
    entry = next(entry for entry in written.tensors if entry.name == "3.key")
    data = bytearray((tmp_path / "a.kv").read_bytes())
    start = len(data) - written.payload + entry.offset
    data[start] ^= 1
    (tmp_path / "a.kv").write_bytes(data)
    with SegmentReader(tmp_path, "a.kv") as reader:
        assert raw(reader.read("3.value")) == raw(tensors["3.value"])
        with pytest.raises(CorruptFile, match="damaged"):
            reader.read("3.key")
        with pytest.raises(CorruptFile, match="missing"):
            reader.read("4.key")


def test_what_is_read_is_nobody_elses_memory(tmp_path: Path) -> None:
    write(tmp_path, "a.kv", header(), some_tensors())
    with SegmentReader(tmp_path, "a.kv") as reader:
        once, again = reader.read("0.key"), reader.read("0.key")
    once.zero_()
    assert bool(again.any())


# -- the wrong segment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["fingerprint", "tenant", "session", "named", "id", "sequence", "first", "before"])
def test_a_foreign_segment_is_doubted_by_the_name_of_the_field(field: str) -> None:
    known = {"fingerprint": "a model", "tenant": "a tenant", "session": "sitzung-ü", "named": True}
    check(header(), **known)
    with pytest.raises(CorruptFile, match=f"another {field}"):
        check(header(), **(known | {field: "foreign"}))


def test_the_hash_of_a_timeline_knows_tokens_from_mask() -> None:
    hashes = [
        timeline_hash(tokens, mask)
        for tokens, mask in (
            (b"", b""),
            (b"\1\0\0\0", b"\1"),
            (b"\1\0\0\0", b"\0"),
            (b"\1\0\0\0\1", b""),
            (b"", b"\1\0\0\0\1"),
        )
    ]
    assert len(set(hashes)) == len(hashes)
    assert {len(digest) for digest in hashes} == {16}


def test_a_longer_timeline_than_expected_is_doubted(tmp_path: Path) -> None:
    write(tmp_path, "a.kv", header(), {})
    read_header(tmp_path, "a.kv", limit_tokens=15)
    with pytest.raises(CorruptFile, match="range"):
        read_header(tmp_path, "a.kv", limit_tokens=14)


@pytest.mark.parametrize(
    ("changes", "tensors"),
    [
        ({"parent": "../a.kv"}, {}),
        ({"parent": "a/../../b"}, {}),
        ({"parent": "a/.hidden"}, {}),
        ({"parent": None}, {}),
        ({"id": "0" * 31}, {}),
        ({"id": "0" * 32 + "\n"}, {}),
        ({"stop": 16}, {}),
        ({"first": -1, "stop": 4}, {}),
        ({"mask": b"\1\1\2\1\1"}, {}),
        ({"tokens": b"\xff" * 20}, {}),
        ({"before": b"short"}, {}),
        ({}, {"0.key": torch.zeros(COUNT + 1, 2)}),
        ({}, {"0.key": torch.tensor(1.0)}),
        ({"facts": {"checkpoint.16.x": 1}}, {}),
        ({}, {"0.other": torch.zeros(COUNT, 2)}),
        ({}, {"other.x": torch.zeros(2)}),
        ({}, {"checkpoint.16.x": torch.zeros(2)}),
        ({}, {"state.x": torch.zeros(2, dtype=torch.complex64)}),
    ],
)
def test_what_no_reader_would_believe_is_not_written(tmp_path: Path, changes: dict[str, Any], tensors: Tensors) -> None:
    with pytest.raises(ValueError, match=r"segment"):
        write(tmp_path, "a.kv", header(**changes), tensors)
    assert os.listdir(tmp_path) == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, "a.kv", header(), some_tensors())
    assert os.listdir(tmp_path) == []


# -- damage ------------------------------------------------------------------------------------------------------------


def damaged(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """``data`` with one seeded damage; ``other`` is another segment."""
    kind = rng.choice(["bit", "bit", "bits", "cut", "zeros", "noise", "append", "drop", "repeat", "splice", "swap"])
    changed = bytearray(data)
    start = rng.randrange(len(data))
    stop = rng.randrange(start, len(data)) + 1
    if kind in ("bit", "bits"):
        for _ in range(1 if kind == "bit" else 9):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del changed[start:]
    elif kind == "zeros":
        changed[start:stop] = bytes(stop - start)
    elif kind == "noise":
        changed[start:stop] = rng.randbytes(stop - start)
    elif kind == "append":
        count = rng.choice([1, 63, 64, 4096])
        changed += rng.choice([bytes(count), rng.randbytes(count)])
    elif kind == "drop":
        del changed[start : min(stop, start + 64)]
    elif kind == "repeat":
        changed[start:start] = changed[start : start + 64]
    elif kind == "splice":
        changed[start:stop] = other[start:stop]
    elif kind == "swap":
        return other
    return bytes(changed)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_thousand_damages_are_all_noticed(tmp_path: Path, codec: Codec) -> None:
    write(tmp_path, "a.kv", header(codec), some_tensors(1))
    write(tmp_path, "b.kv", header(codec, id="f" * 32), some_tensors(2))
    data, other = (tmp_path / "a.kv").read_bytes(), (tmp_path / "b.kv").read_bytes()
    assert len(data) == len(other)
    rng = random.Random(f"damage {codec}")
    seen: dict[str, int] = {}
    for _ in range(1000):
        changed = damaged(data, other, rng)
        if changed == data:  # zeros over zeros
            continue
        (tmp_path / "a.kv").write_bytes(changed)
        with pytest.raises(CorruptFile) as raised:
            load(tmp_path, id=header().id)
        seen[raised.value.reason] = seen.get(raised.value.reason, 0) + 1
    assert sum(seen.values()) > 950
    assert len(seen) >= 6, seen


@pytest.mark.parametrize("codec", list(Codec))
def test_every_single_byte_counts(tmp_path: Path, codec: Codec) -> None:
    write(tmp_path, "a.kv", header(codec), {"0.key": torch.randn(COUNT, 1, 7), "state.x": torch.ones(3)})
    data = (tmp_path / "a.kv").read_bytes()
    path = tmp_path / "a.kv"
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(CorruptFile):
            load(tmp_path)
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFile):
            read_header(tmp_path, "a.kv")


# -- hostile headers ---------------------------------------------------------------------------------------------------

Forgery = Callable[[dict[str, Any]], None]


def forged(data: bytes, forge: Callable[[bytes], bytes]) -> bytes:
    """``data`` with a header of the attacker's, its checksum and the padding made right."""
    length = struct.unpack_from("<I", data, 8)[0]
    encoded = forge(data[32 : 32 + length])
    start = data[:8] + struct.pack("<II", len(encoded), 1) + xxhash.xxh3_128_digest(encoded) + encoded
    payload = data[(32 + length + 63) // 64 * 64 :]
    return start.ljust((len(start) + 63) // 64 * 64, b"\0") + payload


def entry(name: str, field: int, value: Any) -> Forgery:
    def change(fields: dict[str, Any]) -> None:
        found = next(tensor for tensor in fields["tensors"] if tensor[0] == name)
        found[field] = value(found[field]) if callable(value) else value

    return change


def field(name: str, value: Any) -> Forgery:
    def change(fields: dict[str, Any]) -> None:
        fields[name] = value(fields[name]) if callable(value) else value

    return change


NAME, DTYPE, SHAPE, CODEC, OFFSET, NBYTES = range(6)
FORGERIES: dict[str, Forgery] = {
    "huge shape": entry("0.key", SHAPE, [COUNT, 1 << 40, 1 << 20]),
    "huge shape of few bytes": entry("0.key", SHAPE, [COUNT, 1 << 62, 1 << 62]),
    "empty and huge": entry("state.z", SHAPE, [0, 1 << 62, 1 << 62]),
    "shape that wraps around": entry("state.x", SHAPE, [(1 << 62) + 3]),
    "negative shape": entry("state.x", SHAPE, [-3]),
    "two negatives": entry("state.x", SHAPE, [-1, -3]),
    "shape of floats": entry("state.x", SHAPE, [3.0]),
    "too many dimensions": entry("state.x", SHAPE, [1] * 17 + [3]),
    "another shape": entry("state.x", SHAPE, [4]),
    "another dtype": entry("state.x", DTYPE, "float64"),
    "a dtype that is none": entry("state.x", DTYPE, "nn"),
    "a dtype that is an object": entry("state.x", DTYPE, "quint8"),
    "too many tokens": entry("0.key", SHAPE, lambda shape: [shape[0] * 2, shape[1] // 2, *shape[2:]]),
    "no tokens": entry("0.key", SHAPE, []),
    "wrong nbytes": entry("state.x", NBYTES, 8),
    "huge nbytes": entry("state.x", NBYTES, 1 << 62),
    "negative nbytes": entry("state.x", NBYTES, -12),
    "offset beyond the file": entry("state.x", OFFSET, 1 << 40),
    "negative offset": entry("state.x", OFFSET, -64),
    "overlap": entry("state.x", OFFSET, 0),
    "unaligned": entry("state.x", OFFSET, lambda offset: offset + 4),
    "the same name twice": entry("state.x", NAME, "state.y"),
    "a name of nothing": entry("state.x", NAME, "weights"),
    "a layer with a long number": entry("0.key", NAME, "9" * 5000 + ".key"),
    "another codec": entry("0.key", CODEC, lambda codec: "fp8" if codec == "int8" else "int8"),
    "a codec for a state": entry("state.x", CODEC, "int8"),
    "a codec that is none": entry("0.key", CODEC, "zip"),
    "short checksum": entry("state.x", 6, b"1234"),
    "no tensors": field("tensors", []),
    "payload": field("payload", 1 << 50),
    "negative payload": field("payload", -64),
    "backwards": field("stop", 9),
    "range": field("stop", 1 << 30),
    "negative range": field("first", -1),
    "short tokens": field("tokens", lambda tokens: tokens[:-1]),
    "negative tokens": field("tokens", b"\xff" * 4 * COUNT),
    "long mask": field("mask", lambda mask: mask + b"\1"),
    "mask of other bytes": field("mask", b"\1\1\1\1\xff"),
    "a parent elsewhere": field("parent", "../../secret"),
    "an absolute parent": field("parent", "/etc/passwd"),
    "a parent of three": field("parent", "a/b/c"),
    "no parent": field("parent", None),
    "id": field("id", "../../../../../../../../../../etc"),
    "a list for a name": field("tenant", ["a tenant"]),
    "a fact that is a list": field("facts", {"state.x": [1]}),
    "a fact beyond the range": field("facts", {"checkpoint.16.x": 1}),
    "a fact with a long number": field("facts", {"checkpoint." + "9" * 5000 + ".x": 1}),
    "a fact of nothing": field("facts", {"x": 1}),
    "a layer by another number": entry("0.key", NAME, "00.key"),
    "another field": lambda fields: fields.update(more=1),
    "a field less": lambda fields: fields.pop("after"),
    "an unnamed codec": field("codec", "zip"),
}


def segment_of(folder: Path, codec: Codec) -> bytes:
    tensors = {"0.key": torch.randn(COUNT, 2, 16), "state.y": torch.ones(3), "state.x": torch.ones(3)}
    tensors["state.z"] = torch.ones(0)
    write(folder, "a.kv", header(codec), tensors)
    return (folder / "a.kv").read_bytes()


def assert_refused_without_memory(folder: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading this file raises CorruptFile from the header alone, with no more memory than the file has bytes."""
    (folder / "a.kv").write_bytes(data)
    monkeypatch.setattr(torch, "empty", None)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFile):
            read_header(folder, "a.kv")
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_header_is_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec, forgery: str
) -> None:
    def forge(encoded: bytes) -> bytes:
        fields = msgspec.msgpack.decode(encoded)
        FORGERIES[forgery](fields)
        return msgspec.msgpack.encode(fields)

    data = segment_of(tmp_path, codec)
    assert forged(data, lambda encoded: msgspec.msgpack.encode(msgspec.msgpack.decode(encoded))) == data
    assert_refused_without_memory(tmp_path, forged(data, forge), monkeypatch)


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda encoded: b"",
    "more behind it": lambda encoded: encoded + b"\0",
    "a list without an end": lambda encoded: b"\xdd\xff\xff\xff\xff",
    "a map without an end": lambda encoded: b"\xdf\xff\xff\xff\xff" + encoded[3:],
    "tensors without an end": lambda encoded: encoded.replace(b"\xa7tensors\x94", b"\xa7tensors\xdd\xff\xff\xff\xff"),
    "bytes without an end": lambda encoded: encoded.replace(b"\xa4mask\xc4\x05", b"\xa4mask\xc6\xff\xff\xff\xff"),
    "nested": lambda encoded: encoded.replace(b"\xa5facts\x85", b"\xa5facts" + b"\x91" * 10_000),
    "not text": lambda encoded: encoded.replace(b"a model", b"a\xff\xfedel"),
    "written in another way": lambda encoded: encoded.replace(b"\xa8sequence\x07", b"\xa8sequence\xcd\x00\x07"),
    "a field twice": lambda encoded: (
        encoded[:1] + struct.pack(">H", len(msgspec.msgpack.decode(encoded)) + 1) + encoded[3:] + b"\xa5named\xc3"
    ),
}


@pytest.mark.parametrize("kind", BYTES)
def test_a_malformed_header_is_doubted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    data = segment_of(tmp_path, Codec.EXACT)
    changed = forged(data, BYTES[kind])
    assert changed != data
    assert_refused_without_memory(tmp_path, changed, monkeypatch)


@pytest.mark.parametrize("length", [0, 1 << 20, (256 << 20) + 1, 0xFFFFFFFF])
def test_the_length_of_a_header_is_compared_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    data = segment_of(tmp_path, Codec.EXACT)
    assert_refused_without_memory(tmp_path, data[:8] + struct.pack("<I", length) + data[12:], monkeypatch)


def test_a_header_larger_than_any_is_not_read_from_a_file_as_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = segment_of(tmp_path, Codec.EXACT)
    (tmp_path / "a.kv").write_bytes(data[:8] + struct.pack("<I", (256 << 20) + 64) + data[12:])
    os.truncate(tmp_path / "a.kv", 1 << 30)  # sparse
    sizes: list[int] = []

    def read(fd: int, size: int, offset: int) -> bytearray:
        sizes.append(size)
        return whole_files.read_at(fd, size, offset)

    monkeypatch.setattr(segment_file, "read_at", read)
    with pytest.raises(CorruptFile, match="longer"):
        read_header(tmp_path, "a.kv")
    assert sizes == [32]


def test_another_format_is_doubted(tmp_path: Path) -> None:
    data = segment_of(tmp_path, Codec.EXACT)
    (tmp_path / "a.kv").write_bytes(data[:12] + struct.pack("<I", 2) + data[16:])
    with pytest.raises(CorruptFile, match="format"):
        read_header(tmp_path, "a.kv")


def test_a_flag_is_true_or_false(tmp_path: Path) -> None:
    write(tmp_path, "a.kv", header(), {"state.on": torch.tensor([True, False])})
    data = bytearray((tmp_path / "a.kv").read_bytes())
    data[-64] = 2
    right = xxhash.xxh3_128_digest(bytes([2, 0]))
    wrong = xxhash.xxh3_128_digest(bytes([1, 0]))
    changed = forged(bytes(data), lambda encoded: encoded.replace(wrong, right))
    (tmp_path / "a.kv").write_bytes(changed)
    with pytest.raises(CorruptFile, match="flag"):
        load(tmp_path)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    data = segment_of(tmp_path, Codec.EXACT)
    (tmp_path / "b.kv").write_bytes(data[:-1])
    before = len(os.listdir("/proc/self/fd"))
    load(tmp_path)
    with pytest.raises(CorruptFile):
        read_header(tmp_path, "b.kv")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_cut_while_it_is_read_is_doubted(tmp_path: Path) -> None:
    segment_of(tmp_path, Codec.EXACT)
    with SegmentReader(tmp_path, "a.kv") as reader:
        os.truncate(tmp_path / "a.kv", 100)
        with pytest.raises(CorruptFile, match="shorter"):
            reader.read("0.key")
