"""Basic blocks of a program: the instructions (``Operation``), their operands, and the slots that hold their values for
one row.

Every element of every slot has a number of its own. A tensor that was sliced, transposed or concatenated is therefore a
list of these numbers, and ``BasicBlock.ref`` finds the cheapest way to read the elements in that order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]
_SHORT = 16  # elements: shorter repeated stretches are written out


class Opcode(IntEnum):
    """Opcodes, with the numbers of program.cpp."""

    ADD = 0
    SUB = auto()
    MUL = auto()
    DIV = auto()
    MAX = auto()
    MIN = auto()
    ABS = auto()
    EXP = auto()
    SQRT = auto()
    TANH = auto()
    SIGMOID = auto()
    SILU = auto()
    ERF = auto()
    SOFTPLUS = auto()
    REDUCE_SUM = auto()
    REDUCE_MAX = auto()
    COPY = auto()
    GATHER = auto()
    LOAD = auto()
    STORE = auto()
    PACK = auto()
    TOPK = auto()
    TAKE = auto()
    SCATTER = auto()
    MATMUL = auto()  # with a weight: a stage of its own
    ROUTED = auto()  # with the weights of the experts that a row names: a stage of its own


@dataclass(eq=False)
class Slot:
    """``size`` values of a row. ``values`` are set if they are the same in every row."""

    start: int
    size: int
    values: torch.Tensor | None = None
    source: External | None = None  # where it is read from

    @property
    def ids(self) -> Ids:
        """The numbers of its elements, ``[size]`` int64."""
        return np.arange(self.start, self.start + self.size)


@dataclass(frozen=True)
class Ref:
    """Elements of a slot from ``offset`` on: element i is ``i``, ``i % period``, or ``i // -period`` if negative."""

    slot: Slot
    offset: int = 0
    period: int = 0


@dataclass(eq=False)
class External:
    """A tensor outside of the block: an input of the module, the result of attention, or a result of the block.
    ``shape`` is without the token axis, which is ``axis``; ``dtype`` None: float32, between two blocks.
    """

    kind: str  # "input", "attention", "carried", "output"
    number: int
    shape: tuple[int, ...] = ()
    axis: int = 0
    dtype: torch.dtype | None = None


@dataclass(eq=False)
class Operation:
    """One instruction. ``extra`` is its external, table, group size, weight, or weights of experts with
    the number of elements from one choice's input to the next's, by its opcode."""

    code: Opcode
    n: int
    out: Slot
    a: Ref | None = None
    b: Ref | None = None
    extra: Any = None

    @property
    def refs(self) -> Iterator[Ref]:
        """The operands that it reads."""
        yield from (ref for ref in (self.a, self.b) if ref is not None)


class Slots:
    """All slots of a program."""

    def __init__(self) -> None:
        self._all: list[Slot] = []
        self._starts: list[int] = []
        self._next = 0

    def new(self, size: int, values: torch.Tensor | None = None, source: External | None = None) -> Slot:
        """Add a slot of ``size`` elements; ``values [size]`` of a constant, or its ``source`` outside."""
        slot = Slot(self._next, size, values, source)
        self._all.append(slot)
        self._starts.append(self._next)
        self._next += size
        return slot

    def parts(self, ids: Ids) -> list[tuple[Slot, Ids]]:
        """The slots that hold the elements ``ids``, each with the positions of its elements in ``ids``."""
        if not len(ids):
            return []
        first = self._all[bisect_right(self._starts, ids[0]) - 1]
        if first.start <= ids.min() and ids.max() < first.start + first.size:
            return [(first, np.arange(len(ids)))]
        owner = np.searchsorted(self._starts, ids, side="right") - 1
        return [(self._all[number], np.flatnonzero(owner == number)) for number in np.unique(owner)]


@dataclass(eq=False)
class BasicBlock:
    """A basic block: its instructions in the order in which they were recorded."""

    slots: Slots
    before: BasicBlock | None = None
    operations: list[Operation] = field(default_factory=list)
    _mine: dict[Slot, Slot] = field(default_factory=dict)  # what a slot of another block is called here
    _made: dict[bytes, Slot] = field(default_factory=dict)  # elements that were put in order

    def compute(self, code: Opcode, n: int, *refs: Ref, extra: Any = None) -> Slot:
        """Add an instruction with ``n`` results; returns their slot."""
        out = self.slots.new(n)
        a, b, *_ = *refs, None, None
        self.operations.append(Operation(code, n, out, a, b, extra))
        self._mine[out] = out
        return out

    def read(self, external: External, size: int) -> Slot:
        """Add a LOAD of a row of ``external``; returns its slot."""
        slot = self.compute(Opcode.LOAD, size, extra=external)
        slot.source = external
        return slot

    def write(self, external: External, ref: Ref, size: int) -> None:
        """Add a STORE of ``ref`` to a row of ``external``."""
        self.operations.append(Operation(Opcode.STORE, size, self.slots.new(0), ref, extra=external))

    def constant(self, values: torch.Tensor) -> Slot:
        """A slot with the same values in every row: float32 of any shape, read in order."""
        return self.slots.new(values.numel(), values)

    def product(self, weight: Any, ids: Ids, size: int) -> Slot:
        """Add a MATMUL of the elements ``ids`` with a weight; returns the slot of its ``size`` results."""
        if weight.order is not None:
            ids = ids[weight.order]
        key = b"%d" % weight.kind + ids.tobytes()
        if key not in self._made:
            self._made[key] = self.compute(Opcode.PACK, len(ids), self.whole(ids), extra=weight.kind)
        return self.compute(Opcode.MATMUL, size, Ref(self._made[key]), extra=weight)

    def add_routed(self, weights: Any, ids: Ids, experts: Ids) -> Slot:
        """Add a ROUTED: the elements ``ids``, which all choices share or of which each has its own, with the weights of
        the ``experts``, one number per choice. Returns the slot of its results, one choice after the other.
        """
        step = 0 if len(ids) == weights.inside else weights.inside
        size = len(experts) * weights.out
        return self.compute(Opcode.ROUTED, size, self.whole(ids), self.whole(experts), extra=(weights, step))

    def ref(self, ids: Ids) -> Ref:
        """An operand with these elements in this order: a pattern on their slot if there is one, else a copy in a new
        slot.
        """
        parts = self.slots.parts(ids)
        if len(parts) == 1:
            slot = self.local(parts[0][0])
            ref = _pattern(slot, ids - parts[0][0].start)
            if ref is not None:
                return ref
        return Ref(self._order(ids, parts))

    def whole(self, ids: Ids) -> Ref:
        """An operand with these elements that is contiguous and does not repeat."""
        ref = self.ref(ids)
        return ref if ref.period == 0 else Ref(self._order(ids, self.slots.parts(ids)))

    def pair(self, left: Ids, right: Ids) -> tuple[Ref, Ref]:
        """Two operands of one instruction. If both repeat, the longer period is a multiple of the shorter one."""
        a, b = self.ref(left), self.ref(right)
        steps = [abs(ref.period) or len(left) for ref in (a, b)]
        if max(steps) % min(steps) or (a.period < 0 and b.period < 0):
            a = self.whole(left)
        return a, b

    def local(self, slot: Slot) -> Slot:
        """The slot in this block of a value of an earlier block: computed values are stored and loaded, inputs are
        loaded again.
        """
        if slot.values is not None:
            return slot
        if slot not in self._mine:
            assert self.before is not None
            external = slot.source
            if external is None:
                external = slot.source = External("carried", slot.start, (slot.size,))
                self.before.write(external, Ref(self.before.local(slot)), slot.size)
            self._mine[slot] = self.read(external, slot.size)
        return self._mine[slot]

    def _order(self, ids: Ids, parts: list[tuple[Slot, Ids]]) -> Slot:
        key = ids.tobytes()
        if key not in self._made:
            out = self.slots.new(len(ids))
            for slot, places in parts:
                runs = _runs(places, ids[places] - slot.start)
                short = len(places) < 4 * len(runs)
                table = np.stack([places, ids[places] - slot.start], 1) if short else runs
                code = Opcode.GATHER if short else Opcode.COPY
                self.operations.append(Operation(code, len(ids), out, Ref(self.local(slot)), extra=table))
            self._mine[out] = self._made[key] = out
        return self._made[key]


def _pattern(slot: Slot, ids: Ids) -> Ref | None:
    n, offset = len(ids), int(ids[0])
    count = np.arange(n)
    if n == 1 or np.array_equal(ids, offset + count):
        return Ref(slot, offset)
    changes = np.flatnonzero(ids != offset)
    same = int(changes[0]) if len(changes) else n
    if n % same == 0 and (same >= _SHORT or same == n) and np.array_equal(ids, offset + count // same):
        return Ref(slot, offset, -same)
    again = np.flatnonzero(ids[1:] == offset)
    period = int(again[0]) + 1 if len(again) else n
    if n % period == 0 and period >= _SHORT and np.array_equal(ids, offset + count % period):
        return Ref(slot, offset, period)
    return None


def _runs(places: Ids, sources: Ids) -> Ids:
    """(to, from, length) of the runs that can be copied at once, ``[runs, 3]`` int64."""
    breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(sources) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([starts, [len(places)]]))
    return np.stack([places[starts], sources[starts], lengths], 1)
