"""Lines over HTTP: a client that sends its whole history and a hint continues the exact tokens of its conversation."""

from __future__ import annotations

from typing import Any

import pytest
from http_context import Call, Site, served
from line_kit import CALL, HINT, SCHEMA, SYSTEM, TOOL, Client, goes_on, hermes, ids_of, line_of, lines, user

from server.lines.hints import MOST_LINES
from server.log.database import LogFull, LogUnavailable

OTHER = {"type": "function", "function": {"name": "write", "parameters": SCHEMA}}


@served(tokens=hermes)
async def test_the_whole_history_is_continued_token_by_token(site: Site) -> None:
    client = Client(site)
    first = await client.ask(user("Look."), reply=CALL)
    second = await client.ask(client.result(), reply="<think>\nNothing there.\n</think>\n\nIt is empty.")
    assert goes_on(site)
    third = await client.ask(user("Why?"))
    assert goes_on(site)
    told = [line_of(body) for body in (first, second, third)]
    assert [one["outcome"] for one in told] == ["begun", "continued", "continued"]
    assert [one["turns"] for one in told] == [0, 1, 2]
    assert {one["via"] for one in told} == {"thread-id"}
    assert len({one["id"] for one in told}) == 1
    assert [body["cache"].get("adapted") for body in (first, second, third)] == [
        None,
        [{"rule": "reasoning_kept", "param": "messages", "count": 1}],
        [{"rule": "reasoning_kept", "param": "messages", "count": 2}],
    ]
    assert third["cache"]["miss"] is None
    assert "session_id" not in third
    (line,) = await lines(site)
    assert (line["turns"], line["ttl_seconds"], line["metadata"]) == (
        3,
        86_400,
        {"title": "Look.", "hint": "thread-id"},
    )


@served(tokens=hermes, line_seconds=0)
async def test_without_lines_the_history_is_rendered_anew_and_nothing_is_logged(site: Site) -> None:
    client = Client(site)
    await client.ask(user("Look."), reply=CALL)
    body = await client.ask(client.result())
    assert not goes_on(site)
    assert "line" not in body["cache"]
    assert await lines(site) == []


@served(tokens=hermes)
async def test_a_history_that_is_changed_in_the_middle_forks_there_and_the_old_one_can_be_gone_back_to(
    site: Site,
) -> None:
    client = Client(site)
    for question in ("one", "two", "three"):
        body = await client.ask(user(question), reply="<think>\nHm.\n</think>\n\nYes.")
    kept = [*client.messages]
    old = line_of(body)["id"]
    client.messages = kept[:3]
    forked = line_of(await client.ask(user("other"), reply="No."))
    assert (forked["outcome"], forked["turns"]) == ("forked", 1)
    again = line_of(await client.ask(user("more")))
    assert (again["outcome"], again["turns"], again["id"]) == ("continued", 2, forked["id"])
    tree = (await site.http.get(f"/v1/sessions/{old}/tree")).json()["data"]
    new = next(branch for branch in tree if branch["session"]["id"] == forked["id"])
    assert new["session"]["parent"] == {"session_id": old, "turn": 1}
    ids = [[turn["id"] for turn in branch["turns"]] for branch in tree]
    assert ids[0][0] == ids[1][0]
    assert [len(turns) for turns in ids] == [3, 3]
    client.messages = kept
    back = line_of(await client.ask(user("four")))
    assert (back["outcome"], back["turns"], back["id"]) == ("continued", 3, old)


@served(tokens=hermes)
async def test_the_same_request_again_is_another_branch(site: Site) -> None:
    client = Client(site)
    await client.ask(user("one"))
    await client.ask(user("two"))
    del client.messages[-1]
    again = line_of(await client.ask())
    assert (again["outcome"], again["turns"]) == ("forked", 1)


@served(tokens=hermes)
async def test_a_line_that_is_busy_neither_waits_nor_refuses(site: Site) -> None:
    client = Client(site)
    await client.ask(user("one"))
    site.engine.pause_after = 1
    body: dict[str, Any] = {"messages": [*client.messages, user("two")], "tools": [TOOL]}
    running = Call.post(site.app, "/v1/chat/completions", {**body, "stream": True}, headers=HINT)
    await running.until(lambda: b"content" in running.body)
    site.engine.pause_after = None
    answer = (await site.chat(**body, headers=HINT)).json()
    assert (line_of(answer)["outcome"], line_of(answer)["turns"]) == ("forked", 1)
    site.engine.go.set()
    await running.finish()
    assert running.status == 200
    assert sorted(line["turns"] for line in await lines(site)) == [2, 2]


@served(tokens=hermes)
async def test_a_request_that_is_cut_off_leaves_the_line_as_it_was(site: Site) -> None:
    client = Client(site)
    await client.ask(user("one"))
    site.engine.pause_after = 1
    body = {"messages": [*client.messages, user("two")], "tools": [TOOL], "stream": True}
    running = Call.post(site.app, "/v1/chat/completions", body, headers=HINT)
    await running.until(lambda: b"content" in running.body)
    await running.leave()
    site.engine.pause_after = None
    site.engine.go.set()
    (line,) = await lines(site)
    assert line["turns"] == 1
    assert line_of(await client.ask(user("two")))["outcome"] == "continued"


# --- side calls -------------------------------------------------------------------------------------------------

TITLE: dict[str, Any] = {"messages": [{"role": "system", "content": "Write a title."}, user("one")]}


@pytest.mark.parametrize("first", [True, False])
@served(tokens=hermes)
async def test_a_title_call_under_the_same_hint_is_not_logged(site: Site, first: bool) -> None:
    client = Client(site)
    client.headers = {"x-session-affinity": "ses_1", "X-Session-Id": "ses_1", "user-agent": "opencode/1"}
    if not first:
        await client.ask(user("one"))
    title = await site.chat(**TITLE, headers=client.headers)
    assert (title.status_code, line_of(title.json())["outcome"]) == (200, "side")
    assert (site.engine.submitted[-1].session, site.engine.submitted[-1].side) == (None, True)
    if first:
        await client.ask(user("one"))
    assert line_of(await client.ask(user("two")))["outcome"] == "continued"
    assert site.engine.submitted[-1].side is False
    sessions = (await site.http.get("/v1/sessions")).json()["data"]
    assert [(session["turns"], session["kind"], session["side_calls"]) for session in sessions] == [(2, "line", 1)]
    metrics = (await site.http.get("/metrics")).text
    assert 'warmturn_line_requests_total{outcome="side"} 1.0' in metrics
    await site.chat(session_id="named")
    other = (await site.http.get("/v1/sessions/named")).json()
    assert (other["kind"], "side_calls" in other) == ("session", False)


@pytest.mark.parametrize(
    ("headers", "body"),
    [({"x-app": "cli-bg"}, {}), ({"x-openai-subagent": "compact"}, {}), ({}, {"max_tokens": 1})],
)
@served(tokens=hermes)
async def test_a_marked_side_call_begins_with_the_tokens_of_its_line_and_is_not_logged(
    site: Site, headers: dict[str, str], body: dict[str, Any]
) -> None:
    client = Client(site)
    await client.ask(user("one"), reply="<think>\nHm.\n</think>\n\nYes.")
    messages = [*client.messages, user("Sum up.")]
    answer = (await site.chat(messages=messages, tools=[TOOL], headers={**HINT, **headers}, **body)).json()
    assert (line_of(answer)["outcome"], line_of(answer)["turns"]) == ("side", 1)
    assert goes_on(site)
    assert site.engine.submitted[-1].session is None
    (line,) = await lines(site)
    assert (line["turns"], line["id"]) == (1, line_of(answer)["id"])


@served(tokens=hermes)
async def test_a_summary_without_the_tools_is_a_side_call(site: Site) -> None:
    client = Client(site)
    await client.ask(user("one"))
    answer = (await site.chat(messages=[*client.messages, user("Sum up.")], headers=HINT)).json()
    assert (line_of(answer)["outcome"], line_of(answer)["turns"]) == ("side", 1)
    assert answer["cache"]["adapted"] == [{"rule": "tools_kept", "param": "tools", "count": 1}]
    assert goes_on(site)
    assert line_of(await client.ask(user("two")))["turns"] == 1


@served(tokens=hermes)
async def test_a_conversation_that_goes_on_without_its_tools_is_a_line(site: Site) -> None:
    client = Client(site)
    await client.ask(user("one"))
    client.body["tools"] = []
    assert line_of(await client.ask(user("two")))["outcome"] == "side"
    assert line_of(await client.ask(user("three")))["outcome"] == "rewritten"
    assert '"read"' not in site.engine._tokens.decode(ids_of(site.engine.submitted[-1]))
    assert line_of(await client.ask(user("four")))["outcome"] == "continued"


@served(tokens=hermes)
async def test_a_conversation_whose_history_was_summed_up_is_a_new_line(site: Site) -> None:
    client = Client(site)
    first = line_of(await client.ask(user("one")))
    client.messages = [SYSTEM, user("Summary: one was asked.")]
    second = line_of(await client.ask(user("two")))
    assert (second["outcome"], second["id"] == first["id"]) == ("begun", False)
    assert line_of(await client.ask(user("three")))["outcome"] == "continued"


@served(tokens=hermes)
async def test_what_looked_like_a_side_call_is_a_line_once_it_goes_on(site: Site) -> None:
    client = Client(site, tools=[])
    assert line_of(await client.ask(user("one")))["outcome"] == "side"
    assert line_of(await client.ask(user("two")))["outcome"] == "begun"
    assert line_of(await client.ask(user("three")))["outcome"] == "continued"


# --- what changes in front ----------------------------------------------------------------------------------------


@served(tokens=hermes)
async def test_other_instructions_begin_another_line_that_is_related_to_the_first(site: Site) -> None:
    client = Client(site)
    first = line_of(await client.ask(user("one")))
    client.messages[0] = {**SYSTEM, "content": "You write code. It is Tuesday."}
    body = await client.ask(user("two"))
    assert line_of(body)["outcome"] == "rewritten"
    assert "Tuesday" in site.engine._tokens.decode(ids_of(site.engine.submitted[-1]))
    new = next(line for line in await lines(site) if line["id"] != first["id"])
    assert new["parent"] == {"session_id": first["id"], "turn": 0}
    assert line_of(await client.ask(user("three")))["outcome"] == "continued"


@served(tokens=hermes)
async def test_tools_that_come_later_are_defined_where_they_come(site: Site) -> None:
    client = Client(site)
    await client.ask(user("one"), reply="<think>\nHm.\n</think>\n\nYes.")
    client.body["tools"] = [OTHER, TOOL]
    body = await client.ask(user("two"))
    assert (line_of(body)["outcome"], goes_on(site)) == ("continued", True)
    assert {note["rule"]: note["count"] for note in body["cache"]["adapted"]}["tools_in_place"] == 1
    prompt = site.engine._tokens.decode(ids_of(site.engine.submitted[-1]))
    assert prompt.index("two") < prompt.index('"write"')
    says = '<tool_call>\n{"name": "write", "arguments": {"path": "."}}\n</tool_call>'
    body = await client.ask(user("three"), reply=says)
    assert (line_of(body)["outcome"], goes_on(site)) == ("continued", True)
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "write"
    assert site.engine._tokens.decode(ids_of(site.engine.submitted[-1])).count('"write", "parameters"') == 1


@served(tokens=hermes)
async def test_tools_that_are_left_out_again_cost_the_turns_that_had_them(site: Site) -> None:
    client = Client(site)
    thinks = "<think>\nHm.\n</think>\n\nYes."
    first = line_of(await client.ask(user("one"), reply=thinks))
    client.body["tools"] = [TOOL, OTHER]
    await client.ask(user("two"), reply=thinks)
    client.body["tools"] = [TOOL]
    third = line_of(await client.ask(user("three")))
    assert (third["outcome"], third["turns"], third["id"] == first["id"]) == ("forked", 1, False)
    begun, _, last = (ids_of(sent) for sent in site.engine.submitted)
    assert last[: len(begun)] == begun
    text = site.engine._tokens.decode(last)
    assert '"write"' not in text
    assert text.count("Hm.") == 1  # of the turn that the line still has


@served(tokens=hermes)
async def test_what_a_request_leaves_out_is_not_in_force(site: Site) -> None:
    client = Client(site, reasoning_effort="none")
    await client.ask(user("one"))
    del client.body["reasoning_effort"]
    await client.ask(user("two"))
    assert "<think>" not in site.engine._tokens.decode(ids_of(site.engine.submitted[-1])[-12:])


# --- bounds -------------------------------------------------------------------------------------------------------


@served(tokens=hermes)
async def test_a_hint_has_a_bounded_number_of_lines_and_the_oldest_gives_way(site: Site) -> None:
    client = Client(site)
    first = line_of(await client.ask(user("q")))["id"]
    for number in range(MOST_LINES):
        client.messages = [SYSTEM]
        last = line_of(await client.ask(user(f"question {number}")))
        assert last["outcome"] == "begun"
    assert len(await lines(site)) == MOST_LINES
    assert last["id"] == first
    assert (await site.http.get(f"/v1/sessions/{first}")).json()["turns"] == 1
    assert ("default", first) in site.engine.forgotten


@served({"ann": "key-a", "bob": "key-b"}, tokens=hermes)
async def test_a_hint_belongs_to_its_tenant(site: Site) -> None:
    client = Client(site)
    client.headers = {**HINT, "authorization": "Bearer key-a"}
    await client.ask(user("one"))
    client.headers = {**HINT, "authorization": "Bearer key-b"}
    assert line_of(await client.ask(user("two")))["outcome"] == "begun"


@pytest.mark.parametrize("body", [{"n": 2}, {"cache_salt": "x"}, {"reasoning_history": "drop"}])
@served(tokens=hermes)
async def test_what_a_line_cannot_have_runs_without_one(site: Site, body: dict[str, Any]) -> None:
    answer = await site.chat(messages=[user("one")], tools=[TOOL], headers=HINT, **body)
    assert (answer.status_code, "line" in answer.json()["cache"]) == (200, False)
    assert await lines(site) == []


@pytest.mark.parametrize("error", [LogUnavailable("gone"), LogFull("full")])
@served(tokens=hermes)
async def test_a_log_that_cannot_be_used_fails_no_request_with_a_hint(
    site: Site, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise error

    client = Client(site)
    await client.ask(user("one"))
    for method, outcome in (("commit", "continued"), ("find_by_names", None), ("writable", None)):
        with monkeypatch.context() as patched:
            patched.setattr(site.log, method, fail)
            body = await client.ask(user(method))
            assert body["cache"].get("line", {}).get("outcome") == outcome
    (line,) = await lines(site)
    assert line["turns"] == 1


@served(tokens=hermes)
async def test_bad_messages_are_refused_as_without_a_hint(site: Site) -> None:
    client = Client(site)
    await client.ask(user("one"))
    wrong = [*client.messages, {"role": "tool", "tool_call_id": "x", "content": "?"}]
    answers = [await site.chat(messages=wrong, tools=[TOOL], headers=headers) for headers in (HINT, {})]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].json()["error"]["param"] == answers[1].json()["error"]["param"] == "messages[3].tool_call_id"


@served(tokens=hermes)
async def test_an_agent_within_a_session_has_a_line_whose_parent_is_the_sessions(site: Site) -> None:
    main, agent = Client(site), Client(site)
    main.headers = {"x-claude-code-session-id": "s"}
    agent.headers = {**main.headers, "x-claude-code-agent-id": "agent-7"}
    first = line_of(await main.ask(user("one")))
    second = line_of(await agent.ask(user("explore")))
    assert (second["outcome"], second["turns"]) == ("begun", 0)
    listed = {line["id"]: line for line in await lines(site)}
    assert listed[second["id"]]["parent"] == {"session_id": first["id"], "turn": 0}
    assert listed[second["id"]]["metadata"] == {
        "title": "explore",
        "hint": "x-claude-code-session-id",
        "agent": "agent-7",
    }
    assert line_of(await main.ask(user("two")))["id"] == first["id"]


@served(tokens=hermes)
async def test_a_thread_that_was_forked_goes_on_from_its_parents_tokens(site: Site) -> None:
    client = Client(site)
    first = line_of(await client.ask(user("one"), reply="<think>\nHm.\n</think>\n\nYes."))
    client.headers = {"thread-id": "t2", "x-codex-parent-thread-id": "t1"}
    forked = line_of(await client.ask(user("two")))
    assert (forked["outcome"], forked["turns"], forked["id"] == first["id"]) == ("forked", 1, False)
    assert goes_on(site)
    assert line_of(await client.ask(user("three")))["outcome"] == "continued"


@served(tokens=hermes)
async def test_reasoning_that_leaves_no_room_is_left_out_again(site: Site) -> None:
    client = Client(site)
    each = len(site.engine._tokens.encode("Hm. " * 100, special=False)) / 100
    await client.ask(user("one"), reply=f"<think>\n{'Hm. ' * int(1700 / each)}\n</think>\n\nYes.")
    body = await client.ask(user("two " * 100))
    assert body["usage"]["prompt_tokens"] < 1700
    assert (line_of(body)["outcome"], "adapted" in body["cache"]) == ("rewritten", False)
    assert line_of(await client.ask(user("three")))["outcome"] == "continued"


@served(tokens=hermes)
async def test_a_line_that_moves_before_it_is_claimed_is_forked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = Client(site), Client(site)
    await client.ask(user("one"))
    other.messages = [*client.messages]
    writable = site.log.writable
    moved: dict[str, Any] = {}

    async def move_first() -> None:
        if not moved:
            moved["outcome"] = "running"
            moved.update(line_of(await other.ask(user("meanwhile"))))
        await writable()

    monkeypatch.setattr(site.log, "writable", move_first)
    told = line_of(await client.ask(user("two")))
    assert (moved["outcome"], told["outcome"], told["turns"]) == ("continued", "forked", 1)
    kept = (await site.http.get(f"/v1/sessions/{moved['id']}/messages")).json()["data"]
    assert [message["content"] for message in kept if message["role"] == "user"] == ["one", "meanwhile"]


@served(tokens=hermes)
async def test_a_client_may_have_other_ids_for_calls(site: Site) -> None:
    client = Client(site)
    await client.ask(user("Look."), reply=CALL)
    client.messages[-1]["tool_calls"][0]["id"] = "mine"
    assert line_of(await client.ask(client.result()))["outcome"] == "continued"
    assert goes_on(site)
    assert line_of(await client.ask(user("Why?")))["outcome"] == "continued"


@pytest.mark.parametrize("goes_on_from_it", [True, False])
@served(tokens=hermes)
async def test_a_history_that_ends_with_a_reply_does_not_take_it_for_answered(
    site: Site, goes_on_from_it: bool
) -> None:
    client = Client(site)
    for question in ("one", "two"):
        await client.ask(user(question), reply="<think>\nHm.\n</think>\n\nYes.")
    body = {"messages": client.messages, "tools": [TOOL], "continue_final_message": goes_on_from_it}
    answer = await site.chat(headers=HINT, **body)  # type: ignore[arg-type]
    assert answer.status_code == 200
    assert (line_of(answer.json())["outcome"], line_of(answer.json())["turns"]) == ("forked", 1)
    end = site.engine._tokens.decode(ids_of(site.engine.submitted[-1])).rpartition("two")[2]
    assert end.endswith("Yes.") is goes_on_from_it
