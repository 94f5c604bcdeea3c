"""KV at a byte a number (``--kv-dtype``): every reply equals a from-scratch forward whose keys and values are rounded,
whatever has become of the pages in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import PAGE, Kit, Outcome, crowded_rounds, ids
from tiny_models import greedy, model_of
from transformers import DynamicCache

from cache.memory.codec import Codec
from cache.tier import Tier
from cache.tiers import transfer

ROUNDED = (Codec.INT8, Codec.FP8)
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"host_pages": 64, "pages": 40},
    "disk": {"folder": True, "pages": 40},
    "preempted": {"pages": 24, "step_tokens": 16},
    "windows": {"divided": True, "folder": True, "pages": 40},
}
CASES = (
    *(("llama", Codec.INT8, tier) for tier in ("device", "host", "disk", "preempted")),
    ("gemma2", Codec.INT8, "device"),  # soft caps
    ("gemma3", Codec.INT8, "windows"),
    ("gpt_oss", Codec.FP8, "host"),  # sinks, experts
    ("gpt_oss", Codec.FP8, "windows"),
    ("llama", Codec.FP8, "disk"),
)


def rounded(tokens: torch.Tensor, codec: Codec) -> torch.Tensor:
    """``tokens [..., dim]`` as a byte a number and a scale a row give them back."""
    top = 127.0 if codec is Codec.INT8 else 448.0
    scales = tokens.abs().amax(-1, keepdim=True) / top
    numbers = tokens / scales
    return (numbers.round() if codec is Codec.INT8 else numbers.to(torch.float8_e4m3fn).float()) * scales


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """The model's own cache, for a from-scratch forward, but keys and values are rounded."""

    def __init__(self, config: Any, codec: Codec) -> None:
        super().__init__(config=config)
        self.codec = codec

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(rounded(key, self.codec), rounded(value, self.codec), *args, **kwargs)


@torch.inference_mode()
def wanted(name: str, prompt: list[int], tokens: list[int], codec: Codec) -> list[int]:
    """The likeliest token at each place where the engine has drawn ``tokens``, by one forward from scratch."""
    model = model_of(name)
    fed = torch.tensor([[*prompt, *tokens[:-1]]])
    logits = model(input_ids=fed, past_key_values=RoundedCache(model.config, codec), use_cache=True).logits[0]
    best: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return best


def check(kit: Kit, prompt: list[int], codec: Codec, count: int = 4, **options: Any) -> Outcome:
    """One turn whose tokens must be those of a from-scratch forward over rounded keys and values."""
    outcome = kit.ask(prompt, count, **options)
    assert outcome.tokens == wanted(kit.name, prompt, outcome.tokens, codec)
    return outcome


def kit_of(name: str, codec: Codec, tmp_path: Path, **options: Any) -> Kit:
    folder: dict[str, Any] = {"folder": tmp_path} if options.pop("folder", False) else {}
    return Kit(name, kv=codec, **options, **folder)


@pytest.mark.parametrize(("name", "codec", "tier"), CASES)
def test_chats_that_share_memory(name: str, codec: Codec, tier: str, tmp_path: Path) -> None:
    kit = kit_of(name, codec, tmp_path, **TIERS[tier])
    for _ in crowded_rounds(kit, 4, 3, lambda prompt, said: wanted(name, prompt, said, codec)):
        if kit.store.archive is not None:
            kit.settle()


@pytest.mark.parametrize("codec", ROUNDED)
def test_rounding_is_seen_in_what_is_said(codec: Codec) -> None:
    """Else the oracle could be the exact one."""
    kit = Kit(kv=codec, pages=512)
    said = [(prompt, check(kit, prompt, codec, 12).tokens) for prompt in (ids(30, seed) for seed in range(12))]
    assert any(tokens != greedy(kit.model, prompt, 12) for prompt, tokens in said)


@pytest.mark.parametrize("codec", ROUNDED)
def test_pages_that_come_back_from_disk_and_host_have_the_same_bytes(codec: Codec, tmp_path: Path) -> None:
    kit = kit_of("llama", codec, tmp_path, folder=True)
    said = check(kit, ids(50), codec, session="s")
    kit.settle()
    session = kit.find("s")
    before = kit.pool.device.gather(transfer.rows_of(session.pages, PAGE, 0, 53))
    assert {tensor.dtype for tensor in before.values()} == {torch.uint8}
    kit.leave()
    anew = kit_of("llama", codec, tmp_path, folder=True)  # a restart
    more = [*ids(50), *said.tokens, 5]
    outcome = check(anew, more, codec, session="s")
    assert outcome.receipt.count_reused(Tier.DISK) == 53
    found = anew.find("s")
    after = anew.pool.device.gather(transfer.rows_of(found.pages, PAGE, 0, 53))
    assert all(torch.equal(after[name], before[name]) for name in before)
    anew.leave()


@pytest.mark.parametrize("codec", ROUNDED)
def test_files_of_other_kv_are_never_used(codec: Codec, tmp_path: Path) -> None:
    others = [other for other in Codec if other is not codec]
    for other in others:
        folder = tmp_path / str(other)
        kit = kit_of("llama", other, folder, folder=True)
        kit.ask(ids(50), 4, session="s")
        kit.settle()
        kit.leave()
        mine = Kit("llama", kv=codec)
        (folder / kit.fingerprint).rename(folder / mine.fingerprint)  # as if it were that model's
        anew = kit_of("llama", codec, folder, folder=True)
        outcome = check(anew, [*ids(50), 7], codec, session="s")
        assert outcome.receipt.cached == 0
        anew.leave()


@pytest.mark.parametrize("codec", ROUNDED)
def test_twice_the_sessions_fit(codec: Codec) -> None:
    """float32 becomes a byte and a share of a scale: 16 numbers and 8 bytes of 16 for two heads."""
    exact, small = Kit("llama"), Kit("llama", kv=codec)
    assert exact.pool.session_bytes(100) == 100 * 2 * 2 * 2 * 16 * 4
    assert small.pool.session_bytes(100) == 100 * 2 * 2 * (2 * 16 + 16)
    assert 2 * small.pool.page_bytes < exact.pool.page_bytes


def test_latents_stay_exact() -> None:
    kit = Kit("deepseek_v3", kv=Codec.INT8)
    assert {shape.codec for shape in kit.pool.device.shapes.values()} == {Codec.EXACT}
    assert kit.ask(ids(30), 4).tokens == greedy(kit.model, ids(30), 4)


@pytest.mark.parametrize("in_place", [False, True])
def test_layers_whose_keys_are_gathered_read_what_is_stored(in_place: bool) -> None:
    """A layer that is not read in place after all, as in the first steps of the probe."""
    kit = Kit(kv=Codec.INT8, in_place=True)
    kit.mode.in_place = kit.mode.in_place if in_place else frozenset()
    check(kit, ids(40), Codec.INT8, session="s")
    check(kit, ids(50), Codec.INT8, session="s")
