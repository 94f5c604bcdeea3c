"""The nginx configuration that is shipped over servers that do not take what they are sent."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from cluster.routed import PATIENCE, TOLD, Nginx, ask, installed, looks_names_up

pytestmark = pytest.mark.skipif(not installed(), reason="nginx is not installed here: Debian's package is nginx-light")

SESSIONS = [f"session-{number}" for number in range(20)]
CUT = 0  # in place of a status: the connection ends when the request has been read


class Stub:
    """A server that reads requests and answers with ``statuses``, one after the other and then the last one again."""

    def __init__(self, name: str, address: str = "127.0.0.1", port: int = 0) -> None:
        self.statuses = [200]
        self.asked = 0
        self.read = 0  # bytes of the last body
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                stub.read = len(self.rfile.read(int(self.headers["content-length"] or 0)))
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

        self.http = ThreadingHTTPServer((address, port), Handler)
        self.port = self.http.server_port


@contextmanager
def running(stub: Stub) -> Iterator[Stub]:
    with ExitStack() as stack:
        thread = Thread(target=stub.http.serve_forever, args=(0.01,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(stub.http.server_close)
        stack.callback(stub.http.shutdown)
        yield stub


@pytest.fixture
def stubs() -> Iterator[list[Stub]]:
    with running(Stub("one")) as one, running(Stub("two")) as two:
        yield [one, two]


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


# --- capsules -----------------------------------------------------------------------------------------------

CAPSULE = bytes(9 << 20)  # larger than other bodies may be


def bring(router: Nginx, session: str) -> httpx.Response:
    where = f"{router.url}/v1/sessions/import"
    headers = {"content-type": "application/zip"}
    return httpx.post(where, params={"id": session}, content=CAPSULE, headers=headers, timeout=PATIENCE)


@pytest.mark.parametrize("trouble", [CUT, 503])
def test_a_capsule_goes_elsewhere_whole_when_a_server_dies_with_it(
    stubs: list[Stub], router: Nginx, trouble: int
) -> None:
    dying, living = stubs
    dying.statuses = [trouble]
    for sent, session in enumerate(SESSIONS, 1):
        answer = bring(router, session)
        assert (answer.status_code, answer.text) == (200, "two")
        assert living.read == len(CAPSULE)
        assert living.asked == sent
        if dying.asked:  # which server a session is of depends on their ports
            return
    pytest.fail("no session is of the server that dies")


def test_a_capsule_that_is_refused_is_refused(stubs: list[Stub], router: Nginx) -> None:
    for stub in stubs:
        stub.statuses = [409]
    assert bring(router, "s").status_code == 409
    assert sum(stub.asked for stub in stubs) == 1


# --- names --------------------------------------------------------------------------------------------------


class NameServer:
    """Answers questions for addresses of IPv4 over UDP, from ``addresses``. A context manager."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self.addresses = addresses
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.settimeout(0.05)
        self.port = self._socket.getsockname()[1]
        self._ended = False
        self._thread = Thread(target=self._run)

    def __enter__(self) -> NameServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._ended:
            try:
                asked, client = self._socket.recvfrom(512)
            except TimeoutError:
                continue
            self._socket.sendto(self._answer(asked), client)

    def _answer(self, asked: bytes) -> bytes:
        end = asked.index(0, 12)
        labels, at = [], 12
        while at < end:
            labels.append(asked[at + 1 : at + 1 + asked[at]].decode())
            at += 1 + asked[at]
        found = self.addresses.get(".".join(labels))
        flags, count = (0x8180, 1) if found else (0x8183, 0)
        head = asked[:2] + struct.pack(">HHHHH", flags, 1, count, 0, 0) + asked[12 : end + 5]
        if found is None:
            return head
        return head + struct.pack(">HHHIH", 0xC00C, 1, 1, 1, 4) + socket.inet_aton(found)


@pytest.mark.skipif(not looks_names_up(), reason="nginx looks names up again from version 1.27.3 on")
def test_a_replica_that_was_replaced_is_found_at_its_new_address(tmp_path: Path) -> None:
    """Its sessions go to it as before, without a restart of nginx."""
    addresses = {"replica-1": "127.0.0.1", "replica-2": "127.0.0.1"}
    with (
        running(Stub("one")) as one,
        running(Stub("two")) as two,
        NameServer(addresses) as names,
        Nginx(tmp_path / "nginx", [one, two], names.port) as router,
    ):
        homes = {name: send(router, "read", name).text for name in SESSIONS}
        assert set(homes.values()) == {"one", "two"}
        with running(Stub("one anew", "127.0.0.2", one.port)):
            addresses["replica-1"] = "127.0.0.2"
            lost = next(name for name, home in homes.items() if home == "one")
            deadline = time.monotonic() + PATIENCE
            while send(router, "read", lost).text != "one anew":
                assert time.monotonic() < deadline
                time.sleep(0.1)
            expected = {name: home.replace("one", "one anew") for name, home in homes.items()}
            assert {name: send(router, "read", name).text for name in SESSIONS} == expected
