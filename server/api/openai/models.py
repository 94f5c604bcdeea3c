"""The one served model, with what was measured on it."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request

from server.turns.face import Face, face_of, model_not_found

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All models: there is one."""
    return {"object": "list", "data": [model_object(face_of(request))]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """The served model by its name, which may hold slashes."""
    face = face_of(request)
    if model != face.served_name:
        raise model_not_found("model", face.served_name)
    return model_object(face)


def model_object(face: Face) -> dict[str, Any]:
    """OpenAI's object; ``warmturn`` is null while no engine is ready."""
    facts = face.engine.facts
    return {
        "id": face.served_name,
        "object": "model",
        "created": face.created,
        "owned_by": "warmturn",
        "warmturn": None
        if facts is None
        else {**msgspec.to_builtins(facts), "chat_template": msgspec.to_builtins(face.template)},
    }
