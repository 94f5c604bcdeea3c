"""``MixerSplit``: runs a recurrent module within a packed step, with each session's tokens and state on their own.

In a packed row, a recurrence would continue from one session into the next. So every module that keeps a state (see
``scheduler.forward.trace``) is called once per session, with that session's part of the inputs and its state. Sessions
that feed a single token are called together, with states that are the rows of a batch. The module's own code is
unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from cache.pages import state as states
from cache.pages.packed import PackedStep, Span

SpanMask = Callable[[int, Any, int], torch.Tensor]  # layer, the session's cache, new tokens -> mask

_MASKS = ("attention_mask", "conv_mask")  # they describe a padded batch; a session has no padding


class Together(NamedTuple):
    """Single tokens of a step that are computed as one batch. ``order``: where they are in the packed row, in the order
    of the batch; ``rows``: the same on the device, ``[count]`` int64, or None where the step has no other tokens and
    that order. ``state``: of the batch.
    """

    rows: torch.Tensor | None
    order: list[int]
    state: Any


class CurrentStep:
    """The step that split modules currently run in, None outside of a step, and which of its tokens are computed
    together.
    """

    def __init__(self) -> None:
        self.step: PackedStep | None = None
        self.together: Together | None = None

    @contextmanager
    def over(self, step: PackedStep | None, together: Together | None = None) -> Iterator[None]:
        """Within it, ``step`` is in flight."""
        before = self.step, self.together
        self.step, self.together = step, together
        try:
            yield
        finally:
            self.step, self.together = before


class MixerSplit:
    """Replaces one module's ``forward``; ``remove`` restores it.

    With ``token_by_token`` a session that has a state is fed one token at a time, since the multi-token code of some
    modules ignores an existing state (the probe measures that).
    """

    keeps_state = True  # so that it is known where it is the forward of a module

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
        inputs = self._name_arguments(args, kwargs)
        together = self._flight.together
        out: dict[int, Any] = {}
        if together is not None:
            found = self._call(_batch(inputs, together.rows, step.tokens), together.state, step, together.order)
            if len(together.order) == step.tokens:
                return _unbatch(found, together.rows)
            out = {row: states.part_of(found, place) for place, row in enumerate(together.order)}
        for span in step.spans:
            if span.row not in out:
                out[span.row] = self._alone(inputs, span, step)
        return _join([out[span.row] for span in step.spans])

    def _name_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*args, **kwargs).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound.update(bound.pop(name, {}))
        return {name: None if name in _MASKS else value for name, value in bound.items()}

    def _alone(self, inputs: dict[str, Any], span: Span, step: PackedStep) -> Any:
        """One session's tokens with its own state, whole or one at a time."""
        tokens = step.tokens
        end = span.row + span.size
        slow = self.token_by_token and span.start > 0
        cuts = [(at, at + 1) for at in range(span.row, end)] if slow else [(span.row, end)]
        parts = []
        for first, last in cuts:
            mine = {name: _slice(value, slice(first, last), tokens) for name, value in inputs.items()}
            if self._mask is not None:
                mine["attention_mask"] = self._mask(self._layer, span.session.state, last - first)
            parts.append(self._call(mine, span.session.state, step, slice(first, last)))
        if self._mask is not None and isinstance(parts[0], tuple):
            return (_join([part[0] for part in parts]), *[None] * (len(parts[0]) - 1))  # no attention weights
        return _join(parts)

    def _call(self, inputs: dict[str, Any], cache: Any, step: PackedStep, rows: Any) -> Any:
        with step.called_with(rows), self._flight.over(None):  # a module inside this one must not be split again
            return self._forward(**{**inputs, self._argument: cache})


def _slice(value: Any, rows: slice, tokens: int) -> Any:
    """The part of an input that belongs to ``rows`` of the packed row; what has no token dimension is everybody's."""
    return _map_tensors(value, tokens, lambda tensor: tensor[:, rows])


def _batch(value: Any, rows: torch.Tensor | None, tokens: int) -> Any:
    """Single rows of an input as a batch: ``[1, T, ...]`` -> ``[len(rows), 1, ...]``; all of them without ``rows``."""
    if rows is None:
        return _map_tensors(value, tokens, lambda tensor: tensor[0][:, None])
    return _map_tensors(value, tokens, lambda tensor: tensor[0].index_select(0, rows)[:, None])


def _unbatch(value: Any, rows: torch.Tensor | None) -> Any:
    """The reverse of ``_batch`` for a packed row of single tokens: ``[T, 1, ...]`` -> ``[1, T, ...]``."""

    def one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        tensor = tensors[0]
        if tensor.dim() < 2:
            return tensor
        ordered = tensor if rows is None else torch.empty_like(tensor).index_copy_(0, rows, tensor)
        return ordered.transpose(0, 1)

    return states.combine(one, [value])


def _map_tensors(value: Any, tokens: int, part: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return part(value) if value.dim() >= 2 and value.shape[1] == tokens else value
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, tokens, part) for item in value)
    if isinstance(value, dict):
        return {name: _map_tensors(item, tokens, part) for name, item in value.items()}
    return value


def _join(parts: Sequence[Any]) -> Any:
    """Outputs of the spans, one after the other again."""
    if len(parts) == 1:
        return parts[0]
    return states.concatenate(parts, 1)
