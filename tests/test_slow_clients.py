"""Clients that waste a real server's time: a thousand that say nothing, some that stop in the middle."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, until

pytestmark = pytest.mark.wide

IDLE = 1000
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
PATIENCE = 60.0  # seconds until a test that hangs fails


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(None, tmp_path_factory.mktemp("data"), "--client-seconds", "100") as running:
        yield running


@pytest.fixture
def files() -> Iterator[None]:
    """Room for our ends of the connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * IDLE:
        pytest.skip(f"{hard} open files are not enough here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * IDLE), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("files")
def test_a_thousand_silent_connections_keep_nobody_from_being_served(server: ServerProcess) -> None:
    with ExitStack() as stack:
        for number in range(IDLE):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE))
            if number % 2:
                client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
        until(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd")) > IDLE // 2, PATIENCE)  # there, not refused
        for _ in range(3):
            assert server.post("/v1/chat/completions", HI).status_code == 200


def test_half_a_request_ends_by_itself(tmp_path: Path) -> None:
    with (
        ServerProcess(None, tmp_path, "--client-seconds", "0.5") as server,
        socket.create_connection(("127.0.0.1", server.port), PATIENCE) as client,
    ):
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Content-Length: 9\r\n\r\n{")
        answer = b""
        while piece := client.recv(4096):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_silent_connections_do_not_hold_the_exit(server: ServerProcess) -> None:
    """The last test of this server."""
    with ExitStack() as stack:
        for number in range(10):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE))
            if number % 2:
                client.sendall(b"GET /health HTT")
        assert server.stop() == 0  # within the minute that this waits
