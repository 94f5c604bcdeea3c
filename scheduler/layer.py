"""A layer in one call: the piece before attention, new keys and values stored in pages, attention, the piece after.

That is for steps in which every session feeds few tokens, and for layers whose keys are read in place; all others go
piece by piece, with the attention function between them.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from cache.attention import PackedAttention
from cache.layers import Scores
from cache.packed import PackedCache
from scheduler.piece import External, Piece
from scheduler.program import Kernel, Program

if TYPE_CHECKING:
    from scheduler.recording import Asked

_ROWS = 64  # room is made for a multiple of it


class _Attention(ctypes.Structure):
    """``Attention`` of program.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attend", "call", "key", "value", "key_pages", "value_pages", "places")),
        *((name, ctypes.c_int64) for name in ("rows", "key_bytes", "value_bytes")),
    )


class Layer:
    """The two pieces of one module around its attention."""

    def __init__(
        self, pieces: list[Piece], asked: Asked, attention: PackedAttention, kernel: Kernel, compiled: Any
    ) -> None:
        before, after = (Program(piece, kernel) for piece in pieces)
        self._before, self._after = before, after
        self._asked = asked
        self._attention, self._kernel, self._compiled = attention, kernel, compiled
        outputs = {external.number: external for external in before.externals if external.kind == "output"}
        query, key, value = (outputs[number] for number in range(3))
        self._heads, self._dim = query.shape[-2:]
        self._stored = (*key.shape[-2:], *value.shape[-2:])
        self._dtypes = {query.dtype, key.dtype, value.dtype}
        scale, sinks = asked.options["scaling"], attention.sinks(asked.module, asked.options["s_aux"])
        scale = scale if scale is not None else self._dim**-0.5
        self._scores = Scores(scale, asked.options["softcap"], sinks)
        self._sinks = sinks.detach().float().contiguous() if sinks is not None else None
        self._room = Room.of(kernel, before, after)
        self._placed = 0
        self._call = _Attention(attend=compiled.address)
        self._address = ctypes.addressof(self._call)

    def run(self, cache: PackedCache, inputs: list[torch.Tensor], rows: int) -> list[torch.Tensor] | None:
        """What the piece after attention leaves; None where this step, or this layer, is not for it."""
        step, source = cache.step, self._asked.layer
        tier = step.tier
        plan = self._attention.whole_plan(self._asked.module.layer_idx)  # type: ignore[arg-type]
        if plan is None or source not in cache.in_place or source not in tier.keys:
            return None
        shape = tier.shapes[source]
        if self._dtypes != {shape.dtype} or shape[:4] != self._stored:
            return None
        if not self._compiled.fits(shape, self._heads, self._dim, shape.dtype, self._scores):
            return None
        room = self._room.tensors(rows)
        if self._placed != self._room.rows:
            self._placed = self._room.rows
            self._before.place_between(room)
            self._after.place_between({key: tensor for key, tensor in room.items() if key[0] != "output"})
        for program in (self._before, self._after):
            program.place_inputs(inputs)
        outputs = self._after.place_outputs(rows)
        query, key, value = (room["output", number] for number in range(3))
        out, call = room["attention", 0], self._call
        where = (query.data_ptr(), self._dim, self._heads * self._dim, out.data_ptr())
        call.call = self._compiled.prepare(plan, source, self._heads, where, self._scores, self._sinks)
        call.key, call.value = key.data_ptr(), value.data_ptr()
        call.key_pages, call.value_pages = tier.keys[source].data_ptr(), tier.values[source].data_ptr()
        call.places, call.rows = step.write_index.data_ptr(), rows
        call.key_bytes, call.value_bytes = key.stride(0) * key.element_size(), value.stride(0) * value.element_size()
        if self._kernel.attend_between(self._before.prepare(rows), self._address, self._after.prepare(rows)):
            raise MemoryError("no memory for a step")
        return outputs


class Room:
    """What lies between the pieces of a layer; layers of one kind share it, since they run one after the other."""

    def __init__(self, externals: list[External]) -> None:
        self._externals = externals
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}
        self.rows = 0

    @classmethod
    def of(cls, kernel: Kernel, before: Program, after: Program) -> Room:
        """The one for these two programs."""
        between = [external for external in before.externals if external.kind != "input"]
        between += [external for external in after.externals if external.kind not in ("input", "output")]
        kind = tuple((one.kind, one.number, one.shape, one.dtype) for one in between)
        room: Room = kernel.rooms.setdefault(kind, cls(between))
        return room

    def tensors(self, rows: int) -> dict[tuple[str, int], torch.Tensor]:
        """By kind and number, ``[rows or more, elements]`` each."""
        if rows > self.rows:
            self.rows = -(-rows // _ROWS) * _ROWS
            for one in self._externals:
                size = torch.Size(one.shape).numel()
                self._tensors[one.kind, one.number] = torch.empty(self.rows, size, dtype=one.dtype or torch.float32)
        return self._tensors
