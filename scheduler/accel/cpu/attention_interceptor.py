"""``intercept_attention``: while a module is recorded, its attention is recorded as one call between two blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cache.attention.packed_attention import PackedAttention
from cache.pages.packed import PackedCache
from scheduler.accel.cpu.handed_keys import KnowsKeys, source_of
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
        self._attended = 0  # of these updates
        self._taken: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # by the key's id

    def layer_of(self, pair: Any) -> int:
        """See ``KnowsKeys``."""
        if not self._updated or source_of(pair, self._cache.step) != self._updated[-1][2]:
            raise Unrecordable("it hands on what it has not stored")
        return self._updated[-1][2]

    def take(self, pair: Any) -> int:
        """See ``KnowsKeys``."""
        layer = source_of(pair, self._cache.step)
        if layer is None or layer in self._attention.absorbed:
            raise Unrecordable("it takes what is in no pages")
        self._taken[id(pair[0])] = (*pair, layer)
        self._recorder.let_idle(*pair)
        return layer

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
        if any(isinstance(one, torch.Tensor) and type(one) is not torch.nn.Parameter for one in options.values()):
            raise Unrecordable("attention with a tensor of this step")
        if (taken := self._taken.get(id(key))) is not None and taken[1] is value:
            return self._attend_to_stored(module, query, taken, options)
        if len(self._updated) != self._attended + 1:
            raise Unrecordable("attention to what another layer stored")
        *known, layer = self._updated[-1]
        absorbed = self._attention.absorbed.get(layer)
        alike = known[0] is key and known[1] is value
        if not (self._recorder.is_idle(key) and self._recorder.is_idle(value) if absorbed is not None else alike):
            raise Unrecordable("attention to what another layer stored")
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
        self._attended += 1
        return out

    def _attend_to_stored(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        taken: tuple[torch.Tensor, torch.Tensor, int],
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attention to the keys and values of another layer, which are in its pages."""
        key, value, layer = taken
        with self._recorder.paused():
            out = self._attend(module, query, key, value, **options)
            self._recorder.attend([query], out)
        self._asked.append(AttentionRequest(module, layer, options, [query], out, stores=False))
        return out


@contextmanager
def intercept_attention(
    recorder: Recorder, attention: PackedAttention, cache: PackedCache, asked: list[AttentionRequest]
) -> Iterator[KnowsKeys]:
    """Within it, an update of the cache and the attention after it are recorded as one call between two blocks; what is
    yielded knows its keys and values. Asking for the length of the cache raises Unrecordable, since the answer would
    become part of the program.
    """
    watch = _AttentionWatch(recorder, attention, cache, asked)

    def length() -> torch.Tensor:
        raise Unrecordable("it asks for the length of the cache")

    cache.update, attention.attend = watch.update, watch.attend  # type: ignore[method-assign, assignment]
    cache.step.offsets = length  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        del cache.update, attention.attend, cache.step.offsets
