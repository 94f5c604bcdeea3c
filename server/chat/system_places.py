"""Places of system messages: a chat template takes them anywhere, or only in front, or not at all. Where it does not
take one, its text becomes part of a user turn in the same place, so that what stands before it stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from server.chat.late_tools import append_text
from server.config.prompt_rules import MESSAGES_JOINED, SYSTEM_IN_PLACE
from server.log.logged_message import LoggedMessage
from server.media.media import move

REMINDER = "<system-reminder>\n{text}\n</system-reminder>"
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class SystemPlaces:
    """What a template takes (``server.chat.front_probe`` measures it). ``leading``: a system message in front;
    ``several``: more than one there; ``only``: a conversation of nothing else; ``inside``: system messages between and
    behind other messages, in their place.
    ``user_after_user``, ``user_after_tool``: a user message directly after another one, and after a tool result;
    ``reminder_after_tool``: such a one leaves the text before it as it is. By rules of the server, system messages
    that it does not take become user turns (``moves``), and user messages that it does not take are joined to the
    message before (``joins``).
    """

    leading: bool = True
    several: bool = True
    only: bool = True
    inside: bool = True
    user_after_user: bool = True
    user_after_tool: bool = True
    reminder_after_tool: bool = True
    moves: bool = True
    joins: bool = True

    @property
    def in_force(self) -> SystemPlaces:
        """What ``place_messages`` goes by: without ``moves``, as if the template took every system message."""
        if self.moves:
            return self
        return dataclasses.replace(self, leading=True, several=True, only=True, inside=True, moves=True)

    def takes_user_after(self, message: LoggedMessage) -> bool:
        if message.role == "user":
            return self.user_after_user
        return message.role != "tool" or self.user_after_tool

    def takes_reminder_after(self, message: LoggedMessage) -> bool:
        """Whether the template takes a system text as a user message of its own after ``message``."""
        return self.takes_user_after(message) and (message.role != "tool" or self.reminder_after_tool)


ANYWHERE = SystemPlaces()


def place_messages(messages: Sequence[LoggedMessage], places: SystemPlaces) -> tuple[list[LoggedMessage], Counter[str]]:
    """Messages as a template with these ``places`` takes them, in the same order; and how many were changed by which
    rule.
    """
    places = places.in_force
    if places == ANYWHERE:
        return [*messages], Counter()
    front = next((i for i, message in enumerate(messages) if message.role not in SYSTEM_ROLES), len(messages))
    made, counted = place_front(messages[:front], places)
    if front == len(messages) and not places.only:
        made, counted = last_as_user(made, counted)
    ours = bool(made) and made[0].role == "user"  # the last message is a user's, of system texts only
    for message in messages[front:]:
        last = made[-1] if made else None
        if message.role in SYSTEM_ROLES and not places.inside:
            counted[SYSTEM_IN_PLACE] += 1
            text = REMINDER.format(text=message.content)
            if last is not None and last.role in ("user", "tool") and not places.takes_reminder_after(last):
                made[-1] = append_text(last, text)
            else:
                made.append(LoggedMessage("user", text))
                ours = True
            continue
        joined = message.role == "user" and last is not None and not places.takes_user_after(last)
        if last is not None and joined and (ours or places.joins):
            counted[MESSAGES_JOINED] += not ours
            made[-1] = append_message(last, message)
        else:
            made.append(message)
        ours = False
    return made, +counted


def append_message(last: LoggedMessage, message: LoggedMessage) -> LoggedMessage:
    """``last`` with the content of ``message`` at its end."""
    made = append_text(last, message.content)
    media = move(message.media, len(made.content) - len(message.content))
    return replace(made, media=(*last.media, *media))


def place_front(messages: Sequence[LoggedMessage], places: SystemPlaces) -> tuple[list[LoggedMessage], Counter[str]]:
    """The system messages in front: one, where the template takes one only; text of a user message, where it takes
    none.
    """
    if not messages or (places.leading and (places.several or len(messages) == 1)):
        return [*messages], Counter()
    text = "\n\n".join(message.content for message in messages if message.content)
    role = messages[0].role if places.leading else "user"
    return [replace(messages[0], role=role, content=text)], Counter({SYSTEM_IN_PLACE: len(messages) - places.leading})


def last_as_user(messages: Sequence[LoggedMessage], counted: Counter[str]) -> tuple[list[LoggedMessage], Counter[str]]:
    """The last message as a user's, which is what a template without one demands."""
    if not messages or messages[-1].role == "user":
        return [*messages], counted
    return [*messages[:-1], replace(messages[-1], role="user")], counted + Counter({SYSTEM_IN_PLACE: 1})
