"""Routes that export sessions as capsules and import them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from cache.media_ids import MEDIA
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
from server.log.database import SessionDamaged
from server.log.identity import Session
from server.log.portable import InvalidLog, PortableLog
from server.log.timeline import SessionSummary, UnknownSession
from server.media.media import place
from server.media.media_limits import MediaRefused
from server.media.media_reader import MediaReader
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
    media = await export_media(context, session, log, folder / "media")
    return await run_in_threadpool(
        pack,
        model=context.served_name,
        version=__version__,
        session=facts,
        log=log,
        kv=files,
        kv_tokens=kv_tokens,
        media=media,
    )


async def export_media(context: ServerContext, session: Session, log: PortableLog, folder: Path) -> Path | None:
    """The media of a session in a new folder, one file each; None if it has none. Raises LogDamaged for lost ones."""
    if not log.digests:
        return None
    folder.mkdir(mode=0o700)
    for digest in log.digests:
        data = await context.log.media.get(session.tenant, digest)
        if data is None:
            raise SessionDamaged("a picture of the session is lost")
        await run_in_threadpool((folder / digest).write_bytes, data)
    return folder


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
        media = FolderMedia(folder / "media")
        await check_media(request.app.state.media_reader, log, media)
        name = told.session.id if query.id is None else query.id
        session = Session(request.state.tenant, name, stateful=True)
        async with context.log.holding(session.tenant, session.name):
            summary = await restore_log(context, session, told, log, media)
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
    texts = (token for token in ids if token < MEDIA or facts.media_marks is None)
    if log.fingerprint == fingerprint and max(texts, default=0) >= facts.vocab_size:
        raise doubtful("has a token id that its model does not have")
    return told, log


class FolderMedia(Mapping[str, bytes]):
    """The media of an unpacked capsule, read when they are asked for: together they may be large."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, digest: str) -> bytes:
        try:
            return (self._folder / digest).read_bytes()
        except FileNotFoundError:
            raise KeyError(digest) from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(path.name for path in self._folder.iterdir()))

    def __len__(self) -> int:
        return len([*self])


async def check_media(reader: MediaReader, log: PortableLog, media: FolderMedia) -> None:
    """Check that the media of a capsule are sound, and what its messages say of them. Raises a 400."""
    told = {one.digest: one for one in log.media}
    for digest in media:
        data = await run_in_threadpool(media.__getitem__, digest)
        try:
            found = await reader.check(told[digest].kind, data)
        except MediaRefused as error:
            raise doubtful(f"has a picture or sound that {error.problem}") from None
        if any(place(found, one.at) != one for one in log.media if one.digest == digest):
            raise doubtful("has messages that do not match its pictures")


async def restore_log(
    context: ServerContext, session: Session, told: CapsuleFacts, log: PortableLog, media: FolderMedia
) -> SessionSummary:
    """Create the session in the log. Raises SessionExists."""
    facts = told.session
    try:
        return await context.log.restore(
            session.tenant, session.name, log, metadata=facts.metadata, ttl=facts.ttl_seconds, media=media
        )
    except InvalidLog:
        raise doubtful("has no valid log") from None


async def import_kv(
    context: ServerContext, session: Session, told: CapsuleFacts, files: Path
) -> tuple[int, str | None]:
    """Import the KV into the engine. Returns how many tokens it took, and why not all. Without KV, the next turn
    computes it.
    """
    if not any(member.name.startswith("kv/") for member in told.members):
        return 0, "no_kv" if told.tokens else None
    if told.fingerprint != context.fingerprint:
        return 0, "fingerprint"
    try:
        taken = await context.engine.import_(session.tenant, session.name, str(files))
    except (EngineUnavailable, EngineDied):
        return 0, "engine_unavailable"
    return taken.tokens, taken.reason


def transfers_of(request: Request) -> Transfers:
    transfers: Transfers = request.app.state.transfers
    return transfers
