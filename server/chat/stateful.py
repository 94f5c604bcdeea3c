"""Continuations: the token ids that new messages add to a logged conversation.

Generated tokens of a stateful session are never tokenised again, and earlier turns are never rendered again. Instead,
the new messages are rendered after a sentinel text in place of the last reply, and only what the template writes after
the sentinel is tokenised.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Protocol

from msgspec.structs import replace

from server.chat.dialect import Dialect
from server.chat.expansions import NO_MEDIA, PromptMedia
from server.chat.rendering import PLAIN, Rendering
from server.log.logged_message import LoggedMessage


class Renderer(Protocol):
    """The methods of ``server.chat.chat_tokenizer.ChatTokenizer`` that are used here."""

    @property
    def dialect(self) -> Dialect: ...
    def encode(self, text: str, *, special: bool) -> list[int]: ...
    def render(self, messages: Sequence[LoggedMessage], *, generation_prompt: bool, rendering: Rendering) -> str: ...


class NoContinuation(Exception):
    """The template hides or rewrites the beginning of a reply, so it cannot be continued."""


def full_ids(
    renderer: Renderer,
    messages: Sequence[LoggedMessage],
    rendering: Rendering = PLAIN,
    *,
    goes_on: bool = False,
    media: PromptMedia = NO_MEDIA,
) -> list[int]:
    """The whole conversation, rendered and tokenised, up to where the next reply starts; with ``goes_on`` up to the end
    of the last message, which is the beginning of that reply. Raises NoContinuation, and a 400 for what ``media``
    refuses.
    """
    return media.encode(renderer, text_to_reply(renderer, messages, rendering, goes_on), messages)


def continued_ids(
    renderer: Renderer,
    logged_ids: Sequence[int],
    logged: Sequence[LoggedMessage],
    new: Sequence[LoggedMessage],
    turn_ends: Collection[int],
    rendering: Rendering = PLAIN,
    *,
    before: Rendering = PLAIN,
    goes_on: bool = False,
    media: PromptMedia = NO_MEDIA,
) -> list[int]:
    """``logged_ids`` (rendered with ``before``) followed by the ids of ``new``, up to where the next reply starts, or
    with ``goes_on`` as in ``full_ids``. ``turn_ends`` are the ids that end a reply: if the log ends with one that the
    template would write too, it is there once.

    The whole conversation is rendered, as for a stateless request, if the template hides or rewrites the last reply, or
    if the rendering changes in a way that changes earlier text. Raises NoContinuation, and a 400 for what
    ``media`` refuses.
    """
    tail = text_after_reply(renderer, logged, new, rendering, before=before, goes_on=goes_on)
    if tail is None:
        return full_ids(renderer, [*logged, *new], rendering, goes_on=goes_on, media=media)
    # Stripped as an id, not as text: what stands behind a special token can tokenise differently without it.
    ids = media.encode(renderer, tail, new)
    if ids and logged_ids and ids[0] == logged_ids[-1] and ids[0] in turn_ends:
        ids = ids[1:]
    return [*logged_ids, *ids]


def text_after_reply(
    renderer: Renderer,
    logged: Sequence[LoggedMessage],
    new: Sequence[LoggedMessage],
    rendering: Rendering = PLAIN,
    *,
    before: Rendering = PLAIN,
    goes_on: bool = False,
) -> str | None:
    """What the template writes after the last logged reply when ``new`` follows it; None if that cannot be determined,
    or if the text before it would change.
    """
    if not logged or logged[-1].role != "assistant":
        return None
    sentinel = new_sentinel()
    marked, behind = renderer.dialect.ending(logged[-1], sentinel)
    messages = [*logged[:-1], marked, *new]
    text = text_to_reply(renderer, messages, rendering, goes_on)
    head, _, tail = text.partition(sentinel)
    if text.count(sentinel) != 1 or not tail.startswith(behind):
        return None
    if rendering != before and not text_to_reply(renderer, messages, before, goes_on).startswith(head + sentinel):
        return None
    return tail.removeprefix(behind)


def text_to_reply(renderer: Renderer, messages: Sequence[LoggedMessage], rendering: Rendering, goes_on: bool) -> str:
    """The rendered text up to where the model continues. Raises NoContinuation."""
    if not goes_on:
        return renderer.render(messages, generation_prompt=True, rendering=rendering)
    sentinel = new_sentinel()
    text = renderer.render(
        [*messages[:-1], replace(messages[-1], content=sentinel)], generation_prompt=False, rendering=rendering
    )
    if text.count(sentinel) != 1:
        raise NoContinuation
    return text.partition(sentinel)[0] + messages[-1].content


def new_sentinel() -> str:
    """A random text that no message contains."""
    return f"sentinel{secrets.token_hex(16)}"
