"""Compaction: the older part of a conversation is replaced by a summary of it.

A compacted conversation begins with its instructions, then a question and its answer, the summary, then the newest
messages as they are. So it alternates between user and assistant, as many templates demand.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def summary_messages(summary: str, before: Sequence[str] = ()) -> list[LoggedMessage]:
    """The question and the answer that stand for what was summarised; ``before`` are texts of the user that were kept
    word for word.
    """
    return [LoggedMessage("user", "\n\n".join([*before, ASKED])), LoggedMessage("assistant", summary)]


def compacted(messages: Sequence[LoggedMessage], start: int, summary: str) -> list[LoggedMessage]:
    """``messages`` with a summary in place of those from the front to ``start``. A reply that follows the summary is
    given something to answer.
    """
    newest = [*messages[start:]]
    if not newest or newest[0].role != "user":
        newest.insert(0, LoggedMessage("user", GO_ON))
    return [*messages[: front_of(messages)], *summary_messages(summary), *newest]
