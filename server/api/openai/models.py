"""Routes of ``/v1/models``: the served model, with what was measured on it."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request

from server.turns.context import ServerContext, context_of, model_not_found

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List the models: there is one."""
    return {"object": "list", "data": [model_object(context_of(request))]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """Get the served model by its name, which may contain slashes."""
    context = context_of(request)
    if model != context.served_name:
        raise model_not_found("model", context.served_name)
    return model_object(context)


def model_object(context: ServerContext) -> dict[str, Any]:
    """OpenAI's model object; ``warmturn`` is null while no engine is ready."""
    facts = context.engine.facts
    return {
        "id": context.served_name,
        "object": "model",
        "created": context.created,
        "owned_by": "warmturn",
        "warmturn": None
        if facts is None
        else {**msgspec.to_builtins(facts), "chat_template": msgspec.to_builtins(context.template)},
    }
