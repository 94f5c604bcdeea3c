"""Routed experts on CPUs: a function for transformers' registry of experts functions, which reads the weights of those
experts only that some token of a step has chosen, each once.

It serves every experts module that calls the registry. What a module computes beside its products (its gate, a norm
after them) is recorded from its own code, so that the whole is one program. Each module is compared with its own
forward on made-up tokens; one whose results differ, or that is slower so, keeps its own.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from scheduler.accel.cpu.experts_matrix import ExpertsMatrix
from scheduler.accel.cpu.functions import COMPUTED
from scheduler.accel.cpu.kept_tiles import TilePlace
from scheduler.accel.cpu.linear import equal, leave_files
from scheduler.accel.cpu.matrix import TYPES
from scheduler.accel.cpu.packing import Map, Packing
from scheduler.accel.cpu.program import Program
from scheduler.accel.cpu.program_kernel import ProgramKernel, kernel
from scheduler.accel.cpu.recorder import Recorder
from scheduler.weights.quantised_weight import quantised_weight_of
from scheduler.weights.stand_in import WeightStandIn

_NAME = "warmturn over "  # followed by the name of the function that serves modules that are not packed
_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_apply_gate", "_is_expert_parallel")
# Tokens, and what our way may take of the time of the module's own.
_MOST = {1: 0.95, 16: 0.95, 128: 1.1}
_TRIED = 2  # modules that are timed together
_CHOICES = 4  # of a made-up token
_CHECKED = 3  # experts of each module
_SLACK = 4.0  # roundings: two products and what is between them
_SLACK_PACKED = 40.0  # of weights of few bits, whose inputs are rounded to 16 bits
LARGE = 8.0  # by which the last of some made-up tokens is larger


class PackedExperts:
    """An experts module whose weights the C++ kernel reads. ``remove`` restores the plain weights, bit for bit."""

    def __init__(
        self, module: Any, kernel: ProgramKernel, place: Callable[[str], TilePlace | None] = lambda name: None
    ) -> None:
        """``place``: where the tiles of one of its parameters are kept."""
        self.module, self.place = module, place
        self.dtype = module.down_proj.dtype
        self._kernel = kernel
        self._in = "gate_up_proj" if module.has_gate else "up_proj"
        tiled = kernel.tiles and self.dtype is torch.bfloat16
        self._weights = {name: ExpertsWeight(self, name, tiled) for name in (self._in, "down_proj")}
        self._programs: dict[tuple[int, torch.dtype], Program] = {}  # by choices of a token, dtype of their weights
        self._choices = 0  # of a token, as they were last

    @property
    def up(self) -> ExpertsMatrix:
        """The first product's weights."""
        return self._weights[self._in].matrix

    @property
    def down(self) -> ExpertsMatrix:
        """The second product's weights."""
        return self._weights["down_proj"].matrix

    @property
    def limit(self) -> int | None:
        """Tokens up to which it is faster than the module's own forward; None: any."""
        return self.up.limit

    @limit.setter
    def limit(self, tokens: int | None) -> None:
        self.up.limit = self.down.limit = tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self.up.nbytes + self.down.nbytes

    @property
    def bytes_of_row(self) -> int:
        """Bytes of the packed weights that are read for one token: those of the experts that it chooses."""
        return self.nbytes // self.up.count * self._choices

    @property
    def copies(self) -> bool:
        """Whether the plain weights are others in memory than the packed ones."""
        return self.up.matrix.kind not in TYPES.values() or bool(self.module.is_transposed)

    @property
    def touched(self) -> bool:
        """Whether other code has read a packed weight."""
        return any(weight.touched for weight in self._weights.values())

    def install(self) -> None:
        """Put the packed weights in the place of the plain ones, which are released."""
        for name, weight in self._weights.items():
            self.module._parameters[name] = WeightStandIn(weight, self.module._parameters[name])

    def remove(self) -> None:
        """Restore the plain weights."""
        for name, weight in self._weights.items():
            self.module._parameters[name] = torch.nn.Parameter(weight.dense(), False)

    def fits(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> bool:
        """Whether ``forward`` can be called with these arguments, which should be ``hidden [T, hidden]``, ``index [T,
        K]`` and ``weights [T, K]``, and is faster than the module's own.
        """
        if hidden.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or len(index) != len(hidden):
            return False
        few = self.limit is None or len(hidden) <= self.limit
        return few and hidden.dtype is self.dtype and hidden.shape[1] == self.up.inside and weights.dtype in TYPES

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the module returns for tokens ``[T, hidden]``, their experts ``[T, K]``, and the weights of these ``[T,
        K]``; a number that is none of an expert adds nothing.
        """
        self._choices = index.shape[1]
        key = index.shape[1], weights.dtype
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._record_program(*key)
        given = [hidden.contiguous(), index.long().contiguous(), weights.contiguous()]
        program.place_inputs(given)
        (out,) = program.place_outputs(len(hidden))
        program.run(len(hidden))
        return out

    def record(
        self, recorder: Recorder, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Record ``forward``. The values of the result ``[T, hidden]`` are made up. Raises ``Unrecordable`` and
        whatever the module's own code raises.
        """
        self._choices = index.shape[1]
        up = self._product(recorder, self.up, hidden, index)
        inner = self.module._apply_gate(up) if self.module.has_gate else self.module.act_fn(up)
        results = self._product(recorder, self.down, inner, index)
        if self.module.has_post_expert_norm:
            results = self.module.post_expert_norm(results)
        weighted = results * weights.unsqueeze(-1)
        first, *rest = weighted.unbind(1)
        return sum(rest, first).to(hidden.dtype)

    def _product(self, recorder: Recorder, matrix: ExpertsMatrix, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        with recorder.paused():
            out = torch.zeros(*index.shape, matrix.out, dtype=self.dtype)
        recorder.record_routed(matrix, x, index, out)
        return out

    def _record_program(self, choices: int, dtype: torch.dtype) -> Program:
        sizes = {choices, self.up.inside, self.up.out, self.down.inside, self.down.out}
        tokens = next(n for n in (23, 29, 31, 37, 41, 43) if n not in sizes)
        hidden = torch.zeros(tokens, self.up.inside, dtype=self.dtype)
        index = torch.zeros(tokens, choices, dtype=torch.int64)
        weights = torch.zeros(tokens, choices, dtype=dtype)
        recorder = Recorder(tokens, [hidden, index, weights], [], COMPUTED)
        with torch.no_grad(), recorder:
            recorder.result(self.record(recorder, hidden, index, weights))
        return Program(recorder.block, self._kernel)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Within it the module has its plain weights, which is slow if the packed ones are copies."""
        stand_ins = {name: self.module._parameters[name] for name in self._weights}
        self.remove()
        try:
            yield
        finally:
            self.module._parameters.update(stand_ins)


class ExpertsWeight:
    """A packed weight of an experts module."""

    def __init__(self, experts: PackedExperts, name: str, tiled: bool) -> None:
        module, self.experts, self.touched = experts.module, experts, False
        self._flipped = bool(module.is_transposed)
        weight = module._parameters[name].detach()
        bias = module._parameters[f"{name}_bias"] if module.has_bias else None
        if (packed := quantised_weight_of(weight)) is not None:
            self.matrix = ExpertsMatrix.pack(packed, bias, experts.place(name))
        else:
            turned = weight.transpose(1, 2) if self._flipped else weight
            self.matrix = ExpertsMatrix.of(turned, bias, tiled, experts.place(name))

    def dense(self) -> torch.Tensor:
        """The plain weight in the module's layout: ``[experts, out, in]``, or ``[experts, in, out]``."""
        plain = self.matrix.dense().to(self.experts.dtype)
        return plain.transpose(1, 2).contiguous() if self._flipped else plain.contiguous()


def packed_experts(module: torch.nn.Module) -> PackedExperts | None:
    """What has the packed weights of a module; another module with the same weights has the same."""
    weight = module._parameters.get("down_proj")
    of = weight.of if isinstance(weight, WeightStandIn) else None
    return of.experts if isinstance(of, ExpertsWeight) else None


@torch.no_grad()
def pack_experts(model: Any, packing: Packing) -> None:
    """Pack the weights of the experts of ``model`` that are on a CPU, where that is faster."""
    ours = kernel()
    alike: defaultdict[Any, list[Any]] = defaultdict(list)
    for module in model.modules():
        if ours is not None and is_experts(module):
            shapes = tuple((name, weight.shape, weight.dtype) for name, weight in module._parameters.items())
            alike[type(module), shapes, module.config._experts_implementation].append(module)
    for (_, _, own), group in alike.items():
        assert ours is not None
        ALL_EXPERTS_FUNCTIONS.register(_NAME + own, partial(_forward, own))
        model.set_experts_implementation(_NAME + own)
        if all(module.config._experts_implementation == _NAME + own for module in group):
            with suppress(Exception):  # whatever a module raises at made-up input
                _pack_alike(group, packing, ours)
    if alike:
        leave_files(model, packing)


def _forward(
    own: str, module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The entry of transformers' registry. ``own``: the entry that modules have that are not packed."""
    packed, given = packed_experts(module), (hidden_states, top_k_index, top_k_weights)
    if packed is None:
        return _own_forward(own, module, *given)
    if packed.fits(*given):
        return packed.forward(*given)
    with packed.plain():
        return _own_forward(own, packed.module, *given)


def _own_forward(own: str, module: Any, *given: torch.Tensor) -> torch.Tensor:
    plain = type(module).forward.__wrapped__
    out: torch.Tensor = ALL_EXPERTS_FUNCTIONS.get_interface(own, plain)(module, *given)
    return out


def is_experts(module: Any) -> bool:
    """Whether a module is one of experts as the registry serves them, with its weights on a CPU."""
    return serves(module) and all(one.device.type == "cpu" for one in module._parameters.values())


def serves(module: Any) -> bool:
    """Whether the registry serves a module, of experts, whose weights are plain, or packed as a checkpoint has them."""
    if not all(hasattr(module, name) for name in _FLAGS) or module._is_expert_parallel:
        return False
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    weights = [module._parameters.get(name) for name in names]
    names += [f"{name}_bias" for name in names if module.has_bias]
    return (
        module._parameters.keys() == set(names)
        and all(_is_plain(one) or quantised_weight_of(one) is not None for one in weights)
        and len({quantised_weight_of(one) is None for one in weights}) == 1
        and len({one.dtype for one in weights if one is not None}) == 1
        and hasattr(type(module).forward, "__wrapped__")
        and "forward" not in vars(module)
        and not module._buffers
    )


def _is_plain(weight: Any) -> bool:
    return type(weight) is torch.nn.Parameter and weight.dim() == 3 and weight.dtype in TYPES


def _pack_alike(group: list[Any], packing: Packing, ours: ProgramKernel) -> None:
    """Pack modules of one class and shape, if the first of them are right and faster so."""

    def make(module: Any) -> PackedExperts:
        return PackedExperts(module, ours, partial(packing.place, module))

    tried = [make(module) for module in group[:_TRIED]]
    if not _is_right(tried[0]):
        return
    if quantised_weight_of(group[0].down_proj) is not None:  # there is no other way than to unpack them for good
        packing.add(tried.pop(0), None)
        for module in group[1:]:
            one = tried.pop(0) if tried else make(module)
            if _is_right(one):
                packing.add(one, None)
        return
    limit: int | None = 0
    for tokens, most in _MOST.items():
        made_up = _make_inputs(tried[0], tried[0].up.count, tokens)
        plain: list[Map] = [partial(_of_rows, module.forward, made_up) for module in group[:_TRIED]]
        packed: list[Map] = [partial(_of_rows, one.forward, made_up) for one in tried]
        what = f"{type(group[0]).__name__} {tuple(group[0].down_proj.shape)} {tried[0].dtype}"
        if not packing.pays(what, plain, packed, made_up[0][None], most, 0):
            break
        limit = tokens
    else:
        limit = None
    if limit == 0 or (limit is not None and tried[0].copies):
        return
    for module in group:
        one = tried.pop(0) if tried else make(module)
        if _is_right(one):
            one.limit = limit
            packing.add(one, None)


def _of_rows(forward: Any, made_up: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = forward(x[0], *made_up[1:])
    return out


def _is_right(packed: PackedExperts) -> bool:
    """Whether the results are those of the module's own forward, the eager one, but for rounding: of a few experts,
    which are all that is unpacked.
    """
    hidden, places, weights = _make_inputs(packed, _CHECKED, 6)
    hidden[-1] *= LARGE  # where a gate clamps
    count = packed.up.count
    chosen = torch.linspace(0, count - 1, min(_CHECKED, count)).long()
    want = type(packed.module).forward.__wrapped__(some_experts(packed.module, chosen), hidden, places, weights)
    packs = quantised_weight_of(packed.module.down_proj) is not None
    return equal(packed.forward(hidden, chosen[places], weights), want, _SLACK_PACKED if packs else _SLACK)


def some_experts(module: Any, chosen: torch.Tensor) -> Any:
    """A module like this one with only the experts ``chosen``, and plain weights."""
    few = copy.copy(module)
    few._parameters = {}
    for name, parameter in module._parameters.items():
        packed = quantised_weight_of(parameter)
        plain = parameter.detach()[chosen] if packed is None else packed.dense_of(chosen.tolist())
        few._parameters[name] = torch.nn.Parameter(plain, False)
    few.num_experts = len(chosen)
    return few


def _make_inputs(packed: PackedExperts, experts: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens, which of the first ``experts`` they have, and weights of these."""
    experts = min(experts, packed.up.count)
    generator, choices = torch.Generator().manual_seed(tokens), min(_CHOICES, experts)
    hidden = torch.randn(tokens, packed.up.inside, generator=generator).to(packed.dtype)
    weights, index = torch.rand(tokens, experts, generator=generator).topk(choices)
    return hidden, index, weights.to(packed.dtype)
