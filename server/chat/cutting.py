"""The part of a reply that is left when a rewind cuts it."""

from __future__ import annotations

from msgspec.structs import replace

from server.chat.call_rules import CallRules
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.late_tools import callable_tools
from server.chat.partial_reply import PartialReply
from server.chat.rendering import rendering_in_force
from server.log.logged_message import LoggedCall, LoggedMessage
from server.log.timeline import SessionRecord, common_prefix, locate

CONTEXT = 48  # tokens decoded before a reply: what opens its reasoning, and the space that a first word has none of


def cut_reply(tokens: ChatTokenizer, record: SessionRecord, at: int) -> LoggedMessage | None:
    """What is left of the reply that a rewind to token ``at`` cuts; None if it cuts none. Raises NoSuchPlace.

    Incomplete characters and text that a stop string hid are left out; a call that is cut keeps the rest of its
    arguments.
    """
    place = locate(record, at)
    if place.reply is None:
        return None
    index = record.turns[place.turns - 1].messages - 1
    whole = record.messages[index]
    before = record.tokens[max(0, place.reply - CONTEXT) : place.reply]
    head = tokens.decode(before)
    text = tokens.decode([*before, *record.tokens[place.reply : at]])[len(head) :]
    if replace(whole, begun=0) == LoggedMessage(whole.role, whole.content):
        return replace(whole, content=cut_where_text_ends(whole.content, text))
    past = record.messages[:index]
    calls = CallRules(callable_tools(rendering_in_force(past).tools, past))
    partial_reply = PartialReply(tokens.dialect.make_parser(head, calls))
    for part in [*partial_reply.parser.feed(text), *partial_reply.parser.finish()]:
        partial_reply.take(part)
    return shorten_reply(whole, partial_reply.message())


def shorten_reply(whole: LoggedMessage, read: LoggedMessage) -> LoggedMessage:
    """``whole`` cut to ``read``, which was parsed from the beginning of its text."""
    return replace(
        whole,
        content=cut_where_text_ends(whole.content, read.content),
        reasoning_content=cut_where_text_ends(whole.reasoning_content, read.reasoning_content),
        tool_calls=tuple(
            shorten_call(call, left) for call, left in zip(whole.tool_calls, read.tool_calls, strict=False)
        ),
        items=(),
        instructions=False,
        dropped=False,
    )


def shorten_call(whole: LoggedCall, read: LoggedCall) -> LoggedCall:
    arguments = cut_where_text_ends(whole.function.arguments, read.function.arguments)
    return replace(whole, function=replace(whole.function, arguments=arguments))


def cut_where_text_ends(whole: str, text: str) -> str:
    """``whole`` up to the end of ``text``. If the client began the reply, ``text`` does not start at its beginning."""
    begins = max(0, whole.find(text)) if text else 0
    return whole[: begins + common_prefix(whole[begins:], text)]
