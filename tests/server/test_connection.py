"""Clients that are slow, silent or malformed: their connections end, and nobody else notices.

Times are made short by the knob; what a test asserts is that a thing happens, or what must have come before it.
"""

import asyncio
import functools
import json
import time
from collections.abc import Awaitable, Callable

import pytest
import uvicorn
import uvloop
from http_face import HELLO
from real_port import MOST, Client, Port, port, request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.connection import BESIDE, HEAD_BYTES
from server.serve import most_connections

CHAT = "/v1/chat/completions"
GOOD = json.dumps({"messages": HELLO}).encode()
SHORT = 0.4  # seconds of patience
PATIENCE = 60.0  # until a test that hangs fails

Scenario = Callable[[Port], Awaitable[None]]


def at_a_port(patience: float = SHORT, app: ASGIApp | None = None) -> Callable[[Scenario], Callable[[], None]]:
    """Make a test of a coroutine function of a Port."""

    def decorate(test: Scenario) -> Callable[[], None]:
        async def within() -> None:
            async with port(patience, app) as opened:
                await asyncio.wait_for(test(opened), PATIENCE)

        @functools.wraps(test)
        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the server runs
                runner.run(within())

        del run.__wrapped__
        return run

    return decorate


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


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
        if opened.connections == 0:
            break
    assert error_of(await reading)["code"] == "request_timeout"


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
def test_a_slow_reader_that_goes_on_reading_is_served_to_the_end(path: str) -> None:
    @at_a_port(patience=1.0, app=much)
    async def test(opened: Port) -> None:
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

    test()


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_an_answer_that_nobody_reads_is_given_up_too(path: str, connection: str) -> None:
    @at_a_port(app=much)
    async def test(opened: Port) -> None:
        client = await opened.open(receive_buffer=4096)
        await client.send(request(path, b"", "GET", f"Connection: {connection}"))
        await until(lambda: opened.connections == 1)
        await until(lambda: opened.connections == 0)

    test()


@at_a_port(app=much)
async def test_however_much_of_an_answer_is_left_it_is_not_waited_for(opened: Port) -> None:
    """Of some of these the kernel takes all, of some not, but the transport's buffer is never full."""
    for pieces in range(1, 25):
        client = await opened.open(receive_buffer=4096)
        await client.send(request(f"/{pieces}", b"", "GET", "Connection: close"))
    await until(lambda: opened.server.server_state.total_requests == 24)
    await until(lambda: opened.connections == 0)


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
    ],
    ids=lambda data: repr(data[:24]),
)
def test_what_is_not_http_is_a_400_in_shape(data: bytes) -> None:
    @at_a_port(patience=60.0)
    async def test(opened: Port) -> None:
        client = await opened.open()
        await client.send(data)
        answer = await client.closed()
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        assert error_of(answer)["code"] == "invalid_http"
        await good_request(opened)

    test()


async def refused_head(opened: Port, pieces: list[bytes]) -> None:
    client = await opened.open()
    reading = asyncio.create_task(client.closed())
    for piece in pieces:
        try:
            await client.send(piece)
        except ConnectionError:  # refused already
            break
    assert (await reading).startswith((b"HTTP/1.1 431 ", b""))
    await until(lambda: opened.connections == 0)


@at_a_port(patience=60.0)
async def test_a_head_has_a_size(opened: Port) -> None:
    """In one header, in many, in the URL, and in a line that never ends."""
    start = b"GET /health HTTP/1.1\r\nHost: warm\r\n"
    small = b"A: b\r\n"
    for data in (
        start + b"A: " + b"b" * HEAD_BYTES + b"\r\n\r\n",
        start + small * (HEAD_BYTES // 34) + b"\r\n",
        b"GET /" + b"a" * HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
    ):
        client = await opened.open()
        await client.send(data)
        answer = await client.closed()
        assert answer.startswith(b"HTTP/1.1 431 "), answer
        assert error_of(answer)["type"] == "invalid_request_error"
    await refused_head(opened, [start + b"A: ", *[b"b" * 65536] * 40])
    await refused_head(opened, [b"GET /", *[b"b" * 65536] * 40])
    client = await opened.open()
    await client.send(start + b"A: " + b"b" * (HEAD_BYTES // 2) + b"\r\n" + small * 500 + b"\r\n")
    assert (await client.answer())[0] == 200


@at_a_port(patience=60.0)
async def test_what_surrounds_a_body_has_a_size_too(opened: Port) -> None:
    head = request(CHAT, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    await refused_head(opened, [head + b"1;", *[b"x" * 65536] * 40])
    await refused_head(opened, [head + b"1\r\n{\r\n0\r\nA: ", *[b"x" * 65536] * 40])
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
    await client.send(request("/health", b"", "GET", "Connection: Upgrade", "Upgrade: websocket"))
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


def test_uvicorn_is_the_one_that_this_relies_on() -> None:
    """``Connection`` overrides what is not documented: look at it again with each minor version."""
    assert uvicorn.__version__.split(".")[:2] == ["0", "54"]
