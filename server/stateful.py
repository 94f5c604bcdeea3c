"""Continuing a logged conversation: the token ids that new messages add to the ids that are already there.

The log is the truth of a stateful session: what was sampled is never tokenised again and past turns are never
rendered again. So the new messages are rendered *behind a sentinel* that stands in the place of the last reply, and
only what the template puts after the sentinel is tokenised.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Any, Protocol

Message = dict[str, Any]


class Renderer(Protocol):
    """What is needed of ``server.tokens.Tokens``."""

    def encode(self, text: str, *, special: bool) -> list[int]: ...
    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str: ...


def full_ids(renderer: Renderer, messages: Sequence[Message]) -> list[int]:
    """The whole conversation, rendered and tokenised, up to where the next reply starts."""
    return renderer.encode(renderer.render(messages, generation_prompt=True), special=False)


def continued_ids(
    renderer: Renderer,
    logged_ids: Sequence[int],
    logged: Sequence[Message],
    new: Sequence[Message],
    turn_ends: Collection[int],
) -> list[int]:
    """``logged_ids`` followed by the ids of ``new``, up to where the next reply starts.

    ``turn_ends`` are the ids that a model ends its reply with: when the log ends with one and the template would
    write it too, it is there once. A template that hides or rewrites the reply's place leaves nothing to continue
    from: then the whole conversation is rendered, as a stateless call would.
    """
    tail = text_after_reply(renderer, logged, new)
    if tail is None:
        return full_ids(renderer, [*logged, *new])
    # Stripped as an id, not as text: what stands behind a special token can tokenise differently without it.
    ids = renderer.encode(tail, special=False)
    if ids and logged_ids and ids[0] == logged_ids[-1] and ids[0] in turn_ends:
        ids = ids[1:]
    return [*logged_ids, *ids]


def text_after_reply(renderer: Renderer, logged: Sequence[Message], new: Sequence[Message]) -> str | None:
    """What the template writes after the last logged reply when ``new`` follows it; None when that cannot be told."""
    if not logged or logged[-1]["role"] != "assistant":
        return None
    sentinel = f"sentinel{secrets.token_hex(16)}"  # random: no message can hold it
    text = renderer.render([*logged[:-1], {**logged[-1], "content": sentinel}, *new], generation_prompt=True)
    if text.count(sentinel) != 1:
        return None
    return text.partition(sentinel)[2]
