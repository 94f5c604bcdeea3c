"""Routes of Ollama's API that describe the served model."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from scheduler.model_facts import ModelFacts
from scheduler.sampling_params import Generation
from server.api.ollama.objects import Details, ListedModel, Models, OllamaVersion, RunningModel, ShownModel
from server.api.ollama.schemas import ShowBody, plain_name
from server.api.openai.models import timestamp
from server.chat.tokenizer import ChatTokenizer
from server.http.body import JsonRoute
from server.http.json_response import json_response
from server.turns.context import context_of

FOLLOWED = "0.18.0"  # the version of Ollama whose API this is: clients refuse older ones
FOREVER = 100 * 365 * 86_400  # seconds for which the model stays loaded
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))

router = APIRouter(route_class=JsonRoute)


@router.get("/api/version")
async def ollama_version() -> Response:
    """The version of Ollama whose API this server follows."""
    return json_response(OllamaVersion(FOLLOWED))


@router.get("/api/tags")
async def ollama_tags(request: Request) -> Response:
    """List the model under each of its names."""
    context = context_of(request)
    facts, modified = context.facts, timestamp(context.created)
    details = details_of(facts)
    return json_response(
        Models(
            [
                ListedModel(name, name, modified, facts.weight_bytes, facts.fingerprint, details)
                for name in context.names
            ]
        )
    )


@router.get("/api/ps")
async def ollama_running(request: Request) -> Response:
    """The loaded model: it stays loaded."""
    context = context_of(request)
    facts, name = context.facts, context.served_name
    size = facts.weight_bytes + facts.pages * facts.page_size * facts.kv_bytes_per_token
    on_gpu = size if facts.device.startswith("cuda") else 0
    expires = timestamp(time.time() + FOREVER)
    running = RunningModel(name, name, size, facts.fingerprint, details_of(facts), expires, on_gpu, facts.max_context)
    return json_response(Models([running]))


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
    template = context.tokens.info["chat_template"] or ""
    shown = ShownModel(
        modelfile=f"FROM {context.served_name}\n",
        parameters="\n".join(parameters_of(facts.generation)),
        template=template,
        details=details_of(facts),
        model_info=info,
        capabilities=capabilities_of(context.tokens),
        modified_at=timestamp(context.created),
    )
    return json_response(shown)


def family_of(facts: ModelFacts) -> str:
    """The family of a model's architecture, as in ``llama``."""
    return facts.architecture.partition("For")[0].removesuffix("Model").lower() or "unknown"


def details_of(facts: ModelFacts) -> Details:
    """The model in short."""
    family = family_of(facts)
    return Details("safetensors", family, [family], parameter_size(facts.parameters), facts.dtype)


def parameter_size(parameters: int) -> str:
    """A number of parameters in short, as in ``134.5M``."""
    for unit, letter in UNITS:
        if parameters >= unit:
            return f"{parameters / unit:.1f}{letter}"
    return str(parameters)


def capabilities_of(tokens: ChatTokenizer) -> list[str]:
    """What the model can do, in Ollama's words."""
    if not tokens.has_template:
        return ["completion"]
    return ["completion", "tools", *(["thinking"] if tokens.dialect.thought is not None else [])]


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
