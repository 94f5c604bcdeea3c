"""Reads the input of a request that makes a response: its items, the messages that they become, and their prompt."""

from __future__ import annotations

from dataclasses import dataclass

from server.api.responses.client_tools import ToolNames
from server.api.responses.input_items import gather_input
from server.api.responses.prompt import (
    fold_front,
    rendering_change_of,
    response_prompt,
    tool_names,
    with_instructions,
)
from server.api.responses.response_branch import ResponseBranch
from server.api.responses.schemas import InputRequest
from server.chat.prompts import Prompt
from server.chat.rendering import rendering_in_force
from server.lines.recognition import Conversation
from server.log.logged_message import LoggedMessage
from server.log.timeline import SessionRecord
from server.schemas.items import Item
from server.turns.context import ServerContext


@dataclass(frozen=True)
class ReadInput:
    """The items of a request's input, the messages that they become, the conversation that these make with what they
    follow, and the functions that the tools are in it.
    """

    items: list[Item]
    new: list[LoggedMessage]
    conversation: Conversation
    names: ToolNames


async def make_prompt(context: ServerContext, read: ReadInput) -> Prompt:
    """The prompt of the whole conversation."""
    return await context.tokens.run(read.conversation.make_prompt, None, read.conversation.messages)


async def read_conversation(
    context: ServerContext, tenant: str, body: InputRequest, branch: ResponseBranch
) -> ReadInput:
    name = None if branch.session is None else branch.session.name
    past = [] if branch.past is None else branch.past.messages
    given = body.input if isinstance(body.input, list) else []
    names = tool_names(body, branch.past)
    items, messages = await gather_input(
        context, tenant, name, past, body.input if isinstance(body.input, str) else given, names=names
    )
    tokens, facts = context.tokens, context.facts
    instructions, messages = fold_front(body, tokens, messages)

    def prompt_of(record: SessionRecord | None, new: list[LoggedMessage]) -> Prompt:
        if record is None:
            return response_prompt(body, tokens, facts, branch.past, messages, names)
        return response_prompt(body, tokens, facts, record, new, names)

    whole = [*with_instructions(instructions, branch.past).messages, *messages]
    rendering = rendering_change_of(body, tokens, names, whole).apply_over(rendering_in_force(whole))
    return ReadInput(items, messages, Conversation(whole, rendering, prompt_of), names)
