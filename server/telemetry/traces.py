"""Traces: one span per generation, by OpenTelemetry's GenAI conventions, below FastAPI's span of the request.

Nothing is traced, and nothing but OpenTelemetry's interface (which FastAPI needs anyway) is imported, unless the
standard environment variables name a collector. Spans hold no text of prompts or replies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode, Tracer, TracerProvider

from scheduler.extras import install_command
from scheduler.protocol import Submit
from server import __version__
from server.telemetry.log_context import PROBES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as OwnProvider

NAME = "warmturn"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SPOKEN = "http/protobuf"
CLOSE_SECONDS = 3.0  # for the last spans, when the server ends

logger = logging.getLogger("warmturn.telemetry")
Value = str | int | float | bool | Sequence[str]


def is_untraced(scope: MutableMapping[str, Any]) -> bool:
    """Whether a request gets no span because it repeats every few seconds (health checks, metrics)."""
    return scope["path"] in PROBES


def tracer(provider: TracerProvider | None = None) -> Tracer:
    """Our tracer of ``provider``; None: of the process's global provider, if one is set."""
    return trace.get_tracer(NAME, __version__, provider)


def provider_of_environment() -> OwnProvider | None:
    """The provider that the environment asks for; None if it asks for none. If tracing cannot be set up, that is logged
    and the server runs without it.
    """
    endpoint = first_of(ENDPOINTS)
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if endpoint is None or exporter == "none" or disabled:
        return None
    if exporter != "otlp" or first_of(PROTOCOLS) not in (None, SPOKEN):
        logger.warning("no traces are sent: only OTLP over %s is supported", SPOKEN)
        return None
    try:
        from server.telemetry.trace_export import otlp
    except ImportError:
        logger.warning("no traces are sent: install the extra: %s", install_command("otel"))
        return None
    return otlp()


def first_of(variables: Sequence[str]) -> str | None:
    """The value of the first environment variable that is not empty."""
    return next((os.environ[name] for name in variables if os.environ.get(name)), None)


async def close(provider: OwnProvider) -> None:
    """Send the last spans, for ``CLOSE_SECONDS`` at most, so that an unreachable collector does not delay the exit."""
    closing = threading.Thread(target=provider.shutdown, name="telemetry", daemon=True)
    closing.start()
    await asyncio.to_thread(closing.join, CLOSE_SECONDS)


def generation(tracer: Tracer, operation: str, model: str, session: str | None, submit: Submit, choices: int) -> Span:
    """A started span for ``choices`` turns like ``submit``; the caller ends it. ``operation`` is a name of the
    conventions.
    """
    sampling = submit.sampling
    span = tracer.start_span(
        f"{operation} {model}",
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": NAME,
            "gen_ai.request.model": model,
        },
    )
    if span.is_recording():
        asked: dict[str, Value | None] = {
            "gen_ai.conversation.id": session,
            "gen_ai.request.choice.count": choices if choices > 1 else None,
            "gen_ai.request.max_tokens": submit.stopping.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k or None,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
            "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
            "gen_ai.request.seed": sampling.seed,
            "warmturn.tenant": submit.tenant,
        }
        span.set_attributes(known_attributes(asked))
    return span


def pooling(tracer: Tracer, operation: str, model: str, tenant: str) -> Span:
    """A started span for a request of embeddings or scores; the caller ends it."""
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": NAME,
        "gen_ai.request.model": model,
        "warmturn.tenant": tenant,
    }
    return tracer.start_span(f"{operation} {model}", attributes=attributes)


def end_span(span: Span, told: Mapping[str, Value | None], error: str | None) -> None:
    """End a span with the known attributes; ``error`` is a short error type."""
    if span.is_recording():
        span.set_attributes(known_attributes({**told, "error.type": error}))
        if error is not None:
            span.set_status(StatusCode.ERROR)
    span.end()


def known_attributes(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}
