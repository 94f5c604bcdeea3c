"""Translates requests of Ollama's API to requests of chats and completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.api.ollama.schemas import ChatBody, GenerateBody, GeneratingRequest, Options, SentMessage, plain_name
from server.errors import bad_request
from server.media.media import Media
from server.schemas.completion_requests import CompletionRequest
from server.schemas.requests import ChatRequest
from server.schemas.strict import validate

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")


def as_chat(request: ChatBody) -> ChatRequest:
    """The chat of a chat request. Raises a 400 for a tool's result without a call."""
    made = chat_fields(request) | {"messages": messages_of(request.messages)}
    if request.tools:
        made["tools"] = [tool.model_dump(exclude_unset=True, by_alias=True) for tool in request.tools]
    if request.messages[-1].role == "assistant" and not request.messages[-1].tool_calls:
        made["continue_final_message"] = True
    return validate(ChatRequest, made)


def prompt_chat(request: GenerateBody) -> ChatRequest:
    """The chat of a prompt, with its system message."""
    system = [{"role": "system", "content": request.system}] if request.system else []
    asked = {"role": "user", "content": content_of(request.prompt, request.images)}
    return validate(ChatRequest, chat_fields(request) | {"messages": [*system, asked]})


def content_of(text: str, images: Sequence[Media]) -> str | list[Any]:
    """A chat's content: pictures come before the text."""
    return [*images, {"type": "text", "text": text}] if images else text


def as_completion(request: GenerateBody) -> CompletionRequest:
    """The completion of a prompt that is used as it is."""
    made = common_fields(request) | {"prompt": request.prompt, "suffix": request.suffix}
    if request.logprobs:
        made["logprobs"] = request.top_logprobs or 0
    return validate(CompletionRequest, made)


def chat_fields(request: GeneratingRequest) -> dict[str, Any]:
    """The fields of a chat but for its messages and tools."""
    made = common_fields(request) | {"logprobs": request.logprobs}
    if request.keep_alive is not None:
        made["keep_alive"] = request.keep_alive
    if request.top_logprobs and request.logprobs:
        made["top_logprobs"] = request.top_logprobs
    if request.think is not None:
        made |= {"reasoning_effort": request.think} if isinstance(request.think, str) else {"think": request.think}
    return made


def common_fields(request: GeneratingRequest) -> dict[str, Any]:
    """What chats and completions share: the model, sampling, limits and the format."""
    made: dict[str, Any] = {"model": plain_name(request.model), "stream": request.stream}
    made |= sampling_of(request.options)
    if request.format == "json":
        made["response_format"] = {"type": "json_object"}
    elif isinstance(request.format, dict):
        schema = {"name": "format", "schema": request.format, "strict": True}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    return made


def sampling_of(options: Options) -> dict[str, Any]:
    """Sampling and limits. ``num_predict`` -1 and -2 mean: as many as fit."""
    made = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    if options.repeat_penalty is not None:
        made["repetition_penalty"] = options.repeat_penalty
    if options.num_predict is not None and options.num_predict >= 0:
        made["max_tokens"] = max(options.num_predict, 1)
    return made


def messages_of(messages: Sequence[SentMessage]) -> list[dict[str, Any]]:
    """The messages of a chat. Calls without an id get one, by their place; a tool's result without one answers the
    first call of its tool that has no result yet, or the first call of all.
    """
    made: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # id and tool of each call that has no result yet
    for index, message in enumerate(messages):
        if message.role == "tool":
            call = take_call_id(index, message, waiting)
            content = content_of(message.content, message.images)
            made.append({"role": "tool", "content": content, "tool_call_id": call})
            continue
        one: dict[str, Any] = {"role": message.role, "content": content_of(message.content, message.images)}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        calls = [(call.id or f"call_{index}_{number}", call) for number, call in enumerate(message.tool_calls)]
        if calls:
            one["tool_calls"] = [
                {
                    "id": id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.dumps(call.function.arguments, ensure_ascii=False),
                    },
                }
                for id, call in calls
            ]
        waiting = [(id, call.function.name) for id, call in calls]
        made.append(one)
    return made


def take_call_id(index: int, message: SentMessage, waiting: list[tuple[str, str]]) -> str:
    """The id of the call that a tool's result answers; it is taken from ``waiting``. Raises a 400."""
    name = message.tool_name or message.name
    found = next(
        (
            call
            for call in waiting
            if (call[0] == message.tool_call_id if message.tool_call_id else name in (None, call[1]))
        ),
        None,
    )
    if found is None:
        field = f"messages[{index}]"
        raise bad_request(f"{field} answers no call of the message before it.", field, "invalid_value")
    waiting.remove(found)
    return found[0]
