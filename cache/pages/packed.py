"""The layout of a packed step, ``PackedStep``, and the transformers cache for it, ``PackedCache``: where each token of
the step is stored, and which keys it may see.

``PackedCache`` is the transformers ``Cache`` that unmodified modeling code updates; ``PackedStep`` is the layout of the
step in flight, which the cache and the attention function share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from cache.memory.memory_tier import MemoryTier
from cache.memory.stream import put
from cache.pages.layers import AttentionLayer, Reach
from cache.pages.session import SessionCache
from cache.pages.timeline_media import BothWays, TimelineMedia


class NotInPlace(Exception):
    """Raised in compiled code that would need the KV that is in the cache: its length differs from step to step."""


class Span(NamedTuple):
    """``size`` new tokens of one session, in rows ``row .. row + size`` of the packed step."""

    session: SessionCache
    row: int
    size: int

    @property
    def start(self) -> int:
        """Position of the first new token: the length of the session cache before this step."""
        return self.session.length

    @property
    def stop(self) -> int:
        """Length of the timeline after this step."""
        return self.session.length + self.size


class StepPlan:
    """Base class of what an attention backend must know of a step."""

    def follow(self, step: PackedStep) -> bool:
        """Become the plan of ``step``, which feeds one token of each session that it was made for; False if it
        cannot.
        """
        return False


class PackedStep:
    """The layout of one step: T new tokens of several sessions in one row, no padding.

    Valid until the sessions' lengths change, that is until the step is committed. After ``release`` it may ``follow``:
    become the layout of the next step.
    """

    def __init__(self, work: Sequence[tuple[SessionCache, int]], tier: MemoryTier) -> None:
        self.tier = tier
        self.spans: list[Span] = []
        row = 0
        for session, count in work:
            self.spans.append(Span(session, row, count))
            row += count
        self.tokens = row
        self._decodes = all(span.size == 1 for span in self.spans)
        self._fed: list[weakref.ref[SessionCache]] = []  # the sessions, once it is released
        self.numbers = frozenset(range(len(self.spans)))  # of the spans
        sessions = ((number, span.session.media) for number, span in enumerate(self.spans))
        self.media: dict[int, TimelineMedia] = {number: media for number, media in sessions if media is not None}
        self.both_ways = frozenset(n for n, media in self.media.items() if media.looks_ahead(*self.range(n)))
        self.adapted: Any = None  # the rows by adapter, where some have one: see ``scheduler.adapters``
        self._masks: dict[tuple[int, Reach, int | None, int], torch.Tensor | None] = {}
        self._gathers: dict[tuple[Reach, int | None], torch.Tensor] = {}
        self.origins: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
        self.plans: dict[Any, Any] = {}  # of attention backends: what they must know of it
        self._layout = np.empty((4 if tier.near_layers else 3, row), np.int64)
        self._lay_out()
        numbers = put(self._layout, tier.device)
        self.token_ids, self.positions = numbers[0:1], numbers[1:2]  # [1, T] each
        self.write_index = numbers[2]  # [T]
        self.near_write_index = numbers[-1]  # [T]

    def release(self) -> bool:
        """Let go of sessions and tensors, after the forward. Returns whether ``follow`` may be called: on a CPU, where
        nothing reads the layout any more, if each session has fed one token and nothing about it is special.
        """
        sessions = [span.session for span in self.spans]
        plain = all(map(_is_plain, sessions))
        self._fed = [weakref.ref(session) for session in sessions]
        self.spans, self._masks, self._gathers, self.origins = [], {}, {}, {}
        self.plans = {key: plan for key, plan in self.plans.items() if isinstance(plan, StepPlan)}
        return plain and self._decodes and self.adapted is None and self.tier.device.type == "cpu"

    def follow(self, work: Sequence[tuple[SessionCache, int]]) -> bool:
        """Become the layout of another step, if that feeds one token of each of the same sessions. Else it stays as it
        is. Plans that cannot follow are made anew.
        """
        if len(work) != self.tokens:
            return False
        for (session, count), fed in zip(work, self._fed, strict=True):
            if session is not fed() or count != 1 or not _is_plain(session):
                return False
        self.spans = [Span(session, row, 1) for row, (session, _) in enumerate(work)]
        self._lay_out()
        self.plans = {key: plan for key, plan in self.plans.items() if plan.follow(self)}
        return True

    def _lay_out(self) -> None:
        """Set token id, position and write index in each part of pages of each row."""
        rows, spans = self._layout, self.spans
        if self._decodes:
            lay_out_next([span.session for span in spans], rows, self.tier.page_size)
            return
        rows[0] = np.concatenate([np.asarray(s.session.next_tokens(s.size), np.int64) for s in spans])
        rows[1] = np.concatenate([np.arange(s.start, s.stop) for s in spans])
        for near, places in enumerate(rows[2:]):
            places[:] = np.concatenate([self._places(s, s.start, bool(near)) for s in spans])

    def called_with(self, rows: slice | Sequence[int]) -> AbstractContextManager[None]:
        """Within it modules are called with these rows of the step alone, which their adapters have to know."""
        return nullcontext() if self.adapted is None else self.adapted.only(rows)

    def write_positions(self, layer: int) -> torch.Tensor:
        """Slot * page_size + offset of the step's tokens in the pools of the layer with this number, ``[T]`` int64."""
        return self.near_write_index if layer in self.tier.near_layers else self.write_index

    def is_near(self, layer: AttentionLayer) -> bool:
        """Whether layers of this kind read the near parts of pages."""
        return bool(self.tier.near_layers) and layer.window is not None

    def table(self, span: Span, layer: AttentionLayer) -> torch.Tensor:
        """The page table of ``span``'s session for layers of this kind, on the device: int32 ``[pages]``."""
        return span.session.table(self.tier.device, self.is_near(layer))

    def range(self, number: int) -> tuple[int, int]:
        """The positions of the new tokens of span ``number``: first, and behind the last."""
        return self.spans[number].start, self.spans[number].stop

    def first_page(self, span: Span, layer: AttentionLayer) -> int:
        """Index in the page table of the first page that ``span`` sees in ``layer``."""
        return layer.first_key(span.start) // self.tier.page_size

    def pages(self, span: Span, layer: AttentionLayer) -> torch.Tensor:
        """The slots of the pages that ``span`` sees in ``layer``, in order, ``[pages]`` int64."""
        last = -(-span.stop // self.tier.page_size)
        return self.table(span, layer)[self.first_page(span, layer) : last]

    def gather_index(self, layer: AttentionLayer) -> torch.Tensor:
        """Slot * page_size + offset of every key that the step sees in ``layer``, span after span, ``[keys]`` int64."""
        if layer.kind not in self._gathers:
            places = np.concatenate([self.places(s, layer.first_key(s.start), layer) for s in self.spans])
            self._gathers[layer.kind] = put(places, self.tier.device)
        return self._gathers[layer.kind]

    def mask(self, number: int, layer: AttentionLayer, first: int) -> torch.Tensor | None:
        """Which of the keys ``first .. stop`` each query of span ``number`` may see, bool ``[size, keys]``; None: all
        of them.
        """
        key = (number, layer.reach, layer.window, first)
        if key not in self._masks:
            self._masks[key] = self._mask(self.spans[number], layer, first)
        return self._masks[key]

    def _mask(self, span: Span, layer: AttentionLayer, first: int) -> torch.Tensor | None:
        device = self.tier.device
        hidden = span.session.hidden > 0
        if span.size == 1 and not hidden and first == layer.first_key(span.start):
            return None
        query = torch.arange(span.start, span.stop, device=device)[:, None]
        key = torch.arange(first, span.stop, device=device)[None]
        seen = layer.sees(query, key)
        if span.session.media is not None and span.session.media.looks_ahead(span.start, span.stop):
            seen = self._both_ways(span.session.media, span, layer, first, seen, query, key)
        if hidden:
            flags = np.frombuffer(bytes(span.session.mask) + b"\x01" * span.size, np.bool_)[first:]
            seen &= torch.from_numpy(flags.copy()).to(device)
        return seen

    @staticmethod
    def _both_ways(
        media: TimelineMedia,
        span: Span,
        layer: AttentionLayer,
        first: int,
        seen: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
    ) -> torch.Tensor:
        """``seen`` with what rows of media see besides. Blocks of rows begin in the span that they are fed with."""
        blocks = torch.from_numpy(media.blocks(first, span.stop)).to(seen.device)
        same = (blocks[None] >= 0) & (blocks[span.start - first :, None] == blocks[None])
        if media.rule is BothWays.BEYOND:
            return seen | same
        if media.rule is BothWays.WINDOWS and layer.window is None:
            return seen
        return seen | (same & layer.near(query, key))

    def offsets(self) -> torch.Tensor:
        """For each row its position minus its index in the step: ``[T]`` int64."""
        return self.positions[0] - torch.arange(self.tokens, device=self.positions.device)

    def places(self, span: Span, first: int, layer: AttentionLayer) -> np.ndarray[Any, Any]:
        """Slot * page_size + offset of positions ``first .. stop`` in layers of this kind, int64."""
        return self._places(span, first, self.is_near(layer))

    def _places(self, span: Span, first: int, near: bool) -> np.ndarray[Any, Any]:
        size = self.tier.page_size
        positions = np.arange(first, span.stop)
        slots = span.session.near_slots if near else span.session.slots
        return slots[positions // size] * size + positions % size


def lay_out_next(sessions: Sequence[SessionCache], rows: np.ndarray[Any, Any], page_size: int) -> None:
    """Set ``rows [3 or 4, sessions]`` to token id, position, and write index in each part of pages, of the next token
    of each session.
    """
    lengths = [session.length for session in sessions]
    rows[0] = [session.next_tokens(1)[0] for session in sessions]
    rows[1] = lengths
    for near, places in enumerate(rows[2:]):
        tables = [session.near_slots if near else session.slots for session in sessions]
        pages = [table.item(at // page_size) for table, at in zip(tables, lengths, strict=True)]
        places[:] = [page * page_size + at % page_size for page, at in zip(pages, lengths, strict=True)]


def _is_plain(session: SessionCache) -> bool:
    """Whether it has no hidden token, no media and no adapter."""
    return not session.hidden and session.media is None and session.key is None


class _Placeholder(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """The layer object that modeling code sees in the cache; it stores nothing."""

    def __init__(self, layer: AttentionLayer, step: PackedStep, by_row: bool) -> None:
        super().__init__()
        self._step, self._by_row = step, by_row
        self.is_sliding = layer.reach is not Reach.FULL
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: KV is stored in the tier."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises RuntimeError: ``PackedCache.update`` is called instead."""
        raise RuntimeError("a packed layer is updated through its cache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Raises RuntimeError: it is called only by models that build their own mask, which cannot run packed."""
        raise RuntimeError("no mask fits a packed step")

    def get_seq_length(self) -> int | torch.Tensor:
        return _length(self._step, self._by_row)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class PackedCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """The transformers cache of a packed forward: stores new K and V in the sessions' pages.

    ``update`` returns the gathered K and V of all sessions, since some models compute with them after the update (MLA
    expands its latents). For a layer in ``in_place`` it returns the new K and V unchanged: the load-time probe has
    verified that the layer passes on the same tensors that it got, and the attention function reads the pages itself.
    In compiled code nothing is stored here: the attention function stores K and V, so all layers must be in
    ``in_place``. ``by_row``: see ``get_seq_length``. Of a layer in ``joined`` K and V are stored as one row. In steps
    for which its function there is true, attention knows how to use rows, and ``update`` returns one new token, which
    the layer may do with as it likes. In others it returns the gathered K and V.
    """

    def __init__(
        self,
        layers: list[AttentionLayer],
        step: PackedStep,
        in_place: frozenset[int],
        *,
        by_row: bool = True,
        joined: Mapping[int, Callable[[PackedStep], bool]] = MappingProxyType({}),
    ) -> None:
        # What ``Cache`` has besides ``layers``; a model's own subclass may have another constructor.
        self.layer_class_to_replicate, self.offloading = None, False
        self.by_row = by_row
        self.kinds = layers
        self.step = step
        self.in_place = in_place
        self.joined = joined
        self.compilable = all(number in in_place or not layer.stores for number, layer in enumerate(layers))

    @cached_property
    def layers(self) -> list[_Placeholder]:
        """The layer objects, made when the model's code asks for them."""
        return [_Placeholder(layer, self.step, self.by_row) for layer in self.kinds]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``key_states`` and ``value_states``: ``[1, H, T, D]`` of the step's tokens; returns ``[1, H, T or all keys,
        D]``. Raises NotInPlace in compiled code if some layer is not in ``in_place``.
        """
        if torch.compiler.is_compiling():
            if not self.compilable:
                raise NotInPlace
            return key_states, value_states
        tier = self.step.tier
        if layer_idx in self.joined:
            return self._update_rows(layer_idx, key_states, value_states)
        tier.write(layer_idx, self.step.write_positions(layer_idx), key_states, value_states)
        if layer_idx not in self.in_place:
            index = self.step.gather_index(self.kinds[layer_idx])
            key_states, value_states = (part.transpose(0, 1)[None] for part in tier.tokens(layer_idx, index))
        # The tensors are kept, so that their identity stays theirs for the whole step.
        self.step.origins[id(key_states)] = (layer_idx, key_states, value_states)
        return key_states, value_states

    def _update_rows(
        self, layer: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step, latent = self.step, key_states.shape[3]
        rows = torch.cat([key_states[0, 0], value_states[0, 0]], dim=-1)
        step.tier.write_rows(layer, step.write_positions(layer), rows, latent)
        if self.joined[layer](step):
            return key_states[:, :, :1], value_states[:, :, :1]
        rows = step.tier.tokens(layer, step.gather_index(self.kinds[layer]))[0].transpose(0, 1)[None]
        key_states, value_states = rows[..., :latent], rows[..., latent:]
        step.origins[id(key_states)] = (layer, key_states, value_states)
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store indexer keys of sparse attention, ``[1, T, D]`` of the step's tokens; returns those of all keys, ``[1,
        keys, D]``. Raises NotInPlace in compiled code.
        """
        if torch.compiler.is_compiling():
            raise NotInPlace
        index = self.step.gather_index(self.kinds[layer_idx])
        return self.step.tier.write_index(layer_idx, self.step.write_positions(layer_idx), indexer_key_states)[index][
            None
        ]

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """For each row its position minus its index in the step, ``[T]`` int64: code that adds the index to it gets the
        position of every token. Code that needs one number for the whole step fails. Raises NotInPlace in compiled
        code.

        0 without ``by_row``, for models that ask only outside of their layers although they were given positions.
        """
        return _length(self.step, self.by_row)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """False: recurrent modules are called with their session's own state instead."""
        return False


def _length(step: PackedStep, by_row: bool) -> int | torch.Tensor:
    if not by_row:
        return 0
    if torch.compiler.is_compiling():
        raise NotInPlace
    return step.offsets()


def packed_class(kind: type, packed: type = PackedCache) -> type:
    """``packed``, or a subclass of it and of the model's own cache class ``kind`` if the model checks for that."""
    if kind is DynamicCache or not issubclass(kind, DynamicCache):
        return packed
    own = {name: value for name, value in vars(kind()).items() if name not in ("layers", "layer_class_to_replicate")}
    return type("PackedCache", (packed, kind), own)
