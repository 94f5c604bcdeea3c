"""Turns with a grammar: every reply obeys it, nobody else notices."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import END, Kit, ours
from llguidance import LLMatcher
from tiny_models import byte_tokenizer, greedy, make_tokenizer, model_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scheduler.core.constraint import Constraint, GrammarError, Grammars, grammar_tokenizer
from scheduler.core.sampling import Sampler
from scheduler.core.text import TextStream, Vocabulary
from scheduler.core.turn import Turn
from scheduler.protocol import FinishReason, Submit, pack_ids
from scheduler.sampling_params import Sampling, Stopping

HEAD = '%llguidance {"no_forcing": true}\n'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_pattern": r"\x20"})
LETTERS = HEAD + "start: /[a-c]{2,6}/"


def drawn(seed: int, **more: Any) -> Sampling:
    return Sampling(temperature=1.0, seed=seed, **more)


def check_person(text: str) -> None:
    """Under ``SCHEMA``, by hand."""
    person = json.loads(text)
    assert [*person] == ["name", "age", "tags"]
    assert len(person["name"]) <= 8
    assert person["age"] in range(121)
    assert len(person["tags"]) <= 3
    assert {*person["tags"]} <= {"x", "yy"}


def test_every_sampled_reply_obeys_its_schema() -> None:
    kit = Kit()
    turns = [kit.send([65, seed], 200, sampling=drawn(seed), grammar=PERSON) for seed in range(20)]
    kit.run()
    outcomes = [kit.outcomes[turn] for turn in turns]
    assert all(outcome.finish_reason is FinishReason.STOP for outcome in outcomes)
    assert len({outcome.text for outcome in outcomes}) > 10
    for outcome in outcomes:
        check_person(outcome.text)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon"])
def test_in_other_modes_too(name: str) -> None:
    outcome = Kit(name).ask([65], 200, sampling=drawn(1), grammar=PERSON)
    check_person(outcome.text)


# -- masks against a slow reference ---------------------------------------------------------------------------------


def pairs_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens of several letters, so that a text has several spellings."""
    vocab = {token: number for number, token in enumerate(["a", "b", "c", "d", "ab", "cd", "abc", "bc"])}
    merges = [("a", "b"), ("c", "d"), ("ab", "c"), ("b", "c")]
    backend = byte_tokenizer(["<end>", "<mark>"], vocab, merges)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def ids_of(mask: Any) -> set[int]:
    return {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()}


def test_masks_are_those_of_a_slow_reference() -> None:
    tokenizer = pairs_tokenizer()
    grammars = Grammars(lambda: grammar_tokenizer(tokenizer, (8,), len(tokenizer)))
    language = ["abcd", "abd", "cab", "abcdcd"]
    compiled = grammars.submit(HEAD + "start: " + " | ".join(map(json.dumps, language))).result()
    texts = {number: tokenizer.decode([number]) for number in range(8)}
    paths: list[list[int]] = [[]]
    looked_at = 0
    while paths:
        path = paths.pop()
        constraint = grammars.constraint(compiled)
        ended = [constraint.accept(token) for token in path]
        said = "".join(texts[token] for token in path)
        allowed = {token for token, text in texts.items() if any(word.startswith(said + text) for word in language)}
        assert ids_of(constraint.compute_mask()) == allowed | ({8} if said in language else set())
        assert not path or ended[-1] == (not allowed)
        paths += [[*path, token] for token in allowed]
        looked_at += 1
    assert looked_at > 20


def test_what_is_unwanted_goes_unless_nothing_else_is_left() -> None:
    kit = Kit()
    constraint = kit.grammars.constraint(kit.grammars.submit(HEAD + "start: /[ab]c/").result())
    assert ids_of(constraint.compute_mask([97, 500])) == {98}
    assert ids_of(constraint.compute_mask([97, 98])) == {97, 98}


def turn_with(constraint: Constraint, **fields: Any) -> Turn:
    request = Submit("t", "a", pack_ids([0]), None, **fields)
    turn = Turn(request, TextStream(Vocabulary(make_tokenizer()), ()))
    turn.constraint = constraint
    return turn


def test_logits_wider_than_the_vocabulary_are_never_drawn() -> None:
    kit = Kit()
    compiled = kit.grammars.submit(HEAD + "start: /[ab]+/").result()
    turns = [turn_with(kit.grammars.constraint(compiled), sampling=drawn(seed)) for seed in range(40)]
    logits = torch.zeros(40, 400)
    logits[:, 300:] = 50.0
    assert {sampled.token for sampled in Sampler((END,)).draw(logits, turns).read()} == {97, 98}


def test_logits_narrower_than_the_vocabulary_do() -> None:
    tokenizer = make_tokenizer()
    grammars = Grammars(lambda: grammar_tokenizer(tokenizer, (98,), 99))
    compiled = grammars.submit(HEAD + "start: /[ax]+/").result()
    turn = turn_with(grammars.constraint(compiled), sampling=Sampling(temperature=0.0))
    assert Sampler((98,)).draw(torch.zeros(1, 99), [turn]).read()[0].token == 97


def test_a_grammar_comes_after_biases_and_penalties_and_before_temperature() -> None:
    kit = Kit()
    biased = drawn(3, logit_bias={122: 100.0, 98: 100.0}, presence_penalty=2.0, repetition_penalty=1.5)
    outcome = kit.ask([65], 6, sampling=biased, grammar=HEAD + "start: /[abc]{6}/")
    assert outcome.text == "bbbbbb"


# -- neighbours -----------------------------------------------------------------------------------------------------


def test_neighbours_say_what_they_say_alone() -> None:
    prompt, other = [70, 71, 72], [80, 81]
    alone = Kit().ask(other, 30, sampling=drawn(7)).tokens
    kit = Kit()
    plain, seeded = kit.send(prompt, 30), kit.send(other, 30, sampling=drawn(7))
    for seed in range(4):
        kit.send([90 + seed], 200, sampling=drawn(seed), grammar=PERSON)
    kit.run()
    assert kit.outcomes[plain].tokens == greedy(model_of("llama"), prompt, 30, kit.outcomes[plain].tokens)
    assert kit.outcomes[seeded].tokens == alone


def test_logprobs_are_the_models_own() -> None:
    outcome = Kit().ask([65], 3, grammar=HEAD + "start: /[abc]{3}/", logprobs=2)
    model = model_of("llama")
    with torch.no_grad():
        wanted = torch.log_softmax(model(input_ids=torch.tensor([[65]])).logits[0, -1], -1)
    entry = outcome.deltas[1].logprobs[0] if not outcome.deltas[0].logprobs else outcome.deltas[0].logprobs[0]
    assert entry.token_id == outcome.tokens[0]
    assert entry.logprob == pytest.approx(float(wanted[outcome.tokens[0]]), abs=1e-3)
    assert entry.top[0][0] == int(wanted.argmax())


# -- ends -----------------------------------------------------------------------------------------------------------


def test_an_end_of_sequence_comes_only_where_the_grammar_is_complete() -> None:
    kit = Kit()
    wanted = drawn(1, logit_bias={END: 100.0})
    outcome = kit.ask([65], 50, sampling=wanted, grammar=LETTERS, ignore_eos=False)
    assert len(outcome.text) == 2
    assert outcome.tokens[-1] == END
    assert outcome.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("stopping", [Stopping(ignore_eos=True), Stopping(min_tokens=6), Stopping(min_tokens=50)])
def test_where_ends_are_not_wanted_the_grammars_own_end_counts(stopping: Stopping) -> None:
    outcome = Kit().ask([65], sampling=drawn(1, logit_bias={END: 100.0}), grammar=LETTERS, stopping=stopping)
    assert len(outcome.text) == 6
    assert END not in outcome.tokens
    assert outcome.finish_reason is FinishReason.STOP


def test_a_grammar_of_nothing_ends_at_once() -> None:
    for stopping in (Stopping(), Stopping(ignore_eos=True), Stopping(min_tokens=5)):
        outcome = Kit().ask([65], grammar='start: ""', stopping=stopping, special=True)
        assert (outcome.tokens, outcome.text, outcome.finish_reason) == ([END], "", FinishReason.STOP)


def test_stop_strings_and_stop_tokens_end_before_the_grammar_does() -> None:
    kit = Kit()
    endless: dict[str, Any] = {"grammar": HEAD + "start: /[ab]*/", "sampling": drawn(1, logit_bias={END: -100.0})}
    outcome = kit.ask([65], stopping=Stopping(max_tokens=200, stop=("ab",)), **endless)
    assert outcome.deltas[-1].stop == "ab"
    assert "ab" not in outcome.text
    outcome = kit.ask([65], stopping=Stopping(max_tokens=200, stop_token_ids=(98,)), **endless)
    assert outcome.deltas[-1].stop == 98
    assert {*outcome.text} <= {"a"}


def test_a_limit_cuts_a_reply() -> None:
    outcome = Kit().ask([65], 5, grammar=HEAD + "start: /[ab]{9}/")
    assert len(outcome.text) == 5
    assert outcome.finish_reason is FinishReason.LENGTH


def test_a_model_without_ends_stops_where_the_grammar_must() -> None:
    tokenizer = make_tokenizer()
    grammars = Grammars(lambda: grammar_tokenizer(tokenizer, (), 259))
    constraint = grammars.constraint(grammars.submit(HEAD + "start: /ab?/").result())
    assert not constraint.accept(97)
    assert ids_of(constraint.compute_mask()) == {98, 259}  # no logit is 259
    assert constraint.accept(98)


def test_special_tokens_are_named_and_shown_where_that_is_asked_for() -> None:
    kit = Kit()
    grammar = HEAD + "start: <|im_start|> /[ab]{3}/ <[256]>"
    hidden = kit.ask([65], 20, sampling=drawn(1), grammar=grammar)
    shown = kit.ask([65], 20, sampling=drawn(1), grammar=grammar, special=True)
    assert hidden.tokens == shown.tokens
    assert shown.text == f"<|im_start|>{hidden.text}<|endoftext|>"


def test_the_token_that_ended_the_turn_is_never_shown() -> None:
    outcome = Kit().ask(
        [65], 20, sampling=drawn(1, logit_bias={END: 100.0}), grammar=LETTERS, special=True, ignore_eos=False
    )
    assert outcome.tokens[-1] == END
    assert len(outcome.text) == 2


# -- compiling ------------------------------------------------------------------------------------------------------


def test_choices_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = Grammars._compile

    def counted(self: Grammars, grammar: str) -> LLMatcher:
        compiled.append(grammar)
        return compile_(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", counted)
    kit = Kit()
    turns = [kit.send([65], 50, sampling=drawn(seed), grammar=LETTERS) for seed in range(5)]
    kit.run()
    assert compiled == [LETTERS]
    assert len({kit.outcomes[turn].text for turn in turns}) > 1


def test_few_grammars_are_kept() -> None:
    grammars = Kit().grammars
    first = grammars.submit(LETTERS)
    assert grammars.submit(LETTERS) is first
    for number in range(70):
        grammars.submit(f'start: "{number}"')
    assert grammars.submit(LETTERS) is not first
    large = 'start: "' + "a" * 600_000 + '"'
    kept = grammars.submit(large)
    assert grammars.submit(large + " ") is not kept
    assert grammars.submit(LETTERS) is grammars.submit(LETTERS)
    assert grammars.submit(large) is not kept


def test_a_grammar_that_is_none_refuses_its_turn_alone() -> None:
    kit = Kit()
    neighbour = kit.send([70, 71], 10)
    broken = kit.send([65], 20, grammar="start: <|no_such_token|>", session="s")
    kit.run()
    assert kit.refused[broken].code == "invalid_grammar"
    assert "no_such_token" not in kit.refused[broken].message
    assert not kit.outcomes[broken].deltas
    assert kit.outcomes[neighbour].tokens == greedy(model_of("llama"), [70, 71], 10, kit.outcomes[neighbour].tokens)
    assert kit.ask([65], 5, session="s").finish_reason is FinishReason.LENGTH  # the session is free again


def test_a_grammar_that_breaks_fails_its_stream_alone() -> None:
    kit = Kit()
    neighbour = kit.send([70, 71], 10)
    turn = kit.send([65], 50, sampling=drawn(1), grammar=HEAD + "start: /[ab]{40}/")
    while len(kit.outcomes[turn].tokens) < 3:
        kit.step()
    running = kit.scheduler.find(turn)
    assert running is not None
    assert running.constraint is not None
    running.constraint.matcher.consume_token(0)  # from here on it is in an error state
    kit.run()
    assert kit.refused[turn].code == "invalid_grammar"
    assert len(kit.outcomes[turn].tokens) == 3
    assert kit.outcomes[neighbour].tokens == greedy(model_of("llama"), [70, 71], 10, kit.outcomes[neighbour].tokens)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_grammar_that_leads_nowhere_is_told_as_a_fault_of_the_grammar(
    overlaps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can follow the first letter. It compiles, as does a grammar that is too complex further on."""
    caplog.set_level("INFO")
    kit = Kit(overlaps=overlaps)
    turn = kit.send([65], 50, sampling=drawn(1), grammar=HEAD + 'start: "a" b\nb: b "c"')
    kit.run()
    kit.step()
    assert kit.refused[turn].code == "invalid_grammar"
    assert "allows no continuation" in kit.refused[turn].message
    assert all(record.exc_info is None for record in caplog.records)
    assert any(turn in line for line in ours(caplog))


# -- preemption, sessions -------------------------------------------------------------------------------------------


def test_preempted_turns_go_on_where_their_grammar_was() -> None:
    wanted = HEAD + "start: /([a-c][d-f]){30}/"
    prompts = [[60 + number] * 20 for number in range(4)]
    calm = Kit()
    texts = [calm.ask(prompt, 60, sampling=drawn(n), grammar=wanted).text for n, prompt in enumerate(prompts)]
    kit = Kit(pages=50)
    turns = [kit.send(prompt, 60, sampling=drawn(n), grammar=wanted) for n, prompt in enumerate(prompts)]
    kit.run()
    assert kit.scheduler.preemptions > 0
    assert [kit.outcomes[turn].text for turn in turns] == texts


def test_a_session_reuses_what_was_constrained() -> None:
    kit = Kit()
    prompt = [random.Random(3).randrange(256) for _ in range(30)]
    first = kit.ask(prompt, 200, sampling=drawn(1), grammar=PERSON, session="s")
    second = kit.ask([*prompt, *first.tokens, 66, 67], 200, sampling=drawn(2), grammar=PERSON, session="s")
    assert second.receipt.cached >= len(prompt) + len(first.tokens) - 1
    check_person(second.text)


# -- tokenizers -----------------------------------------------------------------------------------------------------


def pieces_tokenizer(decoder: Any) -> PreTrainedTokenizerFast:
    """No byte level: words begin with U+2581, or go on with ##."""
    letters = [(char, -5.0) for char in '{}[]":,abcdefgh0123456789\u2581']
    backend = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *letters, ("\u2581ab", -2.0), ("##cd", -3.0)], unk_id=0)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoder
    backend.add_special_tokens(["</s>", "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def test_tokenizers_of_pieces_are_spelled_out() -> None:
    tokenizer = pieces_tokenizer(decoders.Metaspace())
    grammars = Grammars(lambda: grammar_tokenizer(tokenizer, (1,), len(tokenizer) + 5))
    constraint = grammars.constraint(grammars.submit(HEAD + "start: /a( ab| c)d?/").result())
    word = tokenizer.convert_tokens_to_ids("\u2581ab")
    assert not constraint.accept(tokenizer.convert_tokens_to_ids("a"))
    space = tokenizer.convert_tokens_to_ids("\u2581")
    assert ids_of(constraint.compute_mask()) == {word, space}
    assert not constraint.accept(word)
    assert ids_of(constraint.compute_mask()) == {tokenizer.convert_tokens_to_ids("d"), 1}


def test_tokenizers_whose_tokens_do_not_add_up_are_refused() -> None:
    tokenizer = pieces_tokenizer(decoders.WordPiece())
    grammars = Grammars(lambda: grammar_tokenizer(tokenizer, (1,), len(tokenizer)))
    with pytest.raises(GrammarError, match="tokenizer"):
        grammars.submit(LETTERS).result()
