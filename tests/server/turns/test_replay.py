"""Idempotency-Key: a turn that was committed is answered from the log, not run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from http_context import HELLO, Call, Site, events, served, until
from log_kit import as_logged
from starlette.requests import Request as StarletteRequest

from server.log.timeline import NewTurn
from server.schemas.requests import ChatRequest
from server.turns.replay import idempotency_of

KEY = {"Idempotency-Key": "k-1"}
MORE = [{"role": "user", "content": "And now?"}]
REPLAYED = "idempotent-replayed"


async def messages_of(site: Site, name: str = "s") -> int:
    record = await site.log.get("default", name)
    return len(record.messages) if record else 0


def text_of(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c != "[DONE]" and c["choices"])


@pytest.mark.parametrize("named", [{"session_id": "s"}, {"headers": {"X-Session-ID": "s", "X-Session-Create": "true"}}])
@served()
async def test_a_retry_is_answered_with_the_same_turn(site: Site, named: dict[str, Any]) -> None:
    headers = {**KEY, **named.get("headers", {})}
    body = {"session_id": "s"} if "session_id" in named else {}
    first = await site.chat(headers=headers, **body)
    site.engine.reply = "Something else."
    again = await site.chat(headers=headers, **body)
    assert len(site.engine.submitted) == 1
    assert await messages_of(site) == 2
    assert REPLAYED not in first.headers
    assert (again.headers[REPLAYED], again.headers["x-session-id"]) == ("true", "s")
    one, two = first.json(), again.json()
    assert two["cache"] is None
    for name in ("choices", "usage", "model", "object", "session_id", "system_fingerprint"):
        assert two[name] == one[name]


def test_fields_with_their_defaults_are_not_in_a_requests_hash() -> None:
    """A server of a later version, with more fields, knows the request again."""

    class Later(ChatRequest):
        added: int | None = None

    request = StarletteRequest({"type": "http", "headers": [(b"idempotency-key", b"k")]})
    body = {"messages": HELLO, "temperature": 0.5}
    now, later = (idempotency_of(request, kind.model_validate(body)) for kind in (ChatRequest, Later))
    assert now is not None
    assert now == later
    assert now != idempotency_of(request, Later.model_validate({**body, "added": 1}))


@served()
async def test_what_was_cached_and_when_it_was_made_are_those_of_the_first_time(site: Site) -> None:
    await site.chat(session_id="s")
    first = (await site.chat(headers=KEY, session_id="s", messages=MORE)).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    remembered = site.log.replay

    async def long_ago(tenant: str, session: str, key: str) -> Any:
        found = await remembered(tenant, session, key)
        assert found is not None
        return replace(found, created=5)

    site.log.replay = long_ago  # type: ignore[method-assign]
    again = (await site.chat(headers=KEY, session_id="s", messages=MORE)).json()
    assert again["usage"] == first["usage"]
    assert again["created"] == 5


@served()
async def test_a_cut_reply_is_replayed_as_cut(site: Site) -> None:
    first = (await site.chat(headers=KEY, session_id="s", max_tokens=2)).json()
    again = (await site.chat(headers=KEY, session_id="s", max_tokens=2)).json()
    assert first["choices"][0]["finish_reason"] == "length"
    assert again["choices"] == first["choices"]
    assert again["usage"] == first["usage"]


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"continuous_usage_stats": True}])
@served()
async def test_how_it_is_told_may_differ_from_the_first_time(site: Site, options: dict[str, bool]) -> None:
    first = (await site.chat(headers=KEY, session_id="s")).json()
    asking: dict[str, Any] = {"stream_options": options} if options else {}
    again = await site.chat(headers=KEY, session_id="s", stream=True, **asking)
    assert again.headers["content-type"].startswith("text/event-stream")
    assert again.headers[REPLAYED] == "true"
    chunks = events(again.text)
    assert chunks.pop() == "[DONE]"
    assert text_of(chunks) == first["choices"][0]["message"]["content"]
    usages = [chunk.get("usage", "absent") for chunk in chunks]
    expected = {0: ["absent"] * 3, 1: [None] * 3 + [first["usage"]], 2: [first["usage"]] * 4}
    assert usages == expected[len(options) + bool(options.get("continuous_usage_stats"))]
    endings = [c for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]]
    assert [(c["choices"][0]["finish_reason"], c["cache"]) for c in endings] == [("stop", None)]
    assert len(site.engine.submitted) == 1


@served()
async def test_a_streamed_turn_is_replayed_as_a_body(site: Site) -> None:
    streamed = text_of(events((await site.chat(headers=KEY, session_id="s", stream=True)).text))
    again = await site.chat(headers=KEY, session_id="s")
    assert again.json()["choices"][0]["message"]["content"] == streamed
    assert len(site.engine.submitted) == 1


@served()
async def test_path_and_body_name_the_same_turn(site: Site) -> None:
    await site.chat(headers=KEY, session_id="s")
    again = await site.chat("/v1/sessions/s/chat/completions", headers=KEY)
    assert again.headers[REPLAYED] == "true"


@served()
async def test_an_older_turn_is_replayed_too(site: Site) -> None:
    await site.chat(headers=KEY, session_id="s")
    site.engine.reply = "Later."
    await site.chat(headers={"Idempotency-Key": "k-2"}, session_id="s", messages=MORE)
    again = await site.chat(headers=KEY, session_id="s")
    assert again.json()["choices"][0]["message"]["content"] == "Hello there, friend."
    assert await messages_of(site) == 4


@served()
async def test_completions_are_replayed_with_their_echo_and_without_logprobs(site: Site) -> None:
    for prompt in ("Once", [5, 6, 7]):
        body: dict[str, Any] = {"prompt": prompt, "session_id": f"s{len(prompt)}", "echo": True, "logprobs": 1}
        first = (await site.complete(headers=KEY, **body)).json()
        again = await site.complete(headers=KEY, **body)
        assert again.headers[REPLAYED] == "true"
        assert again.json()["choices"] == [{**first["choices"][0], "logprobs": None}]
        streamed = events((await site.complete(headers=KEY, stream=True, **body)).text)[:-1]
        assert "".join(c["choices"][0]["text"] for c in streamed) == first["choices"][0]["text"]


@pytest.mark.parametrize("change", [{"messages": MORE}, {"temperature": 0.5}, {"max_tokens": 3}])
@served()
async def test_another_request_under_the_same_key_is_refused(site: Site, change: dict[str, Any]) -> None:
    await site.chat(headers=KEY, session_id="s")
    response = await site.chat(headers=KEY, session_id="s", **change)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (422, "idempotency_key_reused", "Idempotency-Key")
    assert "k-1" not in response.text
    assert (await site.complete(headers=KEY, session_id="s")).status_code == 422
    assert len(site.engine.submitted) == 1


@served()
async def test_keys_belong_to_a_session(site: Site) -> None:
    await site.chat(headers=KEY, session_id="s")
    response = await site.chat(headers=KEY, session_id="other", messages=MORE)
    assert REPLAYED not in response.headers
    assert len(site.engine.submitted) == 2


@served({"ann": "key-a", "bob": "key-b"})
async def test_and_to_a_tenant(site: Site) -> None:
    for key in ("key-a", "key-b"):
        response = await site.chat(headers={**KEY, "Authorization": f"Bearer {key}"}, session_id="s")
        assert REPLAYED not in response.headers
    assert len(site.engine.submitted) == 2


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "ä".encode(), b"tab\there"])
@pytest.mark.parametrize("named", [{"session_id": "s"}, {}])
@served()
async def test_keys_that_are_none_are_refused(site: Site, key: Any, named: dict[str, str]) -> None:
    response = await site.chat(headers={"Idempotency-Key": key}, **named)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "Idempotency-Key")
    assert (await site.chat(headers=[("Idempotency-Key", "a"), ("Idempotency-Key", "a")], **named)).status_code == 400
    assert (await site.complete(headers={"Idempotency-Key": key}, **named)).status_code == 400
    assert not site.engine.submitted


@served()
async def test_the_longest_key_is_taken(site: Site) -> None:
    key = {"Idempotency-Key": "~" * 255}
    for replay in (False, True):
        response = await site.chat(headers=key, session_id="s")
        assert (response.status_code, REPLAYED in response.headers) == (200, replay)


@served()
async def test_without_a_session_nothing_is_kept(site: Site) -> None:
    for _ in range(2):
        assert REPLAYED not in (await site.chat(headers=KEY)).headers
    assert len(site.engine.submitted) == 2


@served()
async def test_a_retry_while_the_first_one_runs_is_busy_and_then_replayed(site: Site) -> None:
    site.engine.pause_after = 1
    body = {"messages": HELLO, "session_id": "s"}
    first = Call.post(site.app, "/v1/chat/completions", body, headers=KEY)
    await until(lambda: site.engine.submitted)
    response = await site.chat(headers=KEY, session_id="s")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "session_busy")
    site.engine.go.set()
    await first.finish()
    assert (await site.chat(headers=KEY, session_id="s")).headers[REPLAYED] == "true"
    assert len(site.engine.submitted) == 1


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_turn_that_was_never_committed_runs_again(site: Site, stream: bool) -> None:
    site.engine.pause_after = 1
    body = {"messages": HELLO, "session_id": "s", "stream": stream}
    call = Call.post(site.app, "/v1/chat/completions", body, headers=KEY)
    await until(lambda: site.engine.submitted)
    await call.leave()
    site.engine.pause_after = None
    response = await site.chat(headers=KEY, session_id="s")
    assert (response.status_code, REPLAYED in response.headers) == (200, False)
    assert (await site.chat(headers=KEY, session_id="s")).headers[REPLAYED] == "true"
    assert await messages_of(site) == 2


@served()
async def test_a_turn_on_a_session_that_moved_on_elsewhere_is_not_committed(site: Site) -> None:
    await site.chat(session_id="s")
    site.engine.pause_after = 1
    call = Call.post(site.app, "/v1/chat/completions", {"messages": MORE, "session_id": "s"})
    await until(lambda: len(site.engine.submitted) >= 2)
    await site.log.commit(
        "default", "s", NewTurn(tokens=[5, 6], messages=as_logged(HELLO), fingerprint="f", finish_reason="stop")
    )  # as another server on the same database would
    site.engine.go.set()
    await call.finish()
    assert call.status == 409
    record = await site.log.get("default", "s")
    assert record is not None
    assert record.tokens == [5, 6]
