"""The nginx configuration that is shipped over servers that do not take what they are sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from cluster.routed import TOLD, Nginx, ask, installed

pytestmark = pytest.mark.skipif(not installed(), reason="nginx is not installed here: Debian's package is nginx-light")

SESSIONS = [f"session-{number}" for number in range(20)]
CUT = 0  # in place of a status: the connection ends when the request has been read


class Stub:
    """A server that reads requests and answers with ``statuses``, one after the other and then the last one again."""

    def __init__(self, name: str) -> None:
        self.statuses = [200]
        self.asked = 0
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers["content-length"] or 0))
                status = stub.statuses.pop(0) if len(stub.statuses) > 1 else stub.statuses[0]
                stub.asked += 1
                if status == CUT:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("retry-after", "2")
                self.send_header("content-length", str(len(name)))
                self.end_headers()
                self.wfile.write(name.encode())

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_port


@pytest.fixture
def stubs() -> Iterator[list[Stub]]:
    with ExitStack() as stack:
        started = [Stub(name) for name in ("one", "two")]
        for stub in started:
            thread = Thread(target=stub.http.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(stub.http.shutdown)
            stack.callback(stub.http.server_close)
        yield started


@pytest.fixture
def router(stubs: list[Stub], tmp_path: Path) -> Iterator[Nginx]:
    with Nginx(tmp_path / "nginx", stubs) as running:
        for stub in stubs:
            stub.asked = 0
        yield running


def send(router: Nginx, how: str, session: str) -> httpx.Response:
    if how == "read":
        return httpx.get(f"{router.url}/v1/sessions/{session}")
    return ask(router.url, session, TOLD, None, **{"idempotency-key": "once"} if how == "keyed turn" else {})


@pytest.mark.parametrize("how", ["read", "turn", "keyed turn"])
def test_what_a_server_that_loads_does_not_take_goes_elsewhere(stubs: list[Stub], router: Nginx, how: str) -> None:
    loading, ready = stubs
    loading.statuses = [503]
    answers = [send(router, how, session) for session in SESSIONS]
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, "two")] * len(SESSIONS)
    assert loading.asked > 0
    assert ready.asked == len(SESSIONS)


@pytest.mark.parametrize("how", ["read", "turn", "keyed turn"])
def test_where_nobody_takes_it_the_last_one_is_heard(stubs: list[Stub], router: Nginx, how: str) -> None:
    for stub in stubs:
        stub.statuses = [503]
    answer = send(router, how, "s")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.text in ("one", "two")


@pytest.mark.parametrize("statuses", [[CUT], [503, CUT]])
def test_a_turn_that_may_have_run_is_not_sent_again(stubs: list[Stub], router: Nginx, statuses: list[int]) -> None:
    for stub in stubs:
        stub.statuses = [*statuses]
    assert send(router, "turn", "s").status_code == 502
    assert sorted(stub.asked for stub in stubs) == [0, len(statuses)]


def test_other_answers_pass_as_they_are(stubs: list[Stub], router: Nginx) -> None:
    for status in (404, 409, 429, 500, 502, 507):
        for stub in stubs:
            stub.statuses, stub.asked = [status], 0
        answer = send(router, "turn", "s")
        assert (answer.status_code, answer.headers["retry-after"]) == (status, "2")
        assert answer.text in ("one", "two")
        assert sum(stub.asked for stub in stubs) == 1
