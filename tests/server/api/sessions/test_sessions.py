"""Sessions over HTTP: the two truths, ids, what is committed and when, one turn at a time."""

import asyncio
from typing import Any

import pytest
from http_context import HELLO, Call, Site, demo_tokens, events, reply_ids, served, until
from log_kit import as_logged

from scheduler.protocol import FinishReason
from server.log.database import LogUnavailable
from server.log.logged_message import LoggedMessage

MORE = [{"role": "user", "content": "And now?"}]
END = 2


async def logged(site: Site, name: str, tenant: str = "default") -> Any:
    return await site.log.get(tenant, name)


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_stateful_turn_appends_to_the_log(site: Site, stream: bool) -> None:
    await site.chat(session_id="s1", stream=stream)
    first = await logged(site, "s1")
    assert first.tokens == [*site.prompt_ids(), *demo_tokens().encode(site.engine.reply, special=False), END]
    assert first.messages == [*as_logged(HELLO), LoggedMessage("assistant", "Hello there, friend.")]
    site.engine.reply = "Bye."
    await site.chat(session_id="s1", stream=stream, messages=MORE)
    prompt = site.prompt_ids()
    assert prompt[: len(first.tokens)] == first.tokens
    tail = demo_tokens().decode(prompt[len(first.tokens) :])
    assert tail == "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    second = await logged(site, "s1")
    assert second.tokens == [*prompt, *demo_tokens().encode("Bye.", special=False), END]
    assert [m.content for m in second.messages] == ["Hello", "Hello there, friend.", "And now?", "Bye."]


@served()
async def test_path_and_body_name_the_same_session(site: Site) -> None:
    path = "/v1/sessions/a.b:c@d-e_f/chat/completions"
    assert (await site.chat(path)).status_code == 200
    await site.chat(session_id="a.b:c@d-e_f", messages=MORE)
    assert len((await logged(site, "a.b:c@d-e_f")).messages) == 4
    assert [s.session for s in site.engine.submitted] == ["a.b:c@d-e_f"] * 2


@pytest.mark.parametrize("cut", [{"max_tokens": 2}, {"stop": " there"}])
@served()
async def test_a_cut_reply_is_ended_by_the_next_turn(site: Site, cut: dict[str, Any]) -> None:
    await site.chat(session_id="s", **cut)
    before = (await logged(site, "s")).tokens
    await site.chat(session_id="s", messages=MORE)
    prompt = site.prompt_ids()
    assert prompt[: len(before)] == before
    assert demo_tokens().decode(prompt[len(before) :]).startswith("<|im_end|>\n<|im_start|>user\nAnd now?")


@served()
async def test_the_header_names_the_session_of_a_full_history(site: Site) -> None:
    headers = {"X-Session-ID": "s", "X-Session-Create": "true"}
    await site.chat(headers=headers)
    history = [*HELLO, {"role": "assistant", "content": "Edited!"}, *MORE]
    response = await site.chat(headers=headers, messages=history)
    whole = demo_tokens().render(as_logged(history), generation_prompt=True)
    assert site.prompt_ids() == demo_tokens().encode(whole, special=False)
    assert site.engine.submitted[-1].session == "s"
    record = await logged(site, "s")
    assert [m.content for m in record.messages] == ["Hello", "Edited!", "And now?", "Hello there, friend."]
    assert response.headers["x-session-id"] == "s"


@served()
async def test_a_stateful_call_continues_what_a_full_history_left(site: Site) -> None:
    await site.chat(headers={"X-Session-ID": "s", "X-Session-Create": "true"})
    before = (await logged(site, "s")).tokens
    await site.chat(session_id="s", messages=MORE)
    assert site.prompt_ids()[: len(before)] == before


@pytest.mark.parametrize("named", [{"session_id": "s"}, {"headers": {"X-Session-ID": "s", "X-Session-Create": "true"}}])
@served()
async def test_the_id_is_echoed_in_header_body_and_chunks(site: Site, named: dict[str, Any]) -> None:
    response = await site.chat(**named)
    assert response.headers["x-session-id"] == "s"
    assert response.json()["session_id"] == "s"
    streamed = await site.chat(stream=True, **named)
    assert streamed.headers["x-session-id"] == "s"
    assert all(chunk["session_id"] == "s" for chunk in events(streamed.text)[:-1])


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 129, "a/b", "a\n", "../x", 5, ["a"]])
@served()
async def test_other_ids_are_refused(site: Site, name: Any) -> None:
    response = await site.chat(session_id=name)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "session_id"
    if isinstance(name, str) and name.isascii() and name.isprintable():
        headers = {"X-Session-ID": name, "X-Session-Create": "true"}
        assert (await site.chat(headers=headers)).status_code == 400
    assert not site.engine.submitted


@served()
async def test_ids_that_differ_are_refused_and_equal_ones_are_not(site: Site) -> None:
    path = "/v1/sessions/a/chat/completions"
    assert (await site.chat(session_id="a", headers={"X-Session-ID": "b"})).status_code == 400
    assert (await site.chat(path, session_id="b")).status_code == 400
    assert (await site.chat(path, headers={"X-Session-ID": "b"})).status_code == 400
    two = [("X-Session-ID", "a"), ("X-Session-ID", "b"), ("X-Session-Create", "true")]
    assert (await site.chat(headers=two)).status_code == 400
    assert (await site.chat(path, session_id="a", headers={"X-Session-ID": "a"})).status_code == 200


@served()
async def test_a_session_takes_one_choice(site: Site) -> None:
    await site.http.post("/v1/sessions", json={"id": "s"})
    for named in ({"session_id": "s"}, {"headers": {"X-Session-ID": "s"}}):
        response = await site.chat(n=2, **named)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
        assert (await site.complete(prompt=["a", "b"], **named)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_the_second_turn_at_once_is_a_409(site: Site, stream: bool) -> None:
    site.engine.pause_after = 1
    first = Call.post(site.app, "/v1/chat/completions", {"messages": HELLO, "session_id": "s", "stream": stream})
    await until(lambda: site.engine.submitted)
    for named in ({"session_id": "s"}, {"headers": {"X-Session-ID": "s"}}):
        response = await site.chat(**named)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "session_busy")
    site.engine.go.set()
    await first.finish()
    assert (await site.chat(session_id="s", messages=MORE)).status_code == 200
    assert len((await logged(site, "s")).messages) == 4


@served()
async def test_a_refused_turn_frees_its_session(site: Site) -> None:
    assert (await site.chat(session_id="s", max_tokens=5000)).status_code == 400
    facts, site.engine.facts = site.engine.facts, None
    assert (await site.chat(session_id="s")).status_code == 503
    site.engine.facts = facts
    assert (await site.chat(session_id="s")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_turn_whose_client_left_commits_nothing_and_frees_its_session(site: Site, stream: bool) -> None:
    site.engine.pause_after = 1
    call = Call.post(site.app, "/v1/chat/completions", {"messages": HELLO, "session_id": "s", "stream": stream})
    await until(lambda: site.engine.submitted)
    await call.leave()
    assert await logged(site, "s") is None
    assert site.engine.cancelled == [site.engine.submitted[0].turn]
    site.engine.pause_after = None
    assert (await site.chat(session_id="s")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_turn_that_failed_commits_nothing(site: Site, stream: bool) -> None:
    site.engine.ends_badly = FinishReason.ERROR
    await site.chat(session_id="s", stream=stream)
    assert await logged(site, "s") is None


@served()
async def test_a_turn_is_committed_before_its_end_is_told(site: Site) -> None:
    release = asyncio.Event()
    commit = site.log.commit

    async def slow_commit(*args: Any, **kwargs: Any) -> Any:
        await release.wait()
        return await commit(*args, **kwargs)

    site.log.commit = slow_commit  # type: ignore[method-assign]
    call = Call.post(site.app, "/v1/chat/completions", {"messages": HELLO, "session_id": "s", "stream": True})
    await call.until(lambda: b"friend" in call.body)
    await asyncio.sleep(0.02)
    assert b'"finish_reason":"stop"' not in call.body
    release.set()
    await call.finish()
    assert b'"finish_reason":"stop"' in call.body


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_log_that_fails_fails_the_turn(site: Site, stream: bool) -> None:
    async def failing(*args: Any, **kwargs: Any) -> Any:
        raise LogUnavailable("disk full at /secret")

    site.log.commit = failing  # type: ignore[method-assign]
    response = await site.chat(session_id="s", stream=stream)
    assert "secret" not in response.text
    if stream:
        assert events(response.text)[-1]["error"]["code"] == "log_unavailable"
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "log_unavailable")
        assert int(response.headers["retry-after"]) >= 1


@served({"ann": "key-a", "bob": "key-b"})
async def test_tenants_with_the_same_session_name_never_meet(site: Site) -> None:
    for key in ("key-a", "key-b"):
        await site.chat(session_id="s", headers={"Authorization": f"Bearer {key}"})
    assert [s.tenant for s in site.engine.submitted] == ["ann", "bob"]
    assert len((await logged(site, "s", "ann")).messages) == 2
    assert len((await logged(site, "s", "bob")).messages) == 2
    assert await logged(site, "s") is None


@served()
async def test_completions_continue_a_session_as_raw_text(site: Site) -> None:
    response = await site.complete(prompt="Once", session_id="s", max_tokens=3)
    assert response.json()["session_id"] == "s"
    first = await logged(site, "s")
    assert first.tokens[:-3] == demo_tokens().encode("Once", special=True)
    reply = demo_tokens().decode(reply_ids()[:3])
    assert first.messages == [LoggedMessage("user", "Once"), LoggedMessage("assistant", reply)]
    body = (await site.complete(prompt=" upon", session_id="s", echo=True, logprobs=1, max_tokens=1)).json()
    assert site.prompt_ids() == [*first.tokens, *demo_tokens().encode(" upon", special=False)]
    choice = body["choices"][0]
    assert choice["text"] == " uponHello"
    assert "".join(choice["logprobs"]["tokens"]) == " uponHello"  # the session's past is not echoed
