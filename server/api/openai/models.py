"""Routes of ``/v1/models``: the models, with what was measured on them, under their names; loading and unloading."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import Field

from server.http.sse import while_connected
from server.models.offered_model import OfferedModel
from server.models.registry import allowed_models, registry_of
from server.models.room import need_of
from server.schemas.strict import Strict
from server.turns.context import context_of

router = APIRouter()


class ModelPage(Strict):
    """Parameters of Anthropic's list of models, which is one page here."""

    limit: int | None = Field(None, ge=1, le=1000, strict=False)
    after_id: str | None = None
    before_id: str | None = None
    beta: Literal["true", "false"] | None = None


@router.get("/v1/models")
async def list_models(query: Annotated[ModelPage, Query()], request: Request) -> dict[str, Any]:
    """List each model under each of its names; in Anthropic's shape for requests with ``anthropic-version``."""
    created = context_of(request).created
    offered = registry_of(request).offered_models(allowed_models(request))
    named = [(model, name) for model in offered for name in model.names]
    named += registry_of(request).adapters(allowed_models(request))
    if is_anthropic(request):
        data = [anthropic_model(model, name, created) for model, name in named]
        ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"data": data, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
    return {"object": "list", "data": [model_object(model, name, created) for model, name in named]}


@router.post("/v1/models/{model:path}/load")
async def load_model(model: str, request: Request) -> dict[str, Any]:
    """Load a model, and answer when it is loaded. Others may be unloaded for it. A body is not read."""
    registry = registry_of(request)
    chosen = registry.get(model, allowed_models(request))
    await while_connected(request.receive, registry.load(chosen))
    return model_object(chosen, model, context_of(request).created)


@router.post("/v1/models/{model:path}/unload")
async def unload_model(model: str, request: Request) -> dict[str, Any]:
    """Unload a model, and answer when its turns are over and its KV is on disk. A body is not read."""
    registry = registry_of(request)
    chosen = registry.get(model, allowed_models(request))
    await registry.unload(chosen)
    return model_object(chosen, model, context_of(request).created)


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """Get a model by one of its names, which may contain slashes."""
    created = context_of(request).created
    registry, allowed = registry_of(request), allowed_models(request)
    of_adapter = next((base for base, name in registry.adapters(allowed) if name == model), None)
    found = of_adapter or registry.get(model, allowed)
    return anthropic_model(found, model, created) if is_anthropic(request) else model_object(found, model, created)


def timestamp(when: float) -> str:
    """A time in Unix seconds as RFC 3339 has it."""
    return datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z")


def is_anthropic(request: Request) -> bool:
    """Whether a client of Anthropic's API asks."""
    return "anthropic-version" in request.headers


def anthropic_model(model: OfferedModel, name: str, created: int) -> dict[str, Any]:
    facts = model.ready_facts
    limits = {} if facts is None else {"max_input_tokens": facts.max_context, "max_tokens": facts.max_context}
    return {"type": "model", "id": name, "display_name": name, "created_at": timestamp(created), **limits}


def model_object(model: OfferedModel, name: str, created: int) -> dict[str, Any]:
    """OpenAI's model object, of an adapter with its model as ``parent``. ``task``: what it is for, as far as known.
    ``warmturn`` is null while no engine of it is ready. ``created`` is in Unix seconds.
    """
    facts = model.ready_facts
    template = None if model.context is None else model.context.template
    made = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "warmturn",
        "status": status_object(model),
        "task": model.task,
        "warmturn": None
        if facts is None
        else {
            **msgspec.to_builtins(facts),
            "adapters": msgspec.to_builtins([*model.adapter_facts.values()]),
            "chat_template": msgspec.to_builtins(template),
        },
    }
    return made if name in model.names else {**made, "root": model.name, "parent": model.name}


def status_object(model: OfferedModel) -> dict[str, Any]:
    """What a model is doing, with llama-server's field ``value``. ``stage``: how far its load is; ``failed``: the last
    one failed; ``bytes``: its weights and KV memory, as measured when it was last loaded.
    """
    told: dict[str, Any] = {"value": model.status, "pinned": model.pinned, "failed": model.failed_at is not None}
    if model.stage:
        told["stage"] = model.stage
    if model.facts is not None:
        told["bytes"] = need_of(model.facts)
    return told
