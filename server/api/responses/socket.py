"""Responses over a WebSocket: the connection keeps the latest timelines, so that only new items travel."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, WebSocket
from starlette.concurrency import run_in_threadpool
from starlette.websockets import WebSocketDisconnect

from server.api.responses.preparation import prepare_response
from server.api.responses.reply import ResponseReply
from server.api.responses.response_branch import ResponseBranch, branch_of, new_chain
from server.api.responses.routes import router as over_http
from server.api.responses.socket_memory import SocketMemory
from server.api.responses.socket_reply import SocketReply, encode_error
from server.api.responses.socket_requests import LANE_ID, CancelEvent, CreateEvent, lacks_user, with_user_message
from server.errors import ApiError, ClientLeft, bad_request
from server.http.body import INLINE_BYTES, is_turn_route, log_ignored
from server.http.error_responses import as_api_error
from server.http.media_admission import add_media, admit_media, media_of
from server.lines.announcement import announce_line
from server.models.registry import registry_of
from server.schemas import strict
from server.schemas.adaptations import begin_adaptations
from server.schemas.json_body import parse
from server.schemas.strict import Strict, validate
from server.telemetry import log_context
from server.turns.choices import Choices
from server.turns.context import context_of
from server.turns.turn_runner import TurnRunner

LIFETIME = 3600.0  # seconds of a connection, as OpenAI's
MOST_ACTIVE = 16  # responses at once
MOST_LANES = 32  # that have names
MOST_QUEUED = 64  # requests of a connection that wait for others of it
NOT_HANDED_ON = frozenset({b"idempotency-key", b"x-session-id"})  # headers that are about one request, not about many

logger = logging.getLogger("warmturn.http")
router = APIRouter()


@router.websocket("/v1/responses")
async def open_socket(websocket: WebSocket) -> None:
    """Create responses over one connection; ``previous_response_id`` may name one that is not stored."""
    await ResponseSocket(websocket).serve()


class Lane:
    """The requests of one ``stream_id``, which run one after the other; ``id`` None: those without one."""

    def __init__(self, id: str | None) -> None:
        self.id = id
        self.requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None


class ResponseSocket:
    """One connection, and the responses that run on it. Whatever runs is cancelled when the connection ends."""

    def __init__(self, websocket: WebSocket) -> None:
        self._socket = websocket
        self._memory = SocketMemory()
        self._lanes: dict[str | None, Lane] = {}
        self._waiting = 0  # requests that were taken and have not ended
        self._idle = asyncio.Event()
        self._idle.set()
        self._slots = asyncio.Semaphore(MOST_ACTIVE)
        self._running: dict[str, Choices] = {}
        self._sending = asyncio.Lock()

    async def serve(self) -> None:
        """Serve until the client leaves, or until the connection is too old and nothing runs on it."""
        await self._socket.accept()
        await announce_line(self._socket)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(LIFETIME):
                    while True:
                        await self._take(await self._receive())
            await self._idle.wait()
            message = "This connection is an hour old: open a new one."
            await self._refuse(ApiError(400, message, code="websocket_connection_limit_reached"), None)
            await self._socket.close()
        except (WebSocketDisconnect, ClientLeft):
            pass
        finally:
            tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- what comes -------------------------------------------------------------------------------------------

    async def _receive(self) -> bytes:
        """The next message of the client, whether it came as text or as bytes. Raises WebSocketDisconnect."""
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        text: str | None = message.get("text")
        data: bytes = message["bytes"] if text is None else text.encode()
        return data

    async def _take(self, data: bytes) -> None:
        lane = None
        try:
            value = parse(data) if len(data) <= INLINE_BYTES else await run_in_threadpool(parse, data)
            lane = lane_of(value)
            match value.get("type"):
                case "response.create":
                    self._queue(value, lane)
                case "response.cancel":
                    self._cancel(self._validate(CancelEvent, value))
                case "response.steer":
                    await self._send(refuse_steering(value))
                case _:
                    raise bad_request("type must be response.create or response.cancel.", "type", "invalid_value")
        except (ApiError, ValueError, TypeError) as error:
            await self._refuse(as_api_error(error), lane)
        except Exception as error:
            await self._refuse(self._client_error(error), lane)

    def _queue(self, value: dict[str, Any], id: str | None) -> None:
        """Queue a request on its lane. Raises a 429 for too many."""
        if self._waiting >= MOST_QUEUED:
            raise ApiError(429, "Too many requests of this connection are waiting.", code="queue_full")
        lane = self._lanes.get(id)
        if lane is None:
            if id is not None and len(self._lanes.keys() - {None}) >= MOST_LANES:
                message = f"A connection can have {MOST_LANES} values of stream_id."
                raise bad_request(message, "stream_id", "websocket_stream_limit_reached")
            lane = self._lanes[id] = Lane(id)
            lane.task = asyncio.create_task(self._run(lane))
        self._waiting += 1
        self._idle.clear()
        lane.requests.put_nowait(value)

    def _cancel(self, event: CancelEvent) -> None:
        choices = self._running.get(event.response_id)
        if choices is None:
            message = "No response with this id is running on this connection."
            raise bad_request(message, "response_id", "response_not_found")
        choices.stop()

    def _validate(self, model: type[Strict], value: Mapping[str, Any]) -> Any:
        strict.ignore_unknown(self._socket.app.state.ignore_unknown)
        begin_adaptations()
        return validate(model, value)

    # --- what runs --------------------------------------------------------------------------------------------

    async def _run(self, lane: Lane) -> None:
        """Run a lane's requests in order, until the connection ends."""
        with suppress(ClientLeft, WebSocketDisconnect):
            while True:
                value = await lane.requests.get()
                async with self._slots:
                    await self._create(value, lane.id)
                self._waiting -= 1
                if not self._waiting:
                    self._idle.set()

    async def _create(self, value: dict[str, Any], lane: str | None) -> None:
        """Run one request. Whatever fails is told to the client."""
        request = self._request()
        status = 0
        try:
            kept = {"store": False} if value.get("generate") is False else {}  # there is no reply to store
            await admit_media(request, value)
            body = self._validate(CreateEvent, {**value, **kept, "stream": True})
            log_ignored()
            async with registry_of(request).using(request, body.model, tasks=("generate",)):
                status = await self._respond(body, request)
        except (ClientLeft, WebSocketDisconnect):
            raise
        except Exception as error:
            told = self._client_error(error)
            status = told.status_code
            await self._refuse(told, lane)
        finally:
            if status >= 400 and isinstance(previous := value.get("previous_response_id"), str):
                self._memory.drop(previous, lane)
            context_of(request).metrics.count_answer(request.scope["route"].path, status)
            log_context.log_access(request.scope, request.scope["route"].path, status)

    async def _respond(self, body: CreateEvent, request: Request) -> int:
        """Send the events of one response. Returns the status that it would have had over HTTP."""
        context = context_of(request)
        with ExitStack() as claim:
            context.check(body, None)
            branch = await self._branch(body, request, claim)
            context.check(body, branch.session)
            runner, reply, added = await self._prepare(body, request, branch, claim)
            choices = runner.submit()
            claim.callback(choices.close)
            await choices.wait_until_admitted()
            self._running[reply.head.id] = choices
            claim.callback(self._running.pop, reply.head.id)
            try:
                async for data in runner.events(choices):
                    await self._send(data)
            except (ClientLeft, WebSocketDisconnect):
                raise
            except Exception as error:
                told = self._client_error(error)
                await self._send(reply.encode_event(reply.write_failure(told)[1]))
                return told.status_code
            self._keep(body, runner, choices, reply.head.id, added, media_of(request))
        return 200

    async def _prepare(
        self, body: CreateEvent, request: Request, branch: ResponseBranch, claim: ExitStack
    ) -> tuple[TurnRunner, ResponseReply, int]:
        """The turn of a request, the reply that it writes, and how many messages were added to its prompt: a template
        may demand a user's message, and a prompt that is only read may come before there is one.
        """
        write = partial(SocketReply, lane=body.stream_id, warms=not body.generate)
        past = [] if branch.past is None else branch.past.messages
        added = not body.generate and not context_of(request).tokens.dialect.places.only and lacks_user(body, past)
        asked = with_user_message(body) if added else body
        _, runner, reply = await prepare_response(request, asked, branch, None, claim, write)
        return runner, reply, int(added)

    async def _branch(self, body: CreateEvent, request: Request, claim: ExitStack) -> ResponseBranch:
        """The branch of a request, which may follow a response that only this connection knows."""
        context, tenant = context_of(request), request.state.tenant
        known = None if body.previous_response_id is None else self._memory.find(body.previous_response_id)
        if known is not None and body.previous_response_id is not None:
            add_media(request, self._memory.media(body.previous_response_id))
        if known is None:
            return await branch_of(context, tenant, body, body.store, None, claim)
        return ResponseBranch(await new_chain(context, tenant, None, claim) if body.store else None, known)

    def _keep(
        self,
        body: CreateEvent,
        runner: TurnRunner,
        choices: Choices,
        id: str,
        added: int,
        media: Mapping[str, bytes],
    ) -> None:
        """Keep what a later request of this connection may continue, unless the log has it; but not the ``added``
        messages at the end of the prompt.
        """
        turn = runner.new_turn(choices)
        if not body.generate:
            self._memory.keep_prompt(id, turn.messages[: -1 - added], turn.fingerprint, body.stream_id, media)
        elif not body.store:
            self._memory.keep(id, turn, body.stream_id, media)

    # --- what is sent -----------------------------------------------------------------------------------------

    async def _send(self, data: bytes) -> None:
        async with self._sending:
            try:
                await self._socket.send_text(data.decode())
            except (OSError, RuntimeError):
                raise ClientLeft from None

    async def _refuse(self, error: ApiError, lane: str | None) -> None:
        await self._send(encode_error(error, lane))

    def _client_error(self, error: Exception) -> ApiError:
        """An exception as the client sees it; what nobody expected is logged."""
        told = as_api_error(error)
        if told.status_code == 500:
            logger.exception("a request of a WebSocket failed", exc_info=error)
        return told

    def _request(self) -> Request:
        """A request of ``POST /v1/responses`` with the headers of the connection and an id of its own."""
        state = self._socket.scope.get("state", {})
        request_id = uuid.uuid4().hex
        log_context.begin(request_id)
        scope = {
            **self._socket.scope,
            "type": "http",
            "method": "POST",
            "headers": [(name, value) for name, value in self._socket.scope["headers"] if name not in NOT_HANDED_ON],
            "route": next(route for route in over_http.routes if is_turn_route(route)),
            "state": {**state, "started": time.perf_counter(), "request_id": request_id},
        }
        return Request(scope)


def lane_of(value: Mapping[str, Any]) -> str | None:
    """The ``stream_id`` of an event. Raises a 400 for one that is not valid."""
    given = value.get("stream_id")
    if given is None:
        return None
    if isinstance(given, str) and re.fullmatch(LANE_ID, given):
        return given
    message = "stream_id must be 1 to 256 of the characters A-Z a-z 0-9 _ . -"
    raise bad_request(message, "stream_id", "invalid_stream_id")


def refuse_steering(value: Mapping[str, Any]) -> bytes:
    """The answer to ``response.steer``: input is taken between responses, not within one."""
    info = {
        "code": "steering_not_supported",
        "message": "This server takes input between responses: cancel the response, or wait for its end.",
        "type": "invalid_request_error",
    }
    steer = {name: value.get(name) for name in ("previous_response_id", "input")}
    event = {"type": "response.steer.failed", "sequence_number": 0, "error": info, "steer": steer}
    return msgspec.json.encode(event)
