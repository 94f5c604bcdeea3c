"""`Packing`: the modules of one model whose weights are packed, and the measurements that decided it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from scheduler.accel.cpu.kept_tiles import KeptTiles, TilePlace
from scheduler.accel.cpu.matrix import PACKED, Matrix
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.accel.cpu.ways import choose

_ROUNDS = 7
_TRIALS = 3  # of what does not pay: other processes may have had the processor, and the answer holds for ever
_CACHES = 64 << 20  # bytes: about what caches hold
_FEW = 16  # rows up to which products take as long as reading their weights
_ROUNDED_INPUTS = 1e-3
_INPUT_ROUNDING = 2.0**-15  # of packed products, relative to the largest input of a group
_SECONDS = 0.1  # of a measurement; each way is timed once at least

Map = Callable[[torch.Tensor], torch.Tensor]


class PackedModule(Protocol):
    """A module with packed weights."""

    module: torch.nn.Module

    @property
    def touched(self) -> bool:
        """Whether other code has read a packed weight."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        ...

    def install(self) -> None:
        """Make the module use them."""
        ...

    def remove(self) -> None:
        """Restore the module."""
        ...


@runtime_checkable
class RoutedModule(Protocol):
    """A packed module of which a token reads a part."""

    @property
    def bytes_of_row(self) -> int:
        """Bytes of the packed weights that are read for one token."""
        ...


class Packing:
    """The packed modules of one model, and the weights that the C++ kernel can read."""

    def __init__(
        self, answers: dict[str, bool], kept: KeptTiles | None = None, model: torch.nn.Module | None = None
    ) -> None:
        """``kept``: where the tiles of ``model`` are kept between starts."""
        self._answers, self.kept = answers, kept
        self._names = {} if model is None else {module: name for name, module in model.named_modules()}
        self._modules: list[PackedModule] = []
        self._matrices: dict[torch.nn.Module, Matrix] = {}
        self.numbers = 0  # that were given to weights

    def place(self, module: torch.nn.Module, name: str) -> TilePlace | None:
        """Where the tiles of the parameter ``name`` of a module are kept."""
        return None if self.kept is None else TilePlace(self.kept, f"{self._names[module]}.{name}")

    def matrix(self, module: torch.nn.Module) -> tuple[Matrix, torch.Tensor | None] | None:
        """The weight and the bias, ``[out]``, of a linear module; None if it is not linear or the C++ kernel cannot
        read its weight.
        """
        matrix = self._matrices.get(module)
        return (matrix, module._parameters.get("bias")) if matrix is not None else None

    def __len__(self) -> int:
        return len(self._modules)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(one.nbytes for one in self._modules)

    @property
    def bytes_of_row(self) -> int:
        """Bytes of weights that the C++ kernel reads for one token: of experts, as many as were chosen last."""
        routed = (one.bytes_of_row for one in self._modules if isinstance(one, RoutedModule))
        return sum(matrix.nbytes for matrix in self._matrices.values()) + sum(routed)

    @property
    def tolerance(self) -> float:
        """What two ways to compute a logit may differ by because products round their inputs to 16 bits: relative,
        root mean square, after many layers; 0 where none does.
        """
        return _ROUNDED_INPUTS if self.input_rounding else 0.0

    @property
    def input_rounding(self) -> float:
        """How products round their inputs, relative; 0 where none does."""
        return _INPUT_ROUNDING if any(matrix.kind & PACKED for matrix in self._matrices.values()) else 0.0

    def add(self, module: PackedModule, matrix: Matrix | None) -> None:
        """Install a packed module; ``matrix`` is its weight if the C++ kernel can read it."""
        module.install()
        self._modules.append(module)
        if matrix is not None:
            self.read(module.module, matrix)

    def read(self, module: torch.nn.Module, matrix: Matrix) -> None:
        """Add a module whose weight the C++ kernel reads."""
        matrix.number = self.numbers
        self.numbers += 1
        self._matrices[module] = matrix

    def pays(self, what: str, plain: list[Map], packed: list[Map], x: torch.Tensor, most: float, nbytes: int) -> bool:
        """Whether ``packed`` takes at most ``most`` of the time of ``plain`` on ``x [1, T, inside]``; they read
        ``nbytes`` of weights each. A measurement, of this load or an earlier one, is not repeated: results stay the
        same to the last bit after a restart.
        """
        few = x.shape[1] <= _FEW
        asked = f"{what} {x.shape[1]}{' from memory' * few} {torch.backends.cpu.get_cpu_capability()} within {most:.2f}"
        if asked not in self._answers:
            ratios = (_ratio(plain, packed, x, few and nbytes < _CACHES) for _ in range(_TRIALS))
            self._answers[asked] = any(ratio <= most for ratio in ratios)
        return self._answers[asked]

    def choose_ways(self) -> None:
        """Time the ways to go through the packed weights, and use the fastest."""
        ours = kernel() if self._matrices else None
        if ours is not None:
            choose(list(self._matrices.values()), ours)

    def settle(self) -> None:
        """Unpack the weights that other code than their own module has read."""
        for one in self._modules:
            if one.touched:
                one.remove()
                self._matrices.pop(one.module, None)
        self._modules = [one for one in self._modules if not one.touched]

    def remove(self) -> None:
        """Restore the model."""
        self._matrices.clear()
        while self._modules:
            self._modules.pop().remove()


def _ratio(plain: list[Map], packed: list[Map], x: torch.Tensor, evicting: bool) -> float:
    """The best time of all ``packed`` over that of all ``plain``, measured alternately so that other load affects
    both. ``evicting``: something else is read before each, as other weights are in a real step, so that these come from
    memory.
    """
    other = torch.ones(_CACHES, dtype=torch.uint8) if evicting else None
    best, began = [float("inf")] * 2, time.thread_time()
    for way in (plain, packed):
        way[0](x)  # the first call of a shape makes its kernel
    for _ in range(_ROUNDS):
        for i, way in enumerate((plain, packed)):
            if other is not None:
                other.max()
            start = time.thread_time()
            for run in way:
                run(x)
            best[i] = min(best[i], time.thread_time() - start)
        if time.thread_time() - began > _SECONDS:
            break
    return best[1] / best[0]
