"""Measures whether a chat template is prefix-stable: whether each prompt begins with the timeline of the turn before.

Measured on made-up conversations, once, after the tokenizer is loaded. If it is not, a stateless chat can reuse its
cached history only up to the point where the template changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import msgspec

from server.chat.chat_tokenizer import ChatTokenizer, TemplateRefused
from server.chat.stateful import full_ids
from server.log.logged_message import LoggedMessage
from server.log.timeline import common_prefix

SYSTEM = "Answer in a few words."
TURNS = (
    ("How far is the moon?", "About 384,000 km."),
    ("And the sun?", "About 150 million km."),
    ("Which one is larger?", "The sun is."),
)
OPENING = "<think>"
REASONING = "\nThe user wants a short answer.\n</think>\n\n"
SHOWN = 8  # tokens from where two timelines part


class Divergence(msgspec.Struct, frozen=True):
    """Where a prompt first differs from the timeline of the turn before. ``at``: "system" if that is before the first
    user message, else "turn N" for the prompt of that turn. From there on, ``expected`` is the timeline's text and
    ``got`` the prompt's.
    """

    at: str
    got: str
    expected: str


class Stability(msgspec.Struct, frozen=True):
    """``prefix_stable`` is None without a template, or if the template refuses all conversations."""

    prefix_stable: bool | None = None
    diverges: Divergence | None = None


UNMEASURED = Stability()


def stability(tokens: ChatTokenizer) -> Stability:
    """Renders three turns, with and without a system message, with and without reasoning in the replies. Blocking, some
    10 ms.
    """
    if not tokens.has_template:
        return Stability()
    taken = False
    for system, reasoning in product((False, True), (False, True)):
        try:
            # Models differ in whether their reply starts with a space; templates suit their model.
            found = divergence(tokens, system, reasoning)
            if found is not None and divergence(tokens, system, reasoning, lead=" ") is not None:
                return Stability(False, found)
        except TemplateRefused:
            continue
        taken = True
    return Stability(True if taken else None)


def divergence(tokens: ChatTokenizer, system: bool, reasoning: bool, lead: str = "") -> Divergence | None:
    """The first difference between a turn's prompt and the timeline before; None if there is none. Raises
    TemplateRefused.
    """
    messages: list[LoggedMessage] = [LoggedMessage("system", SYSTEM)] if system else []
    left: list[list[int]] = []  # by the turn before: its prompt, then that with its reply
    for number, (question, answer) in enumerate(TURNS, 1):
        messages.append(LoggedMessage("user", question))
        ids = full_ids(tokens, messages)
        for timeline in left:
            same = common_prefix(timeline, ids)
            if same < len(timeline):
                return divergence_after(tokens, number, same, ids, timeline)
        text = tokens.render(messages, generation_prompt=True)
        opened = text.rstrip().endswith(OPENING)
        if opened and not reasoning:  # nothing that this model says
            return None
        reply = answer if not reasoning else f"{'' if opened else OPENING}{REASONING}{answer}"
        messages.append(LoggedMessage("assistant", lead + reply))
        left = [ids, tokens.encode(text + lead + reply, special=False)]
    return None


def divergence_after(
    tokens: ChatTokenizer, turn: int, same: int, ids: Sequence[int], timeline: Sequence[int]
) -> Divergence:
    """The divergence after ``same`` tokens."""
    early = len(tokens.decode(ids[:same])) < tokens.decode(ids).find(TURNS[0][0])
    got, expected = (tokens.decode(part[same : same + SHOWN]) for part in (ids, timeline))
    return Divergence("system" if early else f"turn {turn}", got, expected)
