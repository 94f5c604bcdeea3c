"""``Program``: a basic block compiled to the tables that ``kernels/program.cpp`` runs.

A program has stages: a stage is either a run of instructions that are computed for each row alone, or one product with
a weight. Values that are used only in the stage that computes them lie in scratch memory that all rows share, other
values in one row of the arena per token.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from scheduler.accel.cpu.basic_block import BasicBlock, External, Opcode, Operation, Ref, Slot, Slots
from scheduler.accel.cpu.experts_matrix import ExpertsMatrix
from scheduler.accel.cpu.matrix import GROUP, TYPES, Matrix
from scheduler.accel.cpu.program_kernel import ProgramKernel

log = logging.getLogger("warmturn.engine")
_SCRATCH, _ARENA, _FIXED = range(3)
_ALIGNED = 16  # floats
_ARENA_BYTES = 8 << 20  # aimed at, so that rows that are worked on together stay in a near cache
_ROUTED_BYTES = 64 << 20  # where experts are read again for every chunk
_CHUNKS = (32, 256)  # rows: the fewest and the most that are worked on together
_PRODUCTS = (Opcode.MATMUL, Opcode.ROUTED)  # each is a stage of its own
_TABLES = (Opcode.COPY, Opcode.GATHER, Opcode.TOPK, Opcode.TAKE, Opcode.SCATTER)
_READ = TYPES | {torch.int64: 3}  # what externals may be made of


class ProgramCall(ctypes.Structure):
    """The struct ``ProgramCall`` of program.cpp."""

    _fields_ = (
        ("stages", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("instructions", ctypes.c_void_p),
        ("externals", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
        ("prepared", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("scratch_each", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("team", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
        ("products", ctypes.c_int64),
    )


class Program:
    """A basic block that is ready to run."""

    def __init__(self, block: BasicBlock, kernel: ProgramKernel, adapted: bool = False) -> None:
        """``adapted``: what the rows' adapters add to its products is computed here, and not by who calls it."""
        self._kernel = kernel
        layout = _Layout(_stages(_live_operations(block.operations)))
        self.externals = layout.externals
        instructions = np.array(layout.instructions or np.zeros((0, 13)), np.int64)
        stages = np.array(layout.stages, np.int64)
        self._inputs = [(i, e) for i, e in enumerate(self.externals) if e.kind == "input"]
        outputs = [(i, e) for i, e in enumerate(self.externals) if e.kind == "output"]
        self.outputs = sorted(outputs, key=lambda output: output[1].number)
        self.outside = np.zeros((len(self.externals), 3), np.int64)  # ``External`` of program.cpp
        self.outside[:, 2] = [_READ[external.dtype or torch.float32] for external in self.externals]
        self._alive = (layout.alive, instructions, stages)
        width = layout.width | _ALIGNED  # rows that are a power of two apart would share the places of a cache
        room = _ROUTED_BYTES if layout.routed else _ARENA_BYTES
        rows = room // (4 * (width + layout.prepared)) // _CHUNKS[0] * _CHUNKS[0]
        chunk = min(max(rows, _CHUNKS[0]), _CHUNKS[1])
        self._arena, self._prepared = width * chunk, layout.prepared * chunk
        scratch = max(-(-layout.scratch // _ALIGNED) * _ALIGNED, chunk * GROUP if layout.direct else 0)
        scratch = max(scratch, *(_routed_scratch(op, chunk) for op in layout.routed), 0)
        self.call = ProgramCall(
            stages=stages.ctypes.data,
            count=len(stages),
            instructions=instructions.ctypes.data,
            externals=self.outside.ctypes.data,
            width=width,
            chunk=chunk,
            scratch_each=scratch,
            team=kernel.team,
            adapters=ctypes.addressof(kernel.adapters) if adapted else 0,
            products=layout.products,
        )
        kernel.low_rows = max(kernel.low_rows, chunk * layout.products)
        self._pointer = ctypes.addressof(self.call)
        self._memory = -1
        kernel.reserve(self._arena + self._prepared + scratch * kernel.threads)

    def place(self, number: int, address: int, stride: int) -> None:
        """Set the address of the rows of ``externals[number]``, and their stride in elements."""
        self.outside[number, 0] = address
        self.outside[number, 1] = stride

    def place_inputs(self, inputs: list[torch.Tensor]) -> None:
        """Set the addresses of the module's inputs, as they were recorded but with any number of tokens."""
        for number, external in self._inputs:
            tensor = inputs[external.number]
            self.place(number, tensor.data_ptr(), tensor.stride(external.axis))

    def place_outputs(self, rows: int) -> list[torch.Tensor]:
        """Allocate the block's outputs, with ``rows`` in their token axis, and set their addresses; returns them in
        order.
        """
        outputs = []
        for number, external in self.outputs:
            tensor = torch.empty((rows, *external.shape), dtype=external.dtype)
            self.place(number, tensor.data_ptr(), tensor.stride(0))
            outputs.append(tensor if external.axis == 0 else tensor.movedim(0, external.axis))
        return outputs

    def place_between(self, room: Mapping[tuple[str, int], torch.Tensor]) -> None:
        """Set the addresses of tensors that other blocks write or read, by kind and number: ``[rows, elements]``
        each.
        """
        for number, external in enumerate(self.externals):
            if (external.kind, external.number) in room:
                tensor = room[external.kind, external.number]
                self.place(number, tensor.data_ptr(), tensor.stride(0))

    def prepare(self, rows: int) -> int:
        """Set the call for ``rows`` rows; returns its address."""
        call = self.call
        call.rows, call.threads = rows, min(torch.get_num_threads(), self._kernel.threads)
        if self._memory != self._kernel.memory:
            self._memory = call.arena = self._kernel.memory
            call.prepared = call.arena + 4 * self._arena
            call.scratch = call.prepared + 4 * self._prepared
        return self._pointer

    def run_some(
        self, inputs: list[torch.Tensor], room: Mapping[tuple[str, int], torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        """The block's only output for the rows whose numbers are in ``rows``, int64, of its module's ``inputs`` and of
        the tensors in ``room``, as ``place_between`` gets them. Raises MemoryError.
        """
        outside, alive = self.outside.copy(), []
        for number, external in enumerate(self.externals):
            if external.kind == "output":
                result = tensor = torch.empty((len(rows), *external.shape), dtype=external.dtype)
                axis = external.axis
            elif external.kind == "input":
                tensor = inputs[external.number].movedim(external.axis, 0).index_select(0, rows)
            else:
                tensor = room[external.kind, external.number].index_select(0, rows)
            alive.append(tensor)
            outside[number, :2] = tensor.data_ptr(), tensor.stride(0)
        self.prepare(len(rows))
        call = ProgramCall.from_buffer_copy(self.call)
        call.externals = outside.ctypes.data
        if self._kernel.run(ctypes.addressof(call)):
            raise MemoryError("no memory for a step")
        return result.movedim(0, axis)

    def run(self, rows: int) -> None:
        """Run over ``rows`` rows of the externals, whose addresses have been set. Raises MemoryError."""
        if self._kernel.run(self.prepare(rows)):
            raise MemoryError("no memory for a step")


def product(
    matrix: Matrix, bias: torch.Tensor | None, dtype: torch.dtype, kernel: ProgramKernel
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function like ``F.linear`` with one weight, which runs as a program: ``[..., inside]`` to ``[..., out]`` of
    ``dtype``; it raises RuntimeError for another dtype.
    """
    block = BasicBlock(Slots())
    row = block.read(External("input", 0, dtype=dtype), matrix.inside)
    out = block.product(matrix, row.ids, matrix.out)
    if bias is not None:
        added = block.pair(out.ids, block.constant(bias.detach().float()).ids)
        out = block.compute(Opcode.ADD, matrix.out, *added)
    block.write(External("output", 0, dtype=dtype), Ref(out), matrix.out)
    program = Program(block, kernel)

    def forward(input: torch.Tensor) -> torch.Tensor:
        if input.dtype is not dtype:
            raise RuntimeError(f"a linear map of {dtype} got {input.dtype}")
        rows = input.reshape(-1, matrix.inside)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        result = torch.empty(rows.shape[0], matrix.out, dtype=input.dtype)
        program.place(0, rows.data_ptr(), rows.stride(0))
        program.place(1, result.data_ptr(), matrix.out)
        program.run(rows.shape[0])
        return result.view(*input.shape[:-1], matrix.out)

    return forward


class _Layout:
    """The places of all values, and the tables of stages and instructions."""

    def __init__(self, stages: list[list[Operation]]) -> None:
        self.externals: list[External] = []
        self.instructions: list[list[int]] = []
        self.stages: list[list[int]] = []
        self.alive: list[Any] = []
        self.width = self.scratch = self.prepared = 0  # floats of a row
        self.direct = _direct([op for stage in stages for op in stage])
        self.routed = [op for stage in stages for op in stage if op.code is Opcode.ROUTED]
        self._adapted: defaultdict[Slot, list[int]] = defaultdict(list)  # weight and product of each use, by input
        self._numbers: dict[Slot, int] = {}  # of the products that adapters may add to, by output
        for op in (op for stage in stages for op in stage if op.code is Opcode.MATMUL and op.extra.number >= 0):
            assert op.a is not None
            self._numbers[op.out] = len(self._numbers)
            self._adapted[op.a.slot] += op.extra.number, self._numbers[op.out]
        self.products = len(self._numbers)
        self._places: dict[Slot, tuple[int, int]] = {}
        self._last = {ref.slot: op for stage in stages for op in stage for ref in op.refs}
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        number = {op.out: i for i, stage in enumerate(stages) for op in stage}
        uses = ((i, ref.slot) for i, stage in enumerate(stages) for op in stage for ref in op.refs)
        shared = {slot for i, slot in uses if number.get(slot) != i}
        shared |= {op.out for i, stage in enumerate(stages) for op in stage if number[op.out] != i}  # made in several
        for stage in stages:
            first = len(self.instructions)
            for op in stage:
                if op.code is Opcode.MATMUL:
                    self._product(op)
                elif op.code is Opcode.ROUTED:
                    self._lay_out_routed(op)
                elif op not in self.direct.values():
                    self._instruction(op, op.out in shared)
            if len(self.instructions) > first:
                self.stages.append([first, len(self.instructions), *[0] * 6, -1, 0, -1, 0])

    def _product(self, op: Operation) -> None:
        assert op.a is not None
        matrix: Matrix = op.extra
        self.alive.append(matrix)
        weight = [matrix.data.data_ptr(), matrix.out, matrix.inside, matrix.kind]
        if op.out in self.direct:
            to = [0, self._external(self.direct[op.out])]
        else:
            to = [self._arena(op.out, -(-op.n // 64) * 64), -1]
        adapted = matrix.number, self._numbers.get(op.out, 0)
        self.stages.append([0, 0, *weight, self._places[op.a.slot][1], *to, 0, *adapted])

    def _lay_out_routed(self, op: Operation) -> None:
        assert op.a is not None
        assert op.b is not None
        weights: ExpertsMatrix
        weights, step = op.extra
        index, values = (self._places[ref.slot][1] + ref.offset for ref in (op.b, op.a))
        choices, bias = op.n // weights.out, 0 if weights.bias is None else weights.bias.data_ptr()
        table = np.array([weights.count, weights.nbytes // weights.count, choices, index, values, step, bias], np.int64)
        self.alive += [weights, table]
        matrix = weights.matrix
        weight = [matrix.data.data_ptr(), weights.out, weights.inside, matrix.kind]
        self.stages.append([0, 0, *weight, 0, self._arena(op.out, op.n), -1, table.ctypes.data, -1, 0])

    def _external(self, op: Operation) -> int:
        if op.extra not in self.externals:
            self.externals.append(op.extra)
        return self.externals.index(op.extra)

    def _instruction(self, op: Operation, shared: bool) -> None:
        count, table, n = 0, 0, op.n
        if op.code in (Opcode.LOAD, Opcode.STORE):
            count = self._external(op)
        elif op.code in _TABLES:
            array = np.ascontiguousarray(op.extra)
            self.alive.append(array)
            count, table = len(array), array.ctypes.data
        elif op.code in (Opcode.REDUCE_SUM, Opcode.REDUCE_MAX, Opcode.PACK):
            count = op.extra
            if adapted := self._adapted.get(op.out):
                array = np.array([len(adapted) // 2, *adapted], np.int64)
                self.alive.append(array)
                table = array.ctypes.data
        operands = [self._operand(ref) for ref in (op.a, op.b)]
        if op.out not in self._places:
            if op.code is Opcode.PACK:
                self._places[op.out] = _SCRATCH, self.prepared
                self.prepared += -(-op.n // 32) * 32
            elif shared:
                self._arena(op.out, op.n)
            else:
                self._lay_out_scratch(op.out)
        space, at = self._places[op.out]
        self.instructions.append([op.code, n, at, space, 0, *operands[0], *operands[1], table, count])
        for slot in {ref.slot for ref in op.refs}:
            if self._last[slot] is op and self._places[slot][0] == _SCRATCH:
                self._free[slot.size].append(self._places[slot][1])

    def _operand(self, ref: Ref | None) -> tuple[int, int, int]:
        if ref is None:
            return 0, _SCRATCH, 0
        if ref.slot.values is not None and ref.slot not in self._places:
            padded = torch.zeros(ref.slot.size + _ALIGNED)
            padded[: ref.slot.size] = ref.slot.values
            self.alive.append(padded)
            self._places[ref.slot] = _FIXED, padded.data_ptr()
        space, at = self._places[ref.slot]
        return at + ref.offset * (4 if space == _FIXED else 1), space, ref.period

    def _arena(self, slot: Slot, size: int) -> int:
        at, self.width = self.width, self.width + (-(-size // _ALIGNED) + 1) * _ALIGNED
        self._places[slot] = _ARENA, at
        return at

    def _lay_out_scratch(self, slot: Slot) -> None:
        if self._free[slot.size]:
            at = self._free[slot.size].pop()
        else:
            at, self.scratch = self.scratch, self.scratch + (-(-slot.size // _ALIGNED) + 1) * _ALIGNED
        self._places[slot] = _SCRATCH, at


def _routed_scratch(op: Operation, rows: int) -> int:
    """Floats that a ROUTED needs as ``RoutedProduct`` of experts.h divides them: lists of choices by expert, rows that
    are multiplied, a group of columns of their results.
    """
    weights, _ = op.extra
    listed = -(-(weights.count + 2 + rows * op.n // weights.out) // _ALIGNED) * _ALIGNED
    return int(listed + -(-rows // 32) * 32 * (-(-weights.inside // 32) * 32 + GROUP))


def _direct(operations: list[Operation]) -> dict[Slot, Operation]:
    """Products whose only use is one STORE, which is left out: the product is written there directly."""
    uses = Counter(ref.slot for op in operations for ref in op.refs)
    products = {op.out: op.n for op in operations if op.code is Opcode.MATMUL}
    writes = [(op, op.a) for op in operations if op.code is Opcode.STORE and op.a is not None]
    return {
        ref.slot: op
        for op, ref in writes
        if uses[ref.slot] == 1 and products.get(ref.slot) == op.n and ref.offset == 0 and ref.period == 0
    }


def _live_operations(operations: list[Operation]) -> list[Operation]:
    """The instructions on which a STORE depends."""
    wanted: set[Slot] = set()
    kept = []
    for op in reversed(operations):
        if op.code is Opcode.STORE or op.out in wanted:
            wanted.update(ref.slot for ref in op.refs)
            kept.append(op)
    return kept[::-1]


def _stages(operations: list[Operation]) -> list[list[Operation]]:
    """Stages of instructions and of products in turn, each instruction as early as its operands allow."""
    undone: defaultdict[Slot, int] = defaultdict(int)
    for op in operations:
        undone[op.out] += 1
    stages: list[list[Operation]] = []
    left = operations
    while left:
        for products in (False, True):
            stage, rest = [], []
            for op in left:
                ready = all(ref.slot.values is not None or undone[ref.slot] == 0 for ref in op.refs)
                if ready and (op.code in _PRODUCTS) is products:
                    stage.append(op)
                    undone[op.out] -= not products
                else:
                    rest.append(op)
            for op in stage if products else ():
                undone[op.out] -= 1
            stages += [[op] for op in stage] if products else [stage] if stage else []
            left = rest
    return stages
