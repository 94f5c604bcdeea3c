"""Timing the ways to go through packed weights: the fastest is used and kept, and nothing but time depends on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from program_kit import compiled

from cache.compiler import private_folder
from scheduler.accel.cpu import ways
from scheduler.accel.cpu.matrix import Matrix
from scheduler.accel.cpu.packed_matrix import PackedMatrix
from scheduler.accel.cpu.program_kernel import ProgramKernel
from scheduler.weights.rounded_source import RoundedSource


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgramKernel]:
    found = compiled()
    if not found.tiles:
        pytest.skip("the system lets no process use its matrix units")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ways, "_LEAST", 1)
    before = found.ways
    yield found
    found.ways = before


def weights(*shapes: tuple[int, int]) -> list[Matrix]:
    return [Matrix(torch.ones(*shape, dtype=torch.bfloat16), True) for shape in shapes or [(64, 32), (130, 96)]]


def faked(monkeypatch: pytest.MonkeyPatch, fastest: Sequence[int], by: float = 2.0) -> None:
    """Every measurement takes a second, but that of the ``fastest`` way of each number of rows."""
    turns = iter(fastest)

    def best(works: Sequence[Callable[[], None]]) -> list[float]:
        for work in works:
            work()
        seconds = [1.0] * len(works)
        if len(works) > 1:
            seconds[next(turns)] /= by
        return seconds

    monkeypatch.setattr(ways, "_best", best)


def refused(*args: object) -> None:
    raise AssertionError("it was measured again")


def files() -> list[Path]:
    return sorted(private_folder().glob("ways-*.json"))


def test_the_fastest_way_is_used_for_each_number_of_rows(
    kernel: ProgramKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.ways = (0, 0, 0)
    faked(monkeypatch, (1, 0, 1))
    found = ways.choose(weights(), kernel)
    assert found is not None
    assert kernel.ways == found.chosen == (1, 0, 1)
    assert ways.latest is found
    size = sum(matrix.nbytes for matrix in weights())
    assert found.weight_bytes == found.memory == size
    assert [speeds[way] for speeds, way in zip(found.speeds, found.chosen, strict=True)] == [2 * size] * 3
    assert found.share == 2
    for rows, names, speeds in zip(found.rows, found.ways, found.speeds, strict=True):
        assert len(kernel.ways_through(packed=False, rows=rows)) == len(names) == len(speeds)
    assert any("prefetching" in line and "(used)" in line for line in found.lines)


def test_a_gain_within_the_noise_changes_nothing(kernel: ProgramKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.ways = (0, 1, 0)
    faked(monkeypatch, (1, 0, 1), by=1.01)
    found = ways.choose(weights(), kernel)
    assert found is not None
    assert kernel.ways == found.chosen == (0, 1, 0)


def test_what_was_measured_is_kept_for_these_shapes_and_this_build(
    kernel: ProgramKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(monkeypatch, (1, 1, 1))
    first = ways.choose(weights(), kernel)
    kernel.ways = (0, 0, 0)
    monkeypatch.setattr(ways, "_measure", refused)
    assert ways.choose(weights(), kernel) == first
    assert kernel.ways == (1, 1, 1)
    with pytest.raises(AssertionError, match="measured again"):
        ways.choose(weights((64, 64)), kernel)
    monkeypatch.setattr(kernel, "build", "another")
    with pytest.raises(AssertionError, match="measured again"):
        ways.choose(weights(), kernel)
    assert len(files()) == 1


@pytest.mark.parametrize(("now", "again"), [(1.2, True), (1.05, False), (0.5, False)])
def test_what_was_timed_while_memory_was_busy_is_timed_again(
    kernel: ProgramKernel, monkeypatch: pytest.MonkeyPatch, now: float, again: bool
) -> None:
    faked(monkeypatch, (1, 1, 1))
    first = ways.choose(weights(), kernel)
    assert first is not None
    faked(monkeypatch, (0, 1, 0))
    monkeypatch.setattr(ways, "_memory_speed", lambda sample, kernel: now * first.memory)
    second = ways.choose(weights(), kernel)
    assert second is not None
    assert (second.chosen == (0, 1, 0), second.memory > first.memory) == (again, again)
    monkeypatch.setattr(ways, "_measure", refused)
    assert ways.choose(weights(), kernel) == second


@pytest.mark.parametrize("damage", [b"", b"{}", b'"way"'])
def test_a_damaged_file_is_measured_again(
    kernel: ProgramKernel, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    faked(monkeypatch, (1, 1, 1))
    first = ways.choose(weights(), kernel)
    files()[0].write_bytes(damage)
    faked(monkeypatch, (1, 1, 1))
    assert ways.choose(weights(), kernel) == first


def test_a_way_that_this_kernel_does_not_know_is_measured_again(
    kernel: ProgramKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(monkeypatch, (1, 1, 1))
    ways.choose(weights(), kernel)
    files()[0].write_bytes(files()[0].read_bytes().replace(b'"chosen":[1,', b'"chosen":[99,'))
    faked(monkeypatch, (0, 1, 1))
    ways.choose(weights(), kernel)
    assert kernel.ways[0] in kernel.ways_through(packed=False, rows=1)


def test_a_folder_that_others_can_read_is_not_used(kernel: ProgramKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    private_folder().chmod(0o755)
    faked(monkeypatch, (1, 1, 1))
    assert ways.choose(weights(), kernel) is not None
    assert not list((Path(os.environ["XDG_CACHE_HOME"]) / "warmturn").glob("ways-*"))


def test_little_weights_are_not_timed(kernel: ProgramKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_LEAST", 1 << 20)
    monkeypatch.setattr(ways, "_measure", refused)
    before = kernel.ways
    assert ways.choose(weights(), kernel) is None
    assert ways.choose([Matrix(torch.ones(2048, 1024, dtype=torch.bfloat16), False)], kernel) is None
    assert ways.latest is None
    assert kernel.ways == before


def test_a_sample_of_a_large_model_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_SAMPLE", 40 << 10)
    many = weights(*[(64, 64)] * 20, *[(64, 128)] * 10, (640, 64))
    found = ways._sample(many)
    assert 40 << 10 <= sum(matrix.nbytes for matrix in found) <= 80 << 10
    assert {matrix.inside for matrix in found} == {64, 128}
    assert many[-1] not in found
    assert ways._sample(many[-1:]) == many[-1:]


def test_the_real_measurement(kernel: ProgramKernel) -> None:
    found = ways.choose(weights((512, 512), (512, 256)), kernel)
    assert found is not None
    assert found.memory > 0
    assert all(speed > 0 for speeds in found.speeds for speed in speeds)
    assert 0 <= found.huge_pages <= 1
    assert found.threads == torch.get_num_threads()


def test_weights_of_few_bits_have_ways_of_their_own(kernel: ProgramKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    some = [PackedMatrix(RoundedSource(torch.randn(256, 128), 8)) for _ in range(3)]
    many = kernel.ways_through(packed=True, rows=16)
    last = len(many) - 1  # in pairs where bytes are multiplied
    faked(monkeypatch, (1, 0, last))
    found = ways.choose(some, kernel)
    assert found is not None
    assert found.weight_bytes == sum(matrix.nbytes for matrix in some)
    assert (found.chosen, found.share) == ((1, 0, last), 2.0)
    assert kernel.ways == (1, 0, many[last])
    assert [some[:2] for some in found.ways] == [("in order", "prefetching")] * 3
    in_pairs = ("in pairs", "prefetching, in pairs") if kernel.multiplies_bytes else ()
    assert [some[2:] for some in found.ways] == [(), in_pairs, in_pairs]
    monkeypatch.setattr(ways, "_measure", refused)
    assert ways.choose(some, kernel) == found
    with pytest.raises(AssertionError, match="measured again"):
        ways.choose([PackedMatrix(RoundedSource(torch.randn(256, 128), 4)) for _ in range(3)], kernel)


def test_inputs_of_one_byte_have_ways_of_their_own(kernel: ProgramKernel) -> None:
    if not kernel.multiplies_bytes:
        pytest.skip("this processor has no instruction that multiplies bytes")
    some = [PackedMatrix(RoundedSource(torch.randn(256, 128), 8))]
    assert ways.choose(some, kernel) is not None
    kernel.activation_bytes = 1
    try:
        found = ways.choose(some, kernel)
    finally:
        kernel.activation_bytes = 2
    assert found is not None
    assert found.ways == (("in order", "prefetching"),) * 3
    assert len(files()) == 2


def test_another_model_changes_nothing_for_the_first_one(
    kernel: ProgramKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.ways = (0, 0, 0)
    faked(monkeypatch, (1, 0, 1, 0, 1, 0))
    first = ways.choose(weights(), kernel)
    with ways.kept():
        ways.choose(weights((32, 64)), kernel)
        assert kernel.ways == (0, 1, 0)
    assert kernel.ways == (1, 0, 1)
    assert ways.latest is first
