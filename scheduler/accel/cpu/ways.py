"""Choosing how products go through weights: the ways that kernels/ways.h names are timed at load with weights of the
model, and the result is kept in the folder of the compiled kernels, for this processor and this build. It is timed
again if memory is faster now: it was busy then.

All ways give equal results, so the choice changes nothing but time.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec
import torch

from cache.compiler import NotBuilt, private_folder
from cache.error_line import first_line
from cache.memory import huge
from cache.whole_files import CorruptFile, write_file
from scheduler.accel.cpu import program_kernel
from scheduler.accel.cpu.basic_block import BasicBlock, External, Ref, Slots
from scheduler.accel.cpu.matrix import PACKED, TILED, Matrix
from scheduler.accel.cpu.program import Program
from scheduler.accel.cpu.program_kernel import ProgramKernel
from scheduler.model_facts import WeightReading

log = logging.getLogger("warmturn.engine")
_BITS = ("prefetching", "in pairs")  # of kernels/ways.h
_ROWS = (1, 4, 16)  # one row, few, many
_SAMPLE = 96 << 20  # bytes of weights that are timed: more than caches hold
_LEAST = 16 << 20  # with less, weights stay in the processor's caches, and any way will do
_SECONDS = 0.3  # for each number of rows
_ROUNDS = 5
_FASTER = 1.1  # memory that is now so much faster than when the ways were timed: it was busy then
_WORTH = 0.98  # another way than the one before must take at most so much of its time

latest: WeightReading | None = None  # of the model that was packed last


@contextmanager
def kept() -> Iterator[None]:
    """Within it another model may be loaded and choose; afterwards the ways are what they were."""
    global latest
    compiled = program_kernel.kernel
    ours = compiled() if compiled.cache_info().currsize else None  # nothing is compiled for this, on a GPU
    reading, chosen = latest, (0, 0, 0) if ours is None else ours.ways
    try:
        yield
    finally:
        latest = reading
        if ours is not None:
            ours.ways = chosen


def choose(matrices: Sequence[Matrix], kernel: ProgramKernel) -> WeightReading | None:
    """Set the ways of ``kernel`` that are fastest for weights like these; None where there are too few to matter."""
    global latest
    latest = None
    alike = [[one for one in matrices if one.kind == TILED], [one for one in matrices if one.kind & PACKED]]
    measured = max(alike, key=lambda some: sum(one.nbytes for one in some))
    if sum(matrix.nbytes for matrix in measured) < _LEAST:
        return None
    name, packed = _name(measured, kernel), measured[0].kind != TILED
    ways = [kernel.ways_through(packed, rows) for rows in _ROWS]
    latest = _recall(name, ways)
    if latest is None or _memory_speed(_sample(measured), kernel) > _FASTER * latest.memory:
        latest = _measure(measured, kernel, ways)
        _remember(name, latest)
    one, few, many = (some[number] for some, number in zip(ways, latest.chosen, strict=True))
    kernel.ways = one, few, many
    log.debug("weights are read %s", "; ".join(latest.lines))
    return latest


def _measure(tiled: list[Matrix], kernel: ProgramKernel, ways: list[list[int]]) -> WeightReading:
    sample = _sample(tiled)
    size = sum(matrix.nbytes for matrix in sample)
    memory = _memory_speed(sample, kernel)
    before, speeds, chosen = kernel.ways, [], []
    for rows, some, used in zip(_ROWS, ways, before, strict=True):
        run = _products(sample, rows, kernel)
        seconds = _best([_in(way, run, kernel) for way in some])
        fastest = min(range(len(seconds)), key=seconds.__getitem__)
        now = some.index(used & some[-1])  # without the bits that this kind does not know
        chosen.append(now if seconds[fastest] > _WORTH * seconds[now] else fastest)
        speeds.append(tuple(size / one for one in seconds))
    kernel.ways = before
    return WeightReading(
        weight_bytes=sum(matrix.nbytes for matrix in tiled),
        threads=torch.get_num_threads(),
        memory=memory,
        huge_pages=_in_huge_pages([matrix.data for matrix in sample]),
        ways=tuple(tuple(map(_in_words, some)) for some in ways),
        rows=_ROWS,
        speeds=tuple(speeds),
        chosen=tuple(chosen),
    )


def _in_words(way: int) -> str:
    return ", ".join(name for bit, name in enumerate(_BITS) if way >> bit & 1) or "in order"


def _memory_speed(sample: list[Matrix], kernel: ProgramKernel) -> float:
    """How many bytes of weights a second can be read at all."""
    data = [matrix.data for matrix in sample]
    return sum(matrix.nbytes for matrix in sample) / _best([lambda: kernel.read(data)])[0]


def _sample(tiled: list[Matrix]) -> list[Matrix]:
    """Weights from all over the model, about ``_SAMPLE`` bytes where there are more."""
    small = [matrix for matrix in tiled if matrix.nbytes <= _SAMPLE] or tiled[:1]
    return small[:: max(1, sum(matrix.nbytes for matrix in small) // _SAMPLE)]


def _products(sample: list[Matrix], rows: int, kernel: ProgramKernel) -> Callable[[], None]:
    """A function that multiplies ``rows`` rows with every weight: programs as in a step."""
    alike: defaultdict[int, list[Matrix]] = defaultdict(list)
    for matrix in sample:
        alike[matrix.inside].append(matrix)
    programs, alive = [], []
    for inside, matrices in alike.items():
        block = BasicBlock(Slots())
        ids = block.read(External("input", 0, dtype=torch.bfloat16), inside).ids
        for number, matrix in enumerate(matrices):
            out = Ref(block.product(matrix, ids, matrix.out))
            block.write(External("output", number, dtype=torch.bfloat16), out, matrix.out)
        program = Program(block, kernel)
        x = torch.ones(rows, inside, dtype=torch.bfloat16)
        y = torch.empty(rows, max(matrix.out for matrix in matrices), dtype=torch.bfloat16)
        for number, external in enumerate(program.externals):
            tensor = x if external.kind == "input" else y
            program.place(number, tensor.data_ptr(), tensor.stride(0))
        programs.append(program)
        alive += [x, y]

    def run(alive: list[torch.Tensor] = alive) -> None:
        for program in programs:
            program.run(rows)

    return run


def _in(way: int, run: Callable[[], None], kernel: ProgramKernel) -> Callable[[], None]:
    def choose() -> None:
        kernel.ways = way, way, way
        run()

    return choose


def _best(works: Sequence[Callable[[], None]]) -> list[float]:
    """The best time of each, in seconds of this thread, measured in turns so that other load affects all alike."""
    best, began = [float("inf")] * len(works), time.thread_time()
    for _ in range(_ROUNDS):
        for i, work in enumerate(works):
            start = time.thread_time()
            work()
            best[i] = min(best[i], time.thread_time() - start)
        if time.thread_time() - began > _SECONDS:
            break
    return best


def _in_huge_pages(data: list[torch.Tensor]) -> float:
    """The part of these weights' mappings that is in huge pages."""
    held = {huge.resident(tensor) for tensor in data[:: max(1, len(data) // 16)]}  # a look takes a millisecond
    return sum(found for _, found in held) / max(1, sum(size for size, _ in held))


def _name(tiled: list[Matrix], kernel: ProgramKernel) -> str:
    """The name of the file for these shapes, this processor, these threads and this build of the kernel."""
    shapes = [(matrix.out, matrix.inside, matrix.kind) for matrix in tiled]
    processor = torch.cpu.get_capabilities().get("cpu_name", "")
    settings = kernel.build, kernel.activation_bytes, _BITS, _ROWS
    asked = repr((processor, torch.get_num_threads(), settings, shapes))
    return f"ways-{hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()}.json"


def _recall(name: str, ways: list[list[int]]) -> WeightReading | None:
    with suppress(OSError, NotBuilt, msgspec.MsgspecError, ValueError):
        found = msgspec.json.decode((private_folder() / name).read_bytes(), type=WeightReading)
        if all(0 <= way < len(some) for way, some in zip(found.chosen, ways, strict=True)):
            return found
    return None


def _remember(name: str, reading: WeightReading) -> None:
    """Losing it costs a second at the next load, so no failure matters."""
    try:
        write_file(private_folder(), name, [msgspec.json.encode(reading)])
    except (OSError, NotBuilt, CorruptFile) as error:
        log.debug("what was timed is not kept: %s", first_line(error))
