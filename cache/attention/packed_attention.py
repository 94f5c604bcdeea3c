"""The attention function that transformers' modeling code calls in a packed step, ``PackedAttention``; it calls the
backends, and torch for the spans that no backend takes.

Registered with ``AttentionInterface`` but without a mask function, so that transformers builds no ``[T, all keys]``
mask and hands on None. Each span attends to its own session's keys only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers import AttentionInterface

from cache.attention.absorbed import Absorbed
from cache.attention.backend import Backend, Signature
from cache.attention.backends import backends
from cache.attention.torch_attention import attend
from cache.pages.layers import AttentionLayer, ScoreOptions
from cache.pages.packed import PackedStep

_names = count()
_attentions: WeakValueDictionary[int, PackedAttention] = WeakValueDictionary()

# Tensors that layers pass along and that say nothing about which keys count.
_HARMLESS = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "logits_to_keep"}
)


class Unsupported(ValueError):
    """The model's attention needs something that a packed step does not compute."""


class PackedAttention:
    """The attention function of one loaded model, over the pages of the current step.

    ``transformed`` collects the layers that pass on other tensors than ``PackedCache.update`` returned. ``sources`` has
    for each layer the layer whose pages it attended to, None if these tensors are in no pages.
    """

    def __init__(self, layers: list[AttentionLayer]) -> None:
        self.layers = layers
        self.number = next(_names)
        self.name = f"warmturn_{self.number}"
        self.transformed: set[int] = set()
        self.sources: dict[int, int | None] = {}
        self.absorbed: Mapping[int, Absorbed] = {}
        self.calls = 0
        self._backends: dict[Signature, list[Backend[Any]]] = {}  # those that fit, in the order they are asked
        self.step: PackedStep | None = None  # in flight
        AttentionInterface.register(self.name, self)
        _attentions[self.number] = self

    @contextmanager
    def running(self, step: PackedStep) -> Iterator[None]:
        """Within it, attention calls belong to ``step``."""
        self.step = step
        try:
            yield
        finally:
            self.step = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """The function that modeling code calls. Returns ``[1, T, H, Dv]`` and None; see ``attend``. Raises Unsupported
        for a mask or an unknown tensor.
        """
        self._refuse(attention_mask, kwargs)
        if torch.compiler.is_compiling():
            sinks, index = self.sinks(module, s_aux), module.layer_idx
            out = torch.ops.warmturn.attend(query, key, value, self.number, index, scaling, softcap, sinks)
            return out, None
        return self.attend(module, query, key, value, scaling=scaling, softcap=softcap, s_aux=s_aux), None

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        softcap: float | None,
        s_aux: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of ``query [1, H, T, D]`` over ``key`` and ``value`` as the layer has them after ``update``;
        returns ``[1, T, H, Dv]``. Raises Unsupported outside of a step.
        """
        step, index = self.step, getattr(module, "layer_idx", None)
        if step is not None and not isinstance(index, int):  # a module that several layers share
            index = self._source(step, key, value)
        if step is None or not isinstance(index, int):
            raise Unsupported("attention outside of a step")
        self.calls += 1
        absorbed, scores = self.absorbed.get(index), _scores(query, scaling, softcap, self.sinks(module, s_aux))
        if absorbed is not None and absorbed.serves(step):
            self.sources[index] = index
            return self._over_rows(step, index, absorbed, query[0], scores)
        self.sources[index] = self._source(step, key, value)
        return self._over(step, index, query, key, value, scores)

    def attend_compiled(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        index: int,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """``attend`` for layer ``index`` in compiled code, where ``key [1, heads, T, D]`` and ``value [1, heads, T,
        Dv]`` are not stored yet: they are stored here. ``sinks``: ``[H]``. Raises Unsupported outside of a step.
        """
        step, source = self.step, self.sources.get(index)
        if step is None or source is None:
            raise Unsupported("compiled attention outside of a step, or over keys that are not in pages")
        self.calls += 1
        if source == index:
            step.tier.write(index, step.write_positions(index), key, value)
        step.origins[id(key)] = (source, key, value)
        return self._over(step, index, query, key, value, _scores(query, scaling, softcap, sinks))

    def _over(
        self,
        step: PackedStep,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: ScoreOptions,
    ) -> torch.Tensor:
        layer = self.layers[index]
        out = query.new_empty(step.tokens, query.shape[1], value.shape[-1])
        source = self._source(step, key, value)
        left = self._attend_in_place(step, layer, source, query[0], scores, out)
        for number, first, keys, values in self._spans(step, index, key, value, left):
            span = step.spans[number]
            rows = slice(span.row, span.row + span.size)
            seen = step.mask(number, layer, first)
            out[rows] = attend(query[0, :, rows], keys, values, seen, *scores).transpose(0, 1)
        return out[None]

    @staticmethod
    def sinks(module: torch.nn.Module, given: torch.Tensor | None) -> torch.Tensor | None:
        """``[H]``, per head what is added to the sum of a softmax: what was given, else what the module has."""
        return given if given is not None else getattr(module, "sinks", None)

    @staticmethod
    def _source(step: PackedStep, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """The layer whose pages hold just what ``key`` and ``value`` hold."""
        origin = step.origins.get(id(key))
        return origin[0] if origin is not None and origin[1] is key and origin[2] is value else None

    def _attend_in_place(
        self,
        step: PackedStep,
        layer: AttentionLayer,
        source: int | None,
        query: torch.Tensor,
        scores: ScoreOptions,
        out: torch.Tensor,
        asked: frozenset[int] | None = None,
    ) -> frozenset[int]:
        """Let the device's backends fill rows of ``out``, one after the other, for the spans ``asked``, or all. Returns
        the numbers of those that none took.
        """
        asked = step.numbers if asked is None else asked
        left = asked - step.both_ways  # backends know only keys that come before
        if source is None:
            return asked
        signature = Signature.of(step.tier.shapes[source], query, scores, layer)
        fitting = self._backends.get(signature)
        if fitting is None:
            found = [backend for backend in backends(query.device) if backend.fits(signature)]
            fitting = self._backends[signature] = found
        for backend in fitting:
            plan = backend.plan(step, layer, left, last=backend is fitting[-1])
            if plan is not None:
                backend.attend(plan, step, layer, source, query, scores, out)
                left = plan.unhandled
        return left | asked & step.both_ways

    def _over_rows(
        self, step: PackedStep, index: int, absorbed: Absorbed, query: torch.Tensor, scores: ScoreOptions
    ) -> torch.Tensor:
        """Attention of ``query [H, T, D]`` over the rows of an absorbed layer; returns ``[1, T, H, Dv]``. For a span of
        many tokens keys and values are made of the rows.
        """
        out = query.new_empty(step.tokens, query.shape[0], absorbed.values.shape[1])
        few = absorbed.few(step)
        if few:
            places = [range(step.spans[n].row, step.spans[n].row + step.spans[n].size) for n in sorted(few)]
            some = slice(None) if few == step.numbers else [row for place in places for row in place]
            out[some] = self._over_latents(step, index, absorbed, query, scores, few, some)
        for number, first, rows, _ in self._stored(step, index, index, step.numbers - few):
            span = step.spans[number]
            part, (keys, values) = slice(span.row, span.row + span.size), absorbed.expand(rows[:, 0])
            seen = step.mask(number, self.layers[index], first)
            out[part] = attend(query[:, part], keys, values, seen, *scores).transpose(0, 1)
        return out[None]

    def _over_latents(
        self,
        step: PackedStep,
        index: int,
        absorbed: Absorbed,
        query: torch.Tensor,
        scores: ScoreOptions,
        few: frozenset[int],
        some: slice | list[int],
    ) -> torch.Tensor:
        """``_over_rows`` for the spans ``few``, whose rows in the step are ``some``: ``[rows, H, Dv]``."""
        if isinstance(some, slice):
            asking = absorbed.queries(query)
        else:
            asking = query.new_empty(*query.shape[:2], absorbed.width)
            asking[:, some] = absorbed.queries(query[:, some])
        return absorbed.outputs(self.attend_rows(step, index, asking, scores, few)[some])

    def attend_rows(
        self, step: PackedStep, index: int, asking: torch.Tensor, scores: ScoreOptions, few: frozenset[int]
    ) -> torch.Tensor:
        """Attention of queries as they attend to rows, ``asking [H, T, L + shared]``, for the spans ``few``; returns
        sums of latents, ``[T, H, L]``.
        """
        layer = self.layers[index]
        sums = asking.new_empty(step.tokens, asking.shape[0], step.tier.shapes[index].value_dim)
        left = self._attend_in_place(step, layer, index, asking, scores, sums, few)
        for number, first, keys, values in self._stored(step, index, index, left):
            part = slice(step.spans[number].row, step.spans[number].row + step.spans[number].size)
            seen = step.mask(number, layer, first)
            sums[part] = attend(asking[:, part], keys, values, seen, *scores).transpose(0, 1)
        return sums

    def _stored(
        self, step: PackedStep, index: int, source: int, numbers: frozenset[int]
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """``_spans`` of the spans with these ``numbers``, for a layer that attends to what ``source`` has stored."""
        size, layer = step.tier.page_size, self.layers[index]
        for number in sorted(numbers):
            span = step.spans[number]
            first = step.first_page(span, layer) * size
            keys, values = step.tier.read(source, step.pages(span, layer))
            yield number, first, keys[: span.stop - first], values[: span.stop - first]

    def _spans(
        self, step: PackedStep, index: int, key: torch.Tensor, value: torch.Tensor, left: frozenset[int]
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Per span that is ``left``: its number, the position of its first key, and K, V ``[keys, H, D]``."""
        layer = self.layers[index]
        source = self._source(step, key, value)
        if source is not None:
            yield from self._stored(step, index, source, left)
            return
        origin = step.origins.get(id(key))
        self.transformed.add(index if origin is None else origin[0])
        firsts = [layer.first_key(span.start) for span in step.spans]
        if key.shape[2] != sum(s.stop - first for s, first in zip(step.spans, firsts, strict=True)):
            raise Unsupported("a layer attends to keys that are not its session's")
        at = 0
        for number, (span, first) in enumerate(zip(step.spans, firsts, strict=True)):
            end = at + span.stop - first
            yield number, first, key[0, :, at:end].transpose(0, 1), value[0, :, at:end].transpose(0, 1)
            at = end

    @staticmethod
    def _refuse(attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
        """Raises Unsupported for arguments that are not computed here; the probe then tries another mode."""
        unknown = [k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and k not in _HARMLESS]
        if attention_mask is not None or unknown:
            raise Unsupported(f"attention needs {', '.join(unknown) or 'a mask of its own'}")


def _attend_compiled(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, number: int, *rest: Any
) -> torch.Tensor:
    return _attentions[number].attend_compiled(query, key, value, *rest)


def _result_like(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The shape and dtype of the result, for the compiler."""
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


# An opaque operator for compiled code: it stores keys and values of a step and computes attention.
_library: Any = torch.library.Library("warmturn", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, int number, SymInt layer, "
    "float? scaling, float? softcap, Tensor? sinks) -> Tensor"
)
_library.impl("attend", _attend_compiled, "CompositeExplicitAutograd")
torch.library.register_fake("warmturn::attend", _result_like, lib=_library)


def _scores(
    query: torch.Tensor, scaling: float | None, softcap: float | None, sinks: torch.Tensor | None
) -> ScoreOptions:
    """How scores are computed, with the usual scale where a layer gives none."""
    return ScoreOptions(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap, sinks)
