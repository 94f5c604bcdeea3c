"""The prompt of a response: its instructions, the messages of its session, and its input.

Instructions belong to one response: they come first in its prompt, and the next response does not have them unless it
sends them again. While they stay the same, every prompt begins with the logged tokens; when they change, the whole
history is rendered again after the new ones.

If the client allows truncation, the oldest messages of a prompt that is too long are ``dropped``: they stay among the
conversation's items, but are no longer rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from scheduler.protocol import ModelFacts
from server.api.responses.client_tools import ToolNames
from server.api.responses.schemas import InputRequest
from server.api.responses.tool_schemas import client_tools, tools_in
from server.chat.billing_line import fold_billing_lines, fold_instructions
from server.chat.late_tools import callable_tools
from server.chat.prompts import (
    BYTES_PER_TOKEN,
    EMPTY_RECORD,
    SLACK_BYTES,
    Prompt,
    check_bytes,
    check_room,
    context_exceeded,
    continuation,
    count_fed,
    effort_variables,
    texts_of,
    verbosity_variables,
)
from server.chat.rendering import RenderingChange
from server.chat.tokenizer import ChatTokenizer
from server.config.prompt_rules import BILLING_LINE
from server.errors import bad_request
from server.log.logged_message import LoggedMessage
from server.log.timeline import SessionRecord
from server.schemas.items import bare, tools_of

KEPT = 0.75  # of the context, where something has to be dropped: the next turns have room without dropping again


def response_prompt(
    body: InputRequest,
    tokens: ChatTokenizer,
    facts: ModelFacts,
    past: SessionRecord | None,
    new: Sequence[LoggedMessage],
    names: ToolNames,
) -> Prompt:
    """The prompt of a response that follows ``past`` with ``new`` messages. Blocking: run it on the pool."""
    instructions, new = fold_front(body, tokens, new)
    led = with_instructions(instructions, past)
    whole = [*led.messages, *new]
    change = rendering_change_of(body, tokens, names, whole)
    if not whole or visible_messages(whole)[-1].role == "assistant":
        raise bad_request("input is required: there is nothing to answer.", "input", "missing_required_parameter")
    if body.truncation == "disabled":
        check_bytes([body.instructions or ""], facts, "instructions")
        check_bytes(texts_of(new, change), facts, "input")
    elif size_of(whole, change) > most_bytes(facts):
        return shorten_prompt(body, tokens, facts, whole, change)
    prompt = restore_dropped(whole, continuation(tokens, facts, visible_record(led), visible_messages(new), change))
    if body.truncation == "auto" and count_fed(prompt, facts) > prompt_limit(body, facts):
        return shorten_prompt(body, tokens, facts, whole, change)
    check_room(prompt, body, facts)
    return prompt


def rendering_change_of(
    body: InputRequest, tokens: ChatTokenizer, names: ToolNames, whole: Sequence[LoggedMessage]
) -> RenderingChange:
    """The tools and template variables of a response. Its tools hold for this response only; those that items added
    before the conversation began stay at the front. A reasoning effort holds until it is changed, unless the request
    has the whole conversation.
    """
    template = effort_variables(body.reasoning.effort, tokens)
    template |= verbosity_variables(body.text.verbosity, tokens, "text.verbosity")
    leading = [message for message in whole if message.dropped and message.role == "developer"]
    return RenderingChange(
        callable_tools(names.plain(client_tools(body.tools)), leading), template, whole=body.is_whole
    )


def tool_names(body: InputRequest, past: SessionRecord | None) -> ToolNames:
    """The names of the functions that all tools of a request are: its own, those that earlier items have added, and
    those of its input.
    """
    keys = [tool.key for tool in client_tools(body.tools)]
    for message in [] if past is None else past.messages:
        keys += [tool.key for entry in message.items for tool in tools_in(tools_of(entry))]
    return ToolNames([*keys, *(tool.key for tool in body.added_tools)])


def restore_dropped(whole: Sequence[LoggedMessage], prompt: Prompt) -> Prompt:
    """The prompt with all messages, including those that are not rendered."""
    rendered = iter(prompt.messages)
    messages = []
    for message in whole:
        if not message.dropped:
            shown = next(rendered)
            if shown.tools is not None or shown.template is not None:
                message = structs.replace(message, tools=shown.tools, template=shown.template)
        messages.append(message)
    return replace(prompt, messages=messages)


def fold_front(
    body: InputRequest, tokens: ChatTokenizer, new: Sequence[LoggedMessage]
) -> tuple[str | None, list[LoggedMessage]]:
    """The instructions and the new messages of a response without billing lines."""
    if BILLING_LINE not in tokens.rules:
        return body.instructions, [*new]
    return fold_instructions(body.instructions), fold_billing_lines(new)


def with_instructions(instructions: str | None, past: SessionRecord | None) -> SessionRecord:
    """The history after these instructions. If they differ from the last response's, all messages are unrendered."""
    before = [] if past is None else past.messages
    rest = [message for message in before if not message.instructions]
    told = [message.content for message in before if message.instructions]
    if past is not None and told == ([] if instructions is None else [instructions]):
        return past
    lead: list[LoggedMessage] = []
    if instructions is not None:
        lead = [LoggedMessage("system", instructions, instructions=True)]
    return replace(past or EMPTY_RECORD, tokens=[], messages=[*lead, *rest], rendered=0, turns=())


def visible_record(record: SessionRecord) -> SessionRecord:
    """The record without messages that are not rendered."""
    rendered = len(visible_messages(record.messages[: record.rendered]))
    return replace(record, messages=visible_messages(record.messages), rendered=rendered)


def visible_messages(messages: Sequence[LoggedMessage]) -> list[LoggedMessage]:
    """The messages that are rendered."""
    return [bare(message) for message in messages if not message.dropped]


def shorten_prompt(
    body: InputRequest,
    tokens: ChatTokenizer,
    facts: ModelFacts,
    whole: Sequence[LoggedMessage],
    change: RenderingChange,
) -> Prompt:
    """The prompt without the oldest messages, so that it takes at most the part ``KEPT`` of its limit, or else fits the
    limit; if neither is possible, the whole prompt. Instructions and system messages stay, and a user message follows
    them.
    """
    limit = prompt_limit(body, facts)
    users = [i for i, m in enumerate(whole) if m.role == "user" and not m.dropped]
    starts = users[1:]

    def cut(start: int) -> Prompt | None:
        """The prompt that begins with message ``start``."""
        left = [
            structs.replace(m, dropped=True) if i < start and m.role not in ("system", "developer") else m
            for i, m in enumerate(whole)
        ]
        if size_of(left, change) > most_bytes(facts):
            return None
        return restore_dropped(left, continuation(tokens, facts, EMPTY_RECORD, visible_messages(left), change))

    for aim in (KEPT * limit, limit):
        low, high, best = 0, len(starts), None  # the first start that is late enough is among starts[low:high + 1]
        while low < high:
            middle = (low + high) // 2
            prompt = cut(starts[middle])
            if prompt is not None and count_fed(prompt, facts) <= aim:
                high, best = middle, prompt
            else:
                low = middle + 1
        if best is not None:
            return best
    prompt = cut(users[-1] if users else 0)
    if prompt is None:
        raise context_exceeded(f"input is longer than this model's context of {facts.max_context} tokens.", "input")
    check_room(prompt, body, facts)
    return prompt


def prompt_limit(body: InputRequest, facts: ModelFacts) -> int:
    """The most tokens of the prompt."""
    wanted = body.least_tokens if body.token_limit is None else body.token_limit
    return max(1, facts.max_context - wanted)


def size_of(messages: Sequence[LoggedMessage], change: RenderingChange) -> int:
    """Bytes of the rendered texts."""
    return sum(len(text.encode()) for text in texts_of(visible_messages(messages), change))


def most_bytes(facts: ModelFacts) -> int:
    """The most bytes that a prompt of full length can have."""
    return BYTES_PER_TOKEN * facts.max_context + SLACK_BYTES
