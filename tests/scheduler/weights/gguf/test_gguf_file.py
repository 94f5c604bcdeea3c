"""Reading GGUF files: the header, files that are split, and files that are damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from gguf_kit import F16, F32, Q8_0, store, write_file

from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError, read_metadata
from scheduler.weights.gguf.source import all_values

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "some.number": 0.5,
    "some.switch": True,
    "some.names": ["a", "bc", "ü"],
    "some.numbers": [1, 2, 3],
}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        f"matrix{seed}": torch.randn(6, 64),
        f"experts{seed}": torch.randn(2, 3, 32),
        f"vector{seed}": torch.randn(5),
    }


def written(path: Path) -> Path:
    kinds = {"matrix0": Q8_0, "experts0": F16, "vector0": F32}
    return write_file(path, METADATA, {name: store(each, kinds[name]) for name, each in tensors().items()})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "x.gguf")
    file = GgufFile(path)
    assert file.metadata == METADATA == read_metadata(path)
    assert file.architecture == "llama"
    assert file.keys_of_architecture() == {"block_count": 3}
    assert file.nbytes == path.stat().st_size
    for name, tensor in tensors().items():
        assert file.tensors[name].shape == tuple(tensor.shape)
        kind = {"matrix0": Q8_0, "experts0": F16, "vector0": F32}[name]
        assert torch.equal(all_values(file.tensors[name], torch.float32), store(tensor, kind).values)
    file.drop_pages()
    assert torch.equal(all_values(file.tensors["vector0"], torch.float32), tensors()["vector0"])


def split(folder: Path, count: int = 3) -> Path:
    for number in range(count):
        head = {**(METADATA if number == 0 else {}), "split.no": number, "split.count": count}
        write_file(
            folder / f"x-{number + 1:05}-of-{count:05}.gguf",
            head,
            {name: store(each) for name, each in tensors(number).items()},
        )
    return folder / f"x-00001-of-{count:05}.gguf"


def test_a_model_in_several_files(tmp_path: Path) -> None:
    file = GgufFile(split(tmp_path))
    assert file.architecture == "llama"
    for number in range(3):
        for name, tensor in tensors(number).items():
            assert torch.equal(all_values(file.tensors[name], torch.float32), tensor)


def test_a_part_that_is_missing_or_not_the_first(tmp_path: Path) -> None:
    first = split(tmp_path)
    with pytest.raises(GgufError, match="not the first part"):
        GgufFile(tmp_path / "x-00002-of-00003.gguf")
    (tmp_path / "x-00003-of-00003.gguf").unlink()
    with pytest.raises(GgufError, match="1 of the 3 files of the model are missing"):
        GgufFile(first)
    with pytest.raises(GgufError, match="one of several"):
        GgufFile(first.rename(tmp_path / "alone.gguf"))
    second = tmp_path / "x-00002-of-00003.gguf"
    second.rename(first)
    (tmp_path / "alone.gguf").rename(second)
    (tmp_path / "x-00003-of-00003.gguf").write_bytes(second.read_bytes())
    with pytest.raises(GgufError, match="order of their names"):
        GgufFile(first)


def test_every_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path / "x.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 500, 7), len(data) - 64]:
        path.write_bytes(data[:length])
        with pytest.raises(GgufError) as caught:
            GgufFile(path)
        assert str(tmp_path) not in str(caught.value)


def test_every_byte_of_the_header_may_be_wrong(tmp_path: Path) -> None:
    """No damage makes the reader fail in another way, or take memory that the file does not account for."""
    data = written(tmp_path / "x.gguf").read_bytes()
    path = tmp_path / "damaged.gguf"
    refused = 0
    for place in range(0, 480, 3):
        for value in (0, 0x7F, 0xFF):
            path.write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
            try:
                GgufFile(path)
            except GgufError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "byte order"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "ends before"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60), "ends before"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 62) + bytes(64), "ends before"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 1 << 61) + bytes(64), "ends before"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 77) + bytes(64), "unknown type"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 9, "unknown type"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 1, 0, 1, b"k", 9) + bytes(64), "more than 4 dimensions"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"k", 1, 32, 99, 0) + bytes(64), "supported are F32"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"k", 1, 33, 8, 0) + bytes(64), "whole number of blocks"),
        (struct.pack("<4sIQQQ1sIQQIQ", b"GGUF", 3, 1, 0, 1, b"k", 2, 1 << 40, 1 << 40, 0, 0) + bytes(64), "shorter"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"k", 1, 4, 0, 1 << 50) + bytes(64), "shorter"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"k", 1, 4, 0, 7) + bytes(64), "alignment"),
        (b"", "empty"),
        (b"garbage" * 100, "not a GGUF file"),
    ],
)
def test_what_a_file_must_not_say(head: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(head)
    with pytest.raises(GgufError, match=reason):
        GgufFile(path)
