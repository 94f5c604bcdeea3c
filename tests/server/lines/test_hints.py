"""Hints: which header or field names the conversation, and what of a request is no hint."""

from __future__ import annotations

import json

import pytest

from server.lines.hints import MOST_CHARS, MOST_LINES, Hint, conversation_in, hint_of, names_of
from server.log.identity import check_id
from server.turns.side_call_counts import LINE


def found(headers: dict[str, str], **fields: str) -> Hint:
    hint = hint_of(headers, {name.replace("__", "."): value for name, value in fields.items()})
    assert hint is not None
    return hint


def test_a_request_without_an_id_has_no_hint() -> None:
    assert hint_of({"user-agent": "x"}, {}) is None
    assert hint_of({"thread-id": " ", "session-id": "a" * (MOST_CHARS + 1)}, {"prompt_cache_key": ""}) is None


@pytest.mark.parametrize("user", ["someone", "user_1_account_2_session_", "{", "[1]", '{"session_id": 5}', "{}"])
def test_a_user_id_that_names_no_session_is_no_hint(user: str) -> None:
    assert hint_of({}, {"metadata.user_id": user}) is None


def test_the_same_session_is_found_in_a_header_and_in_both_forms_of_the_user_id() -> None:
    header = found({"x-claude-code-session-id": "abc"})
    suffix = found({}, metadata__user_id="user_1_account_2_session_abc")
    parsed = found({}, metadata__user_id=json.dumps({"device_id": "d", "session_id": "abc", "parent_session_id": "p"}))
    assert header.names == suffix.names == parsed.names == names_of("abc", "")
    assert (header.via, suffix.via) == ("x-claude-code-session-id", "metadata.user_id.session_id")
    assert parsed.parent_names == names_of("p", "")


def test_an_agent_has_lines_of_its_own_and_its_parents() -> None:
    main = found({"x-claude-code-session-id": "s"})
    agent = found({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"})
    within = {"x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"}
    deeper = found({"x-claude-code-session-id": "s", **within})
    assert agent.names != main.names
    assert (agent.agent, agent.parent_names, deeper.parent_names) == ("a", main.names, agent.names)


def test_a_thread_is_the_same_in_its_header_its_window_and_the_metadata() -> None:
    thread = found({"thread-id": "t", "session-id": "s", "x-codex-parent-thread-id": "p"}, prompt_cache_key="k")
    assert thread.parent_names == names_of("p", "")
    assert found({"x-codex-window-id": "t:3"}).names == thread.names
    assert found({}, client_metadata__thread_id="t").names == thread.names
    assert found({"session-id": "s"}, prompt_cache_key="k").names == names_of("s", "")


@pytest.mark.parametrize(
    "header",
    [
        *("session-id", "session_id", "conversation_id", "x-session-affinity", "X-OpenWebUI-Chat-Id", "X-Task-ID"),
        *("X-Qwen-Code-Session-Id", "x-grok-conv-id", "x-litellm-session-id", "x-context-id", "agent-session-id"),
        *("x-goose-session-id", "X-Session-ID"),
    ],
)
def test_a_header_of_a_client_names_its_conversation_to_lines_and_to_routers(header: str) -> None:
    assert found({header: "c"}).names == names_of("c", "")
    assert conversation_in({header.lower(): "c", "user-agent": "x"}) == "c"


@pytest.mark.parametrize("field", ["metadata.session_id", "metadata.sessionId", "prompt_cache_key"])
def test_a_field_of_a_client_names_its_conversation(field: str) -> None:
    hint = hint_of({}, {field: "c"})
    assert hint is not None
    assert (hint.names, hint.via) == (names_of("c", ""), field)


def test_names_are_valid_ids_that_do_not_have_the_hint_in_them() -> None:
    names = names_of("user@example.org", "")
    assert len({*names}) == MOST_LINES
    for name in names:
        assert check_id(name).startswith(LINE)
        assert "user" not in name
