"""``LayerProgram``: a layer that runs in one call: the basic block before attention, storing new keys and values in
pages, attention, the basic block after it. A layer that attends to what another one has stored stores nothing.

It is used for steps that the CPU attention backend takes completely, and for layers whose keys are read in place. Other
steps run block by block and call the attention function between the blocks.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from cache.attention.backend import Signature
from cache.attention.cpu import CpuBackend, CpuPlan, StoreCall
from cache.attention.packed_attention import PackedAttention
from cache.memory.codec import Codec
from cache.pages.layers import Reach, ScoreOptions
from cache.pages.packed import PackedCache, PackedStep
from scheduler.accel.cpu.basic_block import BasicBlock, External
from scheduler.accel.cpu.interceptors import AttentionRequest
from scheduler.accel.cpu.program import Program
from scheduler.accel.cpu.program_kernel import ProgramKernel

_ROWS = 64  # room is made for a multiple of it


class LayerAttention(ctypes.Structure):
    """The struct ``Attention`` of program.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attend", "call", "key", "value", "key_pages", "value_pages", "places")),
        *((name, ctypes.c_int64) for name in ("rows", "key_bytes", "value_bytes")),
        *((name, ctypes.c_void_p) for name in ("store", "records")),
    )


class LayerProgram:
    """The programs of the two basic blocks of a layer, and the attention between them."""

    def __init__(
        self,
        blocks: list[BasicBlock],
        asked: AttentionRequest,
        attention: PackedAttention,
        kernel: ProgramKernel,
        backend: CpuBackend,
    ) -> None:
        before, after = (Program(block, kernel, adapted=True) for block in blocks)
        self.before, self.after = before, after
        self._asked = asked
        self._layer = attention.layers[asked.module.layer_idx]  # type: ignore[index]
        self._attention, self._kernel, self._backend = attention, kernel, backend
        outputs = {external.number: external for external in before.externals if external.kind == "output"}
        query, *stored = (outputs[number] for number in range(len(outputs)))
        self._heads, self._dim = query.shape[-2:]
        self._stored = tuple(size for one in stored for size in one.shape[-2:])  # heads and width of keys, of values
        self._dtypes = {query.dtype, *(one.dtype for one in stored)}
        scale, sinks = asked.options["scaling"], attention.sinks(asked.module, asked.options["s_aux"])
        scale = scale if scale is not None else self._dim**-0.5
        self._scores = ScoreOptions(scale, asked.options["softcap"], sinks)
        self._sinks = sinks.detach().float().contiguous() if sinks is not None else None
        self.room = LayerWorkspace.of(kernel, before, after)
        self._placed = 0
        self.call = LayerAttention(attend=backend.address)
        self.records = StoreCall()
        self.address = ctypes.addressof(self.call)

    def run(self, cache: PackedCache, inputs: list[torch.Tensor], rows: int) -> list[torch.Tensor] | None:
        """The outputs of the block after attention, with ``rows`` in their token axis, as ``inputs`` have; None if this
        step or layer cannot run in one call. Raises MemoryError.
        """
        plan = self.plan()
        if plan is None or not self.fits(cache):
            return None
        self.place(cache, plan, rows)
        for program in self.programs:
            program.place_inputs(inputs)
        outputs = self.after.place_outputs(rows)
        if self._kernel.attend_between(self.before.prepare(rows), self.address, self.after.prepare(rows)):
            raise MemoryError("no memory for a step")
        return outputs

    @property
    def programs(self) -> tuple[Program, Program]:
        """The blocks before and after attention."""
        return self.before, self.after

    @property
    def kind(self) -> Any:
        """Layers of one kind share a plan."""
        return self._layer.kind

    def plan(self) -> CpuPlan | None:
        """The plan for the current step; None if there is no step, or the backend does not take all of it."""
        step = self._attention.step
        if step is None or step.both_ways:
            return None
        plan = self._backend.plan(step, self._layer, step.numbers, last=True)
        return plan if plan is not None and not plan.unhandled else None

    @property
    def source(self) -> int:
        """The number of the layer whose pages it writes and reads."""
        return self._asked.layer

    def fits(self, cache: PackedCache) -> bool:
        """Whether the layer's keys are read in place, from pages with its shapes and dtype."""
        tier, source = cache.step.tier, self._asked.layer
        joined = self._asked.absorbed is not None
        if source not in (cache.joined if joined else cache.in_place) or source not in tier.keys:
            return False
        shape = tier.shapes[source]
        if shape.joined is not joined:
            return False
        if self._dtypes != {shape.dtype} or self._stored not in ((), shape[:4]):
            return False
        if shape.codec is not Codec.EXACT and self._asked.stores and not self._backend.stores(shape):
            return False
        capped, sinks, chunked = (
            self._scores.softcap is not None,
            self._sinks is not None,
            self._layer.reach is Reach.CHUNKED,
        )
        return self._backend.fits(Signature(shape, self._heads, self._dim, shape.dtype, capped, sinks, chunked))

    def place(self, cache: PackedCache, plan: CpuPlan, rows: int) -> None:
        """Set ``call`` for a step of ``rows`` rows, and the addresses of the tensors between the blocks in both
        programs.
        """
        step, source = cache.step, self._asked.layer
        room = self.room.tensors(rows)
        if self._placed != self.room.rows:
            self._placed = self.room.rows
            self.before.place_between(room)
            self.after.place_between({key: tensor for key, tensor in room.items() if key[0] != "output"})
        query, out, call, tier = room["output", 0], room["attention", 0], self.call, step.tier
        where = (query.data_ptr(), self._dim, self._heads * self._dim, out.data_ptr())
        call.call = self._backend.prepare(plan, source, self._heads, where, self._scores, self._sinks)
        if not self._asked.stores:
            return
        key, value = room["output", 1], room["output", 2]
        call.key, call.value = key.data_ptr(), value.data_ptr()
        call.key_pages, call.value_pages = tier.keys[source].data_ptr(), tier.values[source].data_ptr()
        call.places, call.rows = step.write_positions(source).data_ptr(), rows
        call.key_bytes, call.value_bytes = key.stride(0) * key.element_size(), value.stride(0) * value.element_size()
        if tier.shapes[source].joined:
            call.value_bytes = 0  # values are in the keys
        self._place_records(step, rows)

    def _place_records(self, step: PackedStep, rows: int) -> None:
        """Let new keys and values become records, if pages hold these."""
        shape, call, records = step.tier.shapes[self.source], self.call, self.records
        if shape.codec is Codec.EXACT:
            call.store = None
            return
        call.store, call.records = self._backend.store_address, ctypes.addressof(records)
        records.take(shape)
        records.key, records.value, records.rows = call.key, call.value, rows
        records.key_pages, records.value_pages = call.key_pages, call.value_pages


class LayerWorkspace:
    """The tensors between the blocks of a layer. Layers of one kind share them, since they run one after the other."""

    def __init__(self, externals: list[External]) -> None:
        self._externals = externals
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}
        self.rows = 0

    @classmethod
    def of(cls, kernel: ProgramKernel, before: Program, after: Program) -> LayerWorkspace:
        """The workspace for these two programs."""
        between = [external for external in before.externals if external.kind != "input"]
        between += [external for external in after.externals if external.kind not in ("input", "output")]
        kind = tuple((one.kind, one.number, one.shape, one.dtype) for one in between)
        room: LayerWorkspace = kernel.rooms.setdefault(kind, cls(between))
        return room

    def tensors(self, rows: int) -> dict[tuple[str, int], torch.Tensor]:
        """The tensors by kind and number, ``[rows or more, elements]`` each."""
        if rows > self.rows:
            self.rows = -(-rows // _ROWS) * _ROWS
            for one in self._externals:
                size = torch.Size(one.shape).numel()
                self._tensors[one.kind, one.number] = torch.empty(self.rows, size, dtype=one.dtype or torch.float32)
        return self._tensors
