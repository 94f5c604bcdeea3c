"""``DeltaRuleWatch``: while a module is recorded, a gated delta rule and the short convolution before it, which both go
on from a session's state, are recorded as one call between two blocks.

Models name the function that computes the rule as they like; it is known by its parameters, those of flash linear
attention. What it is given and what it returns must be what the kernel computes from the inputs of the convolution.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from scheduler.accel.cpu.convolution_interceptor import ConvolutionWatch
from scheduler.accel.cpu.delta_rule_program import DeltaRule, DeltaRuleRequest, RuleCall
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.accel.cpu.recorder import Recorder, Unrecordable

_PARAMETERS = frozenset({"query", "key", "value", "g", "beta", "initial_state"})
# Root mean square of a difference over that of the result: what rounding may do.
_ROUNDING = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


class DeltaRuleWatch(ConvolutionWatch):
    """See the module. It also knows what becomes of the heads' matrices."""

    def __init__(self, recorder: Recorder, state: Any, asked: list[Any]) -> None:
        super().__init__(recorder, state, asked)
        self._get_matrix, self._update_matrix = state.get_recurrent_state, state.update_recurrent_state
        self._matrix: torch.Tensor | None = None  # what the rule has made of the state

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        """Stands for the method of the cache."""
        return self._unseen(self._get_matrix, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Stands for the method of the cache. Raises Unrecordable for what a recorded rule has not made."""
        if self._matrix is None or recurrent_states is not self._matrix or layer_idx != self._layer:
            raise Unrecordable("it stores what no recorded rule has made")
        self._matrix = None
        return self._unseen(self._update_matrix, recurrent_states, layer_idx, *args, **kwargs)

    @property
    def done(self) -> bool:
        """See ``ConvolutionWatch``."""
        return super().done and self._matrix is None

    def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stands for the function that computes the rule. Raises Unrecordable."""
        bound = inspect.signature(function).bind(*args, **kwargs)
        if self._kernel is None or self._input is None or self._inputs is None or self._asked:
            raise Unrecordable("a delta rule without a convolution")
        with self._recorder.paused():
            state = bound.arguments.get("initial_state")
            before = None if state is None else state.clone()
            out, matrix = function(*args, **kwargs)
            request = self._recognise(function, bound, before, out)
        self._recorder.attend(request.given, out)
        self._recorder.let_idle(matrix)
        self._asked.append(request)
        self._matrix = matrix
        return out, matrix

    def _recognise(
        self,
        function: Callable[..., Any],
        bound: inspect.BoundArguments,
        before: torch.Tensor | None,
        out: torch.Tensor,
    ) -> DeltaRuleRequest:
        """The rule that was computed, with ``out [1, T, heads, width]``: compared with ``function`` in float32, on what
        float32 gives for its queries, keys and values.
        """
        given, inputs = bound.arguments, self._input
        assert self._kernel is not None
        assert inputs is not None
        told = [given["g"].shape, given["beta"].shape]
        if given["key"].dim() != 4 or out.dim() != 4 or any(shape != out.shape[:3] for shape in told):
            raise Unrecordable("another kind of delta rule")
        (weight, bias), (keys, depth), (heads, width) = self._kernel, given["key"].shape[2:], out.shape[2:]
        rule = DeltaRule(keys, heads, depth, width, True, True, depth**-0.5)
        if rule.channels != inputs.shape[1] or heads % keys:
            raise Unrecordable("another kind of delta rule")
        convolved = self._convolved().transpose(1, 2)
        for activated in (True, False):
            exact = _parts(rule, F.silu(convolved) if activated else convolved)
            if all(_alike(one, given[name]) for name, one in exact.items()):
                break
        else:
            raise Unrecordable("a delta rule of something else than a convolution")
        others = {"g": given["g"].float(), "beta": given["beta"].float(), "initial_state": before}
        request = DeltaRuleRequest(self._layer, weight[:, 0], bias, [inputs, given["g"], given["beta"]], out, rule=rule)
        bound.arguments |= exact | others
        want = function(*bound.args, **bound.kwargs)
        for normalised in (True, False):
            request.rule = replace(rule, activated=activated, normalised=normalised)
            found = self._run(request, before)
            if found is not None and all(map(_alike, found, want)):
                return request
        raise Unrecordable("another delta rule than that of the kernel")

    def _run(self, asked: DeltaRuleRequest, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What the kernel computes in float32: the result, and the matrices after it; None without memory."""
        ours = kernel()
        assert ours is not None
        assert self._inputs is not None
        (tokens, taps), rule = (asked.given[0].shape[2], asked.weight.shape[1]), asked.rule
        past = F.pad(self._inputs.float(), (taps, 0))[..., -tokens - taps : -tokens].contiguous()
        matrix = torch.zeros(rule.state_shape) if before is None else before.to(torch.float32, copy=True).contiguous()
        weight, bias = asked.plain
        rows = [asked.given[0][0].t().float().contiguous(), *(one.float().contiguous() for one in asked.given[1:])]
        out = torch.empty(1, tokens, rule.heads, rule.width)
        call = RuleCall.of(rule, weight, bias, [torch.float32] * 4)
        call.input, call.decay, call.strength = (one.data_ptr() for one in rows)
        spans = np.array([past.data_ptr(), 0, matrix.data_ptr(), 0, 0, tokens], np.int64)
        call.out, call.spans, call.count = out.data_ptr(), spans.ctypes.data, 1
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(ours.delta_rule or 0)
        return None if function(ctypes.addressof(call)) else (out, matrix)


def _parts(rule: DeltaRule, mixed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of ``[1, T, C]`` the queries and keys, ``[1, T, keys, depth]``, and values, ``[1, T, heads, width]``."""
    key = rule.keys * rule.depth
    parts = torch.split(mixed, [key, key, rule.heads * rule.width], -1)
    shapes = ((rule.keys, rule.depth), (rule.keys, rule.depth), (rule.heads, rule.width))
    named = zip(("query", "key", "value"), parts, shapes, strict=True)
    return {name: one.reshape(*mixed.shape[:2], *shape) for name, one, shape in named}


@contextmanager
def intercept_rules(modules: Iterable[torch.nn.Module], watch: DeltaRuleWatch) -> Iterator[None]:
    """Within it, delta rules that the code of these modules computes are recorded."""
    spaces = {id(space): space for module in modules if (space := _space(module)) is not None}.values()
    found = [(space, name, one) for space in spaces for name, one in space.items() if _is_rule(one)]
    for space, name, one in found:
        space[name] = partial(watch.compute, one)
    try:
        yield
    finally:
        for space, name, one in found:
            space[name] = one


def computes_rules(module: torch.nn.Module) -> bool:
    """Whether the code of a module knows a function that computes a delta rule."""
    return any(_is_rule(one) for one in (_space(module) or {}).values())


def _space(module: torch.nn.Module) -> dict[str, Any] | None:
    """The names that the code of a module knows."""
    home = sys.modules.get(type(module).__module__)
    return None if home is None else vars(home)


def _is_rule(one: Any) -> bool:
    if not inspect.isfunction(one):
        return False
    return inspect.signature(one).parameters.keys() >= _PARAMETERS


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    difference = (one.float() - other.float()).square().mean().sqrt()
    return bool(difference <= max(_ROUNDING[one.dtype], _ROUNDING[other.dtype]) * other.float().square().mean().sqrt())
