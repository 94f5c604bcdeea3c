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
        self._dtype = next(one.dtype for one in before.externals if one.kind == "output")
        self._shape = torch.Size((1, *asked.weight.shape))
        self._weight = asked.weight.detach().float().t().contiguous()
        self._bias = None if asked.bias is None else asked.bias.detach().float().contiguous()
        self.source = asked.layer
        self._placed = 0
        self._spans = np.zeros((0, 4), np.int64)  # ``ConvolvedSpan`` of convolution.h
        self._saved = torch.empty(0, *asked.weight.shape, dtype=self._dtype)
        self.moved: list[tuple[Any, bool]] = []  # the states of the latest step, and whether they were new
        channels, taps = asked.weight.shape
        self._convolution = _Convolution(
            weight=self._weight.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            channels=channels,
            taps=taps,
            type=TYPES[self._dtype or torch.float32],
        )
        self.call = LayerAttention(attend=kernel.convolve, call=ctypes.addressof(self._convolution))
        self.address = ctypes.addressof(self.call)

    @property
    def programs(self) -> tuple[Program, Program]:
        """The blocks before and after the convolution."""
        return self.before, self.after

    def run(self, cache: PackedCache, inputs: list[torch.Tensor], rows: int) -> list[torch.Tensor] | None:
        """The outputs of the block after the convolution, with ``rows`` in their token axis, as ``inputs`` have; None,
        and nothing has changed, if these are not all rows of the step, or its states are of another kind. Raises
        MemoryError.
        """
        if not self.begin(cache.step, rows):
            return None
        self.place(rows)
        for program in self.programs:
            program.place_inputs(inputs)
        outputs = self.after.place_outputs(rows)
        if self._kernel.attend_between(self.before.prepare(rows), self.address, self.after.prepare(rows)):
            raise MemoryError("no memory for a step")
        self.end()
        return outputs

    def begin(self, step: PackedStep, rows: int) -> bool:
        """Let the convolution go on from the states of this step; False if one of them is of another kind, or the step
        has not so many rows.
        """
        states = [self._state(span) for span in step.spans]
        if rows != step.tokens or any(state is None for state in states):
            return False
        if len(self._spans) != len(states):
            self._spans = np.zeros((len(states), 4), np.int64)
            self._saved = torch.empty(len(states), *self._shape[1:], dtype=self._dtype)
            self._spans[:, 1] = [one.data_ptr() for one in self._saved]
            self._convolution.spans, self._convolution.count = self._spans.ctypes.data, len(states)
        self.moved = []
        for number, (span, state) in enumerate(zip(step.spans, states, strict=True)):
            new = not state.has_previous_state[0]
            if new:
                state.conv_states[0].zero_()
            self.moved.append((state, new))
            self._spans[number] = state.conv_states[0].data_ptr(), self._spans[number, 1], span.row, span.size
        return True

    def end(self) -> None:
        """The states have moved on."""
        for state, new in self.moved:
            if new:
                state.has_previous_state[0] = True

    def take_back(self, moved: list[tuple[Any, bool]]) -> None:
        """The states are what they were before the step, if that has ``moved`` them and is the latest one."""
        if moved is not self.moved:
            return
        for (state, new), saved in zip(moved, self._saved, strict=True):
            state.conv_states[0].copy_(saved[None])
            state.has_previous_state[0] = not new
        self.moved = []

    def place(self, rows: int) -> None:
        """Set the addresses of the tensors between the blocks, in both programs and the convolution."""
        room = self.room.tensors(rows)
        if self._placed != self.room.rows:
            self._placed = self.room.rows
            self.before.place_between(room)
            self.after.place_between({key: tensor for key, tensor in room.items() if key[0] != "output"})
            self._convolution.input = room["output", 0].data_ptr()
            self._convolution.out = room["attention", 0].data_ptr()

    def _state(self, span: Span) -> Any:
        """The part of a session's cache object that has the layer's state; None if it is of another kind."""
        layers = getattr(span.session.state, "layers", ())
        state: Any = layers[self.source] if self.source < len(layers) else None
        if type(state) is not LinearAttentionLayer or state.record_past or state.number_of_states != 1:
            return None
        if not state.is_conv_states_initialized[0]:
            new = torch.zeros(self._shape, dtype=self._dtype)
            state.lazy_initialization(conv_states=new, conv_kernel_size=self._shape[2])
        held = state.conv_states[0]
        fits = held.shape == self._shape and held.dtype is self._dtype and held.is_contiguous()
        return state if fits else None
