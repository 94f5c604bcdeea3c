"""``DeltaRuleProgram``: a layer that runs in one call: the basic block before a gated delta rule, the rule with the
short convolution that its keys, queries and values come from, the basic block after it.

The matrix of every head is a session's state, beside the last inputs of the convolution; both are changed in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from cache.pages.packed import PackedStep
from scheduler.accel.cpu.basic_block import BasicBlock
from scheduler.accel.cpu.convolution_program import ConvolutionProgram, ConvolutionRequest
from scheduler.accel.cpu.matrix import TYPES
from scheduler.accel.cpu.program_kernel import ProgramKernel


@dataclass(frozen=True)
class DeltaRule:
    """A gated delta rule: so many ``keys`` of ``depth`` numbers, shared by ``heads`` with values of ``width`` numbers.
    ``activated``: SiLU follows the convolution; ``normalised``: keys and queries have length 1. Queries are multiplied
    by ``scale``.
    """

    keys: int
    heads: int
    depth: int
    width: int
    activated: bool
    normalised: bool
    scale: float

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, all keys, all values."""
        return 2 * self.keys * self.depth + self.heads * self.width

    @property
    def state_shape(self) -> torch.Size:
        """Of a session's state."""
        return torch.Size((1, self.heads, self.depth, self.width))


@dataclass
class DeltaRuleRequest(ConvolutionRequest):
    """A recorded gated delta rule, and the convolution before it. ``given`` are the inputs of the convolution ``[1, C,
    T]``, the logarithms of decays and the strengths, ``[1, T, heads]`` each; ``out`` is ``[1, T, heads, width]``.
    """

    rule: DeltaRule = field(kw_only=True)

    @property
    def signature(self) -> Any:
        """See ``ConvolutionRequest``."""
        return super().signature, self.rule


class RuleCall(ctypes.Structure):
    """The struct ``DeltaRule`` of delta_rule.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "decay", "strength", "out", "weight", "bias", "spans")),
        *((name, ctypes.c_int64) for name in ("count", "taps", "type", "decay_type", "strength_type", "out_type")),
        *((name, ctypes.c_int64) for name in ("keys", "heads", "depth", "width", "activated", "normalised")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int64),
        ("together", ctypes.c_void_p),
    )

    @classmethod
    def of(
        cls, rule: DeltaRule, weight: torch.Tensor, bias: torch.Tensor | None, types: Sequence[torch.dtype]
    ) -> RuleCall:
        """That of a rule after a convolution with ``weight [K, C]`` and ``bias [C]``, float32. ``types``: of its
        inputs, decays, strengths and results.
        """
        call = cls(weight=weight.data_ptr(), bias=None if bias is None else bias.data_ptr(), taps=len(weight))
        call.type, call.decay_type, call.strength_type, call.out_type = (TYPES[dtype] for dtype in types)
        for name, value in asdict(rule).items():
            setattr(call, name, value)
        return call


class DeltaRuleProgram(ConvolutionProgram):
    """See the module."""

    def __init__(self, blocks: list[BasicBlock], asked: DeltaRuleRequest, kernel: ProgramKernel) -> None:
        super().__init__(blocks, asked, kernel)
        self._rule = asked.rule

    def _make_call(self, asked: ConvolutionRequest) -> tuple[Any, Any]:
        assert isinstance(asked, DeltaRuleRequest)
        out = next(one.dtype for one in self.after.externals if one.kind == "attention")
        types = (*(self._before_type(number) for number in range(3)), out or torch.float32)
        call = RuleCall.of(asked.rule, self._weight, self._bias, types)
        call.together = self._kernel.team
        return self._kernel.delta_rule, call

    def begin(self, step: PackedStep, rows: int, *, keep: bool) -> bool:
        """See ``ConvolutionProgram``."""
        self._call.threads = min(torch.get_num_threads(), self._kernel.threads)
        return super().begin(step, rows, keep=keep)

    def _place_call(self, room: dict[tuple[str, int], torch.Tensor]) -> None:
        super()._place_call(room)
        self._call.decay, self._call.strength = room["output", 1].data_ptr(), room["output", 2].data_ptr()

    def _initialise(self, state: Any) -> None:
        super()._initialise(state)
        if not state.is_recurrent_states_initialized[0]:
            state.lazy_initialization(recurrent_states=torch.zeros(self._rule.state_shape))

    def _fits(self, state: Any) -> bool:
        held = state.recurrent_states[0]
        same = held.shape == self._rule.state_shape and held.dtype is torch.float32
        return super()._fits(state) and same and held.is_contiguous()

    def _tensors(self, state: Any) -> list[torch.Tensor]:
        return [*super()._tensors(state), state.recurrent_states[0]]
