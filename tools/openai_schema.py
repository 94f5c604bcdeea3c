"""Writes the schemas of OpenAI's API to one JSON Schema file, with which tests compare this server's API.

    python -m tools.openai_schema > tests/openai_schema/openai.json
    python -m tools.openai_schema openapi.json > elsewhere.json

Without an argument from the types of the installed ``openai`` package, which are generated from OpenAI's OpenAPI
document; with one from a copy of the document itself, whose text is not kept here. The names are the document's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import openai
from openai.types import Completion, Model, completion_create_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.conversations import (
    Conversation,
    ConversationCreateParams,
    ConversationDeletedResource,
    ConversationItem,
    ConversationItemList,
    ConversationUpdateParams,
    ItemCreateParams,
)
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent, response_create_params
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

Schema = dict[str, Any]


class ErrorResponse(BaseModel):
    """The package parses it by hand."""

    error: ErrorObject


class ListModelsResponse(BaseModel):
    object: Literal["list"]
    data: list[Model]


TYPES: dict[str, Any] = {
    "CreateChatCompletionRequest": chat_create_params.CompletionCreateParamsNonStreaming
    | chat_create_params.CompletionCreateParamsStreaming,
    "CreateChatCompletionResponse": ChatCompletion,
    "CreateChatCompletionStreamResponse": ChatCompletionChunk,
    "CreateCompletionRequest": completion_create_params.CompletionCreateParamsNonStreaming
    | completion_create_params.CompletionCreateParamsStreaming,
    "CreateCompletionResponse": Completion,
    "CreateResponse": response_create_params.ResponseCreateParamsNonStreaming
    | response_create_params.ResponseCreateParamsStreaming,
    "Response": Response,
    "ResponseStreamEvent": ResponseStreamEvent,
    "ResponseItemList": ResponseItemList,
    "CreateConversationBody": ConversationCreateParams,
    "UpdateConversationBody": ConversationUpdateParams,
    "CreateConversationItemsBody": ItemCreateParams,
    "ConversationResource": Conversation,
    "DeletedConversationResource": ConversationDeletedResource,
    "ConversationItem": ConversationItem,
    "ConversationItemList": ConversationItemList,
    "Model": Model,
    "ListModelsResponse": ListModelsResponse,
    "ErrorResponse": ErrorResponse,
}
WITHOUT_A_NAME = {"CreateConversationItemsBody": ("/conversations/{conversation_id}/items", "post")}  # in the document

# A field that may be null is optional in the package. These must be there all the same.
REQUIRED = {
    "ErrorObject": ("message", "type", "param", "code"),
    "ChatCompletionMessage": ("role", "content", "refusal"),
    "openai__types__chat__chat_completion__Choice": ("finish_reason", "index", "message", "logprobs"),
    "ChoiceLogprobs": ("content", "refusal"),
    "openai__types__chat__chat_completion_chunk__Choice": ("delta", "finish_reason", "index"),
    "ChatCompletionTokenLogprob": ("token", "logprob", "bytes", "top_logprobs"),
    "TopLogprob": ("token", "logprob", "bytes"),
    "CompletionChoice": ("finish_reason", "index", "logprobs", "text"),
    "Response": (
        *("id", "object", "created_at", "error", "incomplete_details", "instructions", "model", "tools", "output"),
        *("parallel_tool_calls", "metadata", "tool_choice", "temperature", "top_p"),
    ),
}
# Completions that are streamed say null until they end, and the first token of an echoed prompt has no probability;
# OpenAI's own server answers so, and neither source knows it.
ALSO_NULL = {
    "CompletionChoice": ("finish_reason",),
    "Logprobs": ("token_logprobs", "top_logprobs"),
}
NOISE = frozenset({"description", "title", "default", "example", "examples", "deprecated", "format"})


def from_package() -> Schema:
    """The installed package's types."""
    adapters = [(name, "validation", TypeAdapter(kind)) for name, kind in TYPES.items()]
    named, shared = TypeAdapter.json_schemas(adapters, ref_template="#/$defs/{model}")  # type: ignore[arg-type]
    schemas = {name: schema for (name, _), schema in named.items()}
    shapes = {name: bare(shape) for name, shape in shared["$defs"].items()}
    for name, fields in REQUIRED.items():
        assert set(fields) <= set(shapes[name]["properties"]), name
        shapes[name]["required"] = sorted({*shapes[name].get("required", ()), *fields})
    for name, fields in ALSO_NULL.items():
        for field in fields:
            or_null(shapes[name]["properties"], field)
    source = f"the types of the Python package openai {openai.__version__}, Apache-2.0, Copyright OpenAI"
    return {"source": source, "schemas": {name: bare(schema) for name, schema in schemas.items()}, "$defs": shapes}


def or_null(properties: Schema, field: str) -> None:
    """Let a field be null; a list field holds nulls instead."""
    holder, key = properties, field
    options = properties[field].get("anyOf", [properties[field]])
    for option in options:
        if option.get("type") == "array":
            holder, key = option, "items"
    holder[key] = {"anyOf": [holder[key], {"type": "null"}]}


def from_document(path: Path) -> Schema:
    """A copy of OpenAI's OpenAPI document, as JSON."""
    document = json.loads(path.read_text(encoding="utf-8"))
    components = document["components"]["schemas"]
    schemas = {name: components[name] for name in TYPES if name not in WITHOUT_A_NAME}
    for name, (route, verb) in WITHOUT_A_NAME.items():
        schemas[name] = document["paths"][route][verb]["requestBody"]["content"]["application/json"]["schema"]
    completion = components["CreateCompletionResponse"]["properties"]
    or_null(completion, "usage")  # as its stream_options say
    choice = completion["choices"]["items"]["properties"]
    or_null(choice, "finish_reason")
    logprobs = next(option for option in choice["logprobs"]["anyOf"] if "properties" in option)["properties"]
    or_null(logprobs, "token_logprobs")
    or_null(logprobs, "top_logprobs")
    source = f"OpenAI's OpenAPI document {document['info']['version']}"
    whole = {"source": source, "schemas": {name: bare(shape) for name, shape in schemas.items()}}
    return {**whole, "$defs": {name: bare(components[name]) for name in reachable(schemas, components)}}


def reachable(start: object, components: Schema) -> list[str]:
    """The components that are referred to from ``start``, directly or not."""
    found: list[str] = []
    pending = [start]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            reference = node.get("$ref")
            name = reference.rpartition("/")[2] if isinstance(reference, str) else None
            if name is not None and name not in found:
                found.append(name)
                pending.append(components[name])
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
    return found


def bare(node: Any, of_names: bool = False) -> Any:
    """A schema without its prose, with references within our file. ``of_names``: the keys are names of fields."""
    if isinstance(node, list):
        return [bare(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, value in node.items():
        if of_names:
            kept[key] = bare(value)
        elif key == "$ref":
            kept[key] = f"#/$defs/{value.rpartition('/')[2]}"
        elif key not in NOISE and not key.startswith("x-") and key not in ("nullable", "discriminator"):
            kept[key] = bare(value, of_names=key in ("properties", "$defs"))
    return {"anyOf": [kept, {"type": "null"}]} if node.get("nullable") is True and not of_names else kept


def in_order(node: Any) -> Any:
    """A schema whose unions are sorted: Python tells them in the order in which they were first made in the process."""
    if isinstance(node, list):
        return [in_order(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: in_order(value) for key, value in node.items()}
    if isinstance(made.get("anyOf"), list):
        made["anyOf"] = sorted(made["anyOf"], key=json.dumps)
    return made


def write_schema(schema: Schema) -> str:
    """As JSON, a line for each shape."""
    schema = in_order(schema)
    parts = [f'"source": {json.dumps(schema["source"])}']
    for group in ("schemas", "$defs"):
        lines = (f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in sorted(schema[group].items()))
        parts.append(f'"{group}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.stdout.write(write_schema(from_document(Path(sys.argv[1])) if len(sys.argv) > 1 else from_package()))
