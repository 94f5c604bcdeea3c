"""Translates a request of Anthropic's Messages API to a chat request: messages, tools and limits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace
from pydantic import Field

from server.api.anthropic.block_schemas import (
    TextBlockParam,
    ThinkingBlockParam,
    ToolAdditionBlockParam,
    ToolReferenceBlockParam,
    ToolRemovalBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from server.api.anthropic.schemas import AnthropicMessageParam, MessagesRequest, PromptRequest
from server.api.anthropic.sent_messages import ADDS, REMOVES, open_compaction
from server.api.anthropic.tool_definitions import AnthropicTool, ToolChoice
from server.errors import bad_request
from server.log.logged_message import LoggedMessage
from server.media.media import Media
from server.schemas.field_types import INT32
from server.schemas.requests import ChatRequest
from server.schemas.strict import validate
from server.schemas.tools import Tool

EFFORTS = ((2048, "low"), (8192, "medium"))  # of thinking, up to so many tokens; beyond them high
FOUND = "Functions that can be called now: {names}"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesChat(ChatRequest):
    """A chat whose token limit is lowered to the rest of the context, as clients must send some ``max_tokens`` without
    knowing the model's; it may be 0. Its KV is kept as its ``cache_control`` says.
    """

    max_tokens: int | None = Field(None, ge=0, le=INT32)
    kept: int = 0
    added_tools: dict[int, list[Tool]] = Field(default_factory=dict)  # by the number of the message
    removed_tools: dict[int, list[str]] = Field(default_factory=dict)
    sender: str = ""  # metadata.user_id

    @property
    def hints(self) -> dict[str, str]:
        return {**super().hints, "metadata.user_id": self.sender} if self.sender else super().hints

    def plain_messages(self) -> list[LoggedMessage]:
        added = {number: [tool.plain() for tool in tools] for number, tools in self.added_tools.items()}
        return [
            replace(
                message,
                added_tools=tuple(added.get(number, ())),
                removed_tools=tuple(self.removed_tools.get(number, ())),
            )
            for number, message in enumerate(super().plain_messages())
        ]

    @property
    def yields(self) -> bool:
        return True

    @property
    def keep_seconds(self) -> int:
        return self.kept


def as_chat(request: PromptRequest, messages: list[dict[str, Any]] | None = None) -> MessagesChat:
    """The chat request; ``messages``: in place of the request's own. Raises a 400 for tool results without a call."""
    check_results(request)
    messages = messages_of(request) if messages is None else messages
    made: dict[str, Any] = {"messages": messages, "kept": request.keep_seconds, "model": request.model}
    made |= tool_changes(messages, request.functions)
    made["session_id"] = request.session_id
    if request.begins_reply:
        made["continue_final_message"] = True
    if request.functions:
        made["tools"] = [tool_of(tool) for tool in request.functions if not tool.defer_loading]
    if request.tool_choice is not None:
        made |= choice_of(request.tool_choice)
    made |= thinking_of(request)
    if request.answer_format is not None:
        schema = {"name": "output", "schema": request.answer_format.schema_, "strict": True}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request, MessagesRequest):
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        made |= {name: getattr(request, name) for name in names}
        made["stop"] = request.stop_sequences
        made["sender"] = (request.metadata and request.metadata.user_id) or ""
    return validate(MessagesChat, made)


def messages_of(request: PromptRequest) -> list[dict[str, Any]]:
    """The messages, the system message first; successive messages of one role are joined."""
    system = text_of(request.system)
    made: list[list[dict[str, Any]]] = [[{"role": "system", "content": system}]] if system else []
    compacted, rest = open_compaction(request.messages)
    for one in (*compacted, *(one for message in rest for one in split_message(message))):
        if made and made[-1][0]["role"] == one["role"] != "tool":
            made[-1].append(one)
        else:
            made.append([one])
    return [join_messages(messages) for messages in made]


def split_message(message: AnthropicMessageParam) -> Iterable[dict[str, Any]]:
    """A message as chat messages; the tool results of a user message become messages of their own, which come first."""
    blocks = message.blocks
    said = "\n".join(block.text for block in blocks if isinstance(block, TextBlockParam))
    if message.role == "assistant":
        yield assistant_message(said, blocks)
        return
    results = [block for block in blocks if isinstance(block, ToolResultBlockParam)]
    for block in results:
        yield {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": result_content(block),
            ADDS: block.references,
        }
    shown = content_of(said, [block for block in blocks if isinstance(block, TextBlockParam | Media)])
    if shown or not results:
        adds = [block.tool.name for block in blocks if isinstance(block, ToolAdditionBlockParam)]
        removes = [block.tool.name for block in blocks if isinstance(block, ToolRemovalBlockParam)]
        yield {"role": message.role, "content": shown, ADDS: adds, REMOVES: removes}


def content_of(text: str, blocks: Sequence[TextBlockParam | Media]) -> str | list[Any]:
    """A chat's content: ``text``, or parts where there are media among the blocks."""
    if not any(isinstance(block, Media) for block in blocks):
        return text
    return [block if isinstance(block, Media) else {"type": "text", "text": block.text} for block in blocks]


def assistant_message(said: str, blocks: Sequence[object]) -> dict[str, Any]:
    """An earlier reply as a chat message."""
    made: dict[str, Any] = {"role": "assistant", "content": said}
    if thought := "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlockParam)):
        made["reasoning_content"] = thought
    if calls := [block for block in blocks if isinstance(block, ToolUseBlockParam)]:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
            }
            for call in calls
        ]
    return made


def join_messages(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Messages of one role as one."""
    made = {**messages[0], "content": join_contents([message["content"] for message in messages])}
    if thought := "\n".join(message["reasoning_content"] for message in messages if "reasoning_content" in message):
        made["reasoning_content"] = thought
    if calls := [call for message in messages for call in message.get("tool_calls", ())]:
        made["tool_calls"] = calls
    for key in (ADDS, REMOVES):
        made[key] = [name for message in messages for name in message.get(key, ())]
    return made


def join_contents(contents: Sequence[str | list[Any]]) -> str | list[Any]:
    """Contents of messages as one: a text, or parts where one of them has parts."""
    given = [content for content in contents if content]
    texts = [content for content in given if isinstance(content, str)]
    if len(texts) == len(given):
        return "\n".join(texts)
    parts = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in given]
    return [part for some in parts for part in some]


def result_content(block: ToolResultBlockParam) -> str | list[Any]:
    """What a call gave back; tools that it has found are named."""
    prefix = "Error: " if block.is_error else ""
    if isinstance(block.content, str):
        return prefix + block.content
    parts = [part for part in block.content if not isinstance(part, ToolReferenceBlockParam)]
    texts = [part if isinstance(part, Media) else part.text for part in parts]
    if block.references:
        texts.append(FOUND.format(names=", ".join(block.references)))
    if not any(isinstance(text, Media) for text in texts):
        return prefix + "\n".join(map(str, texts))
    given = [prefix, *texts] if prefix else texts
    return [one if isinstance(one, Media) else {"type": "text", "text": one} for one in given]


def tool_changes(messages: Sequence[dict[str, Any]], tools: Sequence[AnthropicTool]) -> dict[str, Any]:
    """Which of ``tools`` the messages add, by their number, each where it is first named, and which ones they remove.
    What says so is taken out of the messages. Tools that are at the front, or are not offered any more, are not added.
    """
    known = {tool.name: tool_of(tool) for tool in tools}
    added: dict[int, list[dict[str, Any]]] = {}
    removed: dict[int, list[str]] = {}
    there = {tool.name for tool in tools if not tool.defer_loading}
    for number, message in enumerate(messages):
        names = [name for name in dict.fromkeys(message.pop(ADDS, ())) if name in known and name not in there]
        if names:
            added[number] = [known[name] for name in names]
        if gone := message.pop(REMOVES, []):
            removed[number] = gone
        there = (there | {*names}) - {*gone}
    return {"added_tools": added, "removed_tools": removed}


def text_of(texts: str | Sequence[TextBlockParam]) -> str:
    return texts if isinstance(texts, str) else "\n".join(block.text for block in texts)


def check_results(request: PromptRequest) -> None:
    """Check that tool results answer calls of the message before, each once. The first message of a request on a
    session may answer a logged call, which is checked with the log. Raises a 400.
    """
    waiting: set[str] | None = None if request.session_id is not None else set()
    for index, message in enumerate(request.messages):
        for number, block in enumerate(message.blocks):
            if isinstance(block, ToolResultBlockParam) and waiting is not None:
                if block.tool_use_id not in waiting:
                    field = f"messages[{index}].content[{number}].tool_use_id"
                    problem = "is not that of a call in the message before it, or was answered already"
                    raise bad_request(f"{field} {problem}.", field, "invalid_value")
                waiting.remove(block.tool_use_id)
        if message.role == "assistant":
            calls = {block.id for block in message.blocks if isinstance(block, ToolUseBlockParam)}
            if waiting is not None and index and request.messages[index - 1].role == "assistant":
                waiting |= calls
            else:
                waiting = calls


def tool_of(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def choice_of(choice: ToolChoice) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": choice.name}}
    made: dict[str, Any] = {"tool_choice": named if choice.type == "tool" else CHOICES[choice.type]}
    if choice.disable_parallel_tool_use:
        made["parallel_tool_calls"] = False
    return made


def thinking_of(request: PromptRequest) -> dict[str, Any]:
    """The chat's reasoning effort: from ``output_config.effort``, else from the budget of thinking tokens; and the
    budget, which is kept too.
    """
    thinking = request.thinking
    effort: str | None = None if request.output_config is None else request.output_config.effort
    if thinking is not None and thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    made: dict[str, Any] = {}
    if thinking is not None and thinking.budget_tokens is not None:
        made["thinking_token_budget"] = thinking.budget_tokens
        if effort is None:
            effort = next((word for most, word in EFFORTS if thinking.budget_tokens <= most), "high")
    if effort is not None:
        made["reasoning_effort"] = "xhigh" if effort == "max" else effort
    return made
