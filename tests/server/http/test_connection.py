"""Clients that are slow, silent or malformed: their connections end, and nobody else notices.

Times are made short by the knob; what a test asserts is that a thing happens, or what must have come before it.
"""

import ast
import asyncio
import functools
import hashlib
import inspect
import json
import time
from collections.abc import Callable

import pytest
import uvicorn
import uvloop
from http_context import HELLO, P, Scenario, until, within
from real_port import MOST, Client, Port, port, request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http import httptools_impl
from uvicorn.server import ServerState

import server.http.connection
from server.http.connection import BESIDE, HEAD_BYTES, Connection, HttpConfig
from server.serve import most_connections

CHAT = "/v1/chat/completions"
GOOD = json.dumps({"messages": HELLO}).encode()
SHORT = 0.4  # seconds of patience
PATIENCE = 60.0  # until a test that hangs fails

UPGRADE = request("/health", b"", "GET", "Connection: Upgrade", "Upgrade: websocket")


def at_a_port(patience: float = SHORT, app: ASGIApp | None = None) -> Callable[[Scenario[Port, P]], Callable[P, None]]:
    """Make a test of a coroutine function whose first parameter is a Port, in an event loop as the server's."""

    def decorate(test: Scenario[Port, P]) -> Callable[P, None]:
        coroutine = within(lambda: port(patience, app), PATIENCE)(test)

        @functools.wraps(coroutine)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(coroutine(*args, **kwargs))

        return run

    return decorate


async def good_request(opened: Port) -> None:
    """Somebody else is served."""
    client = await opened.open()
    await client.send(request(CHAT, GOOD))
    assert (await client.answer())[0] == 200


def error_of(answer: bytes) -> dict[str, str | None]:
    error: dict[str, str | None] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# --- slow senders ---------------------------------------------------------------------------------------------


@at_a_port()
async def test_a_request_that_is_not_complete_in_time_is_a_408(opened: Port) -> None:
    whole = request(CHAT, GOOD)
    for part in (b"P", whole[:40], whole[:-1], request(CHAT, GOOD).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"):
        began = time.monotonic()
        client = await opened.open()
        await client.send(part)
        answer = await client.closed()
        assert time.monotonic() - began >= SHORT
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close\r\n" in answer
        assert b"x-request-id: " in answer
        assert error_of(answer)["code"] == "request_timeout"
    await good_request(opened)
    assert len(opened.site.engine.submitted) == 1


@at_a_port()
async def test_bytes_that_drip_in_do_not_lengthen_the_time(opened: Port) -> None:
    client = await opened.open()
    await client.send(request(CHAT, GOOD)[:60])
    reading = asyncio.create_task(client.closed())
    while not reading.done():
        await client.send(b"a")
        await asyncio.sleep(0.02)
    assert error_of(await reading)["code"] == "request_timeout"


@at_a_port(PATIENCE)
async def test_an_answer_reaches_who_is_still_sending(opened: Port) -> None:
    client = await opened.open()
    whole = request("/health", b"", "GET", f"A: {'b' * (8 << 20)}")
    await client.send(whole)  # all of it is taken
    await client.send(whole)
    assert (await client.closed()).startswith(b"HTTP/1.1 431 ")
    assert opened.connections == 1
    client.leave()
    await until(lambda: opened.connections == 0)
    await good_request(opened)


def test_a_refused_body_is_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """The app comes to read it when the answer is written already."""

    @at_a_port(PATIENCE, much)
    async def test(opened: Port) -> None:
        client = await opened.open()
        head = request("/1", b"", "GET", "Transfer-Encoding: chunked", "Expect: 100-continue")
        await client.send(head + b"ZZ\r\n")
        answer = await client.closed()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"100 Continue" not in answer

    with caplog.at_level("WARNING"):
        test()
    assert caplog.text == ""


class Unread(asyncio.Transport):
    """A connection that its client has closed without reading all that was written."""

    closing = aborted = False

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = True

    def get_write_buffer_size(self) -> int:
        return 100


def test_who_leaves_in_a_request_with_answers_unread_is_cut_off() -> None:
    async def run() -> bool:
        connection = Connection(HttpConfig(much, patience=0.01, most=9, goodbye=1), ServerState(), {})
        transport = Unread()
        connection.connection_made(transport)
        connection.data_received(b"GET / HTTP/1.1\r\n")
        transport.close()
        await asyncio.wait_for(until(lambda: transport.aborted), PATIENCE)
        return transport.aborted

    assert asyncio.run(run())


@at_a_port()
async def test_who_does_not_stop_sending_is_cut_off(opened: Port) -> None:
    client = await opened.open()

    async def send() -> None:
        while True:
            await client.send(b"not HTTP at all\r\n")
            await asyncio.sleep(0.02)

    with pytest.raises(ConnectionError):
        await send()
    await until(lambda: opened.connections == 0)


@at_a_port()
async def test_a_large_request_has_longer(opened: Port) -> None:
    """64 KiB are worth a second: more than the body's second half takes to come."""
    body = GOOD + b" " * (256 * 1024)
    client = await opened.open()
    data = request(CHAT, body)
    await client.send(data[:-100])
    await asyncio.sleep(3 * SHORT)
    await client.send(data[-100:])
    assert (await client.answer())[0] == 200


@at_a_port()
async def test_a_silent_connection_is_closed_without_a_word(opened: Port) -> None:
    client = await opened.open()
    assert await client.closed() == b""
    await until(lambda: opened.connections == 0)


@at_a_port()
async def test_line_ends_between_requests_keep_nothing_open(opened: Port) -> None:
    client = await opened.open()
    await client.send(request(CHAT, GOOD))
    assert (await client.answer())[0] == 200
    await client.send(b"\r\n")
    assert await client.closed() == b""


@at_a_port()
async def test_a_body_that_nobody_reads_is_waited_for_no_longer(opened: Port) -> None:
    client = await opened.open()
    await client.send(request("/nothing", b"{" * 100)[:-50])
    assert (await client.answer())[0] == 404
    assert await client.closed() == b""


@at_a_port()
async def test_the_time_between_two_requests_is_another(opened: Port) -> None:
    client = await opened.open()
    for _ in range(2):
        await client.send(request(CHAT, GOOD))
        assert (await client.answer())[0] == 200
        await asyncio.sleep(2 * SHORT)


@at_a_port()
async def test_a_turn_may_take_its_time(opened: Port) -> None:
    """A client that waits for its answer is not late, and so is not one that reads a stream with pauses in it."""
    engine = opened.site.engine
    engine.admit.clear()
    client = await opened.open()
    await client.send(request(CHAT, GOOD))
    await asyncio.sleep(3 * SHORT)
    engine.admit.set()
    assert (await client.answer())[0] == 200


# --- slow readers ---------------------------------------------------------------------------------------------


def stream_past_the_buffers(opened: Port) -> bytes:
    """A request whose turn says more than any buffer holds, and is not over then."""
    opened.site.engine.reply = "word " * 4_000
    opened.site.engine.pause_after = 3_500
    return request(CHAT, json.dumps({"messages": HELLO, "stream": True, "logprobs": True}).encode())


@at_a_port()
async def test_a_stream_that_nobody_reads_is_cut_off_and_its_turn_ends(opened: Port) -> None:
    client = await opened.open(receive_buffer=4096)
    await client.send(stream_past_the_buffers(opened))
    await until(lambda: opened.site.engine.cancelled != [])
    await until(lambda: opened.connections == 0)
    assert opened.site.engine.running == set()
    opened.site.engine.reply, opened.site.engine.pause_after = "Hello.", None
    await good_request(opened)


@pytest.mark.slow
@pytest.mark.wide
@at_a_port(patience=9.0)
async def test_the_time_to_read_is_the_same_where_a_token_has_many_alternatives(opened: Port) -> None:
    """Nobody reads, and much waits: the connection is cut when it has had its time, and not before."""
    opened.site.engine.reply, opened.site.engine.pause_after = "word " * 4_000, 1_500
    body = {"messages": HELLO, "stream": True, "logprobs": True, "top_logprobs": 20}
    client = await opened.open(receive_buffer=4096)
    began = time.monotonic()
    await client.send(request(CHAT, json.dumps(body).encode()))
    await until(lambda: opened.connections == 1)
    await asyncio.sleep(6.0)
    opened.site.engine.pause_after = None
    opened.site.engine.go.set()  # tokens that come when others have waited for long
    await asyncio.sleep(1.0)
    assert opened.site.engine.cancelled == []
    await until(lambda: opened.connections == 0)
    assert time.monotonic() - began >= 9.0
    await until(lambda: not opened.site.engine.running)


@at_a_port(patience=60.0)
async def test_what_waits_for_a_slow_reader_is_bounded(opened: Port) -> None:
    client = await opened.open(receive_buffer=4096)
    await client.send(stream_past_the_buffers(opened))
    (connection,) = opened.server.server_state.connections
    sizes = set()
    for _ in range(100):
        sizes.add(connection.transport.get_write_buffer_size())
        await asyncio.sleep(0.005)
    assert 64 * 1024 < max(sizes) <= 128 * 1024


PIECE, PIECES = b"x" * 16_384, 100


async def much(scope: Scope, receive: Receive, send: Send) -> None:
    """An app whose answer is pieces, ``PIECES`` or as many as the path says, and all at once but on one path."""
    await receive()
    pieces = int(scope["path"][1:]) if scope["path"][1:].isdecimal() else PIECES
    length = str(len(PIECE) * pieces).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    if scope["path"] != "/pieces":
        await send({"type": "http.response.body", "body": PIECE * pieces})
        return
    for number in range(pieces, 0, -1):
        await send({"type": "http.response.body", "body": PIECE, "more_body": number > 1})


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
@at_a_port(patience=1.0, app=much)
async def test_a_slow_reader_that_goes_on_reading_is_served_to_the_end(opened: Port, path: str) -> None:
    client = await opened.open(receive_buffer=32 * 1024)
    began = time.monotonic()
    await client.send(request(path, b"", "GET"))
    got = 0
    while got < len(PIECE) * PIECES:
        piece = await client.reader.read(16 * 1024)
        assert piece, "the connection was cut off"
        got += len(piece)
        await asyncio.sleep(0.02)
    assert time.monotonic() - began > 1.0  # else this says nothing


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@at_a_port(app=much)
async def test_an_answer_that_nobody_reads_is_given_up_too(opened: Port, path: str, connection: str) -> None:
    client = await opened.open(receive_buffer=4096)
    await client.send(request(path, b"", "GET", f"Connection: {connection}"))
    await until(lambda: opened.connections == 1)
    await until(lambda: opened.connections == 0)
    assert len(await client.closed()) < len(PIECE) * PIECES


@at_a_port(app=much)
async def test_however_much_of_an_answer_is_left_it_is_not_waited_for(opened: Port) -> None:
    """Of some of these the kernel takes all, of some not, but the transport's buffer is never full."""
    for pieces in range(1, 25):
        client = await opened.open(receive_buffer=4096)
        await client.send(request(f"/{pieces}", b"", "GET", "Connection: close"))
    await until(lambda: opened.server.server_state.total_requests == 24)
    await until(lambda: opened.connections == 0)
    assert opened.server.server_state.total_requests == 24  # all were answered before they were given up


# --- what is no request ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,  # TLS
        b"GET\r\n\r\n",
        b"BREW /pot HTTP/1.1\r\nHost: warm\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: warm\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: warm\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: warm\r\nA b: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: warm\r\nA: b\0c\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: warm\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: warm\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: warm\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: warm\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: warm\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # without Host
        b"GET /health HTTP/1.1\r\nHost: warm\r\nHost: warm\r\n\r\n",
        b"GET /health HTTP/1.0\r\nHost: warm\r\nHost: warm\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: warm warm\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: warm/health\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: me@warm\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: warm:http\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: [warm\r\n\r\n",
        b"GET /health\r\nHost: warm\r\n\r\n",  # HTTP/0.9
        b"GET /health HTTP/2.0\r\nHost: warm\r\n\r\n",
        b"GET /health#top HTTP/1.1\r\nHost: warm\r\n\r\n",
    ],
    ids=lambda data: repr(data[:24]),
)
@at_a_port(patience=60.0)
async def test_what_is_not_http_is_a_400_in_shape(opened: Port, data: bytes) -> None:
    client = await opened.open()
    await client.send(data)
    answer = await client.closed()
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert error_of(answer)["code"] == "invalid_http"
    await good_request(opened)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost:\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: warm:8000\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: my_service.name-space.svc.cluster.local\r\n\r\n",
        b"GET http://warm/health HTTP/1.1\r\nHost: warm\r\n\r\n",
        b"\r\nGET /health HTTP/1.1\r\nHost: warm\r\n\r\n",
    ],
    ids=lambda head: repr(head[:48]),
)
@at_a_port(patience=60.0)
async def test_a_head_that_rfc_9112_allows_is_taken(opened: Port, head: bytes) -> None:
    client = await opened.open()
    await client.send(head)
    assert (await client.answer())[0] == 200


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\0", b"GET /health HTTP/1.1\r\n\r\n", UPGRADE])
def test_what_clients_send_is_no_line_of_the_log(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    @at_a_port(patience=60.0)
    async def test(opened: Port) -> None:
        client = await opened.open()
        await client.send(data)
        assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 ")

    with caplog.at_level("WARNING"):
        test()
    assert caplog.text == ""


async def is_refused(opened: Port, pieces: list[bytes], status: bytes, code: str | None) -> None:
    client = await opened.open()
    reading = asyncio.create_task(client.closed())
    for piece in pieces:
        await client.send(piece)
    answer = await reading
    assert answer.startswith(b"HTTP/1.1 %b " % status)
    assert error_of(answer)["code"] == code
    client.leave()
    await until(lambda: opened.connections == 0)


@at_a_port(patience=60.0)
async def test_a_head_has_a_size(opened: Port) -> None:
    """In one header, in many, in the URL, and in a line that never ends."""
    start = b"GET /health HTTP/1.1\r\nHost: warm\r\n"
    small = b"A: b\r\n"
    for data in (
        start + b"A: " + b"b" * HEAD_BYTES + b"\r\n\r\n",
        start + small * (HEAD_BYTES // 34) + b"\r\n",
        b"GET /" + b"a" * HEAD_BYTES + b" HTTP/1.1\r\nHost: warm\r\n\r\n",
    ):
        client = await opened.open()
        await client.send(data)
        answer = await client.closed()
        assert answer.startswith(b"HTTP/1.1 431 "), answer
        assert error_of(answer)["type"] == "invalid_request_error"
    await is_refused(opened, [start + b"A: ", *[b"b" * 65536] * 40], b"431", None)
    await is_refused(opened, [b"GET /", *[b"b" * 65536] * 40], b"431", None)
    client = await opened.open()
    await client.send(start + b"A: " + b"b" * (HEAD_BYTES // 2) + b"\r\n" + small * 500 + b"\r\n")
    assert (await client.answer())[0] == 200


@at_a_port(patience=60.0)
async def test_what_surrounds_a_body_has_a_size_too(opened: Port) -> None:
    head = request(CHAT, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    await is_refused(opened, [head + b"1;", *[b"x" * 65536] * 40], b"400", "invalid_http")
    await is_refused(opened, [head + b"1\r\n{\r\n0\r\nA: ", *[b"x" * 65536] * 40], b"400", "invalid_http")
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in GOOD + b" " * 20_000) + b"0\r\n\r\n"
    assert len(chunks) > HEAD_BYTES
    assert BESIDE > 5  # bytes around each one of these
    client = await opened.open()
    await client.send(head + chunks)
    assert (await client.answer())[0] == 200


@at_a_port(patience=60.0)
async def test_trailers_are_no_headers(opened: Port) -> None:
    head = request(CHAT, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    client = await opened.open()
    body = b"%x\r\n%b\r\n0\r\nX-Session-ID: smuggled\r\n\r\n" % (len(GOOD), GOOD)
    await client.send(head + body)
    status, answer = await client.answer()
    assert status == 200
    assert b"smuggled" not in answer


@at_a_port(patience=60.0)
async def test_requests_in_a_row_are_answered_in_their_order(opened: Port) -> None:
    client = await opened.open()
    await client.send(request(CHAT, GOOD) + request("/nothing", b"", "GET") + request(CHAT, GOOD))
    assert [(await client.answer())[0] for _ in range(3)] == [200, 404, 200]


@at_a_port(patience=60.0)
async def test_an_upgrade_is_not_taken_and_does_no_harm(opened: Port) -> None:
    client = await opened.open()
    await client.send(UPGRADE)
    assert (await client.answer())[0] == 200
    await good_request(opened)


# --- many -----------------------------------------------------------------------------------------------------


@at_a_port(patience=60.0)
async def test_connections_beyond_the_limit_are_told_to_come_back(opened: Port) -> None:
    clients: list[Client] = [await opened.open() for _ in range(MOST)]
    await until(lambda: opened.connections == MOST)
    one_more = await opened.open()
    answer = await one_more.closed()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 5\r\n" in answer
    assert error_of(answer)["code"] == "too_many_connections"
    clients.pop().leave()
    await until(lambda: opened.connections < MOST)
    await good_request(opened)


def test_files_limit_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in ((1_000_000, 65_536), (10_000, 10_000 - 512), (600, 512)):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit, limit))
        assert most_connections() == most


# --- what is relied on of uvicorn -----------------------------------------------------------------------------

ATTRIBUTES = {  # of a connection, which none of uvicorn's documents speak of, and what becomes wrong without them
    "cycle": "whether a request is being answered, which decides whose turn it is",
    "flow": "what a refused request still sends is read, whether its body was waiting for the app or not",
    "headers": "the Host of a request is looked at before its app is called",
    "loop": "the timers of clients that are slow",
    "parser": "bytes are given to it here, so that nothing is logged of what it refuses",
    "pipeline": "requests that came before their predecessor's answer: none of these is answered with a 400 or 408",
    "server_state": "how many connections there are",
    "transport": "answers that are written here, the end of the connection, and how much of an answer is unread",
    "url": "the target of a request is looked at before its app is called",
    "ws_protocol_class": "a WebSocket's protocol class is set when the first one opens",
}
OF_A_CYCLE = {
    "disconnected": "an app whose client is given up must hear it",
    "message_event": "an app that waits for a body that does not come must be woken",
    "response_complete": "whether it is the client's turn",
    "response_started": "whether a 408 can still be sent",
    "waiting_for_100_continue": "a body is not asked for behind a refusal",
}
METHODS = {  # whose code was read: if it is another, what is said there must be looked at
    "HttpToolsProtocol.connection_made": (
        "6efb565ff3d3",
        "the connection is among server_state.connections",
    ),
    "HttpToolsProtocol.connection_lost": ("c91a4c9bf2e2", "an app that waits for the client hears that it left"),
    "HttpToolsProtocol.data_received": ("010a7ae59a5d", "Connection.data_received takes its place"),
    "HttpToolsProtocol.on_message_begin": ("96d377fdc7c2", "headers and url are those of the request that begins"),
    "HttpToolsProtocol.on_url": ("37be44e962b0", "url is what has come of the target"),
    "HttpToolsProtocol.on_header": ("65d62c044f61", "headers has names in lower case"),
    "HttpToolsProtocol.on_headers_complete": (
        "1ea8589acfad",
        "the app is called here, and not before",
    ),
    "HttpToolsProtocol.on_body": ("dba9c32aeba3", "a body is kept for the app, and reading pauses when it is large"),
    "HttpToolsProtocol.on_message_complete": ("1fbad42dc31f", "the request is whole: no timer runs for its sender"),
    "HttpToolsProtocol.on_response_complete": (
        "64e254f28e38",
        "the keep-alive timer begins, or the next request",
    ),
    "HttpToolsProtocol.pause_writing": ("17a8fd215d96", "an app that writes waits until the client has read"),
    "HttpToolsProtocol.resume_writing": ("7844bbaa8cce", "and goes on"),
    "HttpToolsProtocol.timeout_keep_alive_handler": ("8b53bf5f2e20", "is what the keep-alive timer calls"),
    "HttpToolsProtocol._unset_keepalive_if_required": (
        "00a6a4e47214",
        "data, and the end of the connection, end that timer",
    ),
    "HttpToolsProtocol.handle_websocket_upgrade": ("179c4f769386", "the connection is handed to ws_protocol_class"),
    "HttpToolsProtocol._should_upgrade": ("8fcad1ab8e09", "asks _should_upgrade_to_ws only of requests for WebSockets"),
    "HttpToolsProtocol.shutdown": ("d7351fa33f00", "idle connections are closed, others after their answer"),
    "RequestResponseCycle.receive": ("8124ae006be7", "message_event and disconnected end the wait for a body"),
    "RequestResponseCycle.send": (
        "abdd8601b326",
        "response_started and response_complete are told at once",
    ),
    "Server.capture_signals": ("e1bbcd4770d1", "HttpServer leaves signals to the program"),
    "Server.shutdown": ("9b33c5056299", "the port is closed at once, answers get the graceful timeout"),
}


def digest_of(name: str) -> str:
    """Of the code of a method of uvicorn's; "gone" where there is none."""
    of, _, method = name.partition(".")
    found = getattr(getattr(uvicorn if of == "Server" else httptools_impl, of, None), method, None)
    return "gone" if found is None else hashlib.sha256(inspect.getsource(found).encode()).hexdigest()[:12]


def test_the_methods_of_uvicorn_that_this_relies_on_are_those_that_were_read() -> None:
    """After an update: look at each one that is named, correct ``METHODS``, and run the tests of this file."""
    changed = [f"{name} ({digest_of(name)}): {why}" for name, (read, why) in METHODS.items() if digest_of(name) != read]
    assert changed == [], f"uvicorn {uvicorn.__version__} is another one than was read"


def test_the_private_parts_of_uvicorn_that_this_relies_on_are_there_and_named() -> None:
    """All that ``Connection`` uses and does not define itself, and what it uses of the request that is answered."""
    tree = ast.parse(inspect.getsource(server.http.connection))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_named(node.value, "self")}
    own = {*vars(Connection), "patience", "most", "sockets"} | {name for name in used if name.startswith("_")}
    assert used - own == set(ATTRIBUTES), "what is relied on and what is named here differ"
    of_cycle = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and is_cycle(n.value)}
    assert of_cycle == set(OF_A_CYCLE), "what is relied on and what is named here differ"

    async def found() -> set[str]:
        config = HttpConfig(much, patience=1.0, most=1, goodbye=1)
        return set(vars(Connection(config, ServerState(), {}))) | {"headers", "url"}

    missing = {name: why for name, why in ATTRIBUTES.items() if name not in asyncio.run(found())}
    code = inspect.getsource(httptools_impl.RequestResponseCycle)
    missing |= {name: why for name, why in OF_A_CYCLE.items() if f"self.{name} = " not in code}
    assert missing == {}, f"uvicorn {uvicorn.__version__} has these no more"


def is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def is_cycle(node: ast.expr) -> bool:
    return is_named(node, "cycle") or (isinstance(node, ast.Attribute) and node.attr == "cycle")
