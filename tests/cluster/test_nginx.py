"""Two real servers behind a real nginx with the configuration that is shipped."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from cluster.routed import (
    ANSWER,
    ASKED,
    PATIENCE,
    TOLD,
    Ended,
    Nginx,
    ask,
    body_of,
    installed,
    servers,
    stream,
    text_of,
    wait_for,
)
from crash.wire import messages_of
from server_process import ServerProcess

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(not installed(), reason="nginx is not installed here: Debian's package is nginx-light"),
]

SESSIONS = [f"session-{number}" for number in range(12)]
LONG = 1500  # tokens, of replies that are cut
ENDING = 600  # tokens, of replies that come to their end, and not before the server is killed


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two servers on one file of SQLite; the last test kills one."""
    folder = tmp_path_factory.mktemp("pair")
    with servers(folder, f"sqlite:///{folder}/log.sqlite") as started:
        yield started


@pytest.fixture(scope="module")
def router(pair: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with Nginx(tmp_path_factory.mktemp("router") / "nginx", pair) as running:
        yield running


def places(router: Nginx, id: str) -> set[str]:
    """The servers that requests with an X-Request-ID went to, by the access log."""
    found = set()
    for line in router.lines():
        match = re.search(r'"([^"]*)" (\S+)$', line)
        if match is not None and match[2] == id:
            found.add(match[1])
    return found


def test_a_session_goes_to_one_server_however_it_is_named(router: Nginx) -> None:
    used = set()
    for name in SESSIONS:
        mark = f"mark-{name}"
        headers = {"x-session-id": name, "x-session-create": "true", "x-request-id": mark}
        chat = f"{router.url}/v1/chat/completions"
        made = httpx.post(chat, json=body_of(TOLD), headers=headers, timeout=PATIENCE)
        assert text_of(made)
        assert made.headers["x-request-id"] == mark
        assert made.json()["id"].startswith(f"chatcmpl-{name}-")
        assert httpx.get(f"{router.url}/v1/sessions/{name}", headers={"x-request-id": mark}).status_code == 200
        assert text_of(ask(router.url, name, ASKED, x_request_id=mark)) == ANSWER
        conversation = f"{router.url}/v1/conversations/conv_{name}"
        assert httpx.get(conversation, headers={"x-request-id": mark}).status_code == 200
        body = {"input": "Hello!", "conversation": f"conv_{name}"}
        response = httpx.post(f"{router.url}/v1/responses", json=body, headers=headers, timeout=PATIENCE).json()
        where = f"{router.url}/v1/responses/{response['id']}"
        assert httpx.get(where, headers={"x-request-id": mark}).status_code == 200
        assert len(places(router, mark)) == 1
        used |= places(router, mark)
    assert len(used) == 2


def test_capsules_go_to_the_server_of_the_session_that_they_become(router: Nginx) -> None:
    text_of(ask(router.url, "whence", TOLD))
    capsule = httpx.get(f"{router.url}/v1/sessions/whence/export", timeout=PATIENCE).content
    made = httpx.post(
        f"{router.url}/v1/sessions/import",
        params={"id": "whither"},
        content=capsule,
        headers={"content-type": "application/zip", "x-request-id": "import"},
        timeout=PATIENCE,
    )
    assert made.status_code == 201, made.text
    assert text_of(ask(router.url, "whither", ASKED, x_request_id="import")) == ANSWER
    assert len(places(router, "import")) == 1


def test_events_pass_as_they_come(router: Nginx) -> None:
    body = body_of(TOLD, stream=True, ignore_eos=True, max_tokens=300, min_tokens=300)

    def pieces() -> int:
        with httpx.stream("POST", f"{router.url}/v1/chat/completions", json=body, timeout=PATIENCE) as answer:
            return sum(1 for _ in answer.iter_raw())

    # Buffered, they would come in a few. A processor that is busy joins them at times.
    assert any(pieces() > 20 for _ in range(5))


def test_figures_and_large_bodies_do_not_pass(router: Nginx) -> None:
    assert httpx.get(f"{router.url}/metrics").status_code == 404
    large = b" " * (65 * 2**20)
    assert httpx.post(f"{router.url}/v1/chat/completions", content=large, timeout=PATIENCE).status_code == 413


def test_a_server_is_killed(pair: list[ServerProcess], router: Nginx) -> None:
    """Facts that were told are known by the other one; of the running streams only the dead server's end; a turn with
    an Idempotency-Key is sent again by nginx, and has run once."""
    dead = f"127.0.0.1:{pair[0].port}"
    found = {f"live-{number}": home(router, f"live-{number}") for number in range(40)}
    lost = [name for name, address in found.items() if address == dead]
    homes = {name: found[name] for name in [*lost[:2], *[name for name in found if name not in lost][:2]]}
    keyed = lost[2]
    for name in SESSIONS:
        text_of(ask(router.url, name, TOLD))
    lives = [Ended() for _ in homes]
    with ThreadPoolExecutor(8) as pool:
        again = pool.submit(keyed_turn, router, keyed)
        lengths = [LONG if address == dead else ENDING for address in homes.values()]
        given = zip(homes, lengths, lives, strict=True)
        futures = [pool.submit(stream, router.url, name, length, ended) for name, length, ended in given]
        wait_for(lambda: all(ended.text or future.done() for ended, future in zip(lives, futures, strict=True)))
        pair[0].process.kill()
        ended = [future.result(PATIENCE) for future in futures]
    assert [one.finished for one in ended] == [address != dead for address in homes.values()]
    assert text_of(again.result())
    assert roles(router, keyed) == ["user", "assistant"]
    for name, address in homes.items():
        assert roles(router, name) == ([] if address == dead else ["user", "assistant"])
    for name in SESSIONS:
        answer = ask(router.url, name, ASKED)
        assert text_of(answer) == ANSWER, name
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, name


def home(router: Nginx, name: str) -> str:
    """The address of the server that a session goes to."""
    httpx.get(f"{router.url}/v1/sessions/{name}", headers={"x-request-id": f"home-{name}"})
    deadline = time.monotonic() + PATIENCE
    while not (found := places(router, f"home-{name}")):  # the line is written when the answer is away
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found.pop()


def roles(router: Nginx, name: str) -> list[str]:
    """Who said something in a session."""
    return [role for role, _ in messages_of(router.url, name) or ()]


def keyed_turn(router: Nginx, name: str) -> httpx.Response:
    """A long turn that may be repeated."""
    body = body_of(TOLD, ignore_eos=True, max_tokens=ENDING, min_tokens=ENDING)
    return httpx.post(
        f"{router.url}/v1/sessions/{name}/chat/completions",
        content=json.dumps(body),
        headers={"idempotency-key": "once", "content-type": "application/json"},
        timeout=PATIENCE,
    )


def test_the_shipped_file_is_as_it_was_read(tmp_path: Path) -> None:
    """No server is behind it: POSTs and GETs end with a 502, and nothing hangs."""
    nobody = [ServerPort(), ServerPort()]
    with Nginx(tmp_path / "nginx", nobody) as router:
        assert httpx.get(f"{router.url}/health").status_code == 502
        assert ask(router.url, "s", TOLD).status_code == 502


class ServerPort:
    port = 9
