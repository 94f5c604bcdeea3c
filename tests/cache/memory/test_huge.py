"""Memory in huge pages: apart, aligned, and given back."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from cache.memory import huge


def test_tensors_are_apart_and_begin_lines() -> None:
    sizes = [1, 31, 32, 33, 100_000, 20 << 20, 7, 12 << 20, 40 << 20]
    tensors = [huge.empty(size, torch.bfloat16) for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert (tensor.shape, tensor.dtype) == ((size,), torch.bfloat16)
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number).all())


def test_small_ones_share_a_stretch_and_large_ones_begin_huge_pages() -> None:
    small = [huge.empty(64, torch.uint8) for _ in range(3)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in small}) <= 2  # where one stretch ended
    assert huge.empty(100 << 20, torch.uint8).data_ptr() % huge.HUGE == 0


def test_the_system_gives_huge_pages() -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("this system has no huge pages")
    reference = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    reference.madvise(mmap.MADV_HUGEPAGE)
    asked = torch.frombuffer(reference, dtype=torch.uint8).fill_(1)
    if not huge.resident(asked)[1]:
        pytest.skip("this system gives no huge pages, or memory is too fragmented for one")
    del asked
    reference.close()
    held, in_huge_pages = huge.resident(huge.empty(64 << 20, torch.uint8).fill_(1))
    assert held >= 64 << 20
    assert 0 < in_huge_pages <= held


@pytest.mark.parametrize(("part", "mapped"), [(0.0, False), (0.1, False), (1.0, True)])
def test_a_file_is_mapped_if_its_pages_are_huge(
    part: float, mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("this system has no huge pages")
    monkeypatch.setattr(huge, "resident", lambda data: (data.nbytes, int(part * data.nbytes)))
    with (tmp_path / "file").open("w+b") as file:
        file.write(bytes(huge.HUGE) + bytes([7]) * 2 * huge.HUGE)
        file.flush()
        found = huge.map_file(file.fileno(), huge.HUGE, 2 * huge.HUGE)
    assert (found is not None) is mapped
    if found is not None:
        assert found.nbytes == 2 * huge.HUGE
        assert bool((found == 7).all())


def test_a_small_file_is_not_mapped(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(bytes(100))
        file.flush()
        assert huge.map_file(file.fileno(), 0, 100) is None


def test_of_an_unknown_mapping_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert huge.resident(torch.empty(1)) == (0, 0)


@pytest.mark.parametrize("size", [5 << 20, 50 << 20])
def test_memory_is_given_back(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[mmap.mmap]] = []

    class Noted(mmap.mmap):
        def __init__(self, *args: object, **kwargs: object) -> None:
            made.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Noted)
    huge._open = huge._open[:0]
    tensor = huge.empty(size, torch.uint8)
    huge._open = torch.empty(0, dtype=torch.uint8)
    assert made[0]() is not None
    del tensor
    gc.collect()
    assert made[0]() is None


def test_a_kernel_without_huge_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *args: object) -> None:
            raise OSError

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert huge.empty(50 << 20, torch.uint8).zero_().sum() == 0
