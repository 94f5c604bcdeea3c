"""``LayerChain``: consecutive layers that run in one call of the C++ kernel.

The first layer of a chain computes all of them. When a later layer is called with the output of the layer before it and
otherwise the arguments that were foreseen, it returns the result that is ready; when it is called with anything else it
computes and stores its keys and values again, after it has taken back what the state of its convolution has become. A
change of a tensor in place cannot be detected here: the probe verifies that the model makes none, and nothing is
computed ahead while a layer has hooks.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cache.attention.cpu import AttentionCall, CpuPlan
from cache.pages.packed import PackedCache
from scheduler.accel.cpu import program
from scheduler.accel.cpu.convolution_program import ConvolutionProgram
from scheduler.accel.cpu.foresight import Call, same_arguments
from scheduler.accel.cpu.layer_program import LayerAttention, LayerProgram
from scheduler.accel.cpu.program_kernel import ProgramKernel

_MOST = 32 << 20  # bytes of results that are there at once; so many rows take long enough layer by layer


class ChainResult(NamedTuple):
    """The result of a layer if it is called with ``hidden`` and otherwise with the arguments of the call ``like``.
    ``moved``: the states that its convolution has moved on.
    """

    hidden: torch.Tensor
    like: Call
    result: torch.Tensor
    moved: list[tuple[Any, bool]] | None = None

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has these arguments."""
        return bool(args) and args[0] is self.hidden and same_arguments(self.like, (args, kwargs))


class _Link(ctypes.Structure):
    """The struct ``Link`` of program.cpp."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("before", "attention", "after"))


class _Places(NamedTuple):
    """Rows of the table of externals, the layers that they belong to, and the token axis of each tensor."""

    rows: npt.NDArray[np.int64]
    layers: npt.NDArray[np.int64]
    axes: npt.NDArray[np.int64]


class _Tensors(NamedTuple):
    """The inputs that the table has, as group and number, and their token axes; then rows of the table, and of which of
    these inputs, or of the results behind them, each has the address.
    """

    keys: list[tuple[int, int]]
    axes: list[int]
    rows: npt.NDArray[np.int64]
    of: npt.NDArray[np.int64]


class LayerChain:
    """Layers in the order in which they are called; ``scheduler.accel.cpu.fusion`` finds those that can be chained.

    It has copies of the layers' calls and tables, which are made again when the number of rows changes. For each step
    only the addresses of its write index, page tables and inputs are set.
    """

    def __init__(
        self, layers: Sequence[LayerProgram | ConvolutionProgram], group_of: Sequence[int], kernel: ProgramKernel
    ) -> None:
        """``group_of`` each layer: those of a group have the same inputs."""
        self._layers, self._group_of, self._kernel = layers, group_of, kernel
        self._programs = [one for layer in layers for one in layer.programs]
        self._rooms = {id(layer.room): layer.room for layer in layers}.values()
        self._attending = {number: one for number, one in enumerate(layers) if isinstance(one, LayerProgram)}
        self._convolving = {number: one for number, one in enumerate(layers) if isinstance(one, ConvolutionProgram)}
        numbers: defaultdict[Any, list[int]] = defaultdict(list)
        for number, layer in self._attending.items():
            numbers[layer.kind].append(number)
        self._kinds = {kind: np.array(each) for kind, each in numbers.items()}
        self._links = (_Link * len(layers))()
        self._runs = (program.ProgramCall * len(self._programs))()
        self._between, self._attentions = (LayerAttention * len(layers))(), (AttentionCall * len(layers))()
        self._steps = np.frombuffer(memoryview(self._between), np.dtype(LayerAttention))
        attended = np.frombuffer(memoryview(self._attentions), np.dtype(AttentionCall))
        self._attended = {name: attended[name] for name in ("first", "spans", "count")}
        self._outside = np.zeros((sum(len(one.externals) for one in self._programs), 3), np.int64)
        self._places = self._find_places()
        first, last = self._all_places("input"), self._all_places("output")
        behind = first.layers > 0
        # Rows of the table that lie in the results of some layer, and of which.
        self._results = np.concatenate((first.rows[behind], last.rows))
        self._layers_of = np.concatenate((first.layers[behind] - 1, last.layers))
        self._tensors: dict[int, _Tensors] = {}  # by number of results
        self._strides: list[int] = []  # that the table has
        self._placed: tuple[Any, ...] = ()
        self._result = layers[0].after.outputs[0][1]
        row = torch.empty(self._result.shape, dtype=self._result.dtype, device="meta")
        self._most = _MOST // (len(layers) * row.nbytes)  # rows

    def run(self, cache: PackedCache, inputs: list[list[torch.Tensor]], rows: int) -> Sequence[torch.Tensor] | None:
        """The results of all layers, ``[1, rows, hidden]`` each, from the inputs of each group, which have the rows of
        the step in their token axis; of the first input only the first layer's is used. None if the kernel cannot take
        this step. States can be taken back. Raises MemoryError.
        """
        if rows > self._most or not self._begin(cache, rows, keep=True):
            return None
        results = self._place_tensors(inputs, rows, len(self._layers))
        self._compute()
        return results.unbind()

    def run_last(
        self, cache: PackedCache, inputs: list[list[torch.Tensor]], rows: int, wanted: torch.Tensor | None
    ) -> torch.Tensor | None:
        """As ``run``, the result of the last layer only: for all rows, or those whose numbers are in ``wanted``, int64.
        What nothing else needs is not computed for other rows: the last layer's block after its attention.
        """
        if not self._begin(cache, rows, keep=False):
            return None
        results, number = self._place_tensors(inputs, rows, 2), len(self._layers) - 1
        count = rows if wanted is None else wanted.shape[0]
        if wanted is None or count >= rows:
            self._compute()
            result = results[number % 2]
            return result if wanted is None or count == 1 else result.index_select(self._result.axis, wanted)
        link, layer = self._links[number], self._layers[number]
        after = link.after
        try:
            link.after = None
            self._compute()
        finally:
            link.after = after
        given = [results[(number - 1) % 2], *inputs[self._group_of[number]][1:]]
        return layer.after.run_some(given, layer.room.tensors(rows), wanted)

    def _begin(self, cache: PackedCache, rows: int, *, keep: bool) -> bool:
        """Set all but the addresses of tensors for this step; False if the kernel cannot take it. ``keep``: so that
        states can be taken back.
        """
        plans: dict[Any, CpuPlan] = {}
        for kind, numbers in self._kinds.items():
            if (plan := self._attending[numbers[0]].plan()) is None:
                return False
            plans[kind] = plan
        if self._placed != self._place_of(cache, rows):
            if not self._place(cache, plans, rows):
                return False
            self._placed = self._place_of(cache, rows)
        for kind, numbers in self._kinds.items():
            for name, values in self._attended.items():
                values[numbers] = getattr(plans[kind].call, name)
        step = cache.step
        if not all(layer.begin(step, rows, keep=keep) for layer in self._convolving.values()):
            return False
        divided = bool(step.tier.near_layers)
        places = [step.write_positions(layer.source) for layer in self._layers] if divided else [step.write_index]
        self._steps["places"] = [where.data_ptr() for where in places]
        return True

    def _compute(self) -> None:
        if self._kernel.chain(ctypes.addressof(self._links), len(self._layers)):
            raise MemoryError("no memory for a step")
        for layer in self._convolving.values():
            layer.end()

    def _place_tensors(self, inputs: list[list[torch.Tensor]], rows: int, count: int) -> torch.Tensor:
        """Set the addresses of the inputs and of ``count`` new tensors for the results, which layers use in turn; the
        result of a layer is the next one's first input.
        """
        axis = self._result.axis  # all before it are 1, as layers take what lies in rows
        before, behind = self._result.shape[:axis], self._result.shape[axis:]
        results = torch.empty((count, *before, rows, *behind), dtype=self._result.dtype)
        tensors = self._tensors_of(count)
        given = [inputs[group][number] for group, number in tensors.keys]
        first, step, stride = results.data_ptr(), results.stride(0) * results.itemsize, results.stride(axis + 1)
        addresses = [*(tensor.data_ptr() for tensor in given), *range(first, first + count * step, step)]
        self._outside[:, 0][tensors.rows] = np.array(addresses)[tensors.of]
        strides = [tensor.stride(axis) for tensor, axis in zip(given, tensors.axes, strict=True)]
        strides += [stride] * count
        if strides != self._strides:
            self._strides = strides
            self._outside[:, 1][tensors.rows] = np.array(strides)[tensors.of]
        return results

    def _tensors_of(self, count: int) -> _Tensors:
        """Where tensors go, with so many results."""
        tensors = self._tensors.get(count)
        if tensors is None:
            places = {(group, number): at for (kind, number, group), at in self._places.items() if kind == "input"}
            of = np.full(len(self._outside), -1)
            for number, where in enumerate(places.values()):
                of[where.rows] = number
            of[self._results] = len(places) + self._layers_of % count
            rows = np.flatnonzero(of >= 0)
            tensors = _Tensors([*places], [int(where.axes[0]) for where in places.values()], rows, of[rows])
            self._tensors[count] = tensors
        return tensors

    def _place_of(self, cache: PackedCache, rows: int) -> tuple[Any, ...]:
        """The values on which the copies depend."""
        rooms = tuple(room.rows for room in self._rooms)
        return rows, torch.get_num_threads(), self._kernel.memory, rooms, cache.in_place, cache.step.tier

    def _place(self, cache: PackedCache, plans: dict[Any, CpuPlan], rows: int) -> bool:
        """Copy the layers' calls and tables; False if some layer does not fit this cache."""
        self._placed, self._strides = (), []
        if not all(layer.fits(cache) for layer in self._attending.values()):
            return False
        for number, convolving in self._convolving.items():
            convolving.place(rows)
            self._links[number].attention = convolving.address
        for number, layer in self._attending.items():
            plan = plans[layer.kind]
            layer.place(cache, plan, rows)
            self._attentions[number], self._between[number] = plan.call, layer.call
            self._between[number].call = ctypes.addressof(self._attentions[number])
            self._links[number].attention = ctypes.addressof(self._between[number])
        first = 0
        for number, one in enumerate(self._programs):
            one.prepare(rows)
            part = self._outside[first : first + len(one.externals)]
            part[:], self._runs[number] = one.outside, one.call
            self._runs[number].externals = part.ctypes.data
            setattr(self._links[number // 2], ("before", "after")[number % 2], ctypes.addressof(self._runs[number]))
            first += len(part)
        return True

    def _find_places(self) -> dict[tuple[str, int, int], _Places]:
        """The rows of the table of externals for each input of the layers of a group, and each output of their last
        blocks, by number and group.
        """
        found: defaultdict[tuple[str, int, int], list[tuple[int, int, int]]] = defaultdict(list)
        table = [(number, external) for number, one in enumerate(self._programs) for external in one.externals]
        for place, (number, external) in enumerate(table):
            if external.kind == "input" or number % 2:
                key = external.kind, external.number, self._group_of[number // 2]
                found[key].append((place, number // 2, external.axis))
        return {key: _Places(*map(np.array, zip(*each, strict=True))) for key, each in found.items()}

    def _all_places(self, kind: str) -> _Places:
        """Those of the first input, or the output, of all groups."""
        each = [where for (of, number, _), where in self._places.items() if of == kind and not number]
        return _Places(*map(np.concatenate, zip(*each, strict=True)))
