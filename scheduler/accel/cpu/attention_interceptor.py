"""``intercept_attention``: while a module is recorded, its attention is recorded as one call between two blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cache.attention.packed_attention import PackedAttention
from cache.pages.packed import PackedCache
from scheduler.accel.cpu.interceptors import AttentionRequest
from scheduler.accel.cpu.latent_attention import record_absorbed
from scheduler.accel.cpu.recorder import Recorder, Unrecordable


class _AttentionWatch:
    """What one module stores and attends to. ``updated``: what each update returned, and what was stored."""

    def __init__(
        self, recorder: Recorder, attention: PackedAttention, cache: PackedCache, asked: list[AttentionRequest]
    ) -> None:
        self._recorder, self._attention, self._cache, self._asked = recorder, attention, cache, asked
        self._update, self._attend = cache.update, attention.attend
        self._updated: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._stored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        """Stands for ``PackedCache.update``."""
        with self._recorder.paused():
            out = self._update(key, value, layer, *args, **kwargs)
        if layer in self._attention.absorbed:
            self._recorder.let_idle(*out)
        elif out[0] is not key or out[1] is not value:
            raise Unrecordable("keys are worked on after they are stored")
        self._updated.append((*out, layer))
        self._stored.append((key, value))
        return out

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Stands for ``PackedAttention.attend``."""
        if len(self._updated) != len(self._asked) + 1:
            raise Unrecordable("attention to what another layer stored")
        *known, layer = self._updated[-1]
        absorbed = self._attention.absorbed.get(layer)
        alike = known[0] is key and known[1] is value
        if not (self._recorder.is_idle(key) and self._recorder.is_idle(value) if absorbed is not None else alike):
            raise Unrecordable("attention to what another layer stored")
        if any(isinstance(one, torch.Tensor) and type(one) is not torch.nn.Parameter for one in options.values()):
            raise Unrecordable("attention with a tensor of this step")
        if absorbed is not None:
            scale = options["scaling"] if options["scaling"] is not None else query.shape[-1] ** -0.5
            request = AttentionRequest(module, layer, options | {"scaling": scale}, absorbed=absorbed)
            out = record_absorbed(self._recorder, self._attention, request, query, self._stored[-1])
        else:
            with self._recorder.paused():
                out = self._attend(module, query, key, value, **options)
                self._recorder.attend([query, key, value], out)
            request = AttentionRequest(module, layer, options, [query, key, value], out)
        self._asked.append(request)
        return out


@contextmanager
def intercept_attention(
    recorder: Recorder, attention: PackedAttention, cache: PackedCache, asked: list[AttentionRequest]
) -> Iterator[None]:
    """Within it, an update of the cache and the attention after it are recorded as one call between two blocks. Asking
    for the length of the cache raises Unrecordable, since the answer would become part of the program.
    """
    watch = _AttentionWatch(recorder, attention, cache, asked)

    def length() -> torch.Tensor:
        raise Unrecordable("it asks for the length of the cache")

    cache.update, attention.attend = watch.update, watch.attend  # type: ignore[method-assign, assignment]
    cache.step.offsets = length  # type: ignore[method-assign]
    try:
        yield
    finally:
        del cache.update, attention.attend, cache.step.offsets
