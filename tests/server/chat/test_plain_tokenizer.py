"""A tokenizer that the engine hands over in parts does what transformers' tokenizer does."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec
import pytest
from http_context import demo_tokens
from jinja2.exceptions import TemplateError
from template_styles import STYLES, tokens_with
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler.model.tokenizer import take_apart
from scheduler.protocol import TokenizerRead
from server.chat.chat_tokenizer import OPTIONS, ChatTokenizer, TemplateRefused
from server.chat.template import stability
from server.chat.template_language import render_chat

TOOL = {
    "type": "function",
    "function": {"name": "sum_<of>", "description": "é", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "sum_<of>", "arguments": {"a": [1, None, "<&>"]}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "How far is the moon? 🌘"}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a\n"},
        {"role": "assistant", "content": ""},
    ],
    [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": None, "reasoning": "Easy.", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "abcdefghi", "name": "sum_<of>"},
        {"role": "assistant", "content": "2", "thinking": "Done."},
        {"role": "user", "content": [{"type": "text", "text": "Thanks"}]},
    ],
]


def handed_over(tokens: ChatTokenizer) -> ChatTokenizer:
    """The same tokenizer as a server gets it from its engine."""
    parts = take_apart(tokens._tokenizer)
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(TokenizerRead(parts)), type=TokenizerRead)
    assert message.parts is not None
    return ChatTokenizer.of_parts(message.parts)


def outcome(apply: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a template gives, or the name of what it raises; also the text, where that is for clients."""
    try:
        return str(apply(*args, **kwargs))
    except (TemplateError, TemplateRefused) as error:
        told = error.message if type(error) in (TemplateError, TemplateRefused) else ""
        return f"{type(error).__name__}: {told}"
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("style", STYLES)
def test_chats_are_rendered_alike_in_every_style(style: str) -> None:
    usual = tokens_with(STYLES[style])
    plain = handed_over(usual)
    for chat in CHATS:
        for tools in ([], [TOOL]):
            for generation in (False, True):
                given = chat, tools, generation, {"enable_thinking": True}
                assert outcome(plain.apply, *given) == outcome(usual.apply, *given)
    assert plain.dialect == usual.dialect
    assert plain.variables == usual.variables
    assert stability(plain) == stability(usual)


def test_texts_and_ids_are_alike() -> None:
    usual = demo_tokens()
    plain = handed_over(usual)
    size = len(usual._tokenizer)
    assert plain.fingerprint(size) == usual.fingerprint(size), "its sessions could not be continued"
    assert plain.info == usual.info
    assert plain.special_ids == usual.special_ids
    assert plain.named_tokens == usual.named_tokens
    assert plain.fill_in == usual.fill_in
    for text in ("", "How far?", " é\u0301 🌘<|im_end|>\n", "\ud7ff\u200b"):
        for special in (False, True):
            ids = usual.encode(text, special=special)
            assert plain.encode(text, special=special) == ids
            assert plain.decode(ids) == usual.decode(ids)
            assert plain.pieces([*ids, size + 5]) == usual.pieces([*ids, size + 5])


class Role(StrEnum):
    USER = "user"


PROGRAMS = {
    "blocks": "{% for m in messages %}\n  {% if loop.last %}\n  {{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ messages[0].content }}{% endgeneration %}{{ x }}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson(separators=(',', ':')) }}",
    "escapes": "{{ '<é>' | tojson }}{{ '<é>' | tojson(ensure_ascii=True) }}",
    "sorted": "{{ {'b': 1, 'a': 2} | tojson(sort_keys=True) }}",
    "namespace": "{% set n = namespace(self=1, k=2) %}{% set n.k = 3 %}{{ n.self }}{{ n.k }}",
    "private": "{% set n = namespace(_k=2) %}",
    "private later": "{% set n = namespace(k=2) %}{% set n._k = 3 %}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys('ab', 0) }}",
    "dict's class": "{{ dict.mro() }}",
    "loops": "{% for m in messages %}{% continue %}{{ m }}{% endfor %}{% for i in range(9) %}{% break %}{% endfor %}",
    "raises": "{{ raise_exception('No <such> thing.') }}",
    "undefined": "{{ missing.field }}",
    "changes": "{{ messages.append(1) }}",
    "reaches": "{{ messages.__class__.__mro__ }}",
    "no syntax": "{% if %}",
    "named tokens": "{{ bos_token }}{{ given }}{{ eos_token is defined }}",
    "documents": "{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}",
    "reasoning": "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "types": "{{ messages[0].role }}{{ given | tojson }}{{ messages[0].n.strip is defined }}",
    "time": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_template_may_do_what_it_may_in_transformers(name: str) -> None:
    source = PROGRAMS[name]
    given: dict[str, Any] = {"bos_token": "<s>", "given": [1, 2.5, True, None, {"a": (1, Role.USER)}, "é"]}
    for chat in (*CHATS, [{"role": Role.USER, "content": "x", "n": object()}]):
        for tools in (None, [TOOL]):
            whole = [{key: value for key, value in message.items() if value is not None} for message in chat]
            wanted = outcome(render_jinja_template, [whole], tools, None, source, **given)
            found = outcome(render_chat, source, chat, tools, False, given)
            assert wanted in (found, str(([found], [])))


def test_the_options_are_those_of_transformers() -> None:
    ours = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert ours - {"self"} == OPTIONS


def test_a_checkpoint_with_two_templates_keeps_both() -> None:
    tokenizer = tokens_with("x")._tokenizer
    tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools | length }}"}
    plain = handed_over(ChatTokenizer(tokenizer))
    assert plain.apply(CHATS[0], [], False) == "plain"
    assert plain.apply(CHATS[0], [TOOL], False) == "1"


def test_without_a_template_there_is_none() -> None:
    assert not handed_over(tokens_with(None)).has_template


class OwnWay(PreTrainedTokenizerFast):  # type: ignore[misc]  # it has no types
    """Renders chats without a template."""

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        return "own"


def test_a_tokenizer_with_ways_of_its_own_is_not_taken_apart() -> None:
    backend = demo_tokens()._backend
    assert take_apart(OwnWay(tokenizer_object=backend)) is None
    assert take_apart(PreTrainedTokenizerFast(tokenizer_object=backend)) is not None
    assert not issubclass(PreTrainedTokenizer, PreTrainedTokenizerFast)
    assert take_apart(object()) is None
    odd = PreTrainedTokenizerFast(tokenizer_object=backend)
    odd.response_template = {1: {2}}
    assert take_apart(odd) is None


def test_a_response_template_goes_along() -> None:
    tokenizer = tokens_with("x")._tokenizer
    tokenizer.response_template = {"fields": {"content": {}}, "x": [1, None]}
    parts = take_apart(tokenizer)
    assert parts is not None
    assert json.dumps(parts.response_template) == json.dumps(tokenizer.response_template)
