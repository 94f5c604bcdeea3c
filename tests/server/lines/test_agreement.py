"""What of a client's history counts as logged: its content does, what clients rewrite does not."""

from __future__ import annotations

import pytest

from server.lines.agreement import agreement, count_kept_reasoning, with_logged_ids
from server.log.logged_message import LoggedCall, LoggedFunction, LoggedMessage


def calls(arguments: str, id: str = "c1", name: str = "f") -> tuple[LoggedCall, ...]:
    return (LoggedCall(id, "function", LoggedFunction(name, arguments)),)


LOG = [
    LoggedMessage("system", "Be brief."),
    LoggedMessage("user", "Hello"),
    LoggedMessage("assistant", "Hi.\n", reasoning_content="A greeting.\n", tool_calls=calls('{"a": 1, "b": "x"}')),
    LoggedMessage("tool", "done", tool_call_id="c1"),
]


def same(index: int, message: LoggedMessage) -> bool:
    """Whether all of the log is agreed with if this message stands in place of one of it."""
    given = [*LOG[:index], message, *LOG[index + 1 :]]
    return agreement(LOG, given).messages == len(LOG)


@pytest.mark.parametrize(
    "message",
    [
        LoggedMessage("assistant", "Hi.", tool_calls=calls('{"b":"x","a":1}')),
        LoggedMessage(
            "assistant", "\n\nHi. ", reasoning_content="A  greeting.", tool_calls=calls('{"a":1.0,"b":"\\u0078"}')
        ),
    ],
)
def test_what_clients_leave_out_or_write_anew_is_the_same(message: LoggedMessage) -> None:
    assert same(2, message)


@pytest.mark.parametrize(
    "message",
    [
        LoggedMessage("assistant", "Hi!", tool_calls=calls('{"a": 1, "b": "x"}')),
        LoggedMessage("assistant", "Hi.", reasoning_content="Another thought.", tool_calls=calls('{"a": 1, "b": "x"}')),
        LoggedMessage("assistant", "Hi.", tool_calls=calls('{"a": 1, "b": "y"}')),
        LoggedMessage("assistant", "Hi.", tool_calls=calls('{"a": true, "b": "x"}')),
        LoggedMessage("assistant", "Hi.", tool_calls=calls('{"a": 1, "b": "x"}', name="g")),
        LoggedMessage("assistant", "Hi."),
        LoggedMessage("user", "Hi."),
        LoggedMessage("assistant", "Hi.", tool_calls=calls('{"a": 1, "b": "x"}'), added_tools=({"type": "function"},)),
    ],
)
def test_other_content_is_not_the_same(message: LoggedMessage) -> None:
    assert not same(2, message)


@pytest.mark.parametrize("content", [" Hello", "hello", "Hello there", ""])
def test_other_words_of_a_user_are_not_the_same(content: str) -> None:
    assert not same(1, LoggedMessage("user", content))
    assert same(1, LoggedMessage("user", "Hello\n"))


def test_ids_of_calls_may_be_the_clients_own_if_results_follow_them() -> None:
    renamed = LoggedMessage("assistant", "Hi.", tool_calls=calls('{"a": 1, "b": "x"}', id="mine"))
    given = [*LOG[:2], renamed, LoggedMessage("tool", "done", tool_call_id="mine")]
    assert agreement(LOG, given).messages == 4
    assert agreement(LOG, [*given[:3], LoggedMessage("tool", "done", tool_call_id="other")]).messages == 3
    ids = agreement(LOG[:3], given).ids
    assert with_logged_ids(given[3:], ids)[0].tool_call_id == "c1"


def test_arguments_that_were_cut_off_are_those_that_the_client_was_told() -> None:
    cut = [LoggedMessage("assistant", "", tool_calls=calls('{"a": [1, 2'))]
    assert agreement(cut, [LoggedMessage("assistant", "", tool_calls=calls('{"a": [1, 2]}'))]).messages == 1
    assert agreement(cut, [LoggedMessage("assistant", "", tool_calls=calls('{"a": [1]}'))]).messages == 0


def test_reasoning_that_only_the_log_has_is_counted() -> None:
    bare = [*LOG[:2], LoggedMessage("assistant", "Hi.", tool_calls=LOG[2].tool_calls), LOG[3]]
    assert (count_kept_reasoning(LOG, bare), count_kept_reasoning(LOG, LOG)) == (1, 0)
