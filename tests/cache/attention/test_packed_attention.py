"""Attention against a plain float64 softmax, token by token; what it does not compute is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from session_kit import session_of

from cache.attention.packed_attention import PackedAttention, Unsupported
from cache.attention.torch_attention import attend
from cache.memory.memory_tier import MemoryTier
from cache.pages.layers import AttentionLayer, Reach
from cache.pages.packed import PackedCache, PackedStep
from cache.pages.pool import Page

CPU = torch.device("cpu")
SIZE = 4
WIDTH = 6


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attend``, one head and one query at a time, by the definition of softmax."""
    heads, rows, _ = query.shape
    out = torch.zeros(heads, rows, values.shape[-1], dtype=torch.float64)
    group = heads // keys.shape[1]
    for head in range(heads):
        for row in range(rows):
            exponents = []
            for at in range(keys.shape[0]):
                score = float(query[head, row].double() @ keys[at, head // group].double()) * scale
                if softcap is not None:
                    score = softcap * math.tanh(score / softcap)
                visible = seen is None or bool(seen[row, at])
                exponents.append(math.exp(score) if visible else 0.0)
            total = sum(exponents) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            for at, exponent in enumerate(exponents):
                out[head, row] += exponent / total * values[at, head // group].double()
    return out


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attend(kv_heads: int, masked: bool, softcap: float | None, sinks: bool) -> None:
    torch.manual_seed(1)
    query, keys, values = torch.randn(4, 3, WIDTH), torch.randn(9, kv_heads, WIDTH), torch.randn(9, kv_heads, 5)
    seen = torch.rand(3, 9) < 0.6 if masked else None
    if seen is not None:
        seen[:, 0] = True
    weights = torch.randn(4) if sinks else None
    got = attend(query, keys, values, seen, 0.7, softcap, weights)
    want = reference(query, keys, values, seen, 0.7, softcap, weights)
    assert got.shape == (4, 3, 5)
    assert (got.double() - want).abs().max() < 1e-5


def first_layer() -> torch.nn.Module:
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    return module


class Scene:
    """Three sessions in one step over one layer: cached keys and values in pages, new ones in the packed row."""

    def __init__(self, layer: AttentionLayer, hide: bool = False) -> None:
        torch.manual_seed(2)
        self.layers = [layer]
        self.tier = MemoryTier(20, SIZE, CPU)
        slots = torch.randperm(20).tolist()
        self.history: list[tuple[torch.Tensor, torch.Tensor]] = []
        work = []
        for cached, new in ((0, 5), (11, 1), (6, 7)):
            session = session_of(range(cached + new), new)
            session.pages = [Page(self.tier, slots.pop()) for _ in range(-(-(cached + new) // SIZE))]
            key, value = torch.randn(cached + new, 2, WIDTH), torch.randn(cached + new, 2, WIDTH)
            if cached:
                places = torch.tensor([session.pages[p // SIZE].slot * SIZE + p % SIZE for p in range(cached)])
                self.tier.write(0, places, key[:cached].transpose(0, 1)[None], value[:cached].transpose(0, 1)[None])
                if hide:
                    session.hide(3, 5)
            self.history.append((key, value))
            work.append((session, new))
        self.step = PackedStep(work, self.tier)
        self.query = torch.randn(1, 4, self.step.tokens, WIDTH)
        new_rows = [(k[s.start :], v[s.start :]) for (k, v), s in zip(self.history, self.step.spans, strict=True)]
        self.key = torch.cat([k for k, _ in new_rows]).transpose(0, 1)[None]
        self.value = torch.cat([v for _, v in new_rows]).transpose(0, 1)[None]

    def run(self, in_place: bool, transform: bool = False, **kwargs: Any) -> tuple[PackedAttention, torch.Tensor]:
        """What the layer computes through our cache and attention function."""
        attention = PackedAttention(self.layers)
        cache = PackedCache(self.layers, self.step, frozenset({0}) if in_place else frozenset())
        with attention.running(self.step):
            key, value = cache.update(self.key, self.value, 0)
            if transform:
                key, value = key * 1.0, value * 1.0
            out, _ = attention(first_layer(), self.query, key, value, None, scaling=0.5, **kwargs)
        return attention, out

    def wanted(self, **kwargs: Any) -> torch.Tensor:
        """The same, session by session and pair by pair."""
        layer = self.layers[0]
        out = []
        for span, (keys, values) in zip(self.step.spans, self.history, strict=True):
            q = torch.arange(span.start, span.stop)[:, None]
            k = torch.arange(span.stop)[None]
            seen = k <= q
            if layer.window is not None:
                near = q - k < layer.window
                same = q // layer.window == k // layer.window
                seen = seen & (near if layer.reach is Reach.SLIDING else same)
            for at, flag in enumerate(span.session.mask):
                if not flag:
                    seen[:, at] = False
            rows = slice(span.row, span.row + span.size)
            out.append(reference(self.query[0, :, rows], keys, values, seen, 0.5, **kwargs).transpose(0, 1))
        return torch.cat(out)[None]


LAYERS = [
    AttentionLayer(Reach.FULL, None, stores=True),
    AttentionLayer(Reach.SLIDING, 5, stores=True),
    AttentionLayer(Reach.CHUNKED, 4, stores=True),
    AttentionLayer(Reach.CHUNKED, 7, stores=True),
]


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize(("in_place", "transform"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_packed_step_is_each_session_alone(
    layer: AttentionLayer, in_place: bool, transform: bool, hide: bool
) -> None:
    scene = Scene(layer, hide)
    attention, out = scene.run(in_place, transform)
    assert out.shape == (1, 13, 4, WIDTH)
    assert (out.double() - scene.wanted()).abs().max() < 1e-5
    assert attention.transformed == ({0} if transform else set())


def test_soft_caps_and_sinks_reach_the_softmax() -> None:
    scene = Scene(LAYERS[1])
    sinks = torch.randn(4)
    _, out = scene.run(True, softcap=1.5, s_aux=sinks)
    assert (out.double() - scene.wanted(softcap=1.5, sinks=sinks)).abs().max() < 1e-5


def test_sinks_of_the_module_are_used() -> None:
    scene = Scene(LAYERS[0])
    attention = PackedAttention(scene.layers)
    module = first_layer()
    module.sinks = torch.nn.Parameter(torch.randn(4), requires_grad=False)
    cache = PackedCache(scene.layers, scene.step, frozenset())
    with attention.running(scene.step):
        out, _ = attention(module, scene.query, *cache.update(scene.key, scene.value, 0), None, scaling=0.5)
    assert (out.double() - scene.wanted(sinks=module.sinks)).abs().max() < 1e-5


def test_an_unknown_tensor_is_refused_and_named() -> None:
    scene = Scene(LAYERS[0])
    with pytest.raises(Unsupported, match="position_bias"):
        scene.run(True, position_bias=torch.zeros(1))


def test_arguments_that_say_nothing_about_keys_are_accepted() -> None:
    scene = Scene(LAYERS[0])
    _, out = scene.run(True, position_ids=torch.zeros(1), sliding_window=5, is_causal=True)
    assert (out.double() - scene.wanted()).abs().max() < 1e-5


@pytest.mark.parametrize(("mask", "refused"), [(torch.zeros(1), "mask"), (None, "not its session's")])
def test_masks_and_keys_of_unknown_origin_are_refused(mask: torch.Tensor | None, refused: str) -> None:
    scene = Scene(LAYERS[0])
    attention = PackedAttention(scene.layers)
    with attention.running(scene.step), pytest.raises(Unsupported, match=refused):
        attention(first_layer(), scene.query, scene.key, scene.value, mask)


def test_a_call_outside_of_a_step_is_refused() -> None:
    scene = Scene(LAYERS[0])
    attention, _ = scene.run(True)
    with pytest.raises(Unsupported, match="outside"):
        attention(first_layer(), scene.query, scene.key, scene.value, None)
