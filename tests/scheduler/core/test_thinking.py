"""Budgets of reasoning: what is forced, when, and that all other tokens are those of a from-scratch forward."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_kit import END, Kit, Outcome
from msgspec.structs import replace
from tiny_models import greedy, logits

from scheduler.core.thinking import ThinkingState, count_begun, find_first
from scheduler.protocol import FinishReason
from scheduler.sampling_params import Sampling, Stopping, ThinkingBudget

HEAD = '%llguidance {"no_forcing": true}\n'
PROMPT = [65, 10, 66, 23]
MESSAGE, CLOSING = "\n\nEnough.", "</think>"
END_IDS = tuple(b"\n</think>\n\n")
BUDGET = ThinkingBudget(
    tokens=6,
    openings=("<think>",),
    closings=(CLOSING,),
    end=END_IDS,
    opened=True,
    message=tuple(MESSAGE.encode()),
    rests=tuple(tuple(f"{CLOSING[size:]}\n\n".encode()) for size in range(1, len(CLOSING))),
)
FORCED = [*BUDGET.message, *BUDGET.end]


def follow(budget: ThinkingBudget, wanted: str, count: int) -> tuple[str, ThinkingState]:
    """The text of ``count`` tokens of a model that writes ``wanted``, byte by byte, wherever it is free to."""
    state = ThinkingState(budget, lambda token: bytes([token]))
    free = iter(wanted.encode())
    said = []
    for _ in range(count):
        token = state.forced if state.forced is not None else next(free, None)
        if token is None:
            break
        state.accept(token)
        said.append(token)
    return bytes(said).decode(), state


def scratch(model: Any, prompt: Sequence[int], count: int, forced: dict[int, int], seed: int) -> list[int]:
    """The oracle: draws of one random number each, from from-scratch forwards, with the tokens at ``forced`` given."""
    ids, numbers = [*prompt], random.Random(seed)
    for at in range(count):
        number = numbers.random()
        sums = torch.softmax(logits(model, ids)[-1].double(), -1).cumsum(-1)
        ids.append(forced.get(at, int(torch.searchsorted(sums, number * sums[-1], right=True))))
    return ids[len(prompt) :]


def pending(ids: Sequence[int]) -> bytes:
    """What of these bytes is the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(bytes(ids))
    return decoder.getstate()[0]


def reason(model: Any, prompt: Sequence[int], tokens: int, count: int) -> list[int]:
    """The oracle: a greedy reply of from-scratch forwards, cut behind ``tokens`` of reasoning and what the last
    character needs, closed, and gone on with."""
    before = greedy(model, [*prompt], tokens + 3)
    size = next(size for size in range(tokens, tokens + 4) if size == tokens + 3 or not pending(before[:size]))
    cut = [*before[:size], *FORCED]
    return [*cut, *greedy(model, [*prompt, *cut], count - len(cut))]


def told(outcome: Outcome) -> bool:
    """Whether the server was told that the reasoning was cut."""
    return any(delta.thinking_cut for delta in outcome.deltas)


# -- the state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "wanted", "said", "cut"),
    [
        ({}, "123456", "123456" + MESSAGE + "\n</think>\n\n", True),
        ({"tokens": 0}, "yes", "\n</think>\n\nyes", True),  # there was nothing that a message could end
        ({"tokens": 10}, "12</think>3456789", "12</think>3456789", False),
        ({}, "1234</yes", "1234</think>\n\nyes", False),  # what is begun is finished, once
        ({"rests": ()}, "1234</yes", "1234</" + MESSAGE + "\n</think>\n\nyes", True),
        ({}, "12</thyes", "12</think>\n\nyes", False),
        ({"message": ()}, "123456", "123456\n</think>\n\n", True),
        ({"opened": False}, " <think>123456yes", " <think>123456" + MESSAGE + "\n</think>\n\nyes", True),
        ({"opened": False}, "No <think>1234567", "No <think>1234567", False),  # not at the beginning: an answer
        ({"opened": False}, "<thin air>1234567", "<thin air>1234567", False),
        ({"opened": False, "tokens": 0}, "<think>yes", "<think>\n</think>\n\nyes", True),
        ({"tokens": 10}, "12</think>3<think>123456789", "12</think>3<think>123456789", False),  # that is content
        ({"tokens": 12}, "12</think> <think>123456789", "12</think> <think>123456789", False),
        ({"anywhere": True, "tokens": 16}, "1</think>3<think>456yes", "1</think>3<think>456yes", False),
        ({"anywhere": True, "tokens": 12}, "1</think><think>456</yes", "1</think><think>456" + MESSAGE, True),
    ],
)
def test_what_is_forced(budget: dict[str, Any], wanted: str, said: str, cut: bool) -> None:
    text, state = follow(replace(BUDGET, **budget), wanted, len(said))
    assert (text, state.cut) == (said, cut)


def test_what_counts_is_behind_the_opening_and_over_all_of_a_reply() -> None:
    budget = replace(BUDGET, opened=False, anywhere=True, answer=tuple(b"</think>!"), rests=())
    wanted = "ab<think>1</think>cd<think>yesand<think>more"
    # The first reasoning has 9 tokens to its end, of which the mark's are 8: the budget is spent.
    assert follow(replace(budget, tokens=9), wanted, 18)[0] == wanted[:18]
    text, _ = follow(replace(budget, tokens=10), wanted, 200)
    first = "ab<think>1</think>cd<think>y" + MESSAGE + "\n</think>\n\n"
    assert text == first + "esand<think></think>!more"  # the message is said once


def test_the_first_of_several_closings_counts() -> None:
    budget = replace(BUDGET, closings=("<|end|>", "<|start|>"), rests=(), tokens=40)
    text, state = follow(budget, "one<|start|>two" + "3" * 40, 55)
    assert (text, state.cut) == ("one<|start|>two" + "3" * 40, False)


def test_find_first() -> None:
    assert find_first(b"a<end>b<stop>", (b"<stop>", b"<end>")) == (1, 6)
    assert find_first(b"a<en", (b"<end>",)) is None


@pytest.mark.parametrize(("text", "begun"), [("x</th", 4), ("x</think>", 0), ("<", 1), ("</<", 1), ("", 0), ("ab", 0)])
def test_count_begun(text: str, begun: int) -> None:
    assert count_begun(text.encode(), CLOSING.encode()) == begun


@pytest.mark.parametrize("character", ["\u00e9", "\u20ac", "\U0001f600"])
def test_a_character_that_is_begun_is_finished(character: str) -> None:
    size = len(character.encode())
    for tokens in range(1, size + 1):
        text, _ = follow(replace(BUDGET, tokens=tokens, message=()), character + "yes", 40)
        assert text == character + "\n</think>\n\nyes"
    broken = ThinkingState(replace(BUDGET, tokens=2), lambda token: b"\xf0")  # what never becomes one
    for _ in range(5):
        assert broken.forced is None
        broken.accept(1)
    assert broken.forced == FORCED[0]


# -- in the engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mamba2"])
def test_a_greedy_reply_goes_on_from_its_forced_end(name: str) -> None:
    kit = Kit(name)
    outcome = kit.ask(PROMPT, 36, thinking=BUDGET)
    assert outcome.tokens == reason(kit.model, PROMPT, 6, 36)
    cut = [delta.thinking_cut for delta in outcome.deltas if delta.tokens]
    first = bytes(outcome.tokens).index(bytes(FORCED))
    assert cut == [False] * first + [True] * (36 - first)


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("overlaps", [False, True])
def test_seeded_draws_depend_on_seed_and_position(seed: int, overlaps: bool) -> None:
    kit = Kit(overlaps=overlaps)
    count = 6 + len(FORCED) + 9
    want = scratch(kit.model, PROMPT, count, dict(enumerate(FORCED, 6)), seed)
    wanted = Sampling(temperature=1.0, seed=seed)
    turns = [kit.send(PROMPT, count, sampling=wanted, thinking=BUDGET)]
    kit.send([1, 2, 3], 30, sampling=Sampling(temperature=1.0))  # company
    kit.run()
    assert kit.outcomes[turns[0]].tokens == want
    assert want[:6] == kit.ask(PROMPT, 6, sampling=wanted).tokens  # without a budget


def test_a_preempted_turn_goes_on_where_it_was() -> None:
    kit = Kit(pages=20, step_tokens=16)
    turns = [kit.send([100 + at, *range(at, at + 6)], 45, thinking=replace(BUDGET, tokens=12)) for at in range(3)]
    kit.run()
    assert kit.scheduler.preemptions > 0
    for at, turn in enumerate(turns):
        prompt = [100 + at, *range(at, at + 6)]
        assert kit.outcomes[turn].tokens == reason(kit.model, prompt, 12, 45)


@pytest.mark.parametrize("count", [3, 6, 8, 6 + len(FORCED)])
def test_max_tokens_is_above_all(count: int) -> None:
    kit = Kit()
    outcome = kit.ask(PROMPT, count, thinking=BUDGET)
    assert outcome.tokens == [*greedy(kit.model, PROMPT, 6), *FORCED][:count]
    assert outcome.finish_reason is FinishReason.LENGTH
    assert told(outcome) is (count > 6)


def test_what_is_forbidden_is_forced_all_the_same() -> None:
    kit = Kit()
    hated = dict.fromkeys(FORCED, -100.0)
    sampling = Sampling(temperature=0.0, logit_bias=hated, bad_words=((10,), tuple(b"think")), frequency_penalty=2.0)
    outcome = kit.ask(PROMPT, 6 + len(FORCED), sampling=sampling, thinking=BUDGET)
    assert outcome.tokens[6:] == FORCED
    assert not {*outcome.tokens[:6]} & {*FORCED}


def test_logprobs_of_forced_tokens_are_the_models_own() -> None:
    kit = Kit()
    outcome = kit.ask(PROMPT, 6 + len(FORCED), logprobs=2, thinking=BUDGET)
    entries = [entry for delta in outcome.deltas for entry in delta.logprobs]
    want = torch.log_softmax(logits(kit.model, [*PROMPT, *outcome.tokens]), -1)
    for at, entry in enumerate(entries):
        assert entry.token_id == outcome.tokens[at]
        assert entry.logprob == pytest.approx(float(want[len(PROMPT) + at - 1, entry.token_id]), abs=1e-3)
    assert len(entries) == 6 + len(FORCED)


def test_the_message_ends_no_reply() -> None:
    kit = Kit()
    options: dict[str, Any] = {"thinking": BUDGET}
    stopping = Stopping(max_tokens=40, stop=("Enough", "\n\nE"), stop_token_ids=(ord("E"),), ignore_eos=True)
    outcome = kit.ask(PROMPT, stopping=stopping, **options)
    assert outcome.tokens[6 : 6 + len(FORCED)] == FORCED
    assert outcome.finish_reason is FinishReason.LENGTH
    assert MESSAGE in outcome.text


@pytest.mark.parametrize("stopping", [Stopping(stop=("</think>",)), Stopping(stop_token_ids=(ord(">"),))])
def test_the_end_of_the_reasoning_may_be_what_a_reply_stops_at(stopping: Stopping) -> None:
    kit = Kit()
    outcome = kit.ask(PROMPT, stopping=replace(stopping, max_tokens=40, ignore_eos=True), thinking=BUDGET)
    assert outcome.tokens == [*greedy(kit.model, PROMPT, 6), *FORCED[:-2]]
    assert outcome.finish_reason is FinishReason.STOP
    held = kit.ask(PROMPT, stopping=replace(stopping, max_tokens=40, min_tokens=35, ignore_eos=True), thinking=BUDGET)
    assert held.tokens[6 : 6 + len(FORCED)] == FORCED  # min_tokens


def test_text_that_was_held_back_comes_before_the_message() -> None:
    kit = Kit()
    before = bytes(kit.ask(PROMPT, 6).tokens).decode(errors="replace")
    outcome = kit.ask(PROMPT, 40, stop=(before[-2:] + "\n\nEnough. And",), thinking=BUDGET)
    assert outcome.text.startswith(before + MESSAGE + "\n</think>")


def test_a_grammar_takes_forced_tokens_as_its_own() -> None:
    kit = Kit()
    grammar = HEAD + 'start: thought SPACE /[a-c]{3}/\nthought[lazy]: /(?s:.*)/ "</think>"\nSPACE: "\\n\\n"'
    for seed in range(5):
        sampling = Sampling(temperature=1.0, seed=seed)
        outcome = kit.ask(PROMPT, 60, sampling=sampling, grammar=grammar, thinking=BUDGET)
        before, _, answer = bytes(outcome.tokens).partition(bytes(FORCED))
        assert len(before) == 6 or before.decode()[-1] != before[:6].decode(errors="replace")[-1]
        assert len(answer) == 3
        assert {*answer} <= {*b"abc"}
        assert outcome.finish_reason is FinishReason.STOP
    assert kit.refused == {}


def test_a_grammar_may_open_the_reasoning() -> None:
    kit = Kit()
    grammar = HEAD + 'start: "<think>" /(?s:.*)/ "</think>" SPACE? "!"\nSPACE: /\\s{1,8}/'
    outcome = kit.ask(
        PROMPT,
        60,
        sampling=Sampling(temperature=1.0, seed=1),
        grammar=grammar,
        thinking=replace(BUDGET, opened=False),
        stopping=Stopping(max_tokens=60),
    )
    said = bytes(outcome.tokens)
    assert said.startswith(b"<think>")
    assert 13 <= said.index(bytes(FORCED)) <= 16
    assert kit.refused == {}


def test_special_tokens_that_the_text_hides_open_nothing() -> None:
    kit = Kit()
    budget = replace(BUDGET, opened=False, openings=("<|im_start|>",), tokens=2)
    grammar = HEAD + 'start: <[257]> "abcd"'
    options: dict[str, Any] = {"grammar": grammar, "thinking": budget}
    shown = kit.ask(PROMPT, 5, special=True, **options)
    hidden = kit.ask(PROMPT, 5, **options)
    assert bytes(hidden.tokens[1:]) == b"abcd"
    assert shown.finish_reason is None or shown.tokens[:3] == hidden.tokens[:3]
    assert told(hidden) is False
    assert shown.tokens != hidden.tokens


def test_an_end_outside_the_vocabulary_is_refused() -> None:
    kit = Kit()
    for part in ({"end": (1, 259)}, {"message": (-1,)}, {"rests": ((300,),)}, {"answer": (400,)}):
        with pytest.raises(ValueError, match="invalid_prompt"):
            kit.send(PROMPT, 3, thinking=replace(BUDGET, **part))
    assert kit.engine.idle


def test_an_end_of_sequence_within_reasoning_ends_the_reply() -> None:
    kit = Kit()
    sampling = Sampling(temperature=0.0, logit_bias={END: 100.0})
    outcome = kit.ask(PROMPT, 20, sampling=sampling, ignore_eos=False, thinking=BUDGET)
    assert outcome.tokens == [END]
    assert outcome.finish_reason is FinishReason.STOP
    assert told(outcome) is False
