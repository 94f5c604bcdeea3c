"""Routes of health checks and metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from server.telemetry.metrics import CONTENT_TYPE
from server.turns.context import context_of

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 only while the engine's loop runs. Needs no key and reports only the state. ``degraded`` lists what fails
    while turns are served: ``session_log_full`` (turns that would be stored are refused), ``disk_failing`` (KV stays
    in memory)."""
    context = context_of(request)
    engine = context.engine
    if engine.healthy:
        troubles = {"session_log_full": context.log.full, "disk_failing": bool(engine.stats.disk_failing)}
        degraded = [name for name, is_there in troubles.items() if is_there]
        return JSONResponse({"status": "ok", **({"degraded": degraded} if degraded else {})})
    state = engine.state()
    return JSONResponse({"status": "stalled" if state == "ready" else state}, 503, headers={"retry-after": "2"})


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live")
async def live(request: Request) -> Response:
    """503 only if a restart of the server is necessary because its engine hangs. 200 also while a model loads, the
    engine restarts or the server stops. Needs no key."""
    engine = context_of(request).engine
    if engine.state() == "ready" and not engine.healthy:
        return JSONResponse({"status": "stalled"}, 503, headers={"retry-after": "2"})
    return JSONResponse({"status": "ok"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    context = context_of(request)
    context.metrics.engine(context.engine.stats, context.engine.healthy)
    context.metrics.model(context.served_name, context.engine.facts)
    return Response(context.metrics.text(), media_type=CONTENT_TYPE)
