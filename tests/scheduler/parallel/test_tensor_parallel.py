"""A model divided between two ranks says what it says on one: this process is rank 0, another one follows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_kit import LAYERS, Driver, config_of, conversations, loaded, prompt_of
from speculation_kit import feed_all_drafts
from tiny_models import greedy, logits, make_model, model_of, save_model
from transformers import Gemma2Config, LlamaConfig, MambaConfig, T5Config

from cache.tier import Tier
from cache.tiers import transfer
from scheduler.model.loader import LoadedModel, LoadFailed, load
from scheduler.model.memory import TooSmall
from scheduler.parallel.division import obstacle
from scheduler.protocol import pack_ids
from scheduler.sampling_params import ThinkingBudget

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on a CPU are for machines without a GPU"),
]

Pair = tuple[str, LoadedModel, Path]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A model on two ranks: one with full attention, one with windows."""
    with loaded(request.param, tmp_path_factory.mktemp("models"), 2) as (found, folder):
        yield request.param, found, folder


def stored_of(driver: Driver, session: str, length: int) -> dict[str, torch.Tensor]:
    """The keys and values of a session."""
    found, pool = driver.store.find("a", session), driver.store.pool
    assert found is not None
    rows = [transfer.rows_of(found.pages, 16, 0, length, near) for near in (False, True)]
    return pool.device.gather(rows[0], rows[1] if pool.windows is not None else None)


# -- the same words ----------------------------------------------------------------------------------------------------


def test_what_the_server_is_told(pair: Pair) -> None:
    _, found, model = pair
    driver = Driver(found, config_of(model, 2, pages=40))
    assert (driver.facts.mode, driver.facts.tensor_parallel) == ("packed", 2)
    assert (
        driver.facts.kv_bytes_per_token == LAYERS.get(pair[0], 2) * 2 * 2 * 16 * 4
    )  # layers, K and V, heads of both ranks, dim, bytes
    assert driver.facts.pages == 40  # half of every page
    assert driver.facts.parameters == sum(p.numel() for p in model_of(pair[0]).parameters())
    assert driver.facts.weight_bytes == sum(p.nbytes for p in model_of(pair[0]).parameters())


def test_conversations_through_the_host(pair: Pair) -> None:
    name, found, model = pair
    driver = Driver(found, config_of(model, 2, pages=10, host_pages=40, max_step_tokens=32))
    conversations(driver, name, sessions=5, turns=3)
    assert driver.engine.stats().tier(Tier.DEVICE).evictions
    assert any(o.admitted and o.receipt.count_reused(Tier.HOST) for o in driver.outcomes.values())


def test_turns_that_do_not_fit_together(pair: Pair) -> None:
    name, found, model = pair
    driver = Driver(found, config_of(model, 2, pages=6))
    prompts = [prompt_of(30, i) for i in range(3)]
    sent = [driver.send(prompt, 30) for prompt in prompts]
    driver.run()
    assert driver.engine.stats().preemptions
    for turn, prompt in zip(sent, prompts, strict=True):
        assert driver.outcomes[turn].tokens == greedy(model_of(name), prompt, 30, driver.outcomes[turn].tokens)


def test_forks_and_rewinds(pair: Pair) -> None:
    name, found, model = pair
    driver = Driver(found, config_of(model, 2))
    trunk = prompt_of(37)
    first = driver.ask(trunk, 5, "a").tokens
    branches = [[*trunk, *first, 7, 8], [*trunk[:29], 3, 4, 5], [*trunk, 9]]
    sent = [driver.send(branch, 5, session) for branch, session in zip(branches, (None, "b", "c"), strict=True)]
    driver.run()
    rewound = [*trunk[:11], 60, 61]
    sent.append(driver.send(rewound, 5, "a"))
    driver.run()
    for turn, prompt in zip(sent, [*branches, rewound], strict=True):
        assert driver.outcomes[turn].tokens == greedy(model_of(name), prompt, 5, driver.outcomes[turn].tokens)
    receipts = [driver.outcomes[turn].receipt for turn in sent]
    assert [r.cached for r in receipts if r is not None] == [41, 29, 37, 11]


def test_tokens_that_are_forced_are_those_of_every_rank(pair: Pair) -> None:
    name, found, model = pair
    driver = Driver(found, config_of(model, 2, pages=6))
    end = tuple(b"</think>")
    budget = ThinkingBudget(tokens=5, openings=("<think>",), closings=("</think>",), end=end, opened=True)
    prompts = [prompt_of(30, i) for i in range(3)]
    sent = [driver.send(prompt, 30, thinking=budget) for prompt in prompts]
    driver.run()
    assert driver.engine.stats().preemptions
    for turn, prompt in zip(sent, prompts, strict=True):
        tokens = driver.outcomes[turn].tokens
        cut = next(at for at in range(30) if tuple(tokens[at : at + len(end)]) == end)
        before = tokens[:cut]
        assert 5 <= cut <= 8  # a character is completed
        assert before == greedy(model_of(name), prompt, cut, before)
        rest = tokens[cut + len(end) :]
        assert len(tokens) == 30
        assert rest == greedy(model_of(name), [*prompt, *before, *end], len(rest), rest)


def test_drafted_tokens_are_verified_on_every_rank(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    feed_all_drafts(monkeypatch)
    name, found, model = pair
    driver = Driver(found, config_of(model, 2, pages=8, speculate="auto"))
    prompts = [prompt_of(30, i) for i in range(3)]
    said = [greedy(model_of(name), prompt, 20) for prompt in prompts]
    sent = [
        driver.send(prompt, 20, prediction=pack_ids([*one[:7], 9, *one[8:]]))
        for prompt, one in zip(prompts, said, strict=True)
    ]
    driver.run()
    assert [driver.outcomes[turn].tokens for turn in sent] == said
    stats = driver.engine.stats()
    assert stats.drafted["prediction"] > stats.accepted["prediction"] > 30


def test_log_probabilities_of_a_prompt(pair: Pair) -> None:
    name, found, model = pair
    driver = Driver(found, config_of(model, 2, max_step_tokens=24))
    prompt = prompt_of(50, 3)
    outcome = driver.ask(prompt, 1, prompt_logprobs=0)
    got = next(delta.prompt_logprobs for delta in outcome.deltas if delta.prompt_logprobs)
    want = logits(model_of(name), prompt)
    expected = torch.log_softmax(want, -1)[range(49), prompt[1:]]
    told = torch.tensor([one.logprob for one in got[1:]])
    assert len(told) == 49
    assert float((told - expected).abs().max()) <= 1e-4 * float(want.abs().max())


# -- the same files ----------------------------------------------------------------------------------------------------


def test_files_are_those_of_one_rank(pair: Pair, tmp_path: Path) -> None:
    name, found, model = pair
    both = Driver(found, config_of(model, 2, kv_folder=str(tmp_path / "kv")))
    single = load(config_of(model, 1), lambda message: None)
    prompt = prompt_of(45, 4)

    first = both.ask(prompt, 6, "s").tokens
    saved = both.store.find("a", "s")
    assert saved is not None
    here = stored_of(both, "s", saved.length)
    both.leave()

    one = Driver(single, config_of(model, 1, kv_folder=str(tmp_path / "kv")))
    assert one.facts.fingerprint == both.facts.fingerprint
    assert one.facts.kv_bytes_per_token == both.facts.kv_bytes_per_token
    assert one.store.pool.device.token_shapes == both.store.pool.device.token_shapes
    again = [*prompt, *first, 1, 2, 3]
    outcome = one.ask(again, 6, "s")
    assert (outcome.receipt.count_reused(Tier.DISK), outcome.receipt.cached) == (50, 50)
    assert outcome.tokens == greedy(model_of(name), again, 6, outcome.tokens)
    there = stored_of(one, "s", saved.length)
    assert all(torch.equal(here[kind], there[kind]) for kind in here)  # what was loaded
    one.ask(prompt, 1, prompt_logprobs=0)  # from the first token
    one.leave()

    both = Driver(found, config_of(model, 2, kv_folder=str(tmp_path / "kv")))
    third = [*again, *outcome.tokens, 4, 5]
    last = both.ask(third, 6, "s")
    assert (last.receipt.count_reused(Tier.DISK), last.receipt.cached) == (len(third) - 3, len(third) - 3)
    assert last.tokens == greedy(model_of(name), third, 6, last.tokens)
    both.leave()


def test_keys_and_values_are_those_of_one_rank(pair: Pair) -> None:
    """In the order of one rank, which the files of both rely on."""
    _, found, model = pair
    prompt = prompt_of(40, 5)
    gathered: list[dict[str, Any]] = []
    for ranks, source in ((2, found), (1, load(config_of(model, 1), lambda message: None))):
        driver = Driver(source, config_of(model, ranks))
        driver.ask(prompt, 1, "s")
        gathered.append(stored_of(driver, "s", 40))
    two, one = gathered
    assert list(two) == list(one)
    for kind, tensor in one.items():
        assert torch.allclose(two[kind], tensor, rtol=1e-4, atol=1e-4)


def test_too_little_memory_is_told(pair: Pair) -> None:
    _, found, model = pair  # bytes of two layers: of all, or of the windowed ones
    with pytest.raises(TooSmall, match="--kv-memory 4096 bytes hold 1 pages of 4096 bytes"):
        Driver(found, config_of(model, 2, kv_memory=4096))


# -- what is refused ---------------------------------------------------------------------------------------------------

_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}


@pytest.mark.parametrize(
    ("settings", "ranks", "reason"),
    [
        (LlamaConfig(**_HEADS), 2, "its 3 key heads cannot be divided by 2"),
        (LlamaConfig(**_HEADS), 4, "its 6 attention heads cannot be divided by 4"),
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=2), 4, "its 2 key heads cannot be divided by 4"),
        (LlamaConfig(**_HEADS), 3, None),
        (Gemma2Config(), 2, None),
        (LlamaConfig(quantization_config={"quant_method": "gptq"}), 2, "quantised weights cannot be divided"),
        (MambaConfig(), 2, "transformers has no plan for dividing its layers"),
        (T5Config(), 2, "an encoder-decoder model cannot be divided"),
    ],
)
def test_what_can_be_divided(settings: Any, ranks: int, reason: str | None) -> None:
    assert obstacle(settings, ranks, CPU) == reason


def test_a_model_that_cannot_be_divided_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"--tensor-parallel 3: its 4 attention heads cannot be divided by 3$"):
        load(config_of(save_model("llama", tmp_path), 3), lambda message: None)


def test_the_oracle_would_notice_another_model() -> None:
    prompt = prompt_of(30)
    assert greedy(make_model("llama", seed=1), prompt, 6) != greedy(model_of("llama"), prompt, 6)
