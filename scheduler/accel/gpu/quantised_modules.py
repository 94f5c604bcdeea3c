"""Models whose packed weights stay packed on a GPU: linear modules become ``QuantisedLinear``, experts get a function
of transformers' registry, embeddings look up rows. What else reads a packed weight has it unpacked, once, at load.

Nothing here needs a GPU. Each weight is compared with its checkpoint when it is copied, and the kernels with torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from scheduler.accel.cpu.quantised import is_linear
from scheduler.accel.gpu.device_form import MOST
from scheduler.accel.gpu.device_weight import DeviceWeight
from scheduler.accel.gpu.packed_product import multiply, try_kernels
from scheduler.accel.gpu.routed_experts import RoutedTrial, drop, hold, is_routed, route_experts
from scheduler.weights.quantised_weight import QuantisedWeight, quantised_weight_of
from scheduler.weights.stand_in import WeightStandIn

log = logging.getLogger("warmturn.engine")

_CHECKED, _MOST_OFF = 16, 1e-6  # rows of each weight, and how far their values may be off (root mean square)
_MOST_ERROR = {torch.float32: 2e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}  # of products, by their results' type


class QuantisedLinear(torch.nn.Linear):
    """A linear module with a packed weight. ``weight`` is a stand-in for it, which other code may read."""

    def __init__(self, original: torch.nn.Module, weight: WeightStandIn, packed: DeviceWeight) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = packed.form.out, packed.form.inside
        self._parameters["weight"] = weight  # type: ignore[assignment]
        self._parameters["bias"] = original._parameters.get("bias")
        self.parts, self.form = packed.parts, packed.form
        self.train(original.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[.., out]`` of ``input [.., inside]``."""
        found = multiply(input, self.parts, self.form)
        return found if self.bias is None else found + self.bias


@torch.no_grad()
def move_packed(model: Any, device: torch.device) -> Any:
    """``model``, whose packed weights are ``WeightStandIn`` of a ``QuantisedWeight``, on ``device``, where they stay
    packed. One weight after the other is copied, some rows at a time, so beside the model it takes little memory.
    """
    held = list(_packed_parameters(model))
    for module, name, _ in held:
        module._parameters[name] = None
    model.to(device)
    for module, name, stand_in in held:
        module._parameters[name] = stand_in
    modules = dict.fromkeys(module for module, _, _ in held)
    del held
    mover = _Mover(device)
    replaced = {module: mover.move(module) for module in modules}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replaced:
                parent._modules[name] = replaced[child]
    route_experts(model)
    mover.tell()
    return model


def _packed_parameters(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and quantised_weight_of(parameter) is not None:
                yield module, name, parameter


class _Mover:
    """Moves the packed weights of modules to a device, one that several modules have once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[QuantisedWeight, tuple[WeightStandIn, DeviceWeight] | None] = {}
        self._stored = self._taken = self._unpacked = 0  # bytes

    def tell(self) -> None:
        """Say in the log what the weights take that are packed in the checkpoint, if that is more than it should be."""
        if self._taken > MOST * self._stored:
            sizes = self._taken / 1e9, self._stored / 1e9, self._unpacked / 1e9
            log.warning("packed weights take %.1f GB for %.1f in the checkpoint, %.1f of them unpacked", *sizes)

    def move(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with its weights on the device, or one that stands in its place."""
        packed = {name: of for name, one in module._parameters.items() if (of := quantised_weight_of(one)) is not None}
        whole = [*packed] == ["weight"] and packed["weight"].count == 1
        if is_routed(module):
            if self._move_experts(module, packed):
                return module
        elif whole and (isinstance(module, torch.nn.Embedding) or is_linear(module)):
            made = self._copy(packed["weight"], module._parameters["weight"])
            if made is not None:
                module._parameters["weight"] = made[0]  # type: ignore[assignment]
                return module if isinstance(module, torch.nn.Embedding) else QuantisedLinear(module, *made)
        for name, weight in packed.items():
            plain = torch.nn.Parameter(weight.dense().to(self._device), False)
            module._parameters[name] = plain
            self._count(weight, plain.nbytes)
            self._unpacked += plain.nbytes
        return module

    def _count(self, weight: QuantisedWeight, taken: int) -> None:
        self._stored += weight.nbytes
        self._taken += taken

    def _move_experts(self, module: torch.nn.Module, packed: dict[str, QuantisedWeight]) -> bool:
        """Give a module of experts its weights on the device; whether it computes what it did."""
        trial, before = RoutedTrial(module, self._device), dict(module._parameters)
        copies = {name: self._copy(weight, before[name]) for name, weight in packed.items()}
        made = {name: copy for name, copy in copies.items() if copy is not None}
        hold(module, {name: weight for name, (_, weight) in made.items()})
        if len(made) < len(packed) or not trial.passes(module):
            drop(module)
            return False
        module._parameters.update({name: stand_in for name, (stand_in, _) in made.items()})  # type: ignore[misc]
        return True

    def _copy(self, weight: QuantisedWeight, like: torch.Tensor | None) -> tuple[WeightStandIn, DeviceWeight] | None:
        """The weight on the device and its stand-in; None where its values are not those of the checkpoint."""
        if weight in self._made:
            return self._made[weight]
        assert like is not None
        few = min(_CHECKED, weight.out)
        want = weight.dequantise(0, few)
        packed = DeviceWeight(weight, self._device)
        got = packed.dequantise(0, few).cpu()
        right = bool((got - want).norm() <= _MOST_OFF * want.norm())
        self._made[weight] = (WeightStandIn(packed, like, self._device), packed) if right else None
        if right:
            self._count(weight, packed.nbytes)
            try_kernels(packed.parts, packed.form, weight.dtype, _MOST_ERROR.get(weight.dtype, 2e-2))
            weight.replace(packed)
        return self._made[weight]
