"""HTTP connections: uvicorn's protocol class with time limits for clients and a limit on the size of request heads."""

from __future__ import annotations

import asyncio
import http
import logging
import re
import time
import uuid
from collections.abc import Collection
from typing import Any

import httptools
import uvicorn
from uvicorn.importer import import_from_string
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from server.errors import ApiError, bad_request, unavailable
from server.http.body_size import MAX_BYTES

HEAD_BYTES = 64 * 1024  # of a request's line and headers
FIELD_BYTES = 32  # what a header takes beside its text
BESIDE = 8  # bytes around a byte of the body, in chunks; clients send far fewer
BODY_RATE = 64 * 1024  # bytes a second that lengthen the time a request has to be complete
LINGER = 2  # seconds at most that a connection stays open behind an answer for what the client still sends
KEEP_ALIVE = 75  # seconds without a request; longer than usual proxies keep theirs
FULL_RETRY = 5  # seconds, told to a client that comes when there are too many
VERSIONS = ("1.0", "1.1")
SOCKETS = ("/v1/responses",)
SOCKET_CLASS = "uvicorn.protocols.websockets.websockets_sansio_impl:WebSocketsSansIOProtocol"
HOST = re.compile(rb"(\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]{0,5})?\Z")  # RFC 3986, 3.2.2

logger = logging.getLogger("warmturn.http")


class HttpConfig(uvicorn.Config):
    """Settings of connections. ``patience`` is in seconds; connections beyond ``most`` are refused. ``sockets`` are the
    paths of WebSockets; elsewhere a wish for one is answered as the request that it is.
    """

    def __init__(
        self, app: Any, *, patience: float, most: int, goodbye: int, sockets: Collection[str] = SOCKETS
    ) -> None:
        super().__init__(
            app,
            interface="asgi3",  # not found out by looking at the app
            http=Connection,
            ws="none",  # loaded with the first one: see ``Connection.handle_websocket_upgrade``
            ws_max_size=MAX_BYTES,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=goodbye,
        )
        self.patience = patience
        self.most = most
        self.sockets = frozenset(path.encode() for path in sockets)


class HeadTooLarge(ValueError):
    """The head of a request is larger than ``HEAD_BYTES``."""


class HeadMalformed(ValueError):
    """The head of a request is malformed, though the parser accepted it."""


class Connection(HttpToolsProtocol):
    """Invariant: while it is the client's turn, a timer runs that ends the connection.

    - A request that has begun is complete after ``patience`` seconds and one more for each ``BODY_RATE`` bytes that
      came, or it is a 408. A connection that begins none ends the same way; between two requests, after ``KEEP_ALIVE``.
    - Behind a refusal what the client still sends is dropped, until it closes or for ``LINGER`` seconds. The system
      would drop the answer if bytes came while the connection is closed.
    - An answer that is not read lets no more than the transport's buffer wait; without progress for ``patience``
      seconds the connection is cut off, and whoever writes the answer hears that the client left.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        assert isinstance(config, HttpConfig)
        super().__init__(config, server_state, app_state, _loop)
        self._patience = config.patience
        self._most = config.most
        self._sockets = config.sockets
        self._head: int | None = None  # bytes of the head that is coming; None: none is
        self._came = 0  # bytes since the request was awaited
        self._body = 0  # those of them that are its body
        self._since = 0.0
        self._leaving = False  # the last answer is written, and what comes is dropped
        self._sender: asyncio.TimerHandle | None = None  # runs while a request is awaited or incomplete, or leaving
        self._reader: asyncio.TimerHandle | None = None  # runs while an answer is unread
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.server_state.connections) > self._most:
            full = unavailable("The server has too many connections.", FULL_RETRY, "too_many_connections")
            self.transport.write(answer(full))
            self._hang_up()  # at once: there is no room to linger
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_is_here()
        self._watch_ends()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    # --- what comes -------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, without its log lines about clients that send invalid HTTP or ask for an upgrade."""
        if self._leaving:
            return
        self._came += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
                return
            # nobody has to take one; the request is answered as it is
        except httptools.HttpParserError:
            logger.debug("a connection sent invalid HTTP")
            self._refuse_head()
        if self._leaving or self.transport.is_closing():
            return
        if self._sender is not None:
            if self._came - self._body > HEAD_BYTES + BESIDE * self._body:
                self._refuse_head()  # a line or a trailer without an end: the parser keeps it, and counts nothing
        elif self.cycle is None or self.cycle.response_complete:
            self._await_request()  # line ends between two requests begin none, and have ended the keep-alive timer

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0
        if self._sender is None:
            self._await_request()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:
            return  # a trailer: who looked at the headers has not seen it
        self._count(len(name) + len(value) + FIELD_BYTES)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def _should_upgrade_to_ws(self) -> bool:
        return self.url.partition(b"?")[0] in self._sockets and self.parser.get_method() == b"GET"

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over to a WebSocket's protocol class, which has time limits of its own (pings)."""
        self._request_is_here()
        self._watch_ends()
        self.ws_protocol_class = import_from_string(SOCKET_CLASS)
        super().handle_websocket_upgrade()

    def _count(self, size: int) -> None:
        assert self._head is not None
        self._head += size
        if self._head > HEAD_BYTES:
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        """See ``httptools``. Raises ``HeadMalformed``."""
        hosts = [value for name, value in self.headers if name == b"host"]
        if not well_formed(self.parser.get_http_version(), self.url, hosts):
            raise HeadMalformed
        super().on_headers_complete()
        self._head = None

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._request_is_here()

    def _refuse_head(self) -> None:
        """What the parser does not take, in the shape of every error."""
        if self._head is not None and max(self._head, self._came - self._body) > HEAD_BYTES:
            self._refuse(ApiError(431, f"The head of the request is larger than {HEAD_BYTES} bytes."))
        else:
            self._refuse(bad_request("This is not a valid HTTP request.", code="invalid_http"))

    # --- the two timers ---------------------------------------------------------------------------------------

    def _await_request(self) -> None:
        self._since, self._came, self._body = time.monotonic(), 0, 0
        self._sender = self.loop.call_later(self._patience, self._look_at_sender)

    def _request_is_here(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
            self._sender = None

    def _look_at_sender(self) -> None:
        left = self._patience + self._came / BODY_RATE - (time.monotonic() - self._since)
        if left > 0:
            self._sender = self.loop.call_later(left, self._look_at_sender)
        elif self._head is None and (self.cycle is None or self.cycle.response_complete):
            self._hang_up()  # nobody waits for an answer
        else:
            self._refuse(ApiError(408, "The request was not received in time.", code="request_timeout"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._watch_ends()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Called between two requests; the client may not yet have read the last answer."""
        self._hang_up()

    def _watch_reader(self) -> None:
        self._watch_ends()
        self._unread = self.transport.get_write_buffer_size()
        self._reader = self.loop.call_later(self._patience, self._look_at_reader)

    def _watch_ends(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None

    def _look_at_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            self._watch_reader()
        else:
            self.transport.abort()

    # --- ends -------------------------------------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no request, if nothing else is being answered, and close."""
        cycle = self.cycle
        if self.pipeline or (cycle is not None and cycle.response_started and not cycle.response_complete):
            self.transport.abort()
            return
        if cycle is not None and not cycle.response_complete:  # it reads the body that does not come
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
        if self.transport.is_closing():  # the client is gone, and may have left answers unread
            self._hang_up()
            return
        self.transport.write(answer(error))
        self._linger()

    def _linger(self) -> None:
        """Say that nothing more is written, and drop what still comes, for a while."""
        self._leaving = True
        self._request_is_here()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._sender = self.loop.call_later(min(LINGER, self._patience), self._hang_up)

    def shutdown(self) -> None:
        """See uvicorn. Nobody is waited for who has an answer."""
        if self._leaving:
            self._hang_up()
        else:
            super().shutdown()

    def _hang_up(self) -> None:
        """Close, once what was written is read; that, too, is waited for with patience."""
        self.transport.close()
        self._request_is_here()
        self._watch_reader()


def well_formed(version: str, target: bytes, hosts: list[bytes]) -> bool:
    """Checks of RFC 9112 that the parser does not make: an HTTP/1 version, no fragment in the target, and one valid
    Host header (in HTTP/1.0 at most one).
    """
    if version not in VERSIONS or b"#" in target or len(hosts) > 1:
        return False
    return all(HOST.match(host) for host in hosts) if hosts else version == "1.0"


def answer(error: ApiError) -> bytes:
    """An error as a whole HTTP answer; the connection is closed after it."""
    body = error.encode()
    headers = {
        **dict(error.headers or {}),
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": uuid.uuid4().hex,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    status = http.HTTPStatus(error.status_code)
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{lines}\r\n".encode() + body
