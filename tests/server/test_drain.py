"""How a server ends: SIGTERM once, twice, and kill -9 of either process. The engine is a scripted one."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_server import PATIENCE, Server, gone, serving, wait

from server.log.logged_message import LoggedMessage
from server.log.session_log import SessionLog
from server.log.timeline import SessionRecord

TENANTS = ("held", "count", "endless")
KEYS = [part for tenant in TENANTS for part in ("--api-key", f"{tenant}={tenant}-key")]
CHAT = "/v1/chat/completions"

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="children are found in /proc")


class Client:
    """One tenant's requests to a server."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def chat(self, session: str | None = None, **body: Any) -> httpx.Response:
        said = {"messages": [{"role": "user", "content": "hello"}], "session_id": session, **body}
        return self.http.post(CHAT, json=said)

    @contextmanager
    def stream(self, session: str) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a turn, once it has begun to speak."""
        said = {"messages": [{"role": "user", "content": "hello"}], "session_id": session, "stream": True}
        with self.http.stream("POST", CHAT, json=said) as reply:
            events = (line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: "))
            parsed = (json.loads(event) for event in events if event != "[DONE]")
            next(parsed)
            yield parsed


Connect = Callable[[str, str], Client]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes a client of a URL and a tenant."""
    with ExitStack() as stack:

        def client(url: str, tenant: str) -> Client:
            headers = {"authorization": f"Bearer {tenant}-key"}
            return Client(stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=PATIENCE)))

        yield client


def logged(server: Server, tenant: str, session: str) -> SessionRecord | None:
    """What the log of a server that has ended holds."""

    async def read() -> SessionRecord | None:
        log = SessionLog(server.data / "log.sqlite")
        try:
            return await log.get(tenant, session)
        finally:
            await log.close()

    return asyncio.run(read())


def health(url: str) -> tuple[int, Any]:
    response = httpx.get(f"{url}/health")
    return response.status_code, response.json()


@pytest.mark.parametrize("streamed", [True, False])
def test_running_turns_end_by_themselves_while_new_ones_are_refused(
    streamed: bool, connect: Connect, tmp_path: Path
) -> None:
    with serving(tmp_path, *KEYS, "--drain-seconds", "600") as server, ThreadPoolExecutor(1) as pool:
        url = server.url()
        held, other = connect(url, "held"), connect(url, "count")

        def turn() -> str:
            if not streamed:
                choice = held.chat("s").json()["choices"][0]
                return f"{choice['finish_reason']} {choice['message']['content']}"
            with held.stream("s") as events:
                choices = [choice for event in events for choice in event["choices"]]
            return f"{choices[-1]['finish_reason']} " + "".join(c["delta"].get("content", "") for c in choices)

        answer = pool.submit(turn)
        wait(lambda: "\nwarmturn_running 1.0\n" in other.http.get("/metrics").text)
        server.process.terminate()
        wait(lambda: health(url) == (503, {"status": "stopping"}))
        for refused in (other.chat(), other.chat("t", stream=True), held.chat("s")):
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["message"] == "The server is shutting down."
        assert "\nwarmturn_running 1.0\n" in other.http.get("/metrics").text
        assert server.process.poll() is None
        (server.data / "go").touch()
        said = answer.result()
        assert server.process.wait(PATIENCE) == 0
        assert said.startswith("length 1 ")
        record = logged(server, "held", "s")
        assert record is not None
        assert record.messages[-1] == LoggedMessage("assistant", said.removeprefix("length "))
        assert (server.data / "flushed").read_text() == "30.0"
        assert "Traceback" not in server.output


def test_turns_that_do_not_end_in_time_are_ended_and_not_committed(connect: Connect, tmp_path: Path) -> None:
    with serving(tmp_path, *KEYS, "--drain-seconds", "1") as server, ThreadPoolExecutor(1) as pool:
        client = connect(server.url(), "endless")
        body = pool.submit(client.chat, "b")
        with client.stream("s") as events:
            server.process.terminate()
            *_, last = events
        assert last["error"]["type"] == "server_error"
        refused = body.result()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert server.process.wait(PATIENCE) == 0
        assert (server.data / "flushed").read_text() == "1.0"
        assert logged(server, "endless", "s") is None
        assert logged(server, "endless", "b") is None
        assert "Traceback" not in server.output


@pytest.mark.parametrize("moment", ["drain", "flush"])
def test_a_second_signal_leaves_at_once_and_loses_nothing_committed(
    moment: str, connect: Connect, tmp_path: Path
) -> None:
    seconds = "600" if moment == "drain" else "25"  # of which the engine takes all for its flush
    with serving(tmp_path, *KEYS, "--drain-seconds", seconds) as server:
        url = server.url()
        engine = server.engine()
        assert connect(url, "count").chat("kept", max_tokens=3).status_code == 200
        if moment == "drain":
            with connect(url, "endless").stream("s"):
                server.process.terminate()
                wait(lambda: health(url) == (503, {"status": "stopping"}))
                assert server.end() == 1
        else:
            (server.data / "slow").touch()
            server.process.terminate()
            wait((server.data / "flushed").exists)
            assert server.end() == 1
        wait(lambda: gone(engine))
        record = logged(server, "count", "kept")
        assert record is not None
        assert record.messages[-1].content == "1 2 3 "


def test_what_is_no_turn_does_not_hold_the_exit(connect: Connect, tmp_path: Path) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer count-key\r\n"
    with serving(tmp_path, *KEYS, "--drain-seconds", "600") as server:
        client = connect(server.url(), "count")
        assert client.chat(max_tokens=1).status_code == 200  # and its connection stays open
        address = (client.http.base_url.host, client.http.base_url.port or 0)
        with (
            socket.create_connection(address),
            socket.create_connection(address) as half_a_head,
            socket.create_connection(address) as half_a_body,
        ):
            half_a_head.sendall(head)
            half_a_body.sendall(head + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{")
            wait(lambda: client.http.get("/health").status_code == 200)  # they were there before this one
            assert server.end() == 0
        assert "Traceback" not in server.output


def test_kill_9_of_the_engine_in_mid_turn(connect: Connect, tmp_path: Path) -> None:
    with serving(tmp_path, *KEYS) as server:
        url = server.url()
        count, endless = connect(url, "count"), connect(url, "endless")
        for session in ("a", "b"):
            assert count.chat(session, max_tokens=3).status_code == 200
        with endless.stream("s") as events:
            os.kill(int(server.engine().name), signal.SIGKILL)
            *_, last = events
        assert last["error"]["type"] == "server_error"
        wait(lambda: health(url) == (200, {"status": "ok"}))
        assert count.chat("a", max_tokens=2).status_code == 200
        assert server.end() == 0
        for session, replies in (("a", ["1 2 3 ", "1 2 "]), ("b", ["1 2 3 "])):
            record = logged(server, "count", session)
            assert record is not None
            assert [m.content for m in record.messages if m.role == "assistant"] == replies
        assert logged(server, "endless", "s") is None


@pytest.mark.parametrize("moment", ["loading", "running"])
def test_the_engine_goes_when_the_server_is_killed(moment: str, connect: Connect, tmp_path: Path) -> None:
    with serving(tmp_path, *KEYS) as server:
        if moment == "loading":
            server.wait_for("(reading weights)")
            engine = server.engine()
            server.end(signal.SIGKILL)
        else:
            client = connect(server.url(), "endless")
            engine = server.engine()
            with client.stream("s") as events:
                server.end(signal.SIGKILL)
                with pytest.raises(httpx.TransportError):
                    list(events)
        wait(lambda: gone(engine))
