"""Budgets of reasoning as they are made from a dialect: marks, and the tokens that are forced."""

from __future__ import annotations

from typing import Any

import pytest
from http_context import demo_tokens
from template_styles import HERMES, NO_TOOLS, STYLES, THINKS, template, tokens_with
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scheduler.core.thinking import ThinkingState
from scheduler.sampling_params import ThinkingBudget
from server.chat.call_rules import CallRules
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.partial_reply import PartialReply
from server.chat.reply_parser import ReplyParser
from server.chat.thinking_budget import encode_behind, encode_rests, measure_budget

CHANNELS = template("channels")
START = "<|im_start|>assistant\n"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def budget_of(tokens: ChatTokenizer, tail: str, limit: int = 4, message: str = "So.", *, calls: bool = False) -> Any:
    """What is made for the engine; there is one."""
    made = measure_budget(tokens, tail, limit, message, calls=calls)
    assert isinstance(made, ThinkingBudget)
    return made


def spaced_tokens() -> ChatTokenizer:
    """A tokenizer that begins every text with a space, as SentencePiece models do."""
    letters = [*"\u2581abcdefghijklmnopqrstuvwxyz<>/.!\n1", "\u2581a"]
    backend = Tokenizer(models.BPE(vocab={x: n for n, x in enumerate(letters)}, merges=[("\u2581", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_what_is_forced_is_what_the_template_writes() -> None:
    for style, tail, opened in (("hermes", START, False), ("thinks", START + "<think>\n", True)):
        tokens = tokens_with(STYLES[style])
        made = budget_of(tokens, tail)
        assert (made.openings, made.closings, made.opened, made.anywhere) == (
            ("<think>",),
            ("</think>",),
            opened,
            False,
        )
        assert tokens.decode(made.message) == "\n\nSo."
        written = tokens.apply(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Y", "reasoning_content": "T"}],
            [],
            False,
        )
        assert "T" + tokens.decode(made.end) + "Y" in written
        assert made.answer == made.end


def test_without_a_message_only_the_end_is_forced() -> None:
    assert budget_of(tokens_with(HERMES), START, message="").message == ()


def test_a_template_that_writes_no_reasoning_gets_the_usual_end() -> None:
    strips = NO_TOOLS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}") + "{# <think> #}"
    tokens = tokens_with(strips)
    assert tokens.decode(budget_of(tokens, START).end) == "\n</think>\n\n"


@pytest.mark.parametrize("style", ["mistral", "no tools"])
def test_a_model_that_does_not_reason_needs_no_budget(style: str) -> None:
    assert measure_budget(tokens_with(STYLES[style]), START, 4, "So.", calls=False) is None


def test_channels_lead_into_the_answer_unless_a_call_may_follow() -> None:
    tokens = tokens_with(CHANNELS)
    made = budget_of(tokens, "<|start|>assistant")
    assert made.anywhere
    assert made.openings == ("<|channel|>analysis<|message|>",)
    assert tokens.decode(made.end) == "<|end|><|start|>assistant<|channel|>final<|message|>"
    may_call = budget_of(tokens, "<|start|>assistant", calls=True)
    assert tokens.decode(may_call.end) == "<|end|><|start|>assistant"
    assert may_call.answer == made.end


def test_marks_that_are_patterns_cannot_be_kept() -> None:
    fields = {"thinking": {"open_pattern": "<t+>", "close": "</t>"}, "content": {}}
    tokens = tokens_with(HERMES, {"start_anchor": START, "fields": fields})
    with pytest.raises(ValueError, match="not fixed texts"):
        measure_budget(tokens, START, 4, "", calls=False)
    no_thought = tokens_with(HERMES, {"start_anchor": START, "fields": {"content": {}}})
    assert measure_budget(no_thought, START, 4, "", calls=False) is None


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_begins_texts_with_a_space_adds_none() -> None:
    tokens = spaced_tokens()
    assert tokens.decode(tokens.encode("ink>", special=False)) == "ink>"  # but behind a text it is " ink>"
    head = tokens.encode("1</th", special=False)
    for text in ("ink>", "nk>\n", "a!"):
        assert tokens.decode([*head, *encode_behind(tokens, text)]) == "1</th" + text


@pytest.mark.parametrize("make", [demo_tokens, spaced_tokens])
def test_the_rests_of_a_mark_of_several_tokens(make: Any) -> None:
    tokens = make()
    rests = encode_rests(tokens, "</think>", "\n\n")
    assert len(rests) == 7
    for size, rest in enumerate(rests, 1):
        begun = encode_behind(tokens, "a</think>"[: size + 1])
        assert tokens.decode([*begun, *rest]).endswith("a</think>\n\n"), size


def test_a_mark_of_one_token_has_none() -> None:
    assert encode_rests(demo_tokens(), "<|im_end|>", "") == ()


# -- the parser and the engine agree ----------------------------------------------------------------------------------


def written(tokens: ChatTokenizer, budget: ThinkingBudget, wanted: str) -> tuple[list[str], int]:
    """The texts of the tokens of a model that would write ``wanted``, and how many of them are before the end that was
    forced.
    """
    state = ThinkingState(budget, lambda token: tokens.decode([token]).encode())
    said: list[int] = []
    free, at = tokens.encode(wanted, special=False), -1
    while free or state.forced is not None:
        if state.forced is not None and at < 0:
            at = len(said)
        token = free.pop(0) if state.forced is None else state.forced
        state.accept(token)
        said.append(token)
    return [tokens.decode([token]) for token in said], at


def parse(parser: ReplyParser, texts: list[str]) -> PartialReply:
    """What a parser makes of a reply that comes in these pieces."""
    reply = PartialReply(parser)
    for part in [part for text in texts for part in parser.feed(text)] + parser.finish():
        reply.take(part)
    return reply


@pytest.mark.parametrize("limit", range(8))
@pytest.mark.parametrize(
    ("source", "tail", "wanted"),
    [
        (THINKS, START + "<think>\n", "one two three four five six seven eight"),
        (HERMES, START, "<think>one two three four five six seven eight"),
        (CHANNELS, "<|start|>assistant", "<|channel|>analysis<|message|>one two three four five six seven eight"),
    ],
)
def test_what_the_engine_closes_the_parser_reads_as_closed(source: str, tail: str, wanted: str, limit: int) -> None:
    tokens = tokens_with(source)
    texts, at = written(tokens, budget_of(tokens, tail, limit), wanted)
    reply = parse(tokens.dialect.make_parser(tail), texts)
    before = "".join(texts[:at]).removeprefix("<think>").removeprefix("<|channel|>analysis<|message|>")
    assert reply.reasoning.rstrip() == (before + ("\n\nSo." if limit else "")).strip()
    assert reply.content.lstrip() == "one two three four five six seven eight"[len(before) :].lstrip()
    opened = len(tokens.encode(wanted.partition("one")[0], special=False))
    assert limit <= at - opened <= limit + 1


def test_a_call_after_a_forced_end_is_a_call() -> None:
    tokens = tokens_with(THINKS)
    tail = START + "<think>\n"
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    texts, _ = written(tokens, budget_of(tokens, tail, 0, calls=True), call)
    reply = parse(tokens.dialect.make_parser(tail, CallRules([TOOL])), texts)
    assert [(made.name, made.arguments) for made in reply.calls] == [("weather", "{}")]
    assert reply.content.lstrip() == reply.reasoning == ""


def test_channels_that_are_opened_again_are_closed_into_the_answer() -> None:
    tokens = tokens_with(CHANNELS)
    budget = budget_of(tokens, "<|start|>assistant", 2, calls=True)
    again = "<|channel|>analysis<|message|>"
    free = tokens.encode(again + "one two", special=False)
    state = ThinkingState(budget, lambda token: tokens.decode([token]).encode())
    said: list[int] = []
    while state.forced is None:
        said.append(free.pop(0))
        state.accept(said[-1])
    while state.forced is not None:
        said.append(state.forced)
        state.accept(said[-1])
    for token in tokens.encode(again, special=False):
        said.append(token)
        state.accept(token)
    while state.forced is not None:
        said.append(state.forced)
        state.accept(said[-1])
    assert tokens.decode(said).endswith(again + "<|end|><|start|>assistant<|channel|>final<|message|>")
    assert tokens.decode(said).count("So.") == 1
