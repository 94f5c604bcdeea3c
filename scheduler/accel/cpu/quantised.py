"""Linear modules whose weights stay as their checkpoint packed them: ``PackedMatrix`` in the place of the weight.

Which modules are linear is found by calling one of each class with a small weight of floats. A module that is none
reads its ``WeightStandIn`` itself: embeddings look up rows; others get the whole weight unpacked, for good.
"""

from __future__ import annotations

import copy
import logging
from contextlib import suppress

import torch
import torch.nn.functional as F

from scheduler.accel.cpu.kept_tiles import TilePlace
from scheduler.accel.cpu.linear import equal, leave_files
from scheduler.accel.cpu.packed_matrix import NotPackable, PackedMatrix
from scheduler.accel.cpu.packing import Map, Packing
from scheduler.accel.cpu.program import product
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.weights.quantised_weight import QuantisedWeight, quantised_weight_of

log = logging.getLogger("warmturn.engine")
_OUT, _INSIDE, _LARGE = 8, 16, 1000.0  # of the weight and the last row that a class is tried with
_CHECKED, _MOST_ERROR = 16, 2e-4  # rows of each weight, and how far their products may be off (root mean square)
_ROWS = 1024  # that are unpacked at a time where there is no kernel


class QuantisedModule:
    """A module with a ``QuantisedWeight``. ``remove`` gives it the unpacked weight."""

    def __init__(self, module: torch.nn.Module, name: str, weight: QuantisedWeight, forward: Map | None) -> None:
        """``name`` of the parameter. ``forward`` replaces the module's; None: its own reads the weight."""
        self.module, self._name, self._weight, self._forward = module, name, weight, forward

    @property
    def touched(self) -> bool:
        """Whether other code has read the packed weight."""
        return self._weight.touched

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self._weight.nbytes

    def install(self) -> None:
        """Make the module use the packed weight."""
        if self._forward is not None:
            self.module.forward = self._forward

    def remove(self) -> None:
        """Unpack the weight."""
        if self._forward is not None:
            del self.module.forward
        self.module._parameters[self._name] = torch.nn.Parameter(self._weight.dense(), False)


@torch.no_grad()
def keep_packed(model: torch.nn.Module, packing: Packing) -> None:
    """Add all modules of ``model`` to ``packing`` that have parameters which stand for a ``QuantisedWeight``."""
    matrices: dict[QuantisedWeight, PackedMatrix | None] = {}
    held = _quantised_weights(model)
    for module, name, weight in held:
        if name != "weight" or weight.count > 1 or not is_linear(module):
            packing.add(QuantisedModule(module, name, weight, None), None)
            continue
        if weight not in matrices:
            matrices[weight] = _matrix(weight, packing.place(module, name))
        matrix, bias, ours = matrices[weight], module._parameters.get("bias"), kernel()
        forward = _slowly(weight, bias)
        if matrix is not None and ours is not None:
            forward = product(matrix, bias, weight.dtype, ours)
        packing.add(QuantisedModule(module, name, weight, forward), matrix)
    if not all(weight.lasting for _, _, weight in held):
        leave_files(model, packing)


def _quantised_weights(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, QuantisedWeight]]:
    held = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if (weight := quantised_weight_of(parameter)) is not None:
                held.append((module, name, weight))
    return held


def _matrix(weight: QuantisedWeight, place: TilePlace | None) -> PackedMatrix | None:
    """The weight as the kernel reads it; None where it cannot, or does not give what the weight's values give."""
    ours = kernel()
    if ours is None:
        return None
    try:
        matrix = PackedMatrix(weight.source, place=place)
    except NotPackable as error:
        log.info("a packed weight is unpacked at every step, which is slow: %s", error)
        return None
    if matrix.kept:  # it was right when it was packed, by this program
        weight.replace(matrix)
        return matrix
    x = torch.randn(2, matrix.inside, generator=torch.Generator().manual_seed(0))
    got, few = product(matrix, None, torch.float32, ours)(x), min(_CHECKED, matrix.out)
    want = x @ weight.source.dequantise(0, few).t()
    weight.release()
    off = float((got[:, :few] - want).norm() / want.norm().clamp_min(1e-30))
    if off <= _MOST_ERROR:
        weight.replace(matrix)
        return matrix
    log.warning("a packed weight is unpacked at every step: its products differ by %.1e", off)
    return None


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module like this one, with another weight, is a linear map and nothing more."""
    if not module._parameters.keys() <= {"weight", "bias"} or module._modules or "forward" in vars(module):
        return False
    dtype = torch.float32
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(_OUT, _INSIDE, generator=generator), torch.randn(_OUT, generator=generator)
    biased = module._parameters.get("bias") is not None
    trial = copy.copy(module)
    trial._parameters = {"weight": torch.nn.Parameter(weight, False)}
    trial._parameters["bias"] = torch.nn.Parameter(bias, False) if biased else None
    x = torch.randn(1, 3, _INSIDE, generator=generator, dtype=dtype)
    x[:, -1] *= _LARGE  # where a module clamps
    with suppress(Exception):  # whatever a module raises that is something else
        return equal(trial(x), F.linear(x, weight, bias if biased else None))
    return False


def _slowly(weight: QuantisedWeight, bias: torch.Tensor | None) -> Map:
    """A function like ``F.linear``, which unpacks the weight each time, some rows after others."""

    def forward(input: torch.Tensor) -> torch.Tensor:
        out = input.new_empty(*input.shape[:-1], weight.out)
        for start in range(0, weight.out, _ROWS):
            stop = min(start + _ROWS, weight.out)
            out[..., start:stop] = F.linear(input, weight.dequantise(start, stop).to(input.dtype))
        return out if bias is None else out + bias

    return forward
