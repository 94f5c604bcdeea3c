"""Layers that attend to latents: what they are measured to be, and attention over their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from session_kit import session_of

from cache.attention import packed_attention
from cache.attention.absorbed import Absorbed, NotLinear, basis, measure
from cache.attention.packed_attention import PackedAttention
from cache.attention.torch_attention import attend
from cache.memory.memory_tier import MemoryTier
from cache.pages.layers import AttentionLayer, Reach
from cache.pages.packed import PackedCache, PackedStep
from cache.pages.pool import Page

SIZE = 4
HEADS, LATENT, SHARED, OWN, WIDTH = 4, 12, 6, 10, 8


def make_absorbed(at: int = OWN) -> Absorbed:
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(HEADS, LATENT, OWN, generator=random)
    return Absorbed(keys, torch.randn(HEADS, WIDTH, LATENT, generator=random), SHARED, at)


def made_of_basis(absorbed: Absorbed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = basis(LATENT, SHARED, 5, torch.zeros(1))
    keys, values = absorbed.expand(rows)
    return rows, keys.transpose(0, 1), values.transpose(0, 1)


@pytest.mark.parametrize("at", [OWN, 0])
def test_the_weights_of_all_heads_are_measured(at: int) -> None:
    absorbed = make_absorbed(at)
    rows, keys, values = made_of_basis(absorbed)
    found = measure(rows, LATENT, keys, values, 1e-5)
    assert torch.equal(found.keys, absorbed.keys)
    assert torch.equal(found.values, absorbed.values)
    assert (found.latent, found.shared, found.at, found.width) == (LATENT, SHARED, at, LATENT + SHARED)


@pytest.mark.parametrize("change", ["bias", "curve", "scaled", "unlike", "position"])
def test_what_is_no_such_function_is_refused(change: str) -> None:
    rows, keys, values = made_of_basis(make_absorbed())
    if change == "bias":
        values = values + 0.1
    elif change == "curve":
        keys = torch.cat([keys[..., :OWN].tanh(), keys[..., OWN:]], -1)
    elif change == "scaled":
        keys = torch.cat([keys[..., :OWN], 0.5 * keys[..., OWN:]], -1)
    elif change == "unlike":
        keys = keys * torch.arange(1, HEADS + 1)[:, None, None]
    else:
        keys = keys * torch.linspace(1, 1.1, len(rows))[:, None]
    with pytest.raises(NotLinear):
        measure(rows, LATENT, keys, values, 1e-5)


def test_many_queries_pay_for_keys_and_values() -> None:
    wide = Absorbed(torch.zeros(16, 512, 128), torch.zeros(16, 128, 512), 64, 128)
    assert wide.most == 512 * 256 // (1024 - 256)
    assert make_absorbed().most == LATENT * (OWN + WIDTH) // (2 * LATENT - OWN - WIDTH)
    assert Absorbed(torch.zeros(2, 8, 8), torch.zeros(2, 8, 8), 4, 8).most > 1 << 20


class Scene:
    """Three sessions in one step over one absorbed layer, whose rows are in pages."""

    def __init__(self, hide: bool) -> None:
        torch.manual_seed(3)
        self.layers = [AttentionLayer(Reach.FULL, None, stores=True)]
        self.absorbed, self.tier = make_absorbed(), MemoryTier(20, SIZE, torch.device("cpu"))
        slots, work = torch.randperm(20).tolist(), []
        self.rows: list[torch.Tensor] = []
        for cached, new in ((0, 5), (11, 1), (6, 7)):
            session = session_of(range(cached + new), new)
            session.pages = [Page(self.tier, slots.pop()) for _ in range(-(-(cached + new) // SIZE))]
            self.rows.append(torch.randn(cached + new, LATENT + SHARED))
            places = torch.tensor([session.pages[p // SIZE].slot * SIZE + p % SIZE for p in range(cached)])
            self.tier.write_rows(0, places.long(), self.rows[-1][:cached], LATENT)
            if hide and cached:
                session.hide(3, 5)
            work.append((session, new))
        self.step = PackedStep(work, self.tier)
        self.query = torch.randn(1, HEADS, self.step.tokens, OWN + SHARED)

    def run(self) -> torch.Tensor:
        attention, module = PackedAttention(self.layers), torch.nn.Module()
        module.layer_idx = 0  # type: ignore[assignment]
        attention.absorbed = {0: self.absorbed}
        new = torch.cat([rows[s.start :] for rows, s in zip(self.rows, self.step.spans, strict=True)])[None, None]
        cache = PackedCache(self.layers, self.step, frozenset(), joined={0: self.absorbed.serves})
        with attention.running(self.step):
            key, value = cache.update(new[..., :LATENT], new[..., LATENT:], 0)
            if not self.absorbed.serves(self.step):  # what the layer's own code does then
                made = self.absorbed.expand(torch.cat([key, value], -1)[0, 0])
                key, value = (part.transpose(0, 1)[None] for part in made)
            out: Any = attention(module, self.query, key, value, None, scaling=0.3)
        result: torch.Tensor = out[0]
        return result

    def wanted(self) -> torch.Tensor:
        out = []
        for number, (span, rows) in enumerate(zip(self.step.spans, self.rows, strict=True)):
            keys, values = self.absorbed.expand(rows)
            query = self.query[0, :, span.row : span.row + span.size]
            out.append(attend(query, keys, values, self.step.mask(number, self.layers[0], 0), 0.3).transpose(0, 1))
        return torch.cat(out)[None]


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("most", [0, 1, 5, 100])
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_to_rows_is_attention_to_the_keys_that_they_make(
    hide: bool, most: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of none, some or all spans keys and values are made, of all by the layer; with the kernel and with torch."""
    monkeypatch.setattr(Absorbed, "most", most)
    if not compiled:
        monkeypatch.setattr(packed_attention, "backends", lambda device: [])
    scene = Scene(hide)
    got, want = scene.run(), scene.wanted()
    assert got.shape == (1, scene.step.tokens, HEADS, WIDTH)
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


def test_a_row_is_stored_once_and_with_adapters_given_as_it_was() -> None:
    scene = Scene(False)
    scene.step.adapted = object()
    cache = PackedCache(scene.layers, scene.step, frozenset(), joined={0: scene.absorbed.serves})
    new = torch.cat([rows[s.start :] for rows, s in zip(scene.rows, scene.step.spans, strict=True)])[None, None]
    key, value = cache.update(new[..., :LATENT], new[..., LATENT:], 0)
    assert torch.equal(torch.cat([key, value], -1)[0, 0], torch.cat(scene.rows))
    assert list(scene.tier.pools) == ["0.key"]
    assert scene.tier.token_bytes == (LATENT + SHARED) * 4
