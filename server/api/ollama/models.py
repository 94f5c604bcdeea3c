"""Routes of Ollama's API that describe the models."""

from __future__ import annotations

import math
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from scheduler.model_facts import ModelFacts
from scheduler.model_task import Task
from scheduler.sampling_params import Generation
from server.api.ollama.objects import Details, ListedModel, Models, OllamaVersion, RunningModel, ShownModel
from server.api.ollama.schemas import ShowBody, plain_name
from server.api.openai.models import timestamp
from server.chat.chat_tokenizer import ChatTokenizer
from server.http.body import JsonRoute
from server.http.json_response import json_response
from server.models.offered_model import OfferedModel
from server.models.registry import allowed_models, registry_of
from server.models.room import need_of
from server.models.room import on_gpu as on_a_gpu
from server.schemas.keep_alive import LONGEST, KeepAlive, kept_seconds
from server.turns.context import context_of

FOLLOWED = "0.18.0"  # the version of Ollama whose API this is: clients refuse older ones
FOREVER = 100 * 365 * 86_400  # seconds for which the model stays loaded
UNKNOWN = Details("", "", [], "", "")  # of a model that was never loaded
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))

router = APIRouter(route_class=JsonRoute)


@router.get("/api/version")
async def ollama_version() -> Response:
    """The version of Ollama whose API this server follows."""
    return json_response(OllamaVersion(FOLLOWED))


@router.get("/api/tags")
async def ollama_tags(request: Request) -> Response:
    """List each model under each of its names."""
    modified = timestamp(context_of(request).created)
    offered = registry_of(request).offered_models(allowed_models(request))
    named = [(model, name) for model in offered for name in model.names]
    named += registry_of(request).adapters(allowed_models(request))
    return json_response(Models([list_model(model, name, modified) for model, name in named]))


def list_model(model: OfferedModel, name: str, modified: str) -> ListedModel:
    """A model under one of its names. Before its first load nothing is known but the size of its files."""
    facts = model.facts
    if facts is None:
        return ListedModel(name, name, modified, model.weight_bytes, "", UNKNOWN)
    return ListedModel(name, name, modified, facts.weight_bytes, facts.fingerprint, details_of(facts))


@router.get("/api/ps")
async def ollama_running(request: Request) -> Response:
    """List the loaded models."""
    registry = registry_of(request)
    found = [model for model in registry.offered_models(allowed_models(request)) if model.is_loaded]
    return json_response(Models([describe_running(model, registry.idle_seconds) for model in found]))


def describe_running(model: OfferedModel, idle_seconds: float) -> RunningModel:
    """A loaded model. Raises a 503 while its engine restarts."""
    assert model.context is not None
    facts, name = model.context.facts, model.name
    size = need_of(facts)
    stays = min(FOREVER, max(0.0, model.stay(idle_seconds) - time.monotonic() + model.used))
    expires = timestamp(time.time() + stays)
    on_gpu = size if on_a_gpu(facts) else 0
    return RunningModel(name, name, size, facts.fingerprint, details_of(facts), expires, on_gpu, facts.max_context)


def keep_model(request: Request, name: str, keep_alive: KeepAlive | None, task: Task) -> None:
    """Have the model of a request stay loaded for as long as the request says, or for ever, unless it is pinned."""
    if keep_alive is not None:
        seconds = kept_seconds(keep_alive)
        kept = math.inf if seconds == LONGEST else seconds
        registry_of(request).keep(plain_name(name), allowed_models(request), (task,), kept)


@router.post("/api/show")
async def ollama_show(body: ShowBody, request: Request) -> Response:
    """Describe the model: what it can do, and how long its context is."""
    context = context_of(request)
    context.check_model(plain_name(body.model or body.name))
    facts = context.facts
    kind = family_of(facts)
    info: dict[str, str | int | float | None] = {
        "general.architecture": kind,
        "general.basename": context.served_name,
        "general.parameter_count": facts.parameters,
        f"{kind}.context_length": facts.max_context,
        f"{kind}.vocab_size": facts.vocab_size,
    }
    if facts.task == "embed" and facts.pooling is not None:
        info[f"{kind}.embedding_length"] = facts.pooling.width
    template = context.tokens.info["chat_template"] or ""
    shown = ShownModel(
        modelfile=f"FROM {context.served_name}\n",
        parameters="\n".join(parameters_of(facts.generation)),
        template=template,
        details=details_of(facts),
        model_info=info,
        capabilities=capabilities_of(context.tokens, facts),
        modified_at=timestamp(context.created),
    )
    return json_response(shown)


def family_of(facts: ModelFacts) -> str:
    """The family of a model's architecture, as in ``llama``."""
    return facts.architecture.partition("For")[0].removesuffix("Model").lower() or "unknown"


def details_of(facts: ModelFacts) -> Details:
    family = family_of(facts)
    return Details("safetensors", family, [family], parameter_size(facts.parameters), facts.dtype)


def parameter_size(parameters: int) -> str:
    """A number of parameters in short, as in ``134.5M``."""
    for unit, letter in UNITS:
        if parameters >= unit:
            return f"{parameters / unit:.1f}{letter}"
    return str(parameters)


def capabilities_of(tokens: ChatTokenizer, facts: ModelFacts) -> list[str]:
    """What the model can do, in Ollama's words."""
    if facts.pooling is not None:
        return ["embedding"] if facts.task == "embed" else []
    if not tokens.has_template:
        return ["completion"]
    thinking = ["thinking"] if tokens.dialect.thought is not None else []
    return ["completion", "tools", *thinking, *(["vision"] if "image" in facts.media else [])]


def parameters_of(generation: Generation) -> list[str]:
    """The defaults of sampling, a line each."""
    values = {
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "top_k": generation.top_k,
        "min_p": generation.min_p,
        "repeat_penalty": generation.repetition_penalty,
    }
    return [f"{name:<30} {value}" for name, value in values.items()] + [
        f'{"stop":<30} "{text}"' for text in generation.stop
    ]
