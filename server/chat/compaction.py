"""Compaction: the older part of a conversation is replaced by a summary of it.

A compacted conversation begins with its instructions, then a question and its answer, the summary, then the newest
messages as they are. So it alternates between user and assistant, as many templates demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from server.log.logged_message import LoggedMessage

FRONT = ("system", "developer")
TASK = (
    "Write a summary of our conversation so far, from which you could go on without it. Keep what was asked for and "
    "why, what was decided and found out, names, numbers, paths and exact wording that matter, what was done, what "
    "failed, what is open, and what comes next. Write only the summary, and call no tools."
)
ASKED = "Summarise our conversation so far."
GO_ON = "Go on from there."


def ask_for_summary(instructions: str | None = None) -> LoggedMessage:
    """The message that asks the model for a summary; ``instructions`` take the place of ours."""
    return LoggedMessage("user", instructions or TASK)


def front_of(messages: Sequence[LoggedMessage]) -> int:
    """How many messages are the instructions at the beginning, which stay as they are."""
    return next((i for i, message in enumerate(messages) if message.role not in FRONT), len(messages))


def newest_from(messages: Sequence[LoggedMessage]) -> int:
    """The first of the newest messages, which stay as they are: those after the last reply, and that reply if its calls
    are answered by them.
    """
    last = next((i for i in reversed(range(len(messages))) if messages[i].role == "assistant"), None)
    if last is None:
        return front_of(messages)
    answers = last + 1 < len(messages) and messages[last + 1].role == "tool"
    return last if answers else last + 1


def can_be_folded(messages: Sequence[LoggedMessage], start: int) -> bool:
    """Whether the messages from the front to ``start`` hold more than an earlier summary and its question."""
    older = [message for message in messages[front_of(messages) : start] if not message.dropped]
    if len(older) >= 2 and older[0].content.endswith(ASKED) and older[1].role == "assistant":
        older = older[2:]
    return any(message.content != GO_ON for message in older)


def cuts_of(messages: Sequence[LoggedMessage], start: int) -> list[int]:
    """The places up to which messages can be summarised so that no answer is torn from its call: in front of messages
    that are no results of tools, and ``start``.
    """
    front = front_of(messages)
    return [i for i in range(front + 1, start) if messages[i].role != "tool" and not messages[i].dropped] + [start]


def late_tools_of(messages: Sequence[LoggedMessage]) -> tuple[list[dict[str, Any]], list[str]]:
    """The tools that messages add and do not remove again, and the names of those that they remove."""
    added: dict[str, dict[str, Any]] = {}
    removed: dict[str, None] = {}
    for message in messages:
        for tool in message.added_tools:
            added[tool["function"]["name"]] = tool
            removed.pop(tool["function"]["name"], None)
        for name in message.removed_tools:
            added.pop(name, None)
            removed[name] = None
    return [*added.values()], [*removed]


def summary_messages(summary: str, before: Sequence[str] = ()) -> list[LoggedMessage]:
    """The question and the answer that stand for what was summarised; ``before`` are texts of the user that were kept
    word for word.
    """
    return [LoggedMessage("user", "\n\n".join([*before, ASKED])), LoggedMessage("assistant", summary)]


def fold_messages(messages: Sequence[LoggedMessage], start: int, summary: str) -> list[LoggedMessage]:
    """What follows the front where a summary takes the place of the messages up to ``start``: the question, the
    summary, and the newest messages as they are. Tools that the summarised messages add are added by the question. A
    reply that follows the summary is given something to answer.
    """
    question, answer = summary_messages(summary)
    added, removed = late_tools_of([m for m in messages[front_of(messages) : start] if not m.dropped])
    question = structs.replace(question, added_tools=(*added,), removed_tools=(*removed,))
    newest = [*messages[start:]]
    if newest and newest[0].role != "user":
        newest.insert(0, LoggedMessage("user", GO_ON))
    return [question, answer, *newest]
