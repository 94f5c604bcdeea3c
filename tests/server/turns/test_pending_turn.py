"""A turn is the same at every endpoint: what one of them honours, checks and answers, all of them do."""

from __future__ import annotations

from typing import Any, cast

import pytest
from fastapi import FastAPI
from http_context import HELLO, Call, Site, served
from starlette.types import Message, Receive, Scope, Send
from template_styles import NO_TOOLS, tokens_with

from scheduler.protocol import Submit
from server.chat.bad_words import encode_bad_words
from server.chat.chat_tokenizer import ChatTokenizer

KEY = {"Idempotency-Key": "k"}
PATHS: dict[str, dict[str, Any]] = {  # each endpoint with the least that it takes
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
}
FORMATTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"response_format": {"type": "json_object"}},
    "/v1/completions": {"response_format": {"type": "json_object"}},
    "/v1/responses": {"text": {"format": {"type": "json_object"}}},
}


def special_marks() -> ChatTokenizer:
    """The demo model's tokenizer with a template that marks reasoning with special tokens."""
    marked = "{% if m.thinking %}<|im_start|>{{ m.thinking }}<|im_end|>{% endif %}{{ m.content }}"
    return tokens_with(NO_TOOLS.replace("{{ m.content }}", marked))


async def submitted(site: Site, path: str, **body: Any) -> Submit:
    """What the engine gets for a request."""
    answer = await site.http.post(path, json={**PATHS[path], **body})
    assert answer.status_code == 200, answer.text
    return site.engine.submitted[-1]


@served(tokens=special_marks)
async def test_special_tokens_are_shown_to_parsers_that_read_them_only(site: Site) -> None:
    shown = {path: (await submitted(site, path)).special for path in PATHS}
    assert shown == {"/v1/chat/completions": True, "/v1/completions": False, "/v1/responses": True}
    for path, body in FORMATTED.items():  # a reply in a format does not reason: its text is read as it is
        assert (await submitted(site, path, **body)).special is False, path


@pytest.mark.parametrize("path", PATHS)
@served(tokens=special_marks)
async def test_every_endpoint_takes_bad_words_and_special_tokens(site: Site, path: str) -> None:
    submit = await submitted(site, path, bad_words=["friend"], skip_special_tokens=False)
    tokens: ChatTokenizer = site.context.tokens
    assert submit.sampling.bad_words == encode_bad_words(["friend"], tokens, 1024) != ()
    assert submit.special is True
    answer = await site.http.post(path, json={**PATHS[path], **FORMATTED[path], "bad_words": ["friend"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bad_words")


@served()
async def test_a_regenerated_chat_that_is_stored_keeps_its_id_when_it_is_repeated(site: Site) -> None:
    await site.chat(session_id="s")
    path, body = "/v1/sessions/s/regenerate", {"store": True}
    first, again = [await site.http.post(path, json=body, headers=KEY) for _ in range(2)]
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["id"] == first.json()["id"]
    assert (await site.http.get(f"/v1/chat/completions/{again.json()['id']}")).status_code == 200


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}])
@served()
async def test_every_response_of_a_session_names_it_in_its_headers(site: Site, more: dict[str, Any]) -> None:
    conversation = (await site.http.post("/v1/conversations", json={})).json()["id"]
    answer = await site.http.post("/v1/responses", json={"input": "Hello", "conversation": conversation, **more})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-session-id"] == conversation.removeprefix("conv_")


@pytest.mark.parametrize("path", PATHS)
@served()
async def test_a_prompt_without_room_is_refused_before_its_format_is_looked_at(site: Site, path: str) -> None:
    named = {"name": "x", "schema": {"type": "nonsense"}}
    schema = {"type": "json_schema", "json_schema": named}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"max_tokens": 2048, "response_format": schema},
        "/v1/completions": {"max_tokens": 2048, "response_format": schema},
        "/v1/responses": {
            "max_output_tokens": 2048,
            "text": {"format": {"type": "json_schema", **named}},
        },
    }
    answer = await site.http.post(path, json={**PATHS[path], **bodies[path]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@served()
async def test_a_completion_without_a_limit_has_the_endpoints_default(site: Site) -> None:
    limits = {path: (await submitted(site, path)).stopping.max_tokens for path in PATHS}
    assert limits == {"/v1/chat/completions": None, "/v1/completions": 16, "/v1/responses": None}
    assert (await submitted(site, "/v1/completions", min_tokens=20)).stopping.max_tokens == 20


@pytest.mark.parametrize(("path", "background"), [*((path, False) for path in PATHS), ("/v1/responses", True)])
@served()
async def test_the_session_is_free_before_the_last_event_is_sent(site: Site, path: str, background: bool) -> None:
    """Who reads the last event and goes on at once meets nobody, however slowly the rest of the answer is read."""
    held: list[frozenset[Any]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def spy(message: Message) -> None:
            if any(end in message.get("body", b"") for end in (b'"finish_reason":"stop"', b"response.completed")):
                held.append(site.log._claims.claimed_keys())
            await send(message)

        await site.app(scope, receive, spy)

    named = {"background": background} if path == "/v1/responses" else {"session_id": "s"}
    call = Call.post(cast(FastAPI, app), path, {**PATHS[path], **named, "stream": True})
    await call.finish()
    assert call.status == 200, call.body
    assert held == [frozenset()]
