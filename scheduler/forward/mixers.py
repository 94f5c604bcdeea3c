"""``MixerSplit``: runs a recurrent module within a packed step, with each session's tokens and state on their own.

In a packed row, a recurrence would continue from one session into the next. So every module that keeps a state (see
``scheduler.forward.trace``) is called once per session, with that session's part of the inputs and its state. Sessions
that feed a single token are called together, with their states stacked into a batch. The module's own code is
unchanged.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from cache.attention.backend import once
from cache.memory.stream import put
from cache.pages import state as states
from cache.pages.packed import PackedStep, Span

SpanMask = Callable[[int, Any, int], torch.Tensor]  # layer, the session's cache, new tokens -> mask

_MASKS = ("attention_mask", "conv_mask")  # they describe a padded batch; a session has no padding


class CurrentStep:
    """The step that split modules currently run in; None outside of a step."""

    def __init__(self) -> None:
        self.step: PackedStep | None = None

    @contextmanager
    def over(self, step: PackedStep | None) -> Iterator[None]:
        """Within it, ``step`` is in flight."""
        before, self.step = self.step, step
        try:
            yield
        finally:
            self.step = before


class MixerSplit:
    """Replaces one module's ``forward``; ``remove`` restores it.

    With ``token_by_token`` a session that has a state is fed one token at a time, since the multi-token code of some
    modules ignores an existing state (the probe measures that).
    """

    def __init__(
        self, module: torch.nn.Module, argument: str, flight: CurrentStep, mask: SpanMask | None = None
    ) -> None:
        """``mask`` makes the attention mask of one span, for a module that attends."""
        self.token_by_token = False
        self._flight = flight
        self._module = module
        self._mask = mask
        self._forward: Callable[..., Any] = module.forward
        self._signature = inspect.signature(module.forward)
        self._layer: int = getattr(module, "layer_idx", -1)
        self._argument = next(
            (n for n in ("past_key_values", "cache_params") if n in self._signature.parameters), argument
        )
        module.forward = self

    def remove(self) -> None:
        """The module is as it was."""
        del self._module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for the packed row, or what the module itself says outside of a step."""
        step = self._flight.step
        if step is None:
            return self._forward(*args, **kwargs)
        inputs = self._named(args, kwargs)
        out: dict[int, Any] = {}
        single = [s for s in step.spans if s.size == 1 and s.start > 0]
        if len(single) > 1 and self._stackable([span.session.state for span in single]):
            for span, part in zip(single, self._together(inputs, single, step), strict=True):
                out[span.row] = part
        for span in step.spans:
            if span.row not in out:
                out[span.row] = self._alone(inputs, span, step.tokens)
        return _joined([out[span.row] for span in step.spans])

    def _stackable(self, caches: Sequence[Any]) -> bool:
        """Whether this layer's state is all in ``cache.pages.layers``, of one shape; others keep parts elsewhere."""
        if self._mask is not None or self._layer < 0 or type(caches[0]) is not DynamicCache:
            return False
        shapes = [
            {path: tensor.shape for path, tensor in states.tensors_of(cache.layers[self._layer]).items()}
            for cache in caches
        ]
        return all(shape == shapes[0] for shape in shapes)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*args, **kwargs).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound.update(bound.pop(name, {}))
        return {name: None if name in _MASKS else value for name, value in bound.items()}

    def _alone(self, inputs: dict[str, Any], span: Span, tokens: int) -> Any:
        """One session's tokens with its own state, whole or one at a time."""
        end = span.row + span.size
        slow = self.token_by_token and span.start > 0
        cuts = [(at, at + 1) for at in range(span.row, end)] if slow else [(span.row, end)]
        parts = []
        for first, last in cuts:
            mine = {name: _sliced(value, slice(first, last), tokens) for name, value in inputs.items()}
            if self._mask is not None:
                mine["attention_mask"] = self._mask(self._layer, span.session.state, last - first)
            parts.append(self._call(mine, span.session.state))
        if self._mask is not None and isinstance(parts[0], tuple):
            return (_joined([part[0] for part in parts]), *[None] * (len(parts[0]) - 1))  # no attention weights
        return _joined(parts)

    def _together(self, inputs: dict[str, Any], spans: Sequence[Span], step: PackedStep) -> Iterator[Any]:
        """Single tokens of several sessions as one batch, their states of this layer stacked."""
        caches = [span.session.state for span in spans]
        batch = states.stacked([cache.layers[self._layer] for cache in caches])
        # Sent once per step: a list as an index would be copied to the device for each input of each layer.
        rows = once(step, "rows of single tokens", lambda: put(np.array([s.row for s in spans]), step.tier.device))
        mine = {name: _batched(value, rows, step.tokens) for name, value in inputs.items()}
        out = self._call(mine, _with_layer(caches[0], self._layer, batch))
        for cache, state in zip(caches, states.unstacked(batch, len(caches)), strict=True):
            cache.layers[self._layer] = state
        for i in range(len(spans)):
            yield states.part_of(out, i)

    def _call(self, inputs: dict[str, Any], cache: Any) -> Any:
        with self._flight.over(None):  # a module inside this one must not be split again
            return self._forward(**{**inputs, self._argument: cache})


def _sliced(value: Any, rows: slice, tokens: int) -> Any:
    """The part of an input that belongs to ``rows`` of the packed row; what has no token dimension is everybody's."""
    return _mapped(value, tokens, lambda tensor: tensor[:, rows])


def _batched(value: Any, rows: torch.Tensor, tokens: int) -> Any:
    """Single rows of an input as a batch: ``[1, T, ...]`` -> ``[len(rows), 1, ...]``."""
    return _mapped(value, tokens, lambda tensor: tensor[0].index_select(0, rows)[:, None])


def _mapped(value: Any, tokens: int, part: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return part(value) if value.dim() >= 2 and value.shape[1] == tokens else value
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, tokens, part) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, tokens, part) for name, item in value.items()}
    return value


def _joined(parts: Sequence[Any]) -> Any:
    """Outputs of the spans, one after the other again."""
    if len(parts) == 1:
        return parts[0]
    return states.joined(parts, 1)


def _with_layer(cache: Any, index: int, layer: Any) -> Any:
    """A cache like ``cache`` in which layer ``index`` is another; the others are never touched by this call."""
    twin = copy.copy(cache)
    twin.layers = list(cache.layers)
    twin.layers[index] = layer
    return twin
