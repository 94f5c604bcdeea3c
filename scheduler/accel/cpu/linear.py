"""Packing the weights of linear layers for CPUs, where a decode step is bound by the speed of reading weights.

The C++ kernel reads bfloat16 weights in tiles, oneDNN reads its own blocked layout; either is up to twice as fast as a
plain weight. Which modules are linear layers, and for which shapes packing is faster, is measured on the loaded model.
A packed weight replaces the plain one.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F

from scheduler.accel.cpu.kept_tiles import KeptTiles, TilePlace
from scheduler.accel.cpu.matrix import TYPES, Matrix
from scheduler.accel.cpu.packing import Map, Packing
from scheduler.accel.cpu.program import product
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.weights.stand_in import WeightStandIn

SMALLEST = 1 << 16  # elements: a smaller weight stays in the processor's caches, and a call costs more than reading it
_TRIED = 8  # weights of one shape that are timed together, so that they come from memory as in a real step
# Rows, and what the packed way may take of the plain time: decode must gain, prefill must not lose. A product with our
# tiles may take longer: modules can be programs only if all their weights are read here, which saves more elsewhere.
_MOST = {1: 0.95, 256: 1.03}
_MOST_TILED = {1: 1.5, 256: 1.25}
# Of all products' time: what one shape of weights may add to it in tiles, at most three times its own. Else a small one
# (keys and values, 192 columns divided between two threads) keeps every layer from being a program.
_MOST_ADDED, _MOST_SMALL = 0.1, 3.0
_FEW = (1, 4, 16)  # rows up to which our kernel may be faster on plain weights
_MOST_READING = 1.1  # of torch's time: a module that runs as a program saves more than that elsewhere
_LARGE = 1000.0
_ROUNDING = 1e-5  # what the order of a float32 sum may change: many times its precision


class PackedLinear:
    """A linear module with a packed weight; ``remove`` restores the plain weight, bit for bit.

    While it is installed the module's ``weight`` is a ``WeightStandIn``, as other code may read it.
    """

    def __init__(self, module: torch.nn.Module, flipped: bool, way: Way, place: TilePlace | None = None) -> None:
        """``flipped``: the module stores its weight as ``[in, out]``. ``place``: where tiles of it are kept. Raises
        what ``way`` raises if it cannot pack it.
        """
        plain: Any = _weight(module)
        self.touched = False
        self.module = module
        self._flipped = flipped
        self._plain = weakref.ref(plain)  # alive while it is shared, for example with an embedding
        matrix = plain.detach()
        if flipped:
            matrix = matrix.t().contiguous()
        self.packed, self.forward = way(matrix, module._parameters.get("bias"), place)

    def install(self) -> None:
        """Make the module use the packed weight, and drop the plain one."""
        self.module._parameters["weight"] = WeightStandIn(self, _weight(self.module))  # type: ignore[assignment]
        self.module.forward = self.forward

    def remove(self) -> None:
        """Restore the module; its weight is the same object as before if that still exists."""
        del self.module.forward
        plain: Any = self._plain()
        self.module._parameters["weight"] = torch.nn.Parameter(self.dense(), False) if plain is None else plain

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self.packed.nbytes

    def dense(self) -> torch.Tensor:
        """A copy of the plain weight, in the module's layout: ``[out, in]``, or ``[in, out]``."""
        matrix = self.packed.dense()
        return matrix.t().contiguous() if self._flipped else matrix


@torch.no_grad()
def pack(model: torch.nn.Module, answers: dict[str, bool] | None = None, kept: KeptTiles | None = None) -> Packing:
    """Pack the weights of ``model`` that are on a CPU, if that is faster. ``answers`` are the measurements of an
    earlier load; new ones are added to it. ``kept``: where packed weights are kept between starts.
    """
    packing = Packing({} if answers is None else answers, kept, model)
    alike: defaultdict[Any, list[torch.nn.Module]] = defaultdict(list)
    for module in model.modules():
        if _could_be_linear(module):
            alike[type(module), _weight(module).shape, _weight(module).dtype].append(module)
    sizes = [len(group) * _weight(group[0]).nbytes for group in alike.values()]
    for group, size in zip(alike.values(), sizes, strict=True):
        with suppress(Exception):  # whatever a module raises at made-up input, or oneDNN where it has no kernel
            if not _pack_alike(group, packing, size / sum(sizes)):
                _read_alike(group, packing)
    leave_files(model, packing)
    return packing


def leave_files(model: torch.nn.Module, packing: Packing) -> None:
    """Loaded weights are views of mapped files, which stay mapped while one tensor uses them: copy the few weights that
    are not packed.
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
        and weight.device.type == "cpu"
        and weight.dtype in TYPES
        and module._parameters.keys() <= {"weight", "bias"}
        and not module._buffers
        and not module._modules
        and "forward" not in vars(module)  # its forward was replaced
    )


def _ways(dtype: torch.dtype) -> Iterator[Way]:
    """How weights of ``dtype`` can be packed here, the best first."""
    ours = kernel()
    if ours is not None and ours.tiles and dtype is torch.bfloat16:
        yield _tile
    if dtype in _dtypes():
        yield _reorder


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


def _pack_alike(group: list[torch.nn.Module], packing: Packing, share: float) -> bool:
    """Pack modules of one class and shape if the first of them are faster packed, except those whose results differ.
    ``share``: their part of all weights. Returns whether that was done.
    """
    flipped = _is_flipped(group[0])
    if flipped is None or _weight(group[0]).numel() < SMALLEST:
        return False
    plain: list[Map] = [module.forward for module in group[:_TRIED]]
    for way in _ways(_weight(group[0]).dtype):
        # one at a time: in memory twice
        candidates = (PackedLinear(module, flipped, way, packing.place(module, "weight")) for module in group)
        tried = list(islice(candidates, _TRIED))
        if not _pays(packing, way, group[0], flipped, plain, [one.forward for one in tried], share):
            continue
        made_up = _make_input(group[0], 2, flipped)
        for module, one in zip(group, chain(tried, candidates), strict=True):
            kept = isinstance(one.packed, Matrix) and one.packed.kept
            if kept or equal(one.forward(made_up), module.forward(made_up)):
                packing.add(one, one.packed if isinstance(one.packed, Matrix) else None)
        return True
    return False


def _pays(
    packing: Packing,
    way: Way,
    module: torch.nn.Module,
    flipped: bool,
    plain: list[Map],
    packed: list[Map],
    share: float,
) -> bool:
    for rows, most in (_MOST_TILED if way is _tile else _MOST).items():
        if way is _tile:
            most = max(most, min(1 + _MOST_ADDED / share, _MOST_SMALL))
        made_up = _make_input(module, rows, flipped)
        if not equal(packed[0](made_up), plain[0](made_up)):
            return False
        nbytes = len(plain) * _weight(module).nbytes
        if not packing.pays(f"{way.__name__} {_kind(module)}", plain, packed, made_up, most, nbytes):
            return False
    return True


def _kind(module: torch.nn.Module) -> str:
    """A key for modules that are measured together."""
    weight = _weight(module)
    return f"{type(module).__name__} {tuple(weight.shape)} {weight.dtype}"


def _read_alike(group: list[torch.nn.Module], packing: Packing) -> None:
    """Let the C++ kernel read the plain weights of modules of one class and shape, for as many rows as that is fast
    enough.
    """
    ours, flipped = kernel(), _is_flipped(group[0])
    if ours is None or flipped is None:
        return
    small = _weight(group[0]).numel() < SMALLEST
    if flipped and not small:
        return
    matrices = [
        Matrix(_weight(module).detach().t() if flipped else _weight(module).detach(), False) for module in group
    ]
    limit: int | None = None
    if not small:
        plain: list[Map] = [module.forward for module in group[:_TRIED]]
        reading: list[Map] = [product(matrix, None, _weight(group[0]).dtype, ours) for matrix in matrices[:_TRIED]]
        limit = 0
        for rows in _FEW:
            made_up = _make_input(group[0], rows, flipped)
            nbytes = len(plain) * _weight(group[0]).nbytes
            if not packing.pays(f"plain {_kind(group[0])}", plain, reading, made_up, _MOST_READING, nbytes):
                break
            limit = rows
    for module, matrix in zip(group, matrices, strict=True):
        matrix.limit = limit
        if limit != 0:
            packing.read(module, matrix)


def _is_flipped(module: torch.nn.Module) -> bool | None:
    """Whether a linear module stores its weight as ``[in, out]``; None if it is not linear."""
    weight, bias = _weight(module), module._parameters.get("bias")
    for flipped in (False, True):
        with suppress(Exception):
            x = _make_input(module, 2, flipped)
            got = module.forward(x)  # first: embeddings raise here, before a large product
            if equal(F.linear(x, weight.t() if flipped else weight, bias), got):
                return flipped
    return None


def _make_input(module: torch.nn.Module, rows: int, flipped: bool) -> torch.Tensor:
    """A random input ``[1, rows, in]``; the last row is large, to detect modules that clamp."""
    weight = _weight(module)
    generator = torch.Generator().manual_seed(rows)
    made_up = torch.randn(1, rows, weight.shape[0 if flipped else 1], generator=generator)
    made_up[:, -1] *= _LARGE
    return made_up.to(weight.dtype)


def _weight(module: torch.nn.Module) -> torch.Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def equal(got: Any, want: Any, slack: float = 1.0) -> bool:
    """Every row equal but for ``slack`` times one rounding."""
    if type(want) is not torch.Tensor or got.shape != want.shape or got.dtype != want.dtype:
        return False
    error = (got.float() - want.float()).norm(dim=-1)
    return bool((error <= slack * _allowed_error(want.dtype) * want.float().norm(dim=-1)).all())


def _allowed_error(dtype: torch.dtype) -> float:
    """The allowed relative error from another order of summation (root mean square)."""
    return max(torch.finfo(dtype).eps, _ROUNDING)


class _Reordered:
    """A weight ``[out, in]`` in oneDNN's layout."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.data: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, None)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dense(self) -> torch.Tensor:
        return self.data.to_dense()


Way = Callable[[torch.Tensor, torch.Tensor | None, TilePlace | None], tuple[Matrix | _Reordered, Map]]


def _tile(matrix: torch.Tensor, bias: torch.Tensor | None, place: TilePlace | None) -> tuple[Matrix, Map]:
    ours = kernel()
    assert ours is not None
    packed = Matrix(matrix, True, place=place)
    return packed, product(packed, bias, matrix.dtype, ours)


def _reorder(matrix: torch.Tensor, bias: torch.Tensor | None, _: TilePlace | None) -> tuple[_Reordered, Map]:
    packed = _Reordered(matrix)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = multiply(input, packed.data, bias, "none", [], "")
        return out

    return packed, forward
