"""``Thresholds``: checks that a mode is also right on timelines that are longer than a model's thresholds, by measuring
it on the model's twin.
"""

from __future__ import annotations

from typing import Any

import torch

from cache.attention.packed_attention import Unsupported
from cache.error_line import first_line
from cache.pages.layers import read_layers
from cache.pages.session import SessionCache
from scheduler.forward.alone_modes import AloneMode
from scheduler.forward.mode import Mode, installed
from scheduler.forward.rope import LongRope
from scheduler.model.measurement import Measurement, beginning, reference_logits
from scheduler.model.twin import Twin, make_twin

_PART = 30  # tokens that are fed first, where a timeline is fed to the model's own cache in two parts


class Thresholds:
    """Those of one model, found by ``make_twin``. ``crossed`` names them; ``unproven`` says why nothing can be measured
    past them, empty where it can.
    """

    def __init__(self, measurement: Measurement, context: int | None) -> None:
        """``context``: of the longest timelines, in tokens; None: any length."""
        self._causal = self._repeats = True
        session = max(measurement.sessions, key=lambda one: len(one.token_ids))
        argument = measurement.trace.argument

        def says(model: Any, count: int | None) -> torch.Tensor:
            if count is not None:
                return reference_logits(model, beginning(session, count))
            return _run_in_two_parts(model, session, argument)

        found = make_twin(measurement.model, says, context)
        self.crossed = tuple(f"{name} {real}" for name, (real, _) in found.thresholds.items())
        self.unproven = found.obstacle
        self._twin = self._measure(found, measurement.page_size) if found.model is not None else None

    def _measure(self, found: Twin, page_size: int) -> Measurement | None:
        """The twin, ready to be measured; None where that would say nothing."""
        layers = read_layers(found.model.config.get_text_config(decoder=True))
        try:
            twin = Measurement(found.model, layers, page_size, LongRope(found.model))
        except Exception as error:  # any error of modeling code with unusual thresholds
            self.unproven = f"{', '.join(self.crossed)}: {first_line(error, 160)}"
            return None
        self._causal = twin.is_causal()
        again = [reference_logits(twin.model, session) for session in twin.sessions]
        self._repeats = all(map(twin.is_same, again, twin.expected))
        return twin

    def check(self, mode: Mode, tolerance: float) -> None:
        """Raises ``Unsupported`` where ``mode`` is off by more than ``tolerance`` past a threshold, and what the
        modeling code raises there.
        """
        if self._twin is None:
            return
        if not self._repeats:
            raise Unsupported(f"past {' or '.join(self.crossed)} the model's own forward is not deterministic")
        if not mode.caches:
            return
        if not self._causal:
            raise Unsupported(f"past {' or '.join(self.crossed)} the result for a token depends on later tokens")
        try:
            error = self._error(type(mode), mode.token_by_token)
        except Exception:
            if not self._possible():
                return
            raise
        if error > tolerance and error > self._twin.drift((AloneMode,)):
            raise Unsupported(f"error {error:.1e} past {' or '.join(self.crossed)}")

    def allows_release(self, mode: Mode, tolerance: float) -> bool:
        """Whether ``mode`` is as right past the thresholds if keys that no next token sees are gone; True if nothing
        can be measured there.
        """
        if self._twin is None:
            return True
        twin = self._mode(type(mode), mode.token_by_token)
        with installed(twin):
            try:
                whole = self._twin.measure(twin)
                error = self._twin.measure_divided(twin, whole.shapes)
            finally:
                twin.remove()
        return error is None or error <= max(tolerance, 2 * whole.error)

    def _mode(self, kind: type[Mode], token_by_token: bool) -> Mode:
        assert self._twin is not None
        mode = kind(self._twin.model, self._twin.layers, self._twin.trace)
        mode.token_by_token = token_by_token
        return mode

    def _possible(self) -> bool:
        """Whether the model's own code runs with small thresholds at all; else nothing is known, and that is told."""
        try:
            self._error(AloneMode, False)
        except Exception as error:  # any error of modeling code with unusual thresholds
            self.unproven = f"{', '.join(self.crossed)}: {first_line(error, 160)}"
            self._twin = None
            return False
        return True

    def _error(self, kind: type[Mode], token_by_token: bool) -> float:
        assert self._twin is not None
        mode = self._mode(kind, token_by_token)
        with installed(mode):
            try:
                return self._twin.measure(mode).error
            finally:
                mode.remove()


@torch.inference_mode()
def _run_in_two_parts(model: Any, session: SessionCache, argument: str | None) -> torch.Tensor:
    """What a model says of a timeline from scratch, and of its second part on a cache of its own."""
    whole = reference_logits(model, session)
    if argument is None or session.source is not None:
        return whole
    ids = torch.tensor([list(session.token_ids)], device=model.device)
    try:
        cache = model(input_ids=ids[:, :_PART], use_cache=True, return_dict=True).get(argument)
        if cache is None:
            return whole
        rest = model(input_ids=ids[:, _PART:], use_cache=True, return_dict=True, **{argument: cache}).logits[0]
    except Exception:  # this model has no cached path of its own
        return whole
    return torch.cat([whole, rest])
