"""``ConvolutionProgram``: a layer that runs in one call: the basic block before a short causal convolution along the
tokens of each session, the convolution, the basic block after it.

The last inputs of the convolution are a session's state, which is in the model's own cache object. They are changed in
place. What they were is kept, so that a layer that was computed ahead in vain can take it back.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import LinearAttentionLayer

from cache.pages.packed import PackedCache, PackedStep, Span
from scheduler.accel.cpu.basic_block import BasicBlock
from scheduler.accel.cpu.layer_program import LayerAttention, LayerWorkspace
from scheduler.accel.cpu.matrix import TYPES
from scheduler.accel.cpu.program import Program
from scheduler.accel.cpu.program_kernel import ProgramKernel


@dataclass
class ConvolutionRequest:
    """A recorded convolution along tokens: the layer whose state it goes on from, and its ``weight [C, K]`` and ``bias
    [C]``. ``given`` and ``out`` are ``[1, C, T]``.
    """

    layer: int
    weight: torch.Tensor
    bias: torch.Tensor | None
    given: list[torch.Tensor] = field(default_factory=list)
    out: torch.Tensor | None = None

    @property
    def signature(self) -> Any:
        """A value that is equal for two recordings of the same request."""
        return self.layer, tuple(self.weight.shape), self.bias is None

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight ``[K, C]`` and the bias ``[C]`` as kernels read them, float32."""
        bias = None if self.bias is None else self.bias.detach().float().contiguous()
        return self.weight.detach().float().t().contiguous(), bias


class _Convolution(ctypes.Structure):
    """The struct ``Convolution`` of convolution.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "out", "weight", "bias", "spans")),
        *((name, ctypes.c_int64) for name in ("count", "channels", "taps", "type")),
    )


class ConvolutionProgram:
    """The programs of the two basic blocks of a layer, and the convolution between them."""

    def __init__(self, blocks: list[BasicBlock], asked: ConvolutionRequest, kernel: ProgramKernel) -> None:
        before, after = (Program(block, kernel, adapted=True) for block in blocks)
        self.before, self.after = before, after
        self.room = LayerWorkspace.of(kernel, before, after)
        self._kernel = kernel
        self._dtype = self._before_type(0)
        self._shape = torch.Size((1, *asked.weight.shape))
        self._weight, self._bias = asked.plain
        self.source = asked.layer
        self._placed = 0
        self._spans = np.zeros((0, 0), np.int64)
        self._saved: list[torch.Tensor] = []  # what the tensors of all states were
        self.moved: list[tuple[Any, bool]] = []  # the states of the latest step, and whether they were new
        attend, self._call = self._make_call(asked)
        self.call = LayerAttention(attend=attend, call=ctypes.addressof(self._call))
        self.address = ctypes.addressof(self.call)

    def _make_call(self, asked: ConvolutionRequest) -> tuple[Any, Any]:
        """The address of the function of the kernel that runs between the blocks, and the struct that it gets."""
        bias = None if self._bias is None else self._bias.data_ptr()
        call = _Convolution(weight=self._weight.data_ptr(), bias=bias, type=TYPES[self._dtype])
        call.channels, call.taps = asked.weight.shape
        return self._kernel.convolve, call

    def _before_type(self, number: int) -> torch.dtype:
        """The dtype of an output of the block before."""
        places = (one for one in self.before.externals if (one.kind, one.number) == ("output", number))
        return next(places).dtype or torch.float32

    @property
    def programs(self) -> tuple[Program, Program]:
        """The blocks before and after the convolution."""
        return self.before, self.after

    def run(self, cache: PackedCache, inputs: list[torch.Tensor], rows: int) -> list[torch.Tensor] | None:
        """The outputs of the block after the convolution, with ``rows`` in their token axis, as ``inputs`` have; None,
        and nothing has changed, if these are not all rows of the step, or its states are of another kind. Raises
        MemoryError.
        """
        if not self.begin(cache.step, rows, keep=False):
            return None
        self.place(rows)
        for program in self.programs:
            program.place_inputs(inputs)
        outputs = self.after.place_outputs(rows)
        if self._kernel.attend_between(self.before.prepare(rows), self.address, self.after.prepare(rows)):
            raise MemoryError("no memory for a step")
        self.end()
        return outputs

    def begin(self, step: PackedStep, rows: int, *, keep: bool) -> bool:
        """Let the convolution go on from the states of this step; False if one of them is of another kind, or the step
        has not so many rows. ``keep``: what they were is kept, for ``take_back``.
        """
        states = [self._state(span) for span in step.spans]
        if rows != step.tokens or any(state is None for state in states):
            return False
        held = [self._tensors(state) for state in states]
        if len(self._spans) != len(states):
            self._saved = []
            self._spans = np.zeros((len(states), 2 * len(held[0]) + 2), np.int64)
            self._call.spans, self._call.count = self._spans.ctypes.data, len(states)
        if keep and not self._saved:
            self._saved = [torch.empty(len(states), *one.shape[1:], dtype=one.dtype) for one in held[0]]
        kept = zip(*self._saved, strict=True) if keep else [()] * len(states)
        self.moved = []
        for row, span, state, now, before in zip(self._spans, step.spans, states, held, kept, strict=True):
            new = not state.has_previous_state[0]
            for one in now if new else ():
                one.zero_()
            self.moved.append((state, new))
            row[:-2:2] = [one.data_ptr() for one in now]
            row[1:-2:2] = [one.data_ptr() for one in before] or 0
            row[-2:] = span.row, span.size
        return True

    def end(self) -> None:
        """The states have moved on."""
        for state, new in self.moved:
            if new:
                state.has_previous_state[0] = True

    def take_back(self, moved: list[tuple[Any, bool]]) -> None:
        """The states are what they were before the step, if that has ``moved`` them, is the latest one, and they were
        kept.
        """
        if moved is not self.moved:
            return
        for (state, new), *saved in zip(moved, *self._saved, strict=True):
            for now, before in zip(self._tensors(state), saved, strict=True):
                now.copy_(before[None])
            state.has_previous_state[0] = not new
        self.moved = []

    def place(self, rows: int) -> None:
        """Set the addresses of the tensors between the blocks, in both programs and the convolution."""
        room = self.room.tensors(rows)
        if self._placed != self.room.rows:
            self._placed = self.room.rows
            self.before.place_between(room)
            self.after.place_between({key: tensor for key, tensor in room.items() if key[0] != "output"})
            self._place_call(room)

    def _place_call(self, room: dict[tuple[str, int], torch.Tensor]) -> None:
        self._call.input, self._call.out = room["output", 0].data_ptr(), room["attention", 0].data_ptr()

    def _state(self, span: Span) -> Any:
        """The part of a session's cache object that has the layer's state; None if it is of another kind."""
        layers = getattr(span.session.state, "layers", ())
        state: Any = layers[self.source] if self.source < len(layers) else None
        if type(state) is not LinearAttentionLayer or state.record_past or state.number_of_states != 1:
            return None
        self._initialise(state)
        return state if self._fits(state) else None

    def _initialise(self, state: Any) -> None:
        """Let a new state have its tensors."""
        if not state.is_conv_states_initialized[0]:
            new = torch.zeros(self._shape, dtype=self._dtype)
            state.lazy_initialization(conv_states=new, conv_kernel_size=self._shape[2])

    def _fits(self, state: Any) -> bool:
        held = state.conv_states[0]
        return held.shape == self._shape and held.dtype is self._dtype and held.is_contiguous()

    def _tensors(self, state: Any) -> list[torch.Tensor]:
        """The tensors of a state."""
        return [state.conv_states[0]]
