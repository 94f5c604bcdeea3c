"""Routes of health checks and metrics."""

from __future__ import annotations

from collections import Counter

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from server.models.registry import registry_of
from server.telemetry.labelled_metrics import metrics_of
from server.telemetry.metrics import CONTENT_TYPE
from server.turns.context import context_of

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 only while the engine's loop runs. Needs no key and reports only the state. ``degraded`` lists what fails
    while turns are served: ``session_log_full`` (turns that would be stored are refused), ``disk_failing`` (KV stays
    in memory), ``engine_restarting`` (of one of several models). With several models ``models`` counts them by status,
    and ``loading`` says how far a load is."""
    models = registry_of(request)
    engines = models.loaded_engines()
    unhealthy = [engine.state() for engine in engines if not engine.healthy]
    if models.stopping or "ready" in unhealthy or (engines and len(unhealthy) == len(engines)):
        state = "stopping" if models.stopping else "ready" if "ready" in unhealthy else unhealthy[0]
        return JSONResponse({"status": "stalled" if state == "ready" else state}, 503, headers={"retry-after": "2"})
    troubles = {
        "session_log_full": context_of(request).log.full,
        "disk_failing": any(engine.stats.disk_failing for engine in engines),
        "engine_restarting": bool(unhealthy),
    }
    told: dict[str, object] = {"status": "ok"}
    if degraded := [name for name, is_there in troubles.items() if is_there]:
        told["degraded"] = degraded
    if len(models.models) > 1:
        told["models"] = Counter(model.status for model in models.models)
    if loading := [model.stage for model in models.models if model.stage]:
        told["loading"] = loading
    return JSONResponse(told)


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live")
async def live(request: Request) -> Response:
    """503 only if a restart of the server is necessary because its engine hangs. 200 also while a model loads, the
    engine restarts or the server stops. Needs no key."""
    engines = registry_of(request).loaded_engines()
    if any(engine.state() == "ready" and not engine.healthy for engine in engines):
        return JSONResponse({"status": "stalled"}, 503, headers={"retry-after": "2"})
    return JSONResponse({"status": "ok"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format; with several models, each one's have a label ``model``."""
    models = registry_of(request).models
    for model in models:
        if model.engine is not None:
            model.metrics.engine(model.engine.stats, model.engine.healthy)
            model.metrics.model(model.name, model.engine.facts)
    return Response(metrics_of({model.name: model.metrics for model in models}), media_type=CONTENT_TYPE)
