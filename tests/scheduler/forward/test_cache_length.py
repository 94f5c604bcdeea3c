"""Layers that ask their cache for its length get that of every row's own session."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from engine_kit import probed
from tiny_models import logits, make_model, of_unit_gain
from transformers import DynamicCache, Llama4TextConfig
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM, Llama4TextAttention

from cache.attention.packed_attention import PackedAttention
from cache.memory.memory_tier import MemoryTier
from cache.pages.layers import read_layers
from cache.pages.packed import PackedCache, PackedStep
from cache.pages.pool import PagePool
from cache.pages.session import SessionCache
from cache.store import SessionStore
from scheduler.accel.cpu.attention_interceptor import intercept_attention
from scheduler.accel.cpu.functions import COMPUTED
from scheduler.accel.cpu.recorder import Recorder, Unrecordable
from scheduler.forward.mode import installed
from scheduler.forward.trace import trace
from scheduler.model.runner import ModelRunner
from scheduler.model.verdict import Verdict

FLOOR = 8192  # the default of the architecture, for the chunks as well
PAGE = 16
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Any:
    """Llama 4 with its real thresholds and tiny widths; its last layer has no RoPE."""
    config = Llama4TextConfig(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=16,
        intermediate_size_mlp=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=1,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attention_chunk_size=FLOOR,
        floor_scale=FLOOR,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
    )
    torch.manual_seed(0)
    return of_unit_gain(Llama4ForCausalLM(config).float().eval())


@pytest.fixture(scope="module")
def verdict(model: Any) -> Verdict:
    return probed(model, PAGE)


@pytest.fixture(scope="module")
def first(model: Any) -> tuple[list[int], torch.Tensor]:
    """The tokens of the first long session as far as they are fed, and their logits from scratch: computed once."""
    ids = torch.randint(0, 259, (FLOOR + 120,), generator=torch.Generator().manual_seed(3)).tolist()[: FLOOR + 70]
    return ids, logits(model, ids)


def sessions_of(lengths: tuple[int, ...], tier: MemoryTier, store: SessionStore) -> list[SessionCache]:
    generator = torch.Generator().manual_seed(3)
    sessions = []
    for length in lengths:
        session = SessionCache("", None)
        session.token_ids = array("i", torch.randint(0, 259, (length,), generator=generator).tolist())
        session.warm = session.running = True
        store.reserve(session, length)
        sessions.append(session)
    return sessions


@pytest.mark.wide
def test_positions_past_the_real_floor_while_others_share_the_steps(
    model: Any, verdict: Verdict, first: tuple[list[int], torch.Tensor]
) -> None:
    """Prefill in chunks and decode on both sides of position 8,192, first, in the middle and last in a step."""
    assert verdict.mode.name == "packed"
    lengths = (FLOOR + 120, 70, FLOOR + 40)
    tier = MemoryTier(2 * (FLOOR + 160) // PAGE + 16, PAGE, torch.device("cpu"))
    pool = PagePool(tier, MemoryTier(0, PAGE, torch.device("cpu")))
    sessions = sessions_of(lengths, tier, SessionStore(pool, None, None))
    runner = ModelRunner(verdict.mode, tier)
    steps: list[tuple[tuple[int, int], ...]] = [((0, FLOOR - 50),), ((1, 20), (2, FLOOR - 5))]
    steps += [((2, 1), (1, 1), (0, 1))] * 10  # session 2 crosses
    steps += [((1, 3), (0, 90), (2, 3)), ((1, 7), (2, 17), (0, 5)), *[((1, 1), (0, 1), (2, 1))] * 15]
    got: list[list[torch.Tensor]] = [[], [], []]
    with installed(verdict.mode):
        for work in steps:
            rows = runner.run([(sessions[i], n) for i, n in work], range(sum(n for _, n in work)))
            for (i, _), part in zip(work, torch.split(rows, [n for _, n in work]), strict=True):
                got[i].append(part)
        verdict.mode.remove()
    for session, parts in zip(sessions, got, strict=True):
        ids = list(session.token_ids[: session.length])
        want = first[1] if ids == first[0] else logits(model, ids)
        assert (torch.cat(parts) - want).abs().max() <= TOLERANCE * want.abs().max(), session.length
    assert list(sessions[0].token_ids[: sessions[0].length]) == first[0]
    assert sessions[2].length > FLOOR + 20


def test_the_floor_matters(model: Any, first: tuple[list[int], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above could not fail."""
    ids, right = first
    for module in model.modules():
        if isinstance(module, Llama4TextAttention):
            monkeypatch.setattr(module, "floor_scale", 10 * FLOOR)
    wrong = logits(model, ids)
    assert torch.equal(wrong[: FLOOR - 1], right[: FLOOR - 1])
    assert (wrong - right)[FLOOR - 1 :].abs().max() > 10 * TOLERANCE * right.abs().max()


def step_of(lengths: tuple[int, ...], counts: tuple[int, ...]) -> PackedStep:
    tier = MemoryTier(64, PAGE, torch.device("cpu"))
    store = SessionStore(PagePool(tier, MemoryTier(0, PAGE, torch.device("cpu"))), None, None)
    sessions = sessions_of(tuple(a + b for a, b in zip(lengths, counts, strict=True)), tier, store)
    for session, length in zip(sessions, lengths, strict=True):
        session.on_fed(length)
    return PackedStep(list(zip(sessions, counts, strict=True)), tier)


@pytest.fixture
def caches(model: Any) -> Any:
    layers = read_layers(model.config)
    step = step_of((30, 0, 7), (2, 3, 1))
    return lambda by_row: PackedCache(layers, step, frozenset(), by_row=by_row)


def test_a_length_is_told_by_row(caches: Any) -> None:
    cache = caches(True)
    for asked in (cache.get_seq_length(1), cache.get_query_offset(1), cache.layers[0].get_seq_length()):
        assert (torch.arange(6) + asked).tolist() == [30, 31, 0, 1, 2, 7]
    with pytest.raises(RuntimeError):
        bool(cache.get_seq_length() > 0)  # whoever wants one number for all fails
    assert caches(False).get_seq_length() == 0


@pytest.mark.parametrize("name", ["llama4", "llama", "gemma3", "longrope"])
def test_nobody_but_layers_asks_where_positions_are_told(name: str) -> None:
    assert trace(make_model(name)).by_row


class _Asking(LlamaModel):  # type: ignore[misc]  # transformers is untyped
    """Asks for a length that it makes nothing of."""

    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        cache = past_key_values if past_key_values is not None else DynamicCache(config=self.config)
        if cache.get_seq_length() > 100_000:
            raise ValueError("too long")
        return super().forward(*args, past_key_values=cache, **kwargs)


def test_a_model_that_asks_outside_of_its_layers_runs_packed() -> None:
    model = make_model("llama")
    model.model.__class__ = _Asking
    assert not trace(model).by_row
    verdict = probed(model, PAGE)
    assert verdict.mode.name == "packed"


def test_a_length_is_no_part_of_a_program(caches: Any) -> None:
    cache = caches(True)
    recorder = Recorder(6, [], [], COMPUTED)
    with intercept_attention(recorder, PackedAttention(read_layers(make_model("llama").config)), cache, []):
        for ask in (cache.get_seq_length, cache.layers[0].get_seq_length):
            with pytest.raises(Unrecordable, match="length"):
                ask()
    assert len(cache.get_seq_length()) == 6
