"""``Fitter``: makes the parts of an adapter that are no low-rank products fit the modules of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from scheduler.adapters.adapter import Changes
from scheduler.adapters.adapter_checkpoint import BadAdapter

_ROWS = 256  # of a weight that are read at once

Module = torch.nn.Module


class Fitter:
    """Adds to the changes of an adapter that has its pairs already: magnitudes first, then biases."""

    def __init__(
        self,
        model: Any,
        changes: Changes,
        shape: Callable[[Module], tuple[int, int] | None],
        store: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """``shape`` gives ``(out, in)`` of a linear map, None for other modules; ``store`` puts a tensor to where the
        model is.
        """
        self._changes, self._shape, self._store = changes, shape, store
        self._model = model

    @torch.inference_mode()
    def rescale(self, asked: str, module: Module, magnitude: torch.Tensor) -> None:
        """DoRA: each row of the weight with what is added to it has this length. Raises ``BadAdapter``."""
        pair = self._changes.pairs.get(module)
        if pair is None or magnitude.shape != pair.up.shape[:1]:
            raise BadAdapter(f"the magnitudes of {asked[:200]} do not fit its LoRA")
        bias = module._parameters.get("bias")
        weight = self._weight(module, pair.down.shape[1]) + pair.scale * (pair.up.float() @ pair.down.float())
        scale = magnitude.to(weight) / weight.norm(dim=1)
        self._changes.pairs[module] = pair._replace(up=self._store(pair.up.float() * scale[:, None]))
        self._changes.scales[module] = self._store(scale)
        if bias is not None:
            self._changes.shifts[module] = self._store(bias.float() * (1 - scale))

    def replace_bias(self, asked: str, module: Module, bias: torch.Tensor) -> None:
        """The module has another bias. Raises ``BadAdapter``."""
        own = module._parameters.get("bias")
        if own is None or own.shape != bias.shape:
            raise BadAdapter(f"the model has no such bias: {asked[:200]}")
        self._check_rows(asked, module)
        self._shift(module, bias.to(own.device).float() - own.float())

    def add_bias(self, asked: str, module: Module, bias: torch.Tensor) -> None:
        """The upper half of the module's pair has a bias. Raises ``BadAdapter``."""
        pair = self._changes.pairs.get(module)
        if pair is None or bias.shape != pair.up.shape[:1]:
            raise BadAdapter(f"the bias of the LoRA of {asked[:200]} does not fit")
        scale: Any = self._changes.scales.get(module, 1.0)
        self._shift(module, bias.to(pair.up.device).float() * pair.scale * scale)

    def replace(self, asked: str, module: Module, weights: Mapping[str, torch.Tensor]) -> None:
        """The module has other weights. Raises ``BadAdapter``."""
        own = module._parameters
        shape = self._shape(module)
        if any(module.children()) or module in self._changes.pairs:
            raise BadAdapter(f"the weights of {asked[:200]} cannot be replaced: it has parts, or a LoRA")
        for name, weight in weights.items():
            known = own.get(name)
            wanted = shape if shape is not None and name == "weight" else () if known is None else tuple(known.shape)
            if tuple(weight.shape) not in (wanted, wanted[::-1]):
                raise BadAdapter(f"the weights of {asked[:200]} do not fit: the adapter is of another model")
        self._check_rows(asked, module)
        twin = copy.copy(module)
        twin.__dict__ = {
            name: value for name, value in vars(module).items() if name not in ("forward", "_compiled_call_impl")
        }
        kept = {name: weight for name, weight in own.items() if name not in weights}
        new = {name: torch.nn.Parameter(self._store(weight), False) for name, weight in weights.items()}
        twin._parameters = {**kept, **new}
        if shape is not None and "weight" in new:  # whatever stands in its place
            weight = new["weight"] if not hasattr(module, "nf") else new["weight"].T
            twin.forward = partial(linear, weight, twin._parameters.get("bias"))
        self._changes.copies[module] = twin

    def _check_rows(self, asked: str, module: Module) -> None:
        """Raises ``BadAdapter`` for a module that may be called with other rows than those of a step, as norms of
        heads are.
        """
        if self._shape(module) is not None or isinstance(module, torch.nn.Embedding):
            return
        width = self._model.config.get_text_config(decoder=True).hidden_size
        if any(weight.shape[-1:] != (width,) for weight in module._parameters.values() if weight is not None):
            raise BadAdapter(f"other weights are not supported for this kind of module: {asked[:200]}")

    def _shift(self, module: Module, shift: torch.Tensor) -> None:
        before = self._changes.shifts.get(module)
        self._changes.shifts[module] = self._store(shift if before is None else before.float() + shift)

    def _weight(self, module: Module, inside: int) -> torch.Tensor:
        """The weight ``[out, in]`` of a linear map in float32, however it is stored: what it makes of unit vectors."""
        bias = module._parameters.get("bias")
        parts = []
        for first in range(0, inside, _ROWS):
            unit = torch.zeros(min(_ROWS, inside - first), inside, dtype=self._model.dtype, device=self._model.device)
            unit[torch.arange(len(unit)), torch.arange(first, first + len(unit))] = 1
            made = module(unit[None])[0].float()
            parts.append(made if bias is None else made - bias.float())
        return torch.cat(parts).T


def linear(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
