"""Weights of linear maps packed for the CPU: a decode step is bound by the speed at which weights are read.

oneDNN reads a weight that lies in its own blocked layout up to twice as fast as a plain one. Which modules are linear
maps, and for which shapes packing pays, is measured on the loaded model. A packed weight replaces the plain one.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F

_SMALLEST = 1 << 16  # elements: a smaller weight stays in the processor's caches, and a call costs more than reading it
_TRIED = 8  # weights of one shape that are timed together, so that they come from memory as in a real step
# Rows, and what the packed way may take of the plain time: decode must gain, prefill must not lose.
_MOST = {1: 0.95, 256: 1.03}
_ROUNDS = 7
_LARGE = 1000.0
_ROUNDING = 1e-5  # what the order of a float32 sum may change: many times its precision
_SECONDS = 0.1  # of a measurement; each way is timed once at least

Map = Callable[[torch.Tensor], torch.Tensor]


class PackedLinear:
    """One module whose ``forward`` reads a packed weight; ``remove`` puts the plain one back, to the bit.

    The module's ``weight`` is then a ``Shadow``: other code may still ask for it.
    """

    def __init__(self, module: torch.nn.Module, flipped: bool) -> None:
        """``flipped``: the module keeps its weight ``[in, out]``. Raises what oneDNN does where it cannot pack it."""
        plain: Any = _weight(module)
        self.touched = False
        self._module = module
        self._flipped = flipped
        self._plain = weakref.ref(plain)  # alive while it is somebody else's as well: an embedding's table
        matrix = plain.detach()
        self.packed = _reordered(matrix.t().contiguous() if flipped else matrix)
        self.forward = _linear(self.packed, module._parameters.get("bias"))

    def install(self) -> None:
        """From here on the module runs packed, and the plain weight is not kept."""
        self._module._parameters["weight"] = Shadow(self, _weight(self._module))  # type: ignore[assignment]
        self._module.forward = self.forward

    def remove(self) -> None:
        """The module is as it was before ``install``, its weight the same object if that still lives."""
        del self._module.forward
        plain: Any = self._plain()
        self._module._parameters["weight"] = torch.nn.Parameter(self.dense(), False) if plain is None else plain

    def dense(self) -> torch.Tensor:
        """The weight as the module had it, a copy."""
        matrix = self.packed.to_dense()
        return matrix.t().contiguous() if self._flipped else matrix


class Shadow(torch.Tensor):
    """Stands where a packed module had its weight: shape, dtype and device are right, and whatever else is done with
    it is done with an unpacked copy. That is right but slow, so it is noted; writing to it fails.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, of: PackedLinear, like: torch.Tensor) -> Shadow:
        shadow: Shadow = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        return shadow

    def __init__(self, of: PackedLinear, like: torch.Tensor) -> None:
        self._of = of
        self._is_param = True  # for isinstance(weight, torch.nn.Parameter)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as of an instance there
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            raise RuntimeError("a packed weight cannot be written")
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls._dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _dense(self) -> torch.Tensor:
        self._of.touched = True
        return self._of.dense()


class Packing:
    """The packed modules of one model."""

    def __init__(self) -> None:
        self._modules: list[PackedLinear] = []

    def __len__(self) -> int:
        return len(self._modules)

    @property
    def nbytes(self) -> int:
        """What the packed weights take."""
        return sum(one.packed.nbytes for one in self._modules)

    def add(self, module: PackedLinear) -> None:
        """Install one."""
        module.install()
        self._modules.append(module)

    def settle(self) -> None:
        """Unpack what other code than its own module has read since it was packed."""
        for one in self._modules:
            if one.touched:
                one.remove()
        self._modules = [one for one in self._modules if not one.touched]

    def remove(self) -> None:
        """The model is as it was."""
        while self._modules:
            self._modules.pop().remove()


@torch.no_grad()
def pack(model: torch.nn.Module) -> Packing:
    """Pack the weights of ``model`` that lie on a CPU, where that pays."""
    packing = Packing()
    alike: defaultdict[Any, list[torch.nn.Module]] = defaultdict(list)
    for module in model.modules():
        if _could_be_linear(module):
            alike[type(module), _weight(module).shape, _weight(module).dtype].append(module)
    for group in alike.values():
        with suppress(Exception):  # whatever a module raises at made-up input, or oneDNN where it has no kernel
            _pack_alike(group, packing)
    _leave_files(model, packing)
    return packing


def _leave_files(model: torch.nn.Module, packing: Packing) -> None:
    """Weights lie in the files that they were read from, mapped as a whole while one tensor still looks into them: the
    few that are not packed get memory of their own.
    """
    rest = [t for t in chain(model.parameters(), model.buffers()) if type(t) in (torch.nn.Parameter, torch.Tensor)]
    if sum(t.nbytes for t in rest) <= packing.nbytes:
        for tensor in rest:
            if not tensor.untyped_storage().resizable():  # not torch's own
                tensor.data = tensor.data.clone()


def _could_be_linear(module: torch.nn.Module) -> bool:
    """Whether a module has what a linear map needs and nothing more; quantised and distributed weights are none."""
    weight = module._parameters.get("weight")
    return (
        type(weight) is torch.nn.Parameter
        and weight.dim() == 2
        and weight.numel() >= _SMALLEST
        and weight.device.type == "cpu"
        and weight.dtype in _dtypes()
        and module._parameters.keys() <= {"weight", "bias"}
        and not module._buffers
        and not module._modules
        and "forward" not in vars(module)  # somebody has wrapped it
    )


@cache
def _dtypes() -> frozenset[torch.dtype]:
    """What oneDNN multiplies on this machine."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset()
    found = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        found.add(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        found.add(torch.float16)
    return frozenset(found)


def _pack_alike(group: list[torch.nn.Module], packing: Packing) -> None:
    """Pack modules of one class and shape if the first of them are faster packed, but for any that says something
    else then.
    """
    flipped = _is_flipped(group[0])
    if flipped is None:
        return
    candidates = (PackedLinear(module, flipped) for module in group)  # one at a time: they are in memory twice
    tried = list(islice(candidates, _TRIED))
    plain: list[Map] = [module.forward for module in group[:_TRIED]]
    packed: list[Map] = [one.forward for one in tried]
    for rows, most in _MOST.items():
        made_up = _made_up(group[0], rows, flipped)
        if not _equal(packed[0](made_up), plain[0](made_up)) or _ratio(plain, packed, made_up) > most:
            return
    made_up = _made_up(group[0], 2, flipped)
    for module, one in zip(group, chain(tried, candidates), strict=True):
        if _equal(one.forward(made_up), module.forward(made_up)):
            packing.add(one)


def _is_flipped(module: torch.nn.Module) -> bool | None:
    """Whether a linear map keeps its weight as ``[in, out]``; None where it is no linear map."""
    weight, bias = _weight(module), module._parameters.get("bias")
    for flipped in (False, True):
        with suppress(Exception):
            x = _made_up(module, 2, flipped)
            if _equal(F.linear(x, weight.t() if flipped else weight, bias), module.forward(x)):
                return flipped
    return None


def _made_up(module: torch.nn.Module, rows: int, flipped: bool) -> torch.Tensor:
    """An input ``[1, rows, in]``; the last row is large, to meet what clamps."""
    weight = _weight(module)
    generator = torch.Generator().manual_seed(rows)
    made_up = torch.randn(1, rows, weight.shape[0 if flipped else 1], generator=generator)
    made_up[:, -1] *= _LARGE
    return made_up.to(weight.dtype)


def _weight(module: torch.nn.Module) -> torch.Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def _equal(got: Any, want: Any) -> bool:
    """Every row equal but for rounding."""
    if type(want) is not torch.Tensor or got.shape != want.shape or got.dtype != want.dtype:
        return False
    error = (got.float() - want.float()).norm(dim=-1)
    return bool((error <= _rounding(want.dtype) * want.float().norm(dim=-1)).all())


def _rounding(dtype: torch.dtype) -> float:
    """What the order of a sum may change, root mean square over that of the result."""
    return max(torch.finfo(dtype).eps, _ROUNDING)


def _ratio(plain: list[Map], packed: list[Map], x: torch.Tensor) -> float:
    """The best time of all ``packed`` over that of all ``plain``; in turns, so that what else runs slows both."""
    best, began = [float("inf")] * 2, time.thread_time()
    for way in (plain, packed):
        way[0](x)  # the first call of a shape makes its kernel
    for _ in range(_ROUNDS):
        for i, way in enumerate((plain, packed)):
            start = time.thread_time()
            for run in way:
                run(x)
            best[i] = min(best[i], time.thread_time() - start)
        if time.thread_time() - began > _SECONDS:
            break
    return best[1] / best[0]


def _reordered(matrix: torch.Tensor) -> torch.Tensor:
    """``[out, in]`` in oneDNN's own layout."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, None)
    return packed


def _linear(packed: torch.Tensor, bias: torch.Tensor | None) -> Map:
    """``F.linear`` on a packed weight."""
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = multiply(input, packed, bias, "none", [], "")
        return out

    return forward
