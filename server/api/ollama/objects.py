"""Structs of Ollama's answers. Durations are nanoseconds, times RFC 3339."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.schemas.objects import CacheReceipt

DoneReason = Literal["stop", "length", "cancelled", "load", "unload"]


class OllamaFunction(msgspec.Struct, frozen=True):
    """The function of a call, with its arguments as an object."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct, frozen=True):
    """A call of a tool."""

    id: str
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, frozen=True):
    """A reply, or a piece of one."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class Logprob(msgspec.Struct, frozen=True):
    """The log-probability of a token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Logprob] | UnsetType = UNSET


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a stream, or a whole reply; the last line has ``done_reason`` and what the reply cost. ``cache`` is
    this server's receipt.
    """

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    logprobs: list[Logprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    cache: CacheReceipt | UnsetType | None = UNSET


class ChatPiece(Piece, frozen=True, kw_only=True):
    """A piece of a chat."""

    message: OllamaMessage


class GeneratePiece(Piece, frozen=True, kw_only=True):
    """A piece of what ``/api/generate`` generates."""

    response: str
    thinking: str | UnsetType = UNSET


class Details(msgspec.Struct, frozen=True):
    """A model in short."""

    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""


class ListedModel(msgspec.Struct, frozen=True):
    """A model in ``/api/tags``; ``size`` is in bytes."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class RunningModel(msgspec.Struct, frozen=True):
    """A model in ``/api/ps``; ``size_vram`` is in bytes."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Models(msgspec.Struct, frozen=True):
    """A list of models."""

    models: list[ListedModel] | list[RunningModel]


class ShownModel(msgspec.Struct, frozen=True):
    """A model in full; ``parameters`` are the defaults of sampling, a line each."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, str | int | float | None]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, frozen=True):
    """The version of Ollama's API that is followed."""

    version: str


class Embedded(msgspec.Struct, frozen=True):
    """The answer of ``/api/embed``: a vector for each text."""

    model: str
    embeddings: list[list[float] | str]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OldEmbedding(msgspec.Struct, frozen=True):
    """The answer of ``/api/embeddings``."""

    embedding: list[float] | str
