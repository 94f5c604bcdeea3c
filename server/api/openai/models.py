"""Routes of ``/v1/models``: the served model, with what was measured on it, under its name and its aliases."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import Field

from server.schemas.strict import Strict
from server.turns.context import ServerContext, context_of, model_not_found

router = APIRouter()


class ModelPage(Strict):
    """Parameters of Anthropic's list of models, which is one page here."""

    limit: int | None = Field(None, ge=1, le=1000, strict=False)
    after_id: str | None = None
    before_id: str | None = None
    beta: Literal["true", "false"] | None = None


@router.get("/v1/models")
async def list_models(query: Annotated[ModelPage, Query()], request: Request) -> dict[str, Any]:
    """List the model under each of its names; in Anthropic's shape for requests with ``anthropic-version``."""
    context = context_of(request)
    names = context.names
    if is_anthropic(request):
        data = [anthropic_model(context, name) for name in names]
        return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": [model_object(context, name) for name in names]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """Get the served model by one of its names, which may contain slashes."""
    context = context_of(request)
    if model not in context.names:
        raise model_not_found("model", context.served_name)
    return anthropic_model(context, model) if is_anthropic(request) else model_object(context, model)


def timestamp(when: float) -> str:
    """A time in Unix seconds as RFC 3339 has it."""
    return datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z")


def is_anthropic(request: Request) -> bool:
    """Whether a client of Anthropic's API asks."""
    return "anthropic-version" in request.headers


def anthropic_model(context: ServerContext, name: str) -> dict[str, Any]:
    """Anthropic's model object."""
    facts = context.engine.facts
    limits = {} if facts is None else {"max_input_tokens": facts.max_context, "max_tokens": facts.max_context}
    return {"type": "model", "id": name, "display_name": name, "created_at": timestamp(context.created), **limits}


def model_object(context: ServerContext, name: str) -> dict[str, Any]:
    """OpenAI's model object; ``warmturn`` is null while no engine is ready."""
    facts = context.engine.facts
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "warmturn",
        "warmturn": None
        if facts is None
        else {**msgspec.to_builtins(facts), "chat_template": msgspec.to_builtins(context.template)},
    }
