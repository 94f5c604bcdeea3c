"""Prompts: which ids a request becomes, and what is refused before and after tokenising."""

from typing import Any

import pytest
from fake_engine import FACTS
from http_context import demo_tokens
from transformers import AutoTokenizer

from server.chat.chat_tokenizer import ChatTokenizer, TemplateRefused, template_source
from server.chat.prompts import Prompt, chat_prompt, check_room, completion_prompts
from server.errors import ApiError
from server.log.logged_message import LoggedMessage
from server.log.timeline import SessionRecord
from server.schemas.completion_requests import CompletionRequest
from server.schemas.requests import ChatRequest

FINGERPRINT = demo_tokens().fingerprint(FACTS.vocab_size)


def chat(text: str) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": text}]})


def record(fingerprint: str, tokens: list[int]) -> SessionRecord:
    messages = [LoggedMessage("user", "One"), LoggedMessage("assistant", "Two")]
    return SessionRecord("s", tokens, messages, fingerprint, 1)


def test_a_record_of_this_model_is_continued_by_its_ids() -> None:
    prompt = chat_prompt(chat("Three"), demo_tokens(), FACTS, record(FINGERPRINT, [700, 701, 702]))
    assert prompt.ids[:3] == [700, 701, 702]
    assert [m.content for m in prompt.messages] == ["One", "Two", "Three"]


def test_a_record_of_another_model_is_continued_by_its_words() -> None:
    prompt = chat_prompt(chat("Three"), demo_tokens(), FACTS, record("other", [700, 701, 702]))
    text = demo_tokens().decode(prompt.ids)
    assert text == (
        "<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\nTwo<|im_end|>\n"
        "<|im_start|>user\nThree<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_raw_continuation_is_appended_as_it_is() -> None:
    tokens = demo_tokens()
    body = CompletionRequest.model_validate({"prompt": " upon"})
    for fingerprint, past in ((FINGERPRINT, [700, 701]), ("other", tokens.encode("OneTwo", special=True))):
        (prompt,) = completion_prompts(body, tokens, FACTS, record(fingerprint, [700, 701]))
        assert prompt.ids == [*past, *tokens.encode(" upon", special=False)]
        assert (prompt.echo, prompt.echo_from) == (" upon", len(past))
        assert prompt.messages[-1] == LoggedMessage("user", " upon")


def test_texts_that_cannot_fit_are_refused_before_they_are_tokenised() -> None:
    class Untouched:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError("tokenised")

    huge = "x" * (16 * FACTS.max_context + 5000)
    untouched: Any = Untouched()
    with pytest.raises(ApiError) as refused:
        chat_prompt(chat(huge), untouched, FACTS, None)
    assert refused.value.body.error.code == "context_length_exceeded"
    with pytest.raises(ApiError):
        completion_prompts(CompletionRequest.model_validate({"prompt": huge}), untouched, FACTS, None)
    with pytest.raises(ApiError):
        completion_prompts(CompletionRequest.model_validate({"prompt": [5] * 3000}), untouched, FACTS, None)


def test_several_prompts_may_be_longer_together_than_one() -> None:
    texts = [" a" * 2000 for _ in range(20)]
    made = completion_prompts(CompletionRequest.model_validate({"prompt": texts}), demo_tokens(), FACTS, None)
    assert len(made) == 20


def asking(limit: int | None) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", "max_tokens": limit})


@pytest.mark.parametrize(("length", "limit"), [(2048, 0), (2047, 1), (2000, 48), (2047, None)])
def test_what_fits_the_context_exactly_is_taken(length: int, limit: int | None) -> None:
    check_room(Prompt([5] * length), asking(limit), FACTS)


@pytest.mark.parametrize(("length", "limit"), [(2049, 0), (2048, 1), (2000, 49), (2048, None)])
def test_one_token_more_is_not(length: int, limit: int | None) -> None:
    with pytest.raises(ApiError) as refused:
        check_room(Prompt([5] * length), asking(limit), FACTS)
    assert refused.value.body.error.code == "context_length_exceeded"


def tokenizer_with(template: str | None) -> ChatTokenizer:
    """The demo tokenizer under another template."""
    tokenizer = AutoTokenizer.from_pretrained(demo_tokens()._tokenizer.name_or_path)
    tokenizer.chat_template = template
    return ChatTokenizer(tokenizer)


def test_templates_that_raise_are_the_clients_fault_and_say_why() -> None:
    raising = tokenizer_with("{{ raise_exception('Roles must alternate.') }}")
    with pytest.raises(TemplateRefused, match="Roles must alternate"):
        raising.render([LoggedMessage("user", "x")], generation_prompt=True)
    broken = tokenizer_with("{{ messages[0].content + 5 }}")
    with pytest.raises(TemplateRefused) as refused:
        broken.render([LoggedMessage("user", "secret")], generation_prompt=True)
    assert "secret" not in refused.value.message


def test_without_a_template_chats_are_pointed_elsewhere() -> None:
    bare = tokenizer_with(None)
    assert not bare.has_template
    with pytest.raises(TemplateRefused, match="/v1/completions"):
        bare.render([LoggedMessage("user", "x")], generation_prompt=True)


def test_a_template_that_knows_developers_gets_them() -> None:
    knowing = tokenizer_with("{% if messages[0].role == 'developer' %}D{% else %}{{ messages[0].role }}{% endif %}")
    ignorant = tokenizer_with("{{ messages[0].role }}")
    message = LoggedMessage("developer", "x")
    assert knowing.render([message], generation_prompt=True) == "D"
    assert ignorant.render([message], generation_prompt=True) == "system"


def test_named_templates_have_a_default() -> None:
    class Named:
        chat_template: Any = {"default": "a", "tools": "b"}  # noqa: RUF012

    assert template_source(Named()) == "a"
    Named.chat_template = {"tools": "b"}
    assert template_source(Named()) is None
