"""``FusedModule``: a module that runs as a program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from cache.attention import cpu
from cache.attention.packed_attention import PackedAttention
from scheduler.accel.cpu.convolution_program import ConvolutionProgram, ConvolutionRequest
from scheduler.accel.cpu.delta_rule_program import DeltaRuleProgram, DeltaRuleRequest
from scheduler.accel.cpu.foresight import Call, Difference, Foresight, Origins
from scheduler.accel.cpu.handed_keys import HandedKeys, are_there, hand_on, missing, stand_ins
from scheduler.accel.cpu.interceptors import AttentionRequest
from scheduler.accel.cpu.layer_chain import ChainResult, LayerChain
from scheduler.accel.cpu.layer_program import LayerProgram
from scheduler.accel.cpu.program import Program
from scheduler.accel.cpu.program_kernel import ProgramKernel
from scheduler.accel.cpu.recording import ModuleRecording, Request, spread_arguments


class FusedModule:
    """See the module. Installed, it replaces the module's forward and its call."""

    def __init__(
        self, module: torch.nn.Module, recording: ModuleRecording, kernel: ProgramKernel, attention: PackedAttention
    ) -> None:
        self.module = module
        self._original: Callable[..., Any] = module.forward
        self._recording = recording
        self._attention = attention
        self._programs = [Program(block, kernel, adapted=True) for block in recording.blocks]
        latent = (one.absorbed for one in recording.asked if isinstance(one, AttentionRequest))
        self._absorbed = [absorbed for absorbed in latent if absorbed is not None]
        self._limit = min(recording.limits, default=None)  # rows
        backend, asked = cpu.cpu_backend(), recording.asked
        self._layer: LayerProgram | ConvolutionProgram | None = None
        only = asked[0] if len(asked) == 1 else None
        if isinstance(only, DeltaRuleRequest):
            self._layer = DeltaRuleProgram(recording.blocks, only, kernel)
        elif isinstance(only, ConvolutionRequest):
            self._layer = ConvolutionProgram(recording.blocks, only, kernel)
        elif backend is not None and only is not None and isinstance(getattr(only.module, "layer_idx", None), int):
            self._layer = LayerProgram(recording.blocks, only, attention, kernel, backend)  # else layers share a module
        self._kernel = kernel
        self._chain: LayerChain | None = None  # that it is the first of
        self._foresight: Foresight | None = None
        self._behind: list[FusedModule] = []  # those after it
        self._missing: list[tuple[int, HandedKeys]] = []  # keys that no layer of the chain hands on
        self._hooks: list[Any] = []  # the hook dictionaries of all modules of the chain
        self._forwards: list[tuple[dict[str, Any], Any]] = []  # the attributes of each, and the forward installed there
        self._handing: list[tuple[FusedModule, int]] = []  # those that hand keys on, and their groups of calls
        self._computed: ChainResult | None = None  # what the first one has computed for it
        self._own = vars(module)
        self._forward = self.forward
        self.aside = False  # the module runs as it is

    def install(self) -> None:
        """Make the module run as a program."""
        self.module.forward = self._forward
        self.module._compiled_call_impl = self._call

    def remove(self) -> None:
        """Restore the module's own forward."""
        self.module.__dict__.pop("forward", None)
        self.module.__dict__.pop("_compiled_call_impl", None)
        self._computed = None

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the module's ``__call__``. Returns the result that a chain has computed ahead, unless the module has
        hooks, its forward was replaced, or the arguments are others.
        """
        ahead, self._computed = self._computed, None
        if ahead is not None and not self._passed_over and ahead.fits(args, kwargs):
            self._hand_keys_on((args, kwargs))
            return ahead.result
        if ahead is not None and ahead.moved is not None and isinstance(self._layer, ConvolutionProgram):
            self._layer.take_back(ahead.moved)
        return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module's forward; computed by that if the arguments are of other kinds than those
        recorded.
        """
        self._forget()
        if (called := self._matched(args, kwargs)) is None:
            return self._original(*args, **kwargs)
        if (found := self._run_chain((args, kwargs), *called)) is not None:
            self._hand_keys_on((args, kwargs))
            return self._hand_on(*found)
        inputs, cache, rows = called
        outputs = None if self._layer is None else self._layer.run(cache, inputs, rows)
        if outputs is None and isinstance(self._layer, ConvolutionProgram):
            return self._original(*args, **kwargs)
        if outputs is None:
            out = self.compute(inputs, partial(self._attend, cache))
        else:
            out = self._recording.assemble(outputs)
        self._hand_keys_on((args, kwargs))
        return out

    def run_ahead(self, wanted: torch.Tensor | None, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """The result of the last module of its chain, by the arguments of this module, the first, for all rows or those
        whose numbers are in ``wanted``; None if the chain cannot be computed at once, or the forward of one was
        replaced. Raises MemoryError.
        """
        self._forget()
        whole = all(own.get("forward") is forward for own, forward in self._forwards)
        called = self._matched(args, kwargs) if whole else None
        given = None if called is None else self._foresee((args, kwargs), *called)
        if self._chain is None or self._foresight is None or called is None or given is None:
            return None
        calls, inputs = given
        result = self._chain.run_last(called[1], inputs, called[2], wanted)
        if result is not None:
            for fused, group in self._handing:
                fused._hand_keys_on(calls[group])
        return result

    def run_some(self, wanted: torch.Tensor | None, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """The result of this module alone, for the rows whose numbers are in ``wanted``; None if all are wanted, their
        result is there, or its own code or hooks have to run. Raises MemoryError.
        """
        if wanted is None or self._passed_over or self._computed is not None:
            return None
        called = self._matched(args, kwargs) if isinstance(self._layer, LayerProgram) else None
        if called is None or len(wanted) >= called[2]:
            return None
        inputs, cache, _ = called
        out: torch.Tensor = self.compute(inputs, partial(self._attend, cache), wanted)
        self._hand_keys_on((args, kwargs))
        return out

    @property
    def _passed_over(self) -> bool:
        """Whether something else has to run than what was fused: another forward, or hooks."""
        own = self._own
        return own.get("forward") is not self._forward or own["_forward_hooks"] or own["_forward_pre_hooks"]

    def _forget(self) -> None:
        """Nothing is ready for the modules behind it: what is there is of a step that has failed."""
        for fused in self._behind:
            fused._computed = None

    @property
    def ready(self) -> torch.Tensor | None:
        """What the first module of its chain has computed for the next call."""
        return None if self._computed is None else self._computed.result

    def _matched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Any, int] | None:
        """The inputs, the cache and the number of rows; None where only the module's own code can compute."""
        called = None if self.aside or self._expands() else self._recording.match(args, kwargs)
        if called is None or (self._limit is not None and called[2] > self._limit):
            return None
        handed = self._recording.handed
        return called if not handed or are_there(handed, spread_arguments(args, kwargs)[1], called[1].step) else None

    def _hand_keys_on(self, call: Call) -> None:
        """Store in the mappings of this call what the module's own code stores there."""
        if handed := self._recording.handed:
            given = spread_arguments(*call)[1]
            assert self._recording.cache_at is not None
            hand_on(handed, given, given[self._recording.cache_at].step)

    def _expands(self) -> bool:
        """Whether keys and values have to be made of latents in this step, which only the module's own code does."""
        step = self._attention.step
        if not self._absorbed or step is None:
            return False
        return step.adapted is not None or any(one.few(step) != step.numbers for one in self._absorbed)

    def _run_chain(
        self, call: Call, inputs: list[torch.Tensor], cache: Any, rows: int
    ) -> tuple[list[Call], Sequence[torch.Tensor]] | None:
        """The calls that are foreseen and the results of all modules of its chain, which may be called with other
        arguments yet; None if it has none, or they cannot be computed at once.
        """
        given = self._foresee(call, inputs, cache, rows)
        if self._chain is None or given is None:
            return None
        results = self._chain.run(cache, given[1], rows)
        return None if results is None else (given[0], results)

    def _foresee(
        self, call: Call, inputs: list[torch.Tensor], cache: Any, rows: int
    ) -> tuple[list[Call], list[list[torch.Tensor]]] | None:
        """The calls of the groups of its chain, and their inputs; None if it has no chain, or they are not known."""
        if self._chain is None or self._foresight is None or self._hooked:
            return None
        if (calls := self._foresight.calls(call)) is None:
            return None
        if (given := self._foresight.inputs(calls, inputs, cache)) is None:
            return None
        for number, one in self._missing:
            if not are_there([one], spread_arguments(*calls[self._foresight.group_of[number]])[1], cache.step):
                return None
        return calls, given

    def _hand_on(self, calls: list[Call], results: Sequence[torch.Tensor]) -> torch.Tensor:
        """Give the modules behind it their results; returns this module's."""
        assert self._foresight is not None
        groups = self._foresight.group_of[1:]
        for fused, group, (hidden, result) in zip(self._behind, groups, pairwise(results), strict=True):
            moved = fused._layer.moved if isinstance(fused._layer, ConvolutionProgram) else None
            fused._computed = ChainResult(hidden, calls[group], result, moved)
        return results[0]

    def compute(
        self,
        inputs: list[torch.Tensor],
        attend: Callable[[Request, list[torch.Tensor]], torch.Tensor],
        wanted: torch.Tensor | None = None,
    ) -> Any:
        """Run the blocks one after the other on ``inputs``, each with its tokens in the axis that was recorded, with
        ``attend`` called between them. Returns what the module does; for the rows whose numbers are in ``wanted``, if
        that is one tensor.
        """
        rows = inputs[0].shape[self._recording.axis]
        between: dict[tuple[str, int], torch.Tensor] = {}
        outputs: list[torch.Tensor] = []
        for number, program in enumerate(self._programs):
            attended = attend(self._recording.asked[number - 1], outputs) if number else None
            for external in program.externals:
                if external.kind == "attention" and attended is not None:
                    between["attention", 0] = attended.movedim(external.axis, 0).reshape(rows, -1).contiguous()
                if external.kind == "carried":
                    between.setdefault(("carried", external.number), torch.empty(rows, *external.shape))
            if wanted is not None and program is self._programs[-1]:
                return program.run_some(inputs, between, wanted)
            program.place_inputs(inputs)
            program.place_between(between)
            outputs = program.place_outputs(rows)
            program.run(rows)
        return self._recording.assemble(outputs)

    @property
    def chain(self) -> list[FusedModule]:
        """The modules of the chain that it is the first of; itself if there is none."""
        return [self, *self._behind]

    @property
    def watched(self) -> set[torch.nn.Module]:
        """The modules whose results its chain has to know."""
        return self._foresight.modules if self._chain is not None and self._foresight is not None else set()

    @property
    def _hooked(self) -> bool:
        """Whether hooks run between the layers of the chain; they could change tensors in place, which is not
        detected.
        """
        return any_hook(self._hooks)

    def can_precede(self, other: FusedModule) -> bool:
        """Whether ``other`` can directly follow this module in a chain."""
        if self._layer is None or other._layer is None or self._limit != other._limit:
            return False
        mine, theirs = (one.after.outputs[0][1] for one in (self._layer, other._layer))
        same = (mine.shape, mine.axis, mine.dtype) == (theirs.shape, theirs.axis, theirs.dtype)
        return same and self._recording.form.is_leaf() and other._recording.form.is_leaf()

    def set_chain(self, behind: list[FusedModule], differences: list[tuple[Difference, ...]], origins: Origins) -> None:
        """Make this module the first of a chain with the modules ``behind`` it, whose calls differ so from its own; of
        no chain if there are none.
        """
        self._forget()
        layers = [one._layer for one in (self, *behind) if one._layer is not None]
        recordings = [one._recording for one in (self, *behind)]
        self._foresight = Foresight(origins, list(zip(recordings, [(), *differences], strict=True)))
        self._behind = behind
        self._chain = LayerChain(layers, self._foresight.group_of, self._kernel) if behind else None
        self._missing = missing(one.handed for one in recordings)
        self._hooks = hooks_of(one.module for one in self.chain)
        self._forwards = [(one._own, one._forward) for one in self.chain]
        groups = zip(self.chain, self._foresight.group_of, strict=True)
        self._handing = [(one, group) for one, group in groups if one._recording.handed]

    def _attend(self, cache: Any, asked: Request, outputs: list[torch.Tensor]) -> torch.Tensor:
        assert isinstance(asked, AttentionRequest)
        if not asked.stores:
            key, value = stand_ins(cache.step, asked.layer)
            return self._attention.attend(asked.module, outputs[0], key, value, **asked.options)
        query, key, value = outputs
        if asked.absorbed is not None:
            step = cache.step
            step.tier.write_rows(asked.layer, step.write_positions(asked.layer), key[0, 0], value.shape[3])
            return self._attention.attend_rows(step, asked.layer, query[0], asked.scores, step.numbers)[None]
        key, value = cache.update(key, value, asked.layer)
        return self._attention.attend(asked.module, query, key, value, **asked.options)


def hooks_of(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """The dictionaries in which these modules keep the hooks of their forwards."""
    return [hooks for each in modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]


def any_hook(hooks: list[Any]) -> bool:
    """Whether one of these dictionaries has a hook, or all modules have one."""
    return any(hooks) or bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]
