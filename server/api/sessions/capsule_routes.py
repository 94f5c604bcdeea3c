"""Routes that export sessions as capsules and import them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from scheduler.model_facts import ModelFacts
from server import __version__
from server.api.sessions.capsule import MEDIA_TYPE, Capsule, CapsuleFacts, SessionFacts, doubtful, pack, unpack
from server.api.sessions.objects import ImportReport, live_session_object
from server.api.sessions.routes import session_of_path
from server.api.sessions.schemas import CreateSession, ExportSession, ImportSession
from server.api.sessions.transfers import CapsuleResponse, Transfers
from server.engine.engine import EngineDied, EngineUnavailable
from server.errors import ApiError
from server.http.json_response import json_response
from server.http.sse import while_connected
from server.log.identity import Session
from server.log.portable import InvalidLog, PortableLog
from server.log.timeline import SessionSummary, UnknownSession
from server.turns.context import ServerContext, context_of

router = APIRouter()  # bodies are capsules here, not JSON


@router.get("/v1/sessions/{session_id}/export")
async def export_session(session_id: str, query: Annotated[ExportSession, Query()], request: Request) -> Response:
    """Export the session as a capsule. A running turn is not included."""
    context, session = context_of(request), session_of_path(request, session_id)
    async with AsyncExitStack() as stack:
        if await context.log.summary(session.tenant, session.name) is None:
            raise UnknownSession
        folder = await stack.enter_async_context(transfers_of(request).room())
        work = pack_session(context, session, folder, query.kv)
        capsule = await while_connected(request.receive, work)
        return CapsuleResponse(capsule, f"{session.name}.zip", stack.pop_all().aclose)


async def pack_session(context: ServerContext, session: Session, folder: Path, with_kv: bool) -> Capsule:
    """A capsule of a session's log and KV, whose files are in a new folder below ``folder``. Raises UnknownSession, and
    EngineUnavailable or EngineDied if KV is wanted and no engine can export it.
    """
    summary = await context.log.summary(session.tenant, session.name)
    log = await context.log.rows(session.tenant, session.name)
    if summary is None:
        raise UnknownSession
    files, kv_tokens = None, 0
    if with_kv:
        timeline = log.tokens.tobytes()
        exported = await context.engine.export(session.tenant, session.name, str(folder / "kv"), timeline)
        if exported.files:
            files, kv_tokens = folder / "kv", exported.tokens
    facts = SessionFacts(session.name, summary.metadata, summary.ttl)
    return await run_in_threadpool(
        pack, model=context.served_name, version=__version__, session=facts, log=log, kv=files, kv_tokens=kv_tokens
    )


@router.post("/v1/sessions/import", status_code=201)
async def import_session(query: Annotated[ImportSession, Query()], request: Request) -> Response:
    """Create a session from a capsule. Its KV is used if it fits the served model and is undamaged."""
    context, transfers = context_of(request), transfers_of(request)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != MEDIA_TYPE:
        raise ApiError(415, f"The body must be a capsule: Content-Type: {MEDIA_TYPE}.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed bodies are not supported.")
    facts = context.facts
    async with transfers.room() as folder:
        await transfers.receive(request, folder / "capsule")
        told, log = await run_in_threadpool(open_capsule, folder, facts, context.fingerprint)
        name = told.session.id if query.id is None else query.id
        session = Session(request.state.tenant, name, stateful=True)
        async with context.log.holding(session.tenant, session.name):
            summary = await restore_log(context, session, told, log)
            kv_tokens, reason = await import_kv(context, session, told, folder / "kv")
            made = await live_session_object(context, session, summary)
    report = ImportReport(summary.turns, summary.tokens, kv_tokens, reason)
    return json_response(msgspec.structs.replace(made, imported=report), 201)


def open_capsule(folder: Path, facts: ModelFacts, fingerprint: str) -> tuple[CapsuleFacts, PortableLog]:
    """The content of the file ``capsule``, which is deleted; the KV files are then in the folder ``kv``. Blocking.
    Raises a 400 for an invalid capsule.
    """
    told, log = unpack(folder / "capsule", folder / "kv")
    (folder / "capsule").unlink()
    try:
        CreateSession(id=told.session.id, metadata=told.session.metadata, ttl_seconds=told.session.ttl_seconds)
    except ValidationError:
        raise doubtful("has invalid session fields") from None
    try:
        ids = log.tokens
    except InvalidLog:
        raise doubtful("has no valid log") from None
    if log.fingerprint == fingerprint and ids and max(ids) >= facts.vocab_size:
        raise doubtful("has a token id that its model does not have")
    return told, log


async def restore_log(context: ServerContext, session: Session, told: CapsuleFacts, log: PortableLog) -> SessionSummary:
    """Create the session in the log. Raises SessionExists."""
    facts = told.session
    try:
        return await context.log.restore(
            session.tenant, session.name, log, metadata=facts.metadata, ttl=facts.ttl_seconds
        )
    except InvalidLog:
        raise doubtful("has no valid log") from None


async def import_kv(
    context: ServerContext, session: Session, told: CapsuleFacts, files: Path
) -> tuple[int, str | None]:
    """Import the KV into the engine. Returns how many tokens it took, and why not all. Without KV, the next turn
    computes it.
    """
    if len(told.members) == 1:
        return 0, "no_kv" if told.tokens else None
    if told.fingerprint != context.fingerprint:
        return 0, "fingerprint"
    try:
        taken = await context.engine.import_(session.tenant, session.name, str(files))
    except (EngineUnavailable, EngineDied):
        return 0, "engine_unavailable"
    return taken.tokens, taken.reason


def transfers_of(request: Request) -> Transfers:
    """The app's folder for capsules."""
    transfers: Transfers = request.app.state.transfers
    return transfers
