"""What modules do with the state that each session has, while they are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cache.pages import state as states
from cache.pages.packed import PackedCache
from scheduler.accel.cpu.convolution_interceptor import ConvolutionWatch, intercept_state
from scheduler.accel.cpu.delta_rule_interceptor import DeltaRuleWatch, computes_rules, intercept_rules
from scheduler.accel.cpu.recorder import Recorder, Unrecordable


@contextmanager
def moved_only_if_recorded(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Within it ``module`` is recorded with these arguments. The states of sessions are what they were if that raises
    ``Unrecordable``.
    """
    caches = [one for one in tree_leaves((args, kwargs)) if isinstance(one, PackedCache)]
    sessions = [span.session for span in caches[0].step.spans] if caches and has_state(module) else []
    before = [states.clone(session.state) for session in sessions]
    try:
        yield
    except Unrecordable:
        for session, state in zip(sessions, before, strict=True):
            session.state = state
        raise


def intercept_states(
    stack: ExitStack, module: torch.nn.Module, recorder: Recorder, cache: PackedCache, asked: list[Any]
) -> None:
    """Record what ``module`` does with the cache object of the only session of a step, until ``stack`` is closed; what
    it computes from that is added to ``asked``. Raises Unrecordable.
    """
    state = _only_state(cache)
    keeping = [part for part in module.modules() if keeps_state(part)]
    if hasattr(state, "update_recurrent_state") and any(map(computes_rules, keeping)):
        watch = DeltaRuleWatch(recorder, state, asked)
        stack.enter_context(intercept_rules(keeping, watch))
        stack.enter_context(intercept_state(recorder, state, watch))
    else:
        stack.enter_context(intercept_state(recorder, state, ConvolutionWatch(recorder, state, asked)))


def _only_state(cache: PackedCache) -> Any:
    """The cache object of the only session of a step. Raises Unrecordable."""
    state = cache.step.spans[0].session.state if len(cache.step.spans) == 1 else None
    if state is None or not hasattr(state, "update_conv_state"):
        raise Unrecordable("a module within it keeps a state")
    return state


def keeps_state(module: torch.nn.Module) -> bool:
    """Whether a module is called for each session alone, as it keeps a state."""
    return getattr(vars(module).get("forward"), "keeps_state", False)


def has_state(module: torch.nn.Module) -> bool:
    """Whether such a module is within it."""
    return any(keeps_state(part) for part in module.modules())
