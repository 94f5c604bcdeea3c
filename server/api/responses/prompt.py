"""The prompt of a response: its instructions, the messages of its session, and its input.

Instructions belong to one response: they come first in its prompt, and the next response does not have them unless it
sends them again. While they stay the same, every prompt begins with the logged tokens; when they change, the whole
history is rendered again after the new ones.

Messages that a summary stands for are ``dropped``: they stay among the conversation's items, but are no longer
rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from scheduler.model_facts import ModelFacts
from server.api.responses.client_tools import ToolNames
from server.api.responses.schemas import InputRequest
from server.api.responses.tool_schemas import client_tools, tools_in
from server.chat.billing_line import fold_billing_lines, fold_instructions
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.compaction import front_of
from server.chat.late_tools import callable_tools
from server.chat.prompts import (
    EMPTY_RECORD,
    Prompt,
    check_bytes,
    check_room,
    continuation,
    effort_variables,
    texts_of,
    verbosity_variables,
)
from server.chat.rendering import RenderingChange
from server.config.prompt_rules import BILLING_LINE
from server.errors import bad_request
from server.log.logged_message import LoggedMessage
from server.log.timeline import SessionRecord
from server.schemas.items import bare, tools_of


def response_prompt(
    body: InputRequest,
    tokens: ChatTokenizer,
    facts: ModelFacts,
    past: SessionRecord | None,
    new: Sequence[LoggedMessage],
    names: ToolNames,
) -> Prompt:
    """The prompt of a response that follows ``past`` with ``new`` messages. One that is compacted where it is too long
    may leave no room for a reply; any other one is refused then. Blocking: run it on the pool. Raises a 400.
    """
    instructions, new = fold_front(body, tokens, new)
    led = with_instructions(instructions, past)
    whole = [*led.messages, *new]
    change = rendering_change_of(body, tokens, names, whole)
    if not whole or visible_messages(whole)[-1].role == "assistant":
        raise bad_request("input is required: there is nothing to answer.", "input", "missing_required_parameter")
    check_bytes([body.instructions or ""], facts, "instructions")
    check_bytes(texts_of(visible_messages(new), change), facts, "input")
    prompt = restore_dropped(whole, continuation(tokens, facts, visible_record(led), visible_messages(new), change))
    if not body.compacts_if_long:
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
    leading = [message for message in whole[: front_of(whole)] if message.dropped]
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
    return [bare(message) for message in messages if not message.dropped]


def prompt_limit(body: InputRequest, facts: ModelFacts) -> int:
    wanted = body.least_tokens if body.token_limit is None else body.token_limit
    return max(1, facts.max_context - wanted)
