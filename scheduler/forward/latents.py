"""Finding the layers that can attend in the space of their latents: ``LatentFinder``.

The cache gives a layer the rows of a basis in place of what it stored, and the attention function looks at the keys and
values that the layer makes of them. So the weights are measured, whatever the module calls its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cache.attention.absorbed import Absorbed, NotLinear, basis, measure
from cache.attention.backend import Signature
from cache.attention.backends import backends
from cache.attention.packed_attention import PackedAttention
from cache.memory.memory_tier import PageShape
from cache.pages.layers import Reach
from cache.pages.packed import PackedCache

_EXTRA = 9  # rows of a basis that are no unit vectors
_ROUNDINGS = 16
_INPUTS = 4  # how many times as large as a row's mean its largest number may be


class LatentFinder:
    """What one step has shown: ``found`` has the layers that can be absorbed."""

    def __init__(self, attention: PackedAttention, rounding: float = 0.0) -> None:
        """``rounding``: how products round their inputs, relative."""
        self.found: dict[int, Absorbed] = {}
        self._attention, self._rounding = attention, rounding
        self._signatures: dict[int, Signature] = {}  # of attention to their rows
        self._given: dict[int, tuple[int, torch.Tensor]] = {}  # the size of a latent, and the basis
        self._latest = -1  # the layer that was given one

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, layers that store one head work on a basis; what the step computes otherwise is meaningless."""
        update, attend, finder = PackedCache.update, self._attention.attend, self

        def give(
            cache: PackedCache, key: torch.Tensor, value: torch.Tensor, layer: int, *more: Any, **rest: Any
        ) -> Any:
            stored = update(cache, key, value, layer, *more, **rest)
            return stored if layer in cache.in_place else finder._give(layer, key, value) or stored

        def look(
            module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **rest: Any
        ) -> Any:
            layer: Any = getattr(module, "layer_idx", None)
            if self._look(layer, query, key, value):
                self._sign(layer, module, query, **rest)
                return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
            return attend(module, query, key, value, **rest)

        PackedCache.update, self._attention.attend = give, look  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            PackedCache.update = update  # type: ignore[method-assign]
            del self._attention.attend

    def taken(self, device: torch.device) -> dict[int, Absorbed]:
        """``found``, but on a GPU only the layers whose rows a backend takes: torch would attend to them session by
        session.
        """
        if device.type == "cpu":
            return self.found
        there = backends(device)
        return {
            layer: absorbed
            for layer, absorbed in self.found.items()
            if any(backend.fits(self._signatures[layer]) for backend in there)
        }

    def _sign(
        self,
        layer: int,
        module: torch.nn.Module,
        query: torch.Tensor,
        softcap: float | None,
        s_aux: torch.Tensor | None,
        **rest: Any,
    ) -> None:
        """Note the signature of a layer that was found, whose own queries are ``query [1, H, T, D]``."""
        absorbed, chunked = self.found[layer], self._attention.layers[layer].reach is Reach.CHUNKED
        shape = PageShape(1, absorbed.width, 1, absorbed.latent, query.dtype, joined=True)
        sinks = self._attention.sinks(module, s_aux) is not None
        self._signatures[layer] = Signature(
            shape, query.shape[1], absorbed.width, query.dtype, softcap is not None, sinks, chunked
        )

    def _give(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The two parts ``[1, 1, n, D]`` of a basis for a layer that stores ``key`` and ``value`` of one head."""
        if key.shape[1] != 1 or value.shape[1] != 1 or key.dtype is not value.dtype:
            return None
        latent = key.shape[3]
        rows = basis(latent, value.shape[3], _EXTRA, key)
        self._given[layer], self._latest = (latent, rows), layer
        return rows[None, None, :, :latent], rows[None, None, :, latent:]

    def _look(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether ``key`` and ``value`` are what a layer has made of its basis; then it is measured."""
        if layer != self._latest or layer not in self._given:
            return False
        latent, rows = self._given.pop(layer)
        heads, dim = query.shape[1], query.shape[3]
        if key.shape != (1, heads, len(rows), dim) or value.shape[:3] != key.shape[:3]:
            raise NotLinear("a layer makes other tokens of what is stored")
        tolerance = max(1e-5, _ROUNDINGS * torch.finfo(rows.dtype).eps, _INPUTS * self._rounding)
        self.found[layer] = measure(rows, latent, key[0], value[0], tolerance)
        return True
