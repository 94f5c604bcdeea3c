"""Two real servers on one log: one of them dies, is paused, or both want the same session."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from cluster.routed import ANSWER, ASKED, PATIENCE, TOLD, Ended, ask, servers, stream, text_of, wait_for
from crash.wire import messages_of
from postgres_server import PostgresServer
from server_process import ServerProcess

pytestmark = pytest.mark.wide

LONG = 1500  # tokens, of the 2048 that the demo model reads


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture(scope="module")
def pair(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two servers; the last test kills one."""
    with servers(tmp_path_factory.mktemp("pair"), database) as started:
        yield started


@contextmanager
def running(url: str, session: str) -> Iterator[tuple[Ended, Future[Ended]]]:
    """A long turn that has begun to speak."""
    ended = Ended()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(stream, url, session, LONG, ended)
        wait_for(lambda: ended.text or future.done())
        assert not future.done(), ended
        yield ended, future


@contextmanager
def paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_server_that_was_paused_for_too_long_commits_nothing(pair: list[ServerProcess]) -> None:
    one, two = pair
    assert text_of(ask(one.url, "paused", TOLD))
    with running(one.url, "paused") as (ended, future):
        os.kill(one.process.pid, signal.SIGSTOP)
        try:
            assert text_of(ask(two.url, "paused", ASKED)) == ANSWER
            held = messages_of(two.url, "paused")
        finally:
            os.kill(one.process.pid, signal.SIGCONT)
        future.result(PATIENCE)
    assert (ended.finished, ended.error) == (False, "session_busy")
    assert messages_of(one.url, "paused") == messages_of(two.url, "paused") == held
    assert text_of(ask(one.url, "paused", ASKED)) == ANSWER  # and goes on as one of the two


def test_turns_at_two_servers_are_turns_in_a_row_or_refused(pair: list[ServerProcess]) -> None:
    urls = [server.url for server in pair]
    assert text_of(ask(urls[0], "row", TOLD))
    asked = [(urls[number % 2], {"role": "user", "content": f"What is the code? {number}"}) for number in range(24)]
    with ThreadPoolExecutor(6) as pool:
        answers = [*pool.map(lambda one: ask(one[0], "row", [one[1]]), asked)]
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 409)
    done = [(what["content"], text_of(a)) for (_, what), a in zip(asked, answers, strict=True) if a.status_code == 200]
    assert done
    held = messages_of(urls[0], "row")
    assert held is not None
    assert messages_of(urls[1], "row") == held
    texts = [text for _, text in held[2:]]
    assert sorted(zip(texts[::2], texts[1::2], strict=True)) == sorted(done)


def test_a_session_is_deleted_while_another_server_answers(pair: list[ServerProcess]) -> None:
    one, two = pair
    assert text_of(ask(one.url, "deleted", TOLD))
    with running(one.url, "deleted") as (ended, future):
        assert httpx.delete(f"{two.url}/v1/sessions/deleted", timeout=PATIENCE).status_code == 200
        future.result(PATIENCE)
    assert not ended.finished
    assert ended.error is not None
    assert [messages_of(server.url, "deleted") for server in pair] == [None, None]


def in_background(url: str) -> str:
    body = {"input": "Hello!", "background": True, "max_output_tokens": LONG, "ignore_eos": True, "min_tokens": LONG}
    made = httpx.post(f"{url}/v1/responses", json=body, timeout=PATIENCE)
    assert made.status_code == 200, made.text
    return str(made.json()["id"])


def retrieved(url: str, id: str, **params: Any) -> httpx.Response:
    return httpx.get(f"{url}/v1/responses/{id}", params=params, timeout=PATIENCE)


def test_a_response_that_another_server_runs(pair: list[ServerProcess]) -> None:
    one, two = pair
    id = in_background(one.url)
    # Paused, or it would be over before the other server can tell.
    with ThreadPoolExecutor(1) as pool, paused(one.engine_pid()):
        assert retrieved(two.url, id).json()["status"] == "in_progress"
        followed = retrieved(two.url, id, stream="true")
        assert (followed.status_code, followed.json()["error"]["code"]) == (409, "response_elsewhere")
        assert followed.headers["retry-after"]
        cancelling = pool.submit(httpx.post, f"{two.url}/v1/responses/{id}/cancel", timeout=PATIENCE)
        time.sleep(4)  # by then the server that runs it has heard of that
    ended = cancelling.result()
    assert ended.json()["status"] == "cancelled", ended.text
    assert retrieved(one.url, id).json()["status"] == "cancelled"
    other = in_background(one.url)
    assert httpx.delete(f"{two.url}/v1/responses/{other}", timeout=PATIENCE).status_code == 200
    assert retrieved(one.url, other).status_code == 404


@pytest.mark.slow
def test_what_a_dead_server_was_doing_is_gone_and_the_rest_is_there(pair: list[ServerProcess]) -> None:
    one, two = pair
    assert text_of(ask(one.url, "dead", TOLD))
    response = in_background(one.url)
    with running(one.url, "dead") as (ended, future):
        one.process.kill()
        future.result(PATIENCE)
    assert not ended.finished
    answer = ask(two.url, "dead", ASKED)  # waits until the other one is known to be dead
    assert text_of(answer) == ANSWER
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # from the remote tier
    said = messages_of(two.url, "dead")
    assert said is not None
    assert [text for role, text in said if role == "user"] == [TOLD[0]["content"], ASKED[0]["content"]]
    wait_for(lambda: retrieved(two.url, response).json()["status"] != "in_progress")
    assert retrieved(two.url, response).json()["status"] == "failed"
