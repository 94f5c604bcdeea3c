"""Turns with adapters say what a model with merged weights says from scratch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kit import ALL, check_turn, make_parts, merged, save_adapter
from engine_kit import Kit
from tiny_models import greedy, logits, make_model

from cache.tier import Tier
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.turn_receipt import Miss

PROMPT = [65 + i % 23 for i in range(11)]
Serve = Callable[..., Kit]


@cache
def plain_of(name: str) -> Any:
    """The model as it was saved, for all tests."""
    return make_model(name)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes kits, whose models are as they were afterwards."""
    kits: list[Kit] = []

    def make(*args: Any, **options: Any) -> Kit:
        kits.append(Kit(*args, **options))
        return kits[-1]

    yield make
    for kit in reversed(kits):
        kit.adapters.remove()


def load(kit: Kit, folder: Path, name: str, seed: int, targets: tuple[str, ...] = ALL, rank: int = 4) -> Any:
    """Load a random adapter; returns the model with its weights merged."""
    plain = plain_of(kit.name)
    parts = make_parts(plain, targets, rank, seed)
    kit.adapters.load(name, save_adapter(folder / f"{name}-{seed}", parts, rank, 2 * rank))
    return merged(plain, parts, 2.0)


def test_ranks_factors_and_modules_are_those_of_the_checkpoint(serve: Serve, tmp_path: Path) -> None:
    """Rank-stabilised, ranks and alphas of single modules, the output head too, in bfloat16, and names of another
    transformers."""
    kit = serve()
    plain = plain_of("llama")
    ranks = {"k_proj": 2, "lm_head": 3}
    parts = make_parts(plain, ("q_proj", "k_proj", "down_proj", "lm_head"), 5, 0, ranks)
    parts = {name: (down.bfloat16(), up.bfloat16()) for name, (down, up) in parts.items()}
    other_names = {name.replace("model.layers", "language_model.layers"): pair for name, pair in parts.items()}
    patterns = {"rank_pattern": {"k_proj": 2, "lm_.ead": 3}, "alpha_pattern": {r"layers\.\d+\.mlp\.down_proj": 9}}
    folder = save_adapter(tmp_path / "x", other_names, 5, 6, use_rslora=True, **patterns)
    adapter = kit.adapters.load("x", folder)
    assert adapter.rank == 5
    alphas = {"q_proj": 6 / math.sqrt(5), "k_proj": 6 / math.sqrt(2), "down_proj": 9 / math.sqrt(5)}
    model = merged(plain, parts, alphas | {"lm_head": 6 / math.sqrt(3)})
    kit.send(PROMPT, 4)
    kit.check(model, [PROMPT, [*PROMPT, 66]], 3, adapter="x")
    assert greedy(model, PROMPT, 3) != greedy(plain, PROMPT, 3)
    asked = kit.ask(PROMPT, 1, adapter="x", prompt_logprobs=0)
    given = [one for delta in asked.deltas for one in delta.prompt_logprobs]
    want = logits(model, PROMPT).log_softmax(-1)
    assert [one.logprob for one in given[1:]] == pytest.approx(
        [float(want[i, token]) for i, token in enumerate(PROMPT[1:])], abs=1e-4
    )


def test_programs_add_what_modules_add(serve: Serve, tmp_path: Path) -> None:
    """The same turns with the model's own layers, and with programs in their place, held against float64.

    Not against each other: transformers' own float32 forward of this model is 8e-6 off in a log-probability, and two
    that differ to either side have been 1.3e-5 apart.
    """
    kit = serve()
    model = load(kit, tmp_path, "a", 0)
    assert kit.mode.fusion is not None or not kernel()
    calls = []

    def count(wrapped: Callable[..., Any], x: torch.Tensor) -> Any:
        calls.append(1)
        return wrapped(x)

    for module in [found for found in kit.model.modules() if isinstance(vars(found).get("forward"), partial)]:
        module.forward = partial(count, module.forward)
    with_programs = kit.ask(PROMPT, 5, adapter="a", logprobs=0)
    beside = len(calls)  # of modules that were not faster as programs, when that was timed
    calls.clear()
    fusion, kit.mode.fusion = kit.mode.fusion, None
    kit.store.forget("a", "s")
    without = kit.ask([*PROMPT], 5, adapter="a", logprobs=0, salt="anew")
    kit.mode.fusion = fusion
    assert len(calls) >= max(1, beside)
    assert with_programs.tokens == without.tokens
    exact = logits(model.double(), [*PROMPT, *without.tokens[:-1]])[len(PROMPT) - 1 :].log_softmax(-1)
    want = exact.gather(1, torch.tensor(without.tokens)[:, None])[:, 0].tolist()
    for outcome in (with_programs, without):
        assert [one.logprob for delta in outcome.deltas for one in delta.logprobs] == pytest.approx(want, abs=1.2e-5)


def test_sessions_are_resumed_forked_and_moved_between_adapters(serve: Serve, tmp_path: Path) -> None:
    """KV is reused with the adapter that computed it, and with no other."""
    kit = serve()
    plain, model = plain_of("llama"), load(kit, tmp_path, "a", 0)

    def turn(prompt: list[int], adapter: str, reused: int, miss: Miss | None = None, session: str = "s") -> list[int]:
        return check_turn(kit, model if adapter else plain, prompt, 4, reused, miss, adapter=adapter, session=session)

    said = turn(PROMPT, "a", 0)
    said = turn([*said, 66, 67], "a", len(said) - 1)
    turn([*said, 70], "a", len(said) - 1, session="fork")
    said = turn([*said, 68], "", 0, Miss.ADAPTER)
    said = turn([*said, 69], "", len(said) - 1)
    turn(said[:9], "a", 8, session="third")  # from the fork
    turn(said[:3], "a", 2, session="short")
    turn(PROMPT, "", len(PROMPT) - 1, session="plain")


def test_stored_kv_belongs_to_the_weights_that_computed_it(serve: Serve, tmp_path: Path) -> None:
    """After an eviction and a restart it is loaded for the same adapter, and not for another one of that name."""
    first = serve(folder=tmp_path / "kv")
    model = load(first, tmp_path, "a", 0)
    said = [*PROMPT, *first.ask(PROMPT, 4, adapter="a", session="s").tokens]
    first.leave()
    kit = serve(folder=tmp_path / "kv")
    load(kit, tmp_path, "renamed", 0)
    went_on = kit.ask(said, 4, adapter="renamed", session="s")
    assert went_on.tokens == greedy(model, said, 4, went_on.tokens)
    assert went_on.receipt.loaded == {Tier.DISK: len(said) - 1}
    kit.leave()
    last = serve(folder=tmp_path / "kv")
    changed = load(last, tmp_path, "a", 5)
    anew = last.ask(said, 4, adapter="a", session="s")
    assert anew.tokens == greedy(changed, said, 4, anew.tokens)
    assert (anew.receipt.cached, anew.receipt.miss) == (0, Miss.ADAPTER)
    last.leave()


def test_a_turn_keeps_the_adapter_with_which_it_began(serve: Serve, tmp_path: Path) -> None:
    """Whatever is loaded under its name, or unloaded, while it runs."""
    kit = serve()
    model = load(kit, tmp_path, "a", 0)
    turn = kit.send(PROMPT, 8, adapter="a")
    kit.step()
    changed = load(kit, tmp_path, "a", 1)
    other = kit.send(PROMPT, 8, adapter="a")
    kit.step()
    assert kit.adapters.unload("a")
    assert not kit.adapters.unload("a")
    with pytest.raises(ValueError, match="model_not_found"):
        kit.send(PROMPT, 8, adapter="a")
    kit.run()
    for asked, want in ((turn, model), (other, changed)):
        said = kit.outcomes[asked].tokens
        assert said == greedy(want, PROMPT, 8, said)


def test_preempted_and_drafted_turns(serve: Serve, tmp_path: Path) -> None:
    """With few pages, and with drafts, the tokens stay the same."""
    kit = serve(pages=14, speculates=True, step_tokens=8)
    model = load(kit, tmp_path, "a", 0)
    prompts = [[*PROMPT, 65 + n, *PROMPT[:4]] for n in range(4)]
    want = greedy(model, prompts[0], 8)
    turns = [kit.send(prompt, 8, adapter="a", prediction=want) for prompt in prompts]
    kit.run()
    for turn, prompt in zip(turns, prompts, strict=True):
        said = kit.outcomes[turn].tokens
        assert said == greedy(model, prompt, 8, said)
    assert kit.scheduler.preemptions
    assert sum(kit.speculator.accepted.values())


def test_a_loaded_adapter_changes_no_step_without_it(serve: Serve, tmp_path: Path) -> None:
    kit = serve()
    before = kit.ask(PROMPT, 4, logprobs=0)
    load(kit, tmp_path, "a", 0)
    after = kit.ask(PROMPT, 4, logprobs=0, salt="anew")
    assert [delta.logprobs for delta in after.deltas] == [delta.logprobs for delta in before.deltas]
    kit.adapters.remove()
    assert not [module for module in kit.model.modules() if isinstance(vars(module).get("forward"), partial)]
