"""Network paths that are dead without a word: to PostgreSQL, and from nginx to a server. What a client sees is an error
in bounded time, and all is well when the path is there again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from hashlib import sha256
from pathlib import Path
from threading import Thread

import httpx
import pytest
import sqlalchemy as sql
from cluster.routed import TOLD, Nginx, ask, installed
from cluster.test_nginx_elsewhere import Stub
from dead_path import NetworkPath, path_to
from http_context import Site, site, until
from postgres_server import PostgresServer

from server.log import database
from server.log.database import Database, LogUnavailable

pytestmark = pytest.mark.wide

ANSWER, PING, CONNECT = 2.0, 1.0, 2  # seconds of patience, in place of longer ones; libpq takes 2 at least
HANGS = 60.0  # seconds after which a test fails that waits for ever
CHAT = "/v1/sessions/s/chat/completions"


@pytest.fixture
def path(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NetworkPath, str]]:
    """A path to PostgreSQL, and the URL of a database behind it."""
    monkeypatch.setattr("server.log.postgres.ANSWER_SECONDS", ANSWER)
    monkeypatch.setattr("server.log.postgres.PING_SECONDS", PING)
    monkeypatch.setattr("server.log.postgres.TimedConnection.patience", PING)
    monkeypatch.setitem(database.CONNECTION, "connect_timeout", CONNECT)
    url = sql.make_url(postgres.new_database())
    with path_to(Path(str(url.query["host"])) / ".s.PGSQL.5432") as made:
        behind = sql.URL.create("postgresql", "warm", host="127.0.0.1", port=made.port, database=url.database)
        yield made, behind.render_as_string()


def is_unavailable(answer: httpx.Response) -> bool:
    """The 503 that says what is away."""
    told = (answer.status_code, answer.json()["error"]["code"], int(answer.headers["retry-after"]) >= 1)
    return told == (503, "log_unavailable", True)


async def until_served(made: Site) -> httpx.Response:
    """The first answer that is no 503."""
    while (answer := await made.chat(CHAT)).status_code == 503:
        await asyncio.sleep(0.1)
    return answer


async def test_requests_are_a_503_while_the_path_to_postgresql_is_dead(
    path: tuple[NetworkPath, str],
) -> None:
    way, url = path
    async with site(database=url) as made:
        assert (await made.chat(CHAT)).status_code == 200
        way.die()
        for _ in range(3):  # on connections that were open, and on new ones
            assert is_unavailable(await made.chat(CHAT))
            assert is_unavailable(await made.http.get("/v1/sessions/s"))
        way.heal()
        assert (await until_served(made)).status_code == 200
        assert (await made.http.get("/v1/sessions/s")).json()["turns"] == 2


async def test_a_turn_whose_commit_finds_the_path_dead_is_a_503_and_can_be_repeated(
    path: tuple[NetworkPath, str],
) -> None:
    way, url = path
    async with site(database=url) as made:
        made.engine.pause_after = 2
        running = asyncio.create_task(made.chat(CHAT))
        await until(lambda: made.engine.running)
        way.die()
        made.engine.go.set()
        assert is_unavailable(await running)
        way.heal()
        assert (await until_served(made)).status_code == 200


def test_a_transaction_in_the_middle_of_which_the_path_dies_is_given_up(path: tuple[NetworkPath, str]) -> None:
    way, url = path

    def work(connection: sql.Connection) -> None:
        connection.exec_driver_sql("SELECT 1")
        way.die()
        connection.exec_driver_sql("SELECT 2")

    with closing(Database(url, "process")) as base:
        with pytest.raises(LogUnavailable, match="does not answer"):
            base.read(work)
        way.heal()
        assert base.read(lambda connection: connection.exec_driver_sql("SELECT 3").scalar_one()) == 3


def test_a_slow_answer_is_waited_for(path: tuple[NetworkPath, str]) -> None:
    """Longer than for the question whether the database is there."""
    with closing(Database(path[1], "process")) as base:
        for _ in range(2):
            assert base.read(lambda c: c.exec_driver_sql(f"SELECT 4 FROM pg_sleep({1.4 * PING})").scalar_one()) == 4


# --- from nginx to a server ------------------------------------------------------------------------------------


class Unreachable:
    """A server to whose port nobody gets: connections are neither taken nor refused, as its backlog is full."""

    def __init__(self, name: str) -> None:
        self.stub = Stub(name)
        self.port = self.stub.port
        self._fillers: list[socket.socket] = []
        while True:
            filler = socket.socket()
            filler.settimeout(0.3)
            self._fillers.append(filler)
            try:
                filler.connect(("127.0.0.1", self.port))
            except TimeoutError:
                return

    def heal(self, stack: ExitStack) -> None:
        """It serves from now on, until ``stack`` is closed."""
        for filler in self._fillers:
            filler.close()
        thread = Thread(target=self.stub.http.serve_forever, args=(0.01,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(self.stub.http.shutdown)

    def close(self) -> None:
        for filler in self._fillers:
            filler.close()
        self.stub.http.server_close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def unreachable(stack: ExitStack, name: str) -> Unreachable:
    made = Unreachable(name)
    stack.callback(made.close)
    return made


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="nginx is not installed here: Debian's package is nginx-light")
def test_what_cannot_be_sent_to_one_server_goes_to_another(tmp_path: Path, stack: ExitStack) -> None:
    away, there = unreachable(stack, "one"), unreachable(stack, "two")
    there.heal(stack)
    with Nginx(tmp_path / "nginx", [away, there]) as router:
        sessions = [sha256(bytes([number])).hexdigest() for number in range(48)]  # names alike would be hashed alike
        assert [ask(router.url, session, TOLD).text for session in sessions[:6]] == ["two"] * 6
        away.heal(stack)
        assert {ask(router.url, session, TOLD).text for session in sessions} == {"one", "two"}


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="nginx is not installed here: Debian's package is nginx-light")
@pytest.mark.parametrize("headers", [{}, {"idempotency_key": "once"}])
def test_where_no_server_can_be_reached_it_is_a_503(tmp_path: Path, stack: ExitStack, headers: dict[str, str]) -> None:
    both = [unreachable(stack, name) for name in ("one", "two")]
    with Nginx(tmp_path / "nginx", both) as router:
        answers = [ask(router.url, "s", TOLD, None, **headers), httpx.get(f"{router.url}/v1/sessions/s", timeout=HANGS)]
        for answer in answers:
            assert is_unreachable(answer)
        both[0].heal(stack)
        assert ask(router.url, "s", TOLD, None, **headers).text == "one"


def is_unreachable(answer: httpx.Response) -> bool:
    """The 503 of the router."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return (answer.status_code, error["code"], answer.headers["retry-after"]) == (503, "server_unreachable", "2")
