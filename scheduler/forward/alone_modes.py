"""The modes that run each session of a step in a forward of its own, on the model's own cache object or on none."""

from __future__ import annotations

from typing import Any

import torch

from cache.attention.packed_attention import Unsupported
from cache.pages.packed import PackedStep
from scheduler.forward.mode import Mode
from scheduler.media.joint_sight import JointSight
from scheduler.media.sight import FedPart, Sight


class AloneMode(Mode):
    """One forward per session on the model's own cache object: right for most models, but KV is not shared between
    sessions.
    """

    name = "alone"
    stateful = True
    sight: Sight | JointSight | None = None  # how pictures enter, where it was measured

    def install(self) -> None:
        """Nothing: the model runs as it is. Raises Unsupported if it returns no cache."""
        if self.trace.argument is None and not self.trace.attributes:
            raise Unsupported("the model returns no cache")

    def remove(self) -> None:
        """Nothing was changed."""

    def forward(self, step: PackedStep, keep: torch.Tensor) -> torch.Tensor:
        logits = torch.cat([self._feed(step, n) for n in range(len(step.spans))])
        return logits[keep]

    def _feed(self, step: PackedStep, number: int) -> torch.Tensor:
        span = step.spans[number]
        rows = range(span.row, span.row + span.size)
        slow = self.token_by_token and span.start > 0
        parts = [slice(row, row + 1) for row in rows] if slow else [slice(rows.start, rows.stop)]
        return torch.cat([self._run(step, number, part) for part in parts])

    def _run(self, step: PackedStep, number: int, rows: slice) -> torch.Tensor:
        span = step.spans[number]
        inputs: dict[str, Any] = {"input_ids": step.token_ids[:, rows]}
        inputs |= {name: value[:, rows] for name, value in self.positions(step).items()}
        cache, kept = span.session.state or (self.fresh(), None)
        if cache is not None and self.trace.argument is not None:
            inputs[self.trace.argument] = cache
        for (module, name), value in zip(self.trace.attributes, kept or (), strict=kept is not None):
            setattr(module, name, value)
        if self.sight is not None and number in step.media:
            start = step.range(number)[0] + rows.start - span.row
            part = FedPart(step.media[number], start, start + rows.stop - rows.start)
            inputs |= self.sight.inputs(step.token_ids[:, rows], [part])
        with step.called_with(rows):
            out = self.model(use_cache=True, return_dict=True, **inputs)
        cache = out.get(self.trace.argument, cache) if self.trace.argument is not None else None
        span.session.state = (cache, [getattr(module, name) for module, name in self.trace.attributes])
        logits: torch.Tensor = out.logits[0]
        return logits

    def fresh(self) -> Any:
        """The cache of a session that has fed nothing: the model makes its own, unless it does not return it."""
        return None if self.trace.returned else self.trace.fresh(self.model.config.get_text_config(decoder=True))


class PlainAloneMode(AloneMode):
    """Alone, on a cache that keeps every key: for models whose own cache cuts a window that their mask does
    not have.
    """

    name = "alone, all keys"

    def fresh(self) -> Any:
        """A cache that knows no windows."""
        from transformers.cache_utils import DynamicCache

        return DynamicCache()


class RecomputeMode(Mode):
    """No cache: every step runs each session from its first token. Slow, for models that only a plain forward runs
    right.
    """

    name = "recomputed"
    stateful = False
    caches = False

    def install(self) -> None:
        """Nothing: the model runs as it is."""

    def remove(self) -> None:
        """Nothing was changed."""

    def forward(self, step: PackedStep, keep: torch.Tensor) -> torch.Tensor:
        parts = []
        for span in step.spans:
            ids = torch.tensor([list(span.session.plain(0, span.stop))], device=self.model.device)
            with step.called_with([span.row] * span.stop):
                parts.append(self.model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -span.size :])
        return torch.cat(parts)[keep]
