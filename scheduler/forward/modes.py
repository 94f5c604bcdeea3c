"""The modes that run all sessions of a step in one forward, and the list of all modes. ``scheduler.model.probe``
measures at load which one is right for a model.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from cache.attention.decode import DecodeStep
from cache.attention.decode_rows import RowsCache, RowsStep
from cache.attention.packed_attention import PackedAttention, Unsupported
from cache.memory.stream import put
from cache.pages.layers import AttentionLayer, Windows, windows_of
from cache.pages.packed import PackedStep, packed_class
from scheduler.accel.cpu.fusion import Fusion, KnownPrograms, Steps
from scheduler.accel.cpu.packing import Packing
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.accel.gpu.compiled import CompiledLayers
from scheduler.forward.alone_modes import AloneMode, PlainAloneMode, RecomputeMode
from scheduler.forward.latents import LatentFinder
from scheduler.forward.mixers import CurrentStep, MixerSplit, Together
from scheduler.forward.mode import Mode
from scheduler.forward.trace import Trace
from scheduler.media.joint_sight import JointSight
from scheduler.media.sight import FedPart, Sight


class PagedMode(Mode):
    """One forward ``[1, T]`` for all sessions over their pages; modules with a state are split per session."""

    def __init__(self, model: Any, layers: list[AttentionLayer], trace: Trace) -> None:
        super().__init__(model, layers, trace)
        self.stateful = bool(trace.mixers)
        self._stored = frozenset(index for index, layer in enumerate(layers) if layer.stores)
        self._decoder = language_model(model)
        self._text = model.config.get_text_config(decoder=True)
        self._flight = CurrentStep()
        self.sight: Sight | JointSight | None = None  # how pictures enter, where it was measured
        self._splits: list[MixerSplit] = []
        self._cache = packed_class(type(trace.cache))

    def install(self) -> None:
        """Split the recurrent modules. Raises Unsupported for a forward without the arguments, or a state elsewhere."""
        if not self.layers:
            raise Unsupported("the config does not describe the layers")
        if self.trace.argument is None or self.trace.argument not in self.accepts:
            raise Unsupported("the model's forward takes no cache")
        if self.trace.attributes:
            raise Unsupported("modules store a state on themselves")
        if not self.positions_accepted and self._stored and not self.trace.mixers:
            raise Unsupported("the model's forward takes no position_ids")
        self._splits = self._split(self.trace.argument)

    def _split(self, argument: str) -> list[MixerSplit]:
        return [MixerSplit(module, argument, self._flight) for module in self.trace.mixers]

    def remove(self) -> None:
        """Put the recurrent modules' own forwards back."""
        for split in self._splits:
            split.remove()
        self._splits = []

    def forward(self, step: PackedStep, keep: torch.Tensor) -> torch.Tensor:
        """See ``Mode.forward``. The lm_head runs only on ``keep`` where the model has ``logits_to_keep``."""
        assert self.trace.argument is not None
        inputs: dict[str, Any] = {"use_cache": True, "return_dict": True, **self.positions(step), **self.masks(step)}
        if "logits_to_keep" in self.accepts:
            inputs["logits_to_keep"] = keep
        inputs[self.trace.argument] = self._cache(
            self.layers, step, self.in_place, by_row=self.trace.by_row, joined=self.joined
        )
        for split in self._splits:
            split.token_by_token = self.token_by_token
        for span in step.spans if self.stateful and not isinstance(step, DecodeStep) else ():
            if span.session.state is None:
                span.session.state = self.trace.fresh(self._text)
        inputs["input_ids"] = step.token_ids
        if step.media and self.sight is not None:
            parts = [FedPart(step.media.get(n), *step.range(n)) for n in range(len(step.spans))]
            inputs |= self.sight.inputs(step.token_ids, parts)
        together = self._together(step)
        with self._flight.over(step, together), self.attention_context(step):
            logits = self._run(inputs, step)[0]
        if together is not None:
            self.rows.settle(len(together.order))
        return logits if logits.shape[0] == keep.shape[0] else logits[keep]

    def _run(self, inputs: dict[str, Any], step: PackedStep) -> torch.Tensor:
        """The logits ``[1, rows, V]`` of the model's forward. How pictures enter within it is not recorded."""
        found = None if self.fusion is None or step.media else self.fusion.run(inputs, step.adapted is not None)
        if found is None:
            found = self.model(**inputs).logits
        assert isinstance(found, torch.Tensor)
        return found

    def _together(self, step: PackedStep) -> Together | None:
        """The single tokens of a step that are computed as one batch, if there are several."""
        if not self.batches:
            return None
        if isinstance(step, DecodeStep):
            return Together(None, [*range(step.tokens)], self.rows.first(step.tokens))
        single = [span for span in step.spans if span.size == 1 and span.start > 0]
        if len(single) < 2 or any(type(span.session.state) is not DynamicCache for span in single):
            return None
        places = self.rows.bind([span.session for span in single])
        if places is None:
            return None
        order = [span.row for _, span in sorted(zip(places, single, strict=True), key=lambda pair: pair[0])]
        alone = order == list(range(step.tokens))
        rows = None if alone else put(np.array(order), step.tier.device)
        return Together(rows, order, self.rows.first(len(single)))

    @property
    def batches(self) -> bool:
        """See ``Mode``: all of a layer's state must be in the cache."""
        layers = [getattr(module, "layer_idx", None) for module in self.trace.mixers]
        return bool(layers) and all(isinstance(index, int) and index >= 0 for index in layers)

    @property
    def graphed(self) -> Mode | None:
        """See ``Mode``. What reads no pages in place is a batch of rows, if all that sessions keep is in pages."""
        if self.stateful and not self.batches:
            return None
        if (self._stored and self._stored <= self.in_place | self.joined.keys()) or (
            self.stateful and not self._stored
        ):
            return self
        return None if self.stateful else RowsMode(self)

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Within it the model attends by itself."""
        yield

    @abstractmethod
    def masks(self, step: PackedStep) -> dict[str, Any]:
        """The ``attention_mask`` argument, if any."""

    @abstractmethod
    def attention_context(self, step: PackedStep) -> Any:
        """A context within which attention belongs to ``step``."""


class PackedMode(PagedMode):
    """A packed forward with the attention function of ``cache.attention``, which reads pages; no mask is built."""

    name = "packed"
    compiles = True

    def __init__(self, model: Any, layers: list[AttentionLayer], trace: Trace) -> None:
        super().__init__(model, layers, trace)
        self.attention = PackedAttention(layers)
        self._previous = self._decoder.config._attn_implementation

    @property
    def windows(self) -> Windows | None:
        return None if self.stateful else windows_of(self.layers, self.attention.sources)

    def install(self) -> None:
        """Switch the language model to our attention function, where it has any. Raises Unsupported."""
        super().install()
        if self._stored:
            self._attend_with(self.attention.name)
        if self._decoder.config._attn_implementation != self.attention.name and not self.trace.mixers:
            raise Unsupported("the model's attention function cannot be replaced")
        for changed in (self.fusion, self.compiled):
            if changed is not None:
                changed.install()

    def remove(self) -> None:
        """Back to the attention function that the model was loaded with."""
        for changed in (self.compiled, self.fusion):
            if changed is not None:
                changed.remove()
        super().remove()
        self._attend_with(self._previous)

    def _attend_with(self, attention: str) -> None:
        """Set the attention function of the decoder's own layers, not that of encoders inside it."""
        self._decoder.set_attn_implementation({"": attention})

    def masks(self, step: PackedStep) -> dict[str, Any]:
        """None: transformers builds no mask for an attention function that has no mask function. Models that take no
        positions build one themselves if they get none, as long as their cache; theirs says that no token is padding.
        """
        builds = self.trace.by_row and "position_ids" not in self.accepts and not self.trace.mixers
        if not builds or "attention_mask" not in self.accepts:
            return {}
        return {"attention_mask": torch.ones_like(step.token_ids)}

    def attention_context(self, step: PackedStep) -> Any:
        """Our attention function needs to know the step."""
        running = self.attention.running(step)
        return running if self.compiled is None else self.compiled.within(running)

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """See ``PagedMode``."""
        self._attend_with(self._previous)
        try:
            with self.uncompiled():
                yield
        finally:
            self._attend_with(self.attention.name)

    def learn(self) -> bool:
        """Layers that handed on exactly what the cache gave them may read their pages in place."""
        self.in_place = self._stored - self.attention.transformed
        return True

    @property
    def reads_in_place(self) -> bool:
        return bool(self._stored) and self._stored <= self.in_place

    def absorb(self, steps: Callable[[], Iterator[None]], rounding: float = 0.0) -> int:
        if self._stored <= self.in_place:  # all layers read what is stored as it is, so none of it is a latent
            return 0
        finder = LatentFinder(self.attention, rounding)
        with finder.watching():
            next(iter(steps()))
        self.attention.absorbed = finder.taken(self.model.device)
        self.joined = {layer: absorbed.serves for layer, absorbed in self.attention.absorbed.items()}
        return len(self.joined)

    def expand(self) -> None:
        super().expand()
        self.attention.absorbed = {}

    def fuse(self, packing: Packing, steps: Steps, known: KnownPrograms | None = None) -> int:
        ours = kernel() if self.model.device.type == "cpu" else None
        if ours is not None:
            self.fusion = Fusion(self._decoder, self.attention, packing.matrix, ours)
            # What is recorded of states depends on their values: which rule they follow is found by trying.
            with nullcontext() if known is None or self.stateful else ours.without_products():
                self.fusion.find(steps, known)
                if known is None or known.recorded:
                    self.fusion.record(self.model, steps)
        return len(self.fusion) if self.fusion is not None else 0

    def compile(self, backend: Any, steps: Callable[[], Any]) -> int:
        self.compiled = CompiledLayers(backend)
        self.compiled.find(self._decoder, steps)
        return len(self.compiled)


class MaskedMode(PagedMode):
    """The model's own attention over gathered keys, with a block-diagonal mask ``[1, 1, T, all keys]``."""

    name = "masked"

    def masks(self, step: PackedStep) -> dict[str, Any]:
        """One mask, or one per declared layer type where they differ."""
        declared = getattr(self._text, "layer_types", None) or []
        kinds = {layer.kind: layer for layer in self.layers}
        if len(set(declared)) <= 1 and len(kinds) == 1:
            return {"attention_mask": self._mask(step, self.layers[0])}
        made = {key: self._mask(step, layer) for key, layer in kinds.items()}
        # Layers with a state beside their attention ask for the mask of their attention alone.
        named = {f"{layer.reach}_attention": made[key] for key, layer in kinds.items()} | {"linear_attention": None}
        named |= {n: made[layer.kind] for n, layer in zip(declared, self.layers, strict=True)}
        return {"attention_mask": named}

    def attention_context(self, step: PackedStep) -> Any:
        """The model attends by itself."""
        return nullcontext()

    def _mask(self, step: PackedStep, layer: AttentionLayer) -> torch.Tensor:
        """0 where a query sees a key of its own session, the lowest number elsewhere (eager code adds masks)."""
        parts = []
        for number, span in enumerate(step.spans):
            first = layer.first_key(span.start)
            seen = step.mask(number, layer, first)
            size = (span.size, span.stop - first)
            parts.append(torch.ones(size, dtype=torch.bool, device=self.model.device) if seen is None else seen)
        seen = torch.block_diag(*(part.int() for part in parts)).bool()  # type: ignore[no-untyped-call]
        return additive(seen, self.model.dtype)


class RowsMode(MaskedMode):
    """Decode steps as a batch with padding, see ``cache.attention.decode_rows``; beside a mode that runs all others and
    that is installed.
    """

    name = "rows"

    def __init__(self, beside: PagedMode) -> None:
        super().__init__(beside.model, beside.layers, beside.trace)
        self._beside = beside
        self._cache = packed_class(type(beside.trace.cache), RowsCache)

    def forward(self, step: PackedStep, keep: torch.Tensor) -> torch.Tensor:
        """See ``Mode.forward``; the step is a ``RowsStep``, and ``keep`` has all rows."""
        assert self.trace.argument is not None
        inputs: dict[str, Any] = {"use_cache": True, "return_dict": True, **self.positions(step), **self.masks(step)}
        inputs[self.trace.argument] = self._cache(self.layers, step, frozenset(), by_row=self.trace.by_row)
        with self._beside.own_attention():
            logits: torch.Tensor = self.model(input_ids=step.token_ids, **inputs).logits
        return logits[:, -1]

    def _mask(self, step: PackedStep, layer: AttentionLayer) -> torch.Tensor:
        """``[rows, 1, 1, keys]``."""
        assert isinstance(step, RowsStep)
        return additive(step.seen(layer), self.model.dtype)[0, 0, :, None, None]


class SplitMode(MaskedMode):
    """A packed trunk; every module that writes to the cache runs per session, on that session's own cache object.

    For attention that derives more than a mask from the cache: relative biases, compressed or block-wise keys.
    """

    name = "split"

    def __init__(self, model: Any, layers: list[AttentionLayer], trace: Trace) -> None:
        super().__init__(model, layers, trace)
        self.stateful = True

    @property
    def batches(self) -> bool:
        """See ``Mode``: keys that are in a session's own cache have its length."""
        return False

    def _split(self, argument: str) -> list[MixerSplit]:
        return [
            MixerSplit(module, argument, self._flight, self._span_mask if _attends(module) else None)
            for module in self.trace.readers
        ]

    def _span_mask(self, index: int, cache: Any, tokens: int) -> torch.Tensor:
        """``[1, 1, tokens, keys]`` for one session's own cache, which may hold no more than a window of its past."""
        stored = cache.layers[index]
        past = stored.get_seq_length()
        kept = min(past, stored.sliding_window - 1) if getattr(stored, "is_sliding", False) else past
        query = torch.arange(past, past + tokens, device=self.model.device)[:, None]
        key = torch.arange(past - kept, past + tokens, device=self.model.device)[None]
        return additive(self.layers[index].sees(query, key), self.model.dtype)


MODES: tuple[type[Mode], ...] = (PackedMode, MaskedMode, SplitMode, AloneMode, PlainAloneMode)
LAST_RESORT: tuple[type[Mode], ...] = (RecomputeMode,)


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bool mask ``[queries, keys]`` as what eager code adds to scores: ``[1, 1, queries, keys]``, 0 or the
    lowest number.
    """
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


def _attends(module: torch.nn.Module) -> bool:
    return "attention_mask" in inspect.signature(module.forward).parameters


def language_model(model: Any) -> Any:
    """The sub-module that holds the text decoder: the model itself, or the language model inside a multimodal
    wrapper.
    """
    text = model.config.get_text_config(decoder=True)
    if text is model.config:
        return model
    inside = (
        m for m in model.modules() if getattr(m, "config", None) is text and hasattr(m, "set_attn_implementation")
    )
    return next(inside, model)
