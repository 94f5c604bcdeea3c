"""Verbs that race on one session: what is left is what some order of them leaves, or one of them was refused."""

from __future__ import annotations

import io
import json
import random
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from crash.wire import PATIENCE, Outcome, Said, messages_of, say

FIRST = ("My name is Walter.", "I live in Paris.")
TEXT = "What is my name?"
TOKENS = 40
LATEST = 0.09  # seconds after the start of a turn at which the other verb starts; turns take about 0.06

Pair = tuple[str, str]
Verb = Callable[[str, str], httpx.Response]


def ask(url: str, session: str | None, text: str, past: list[Pair] | None = None, stream: bool = False) -> Said:
    messages = [{"role": role, "content": content} for role, content in (*(past or ()), ("user", text))]
    return say(url, session, messages, TOKENS, stream)


def after(url: str, past: list[Pair], text: str = TEXT) -> list[Pair]:
    """What a session with this past holds after one more turn, by a call that no session takes part in."""
    said = ask(url, None, text, past)
    assert said.outcome is Outcome.ACKNOWLEDGED
    return [*past, ("user", text), ("assistant", said.text)]


def begun(url: str, name: str) -> list[Pair]:
    """A session of two turns; what it holds."""
    for text in FIRST:
        assert ask(url, name, text).outcome is Outcome.ACKNOWLEDGED
    held = messages_of(url, name)
    assert held is not None
    assert len(held) == 4
    return held


def race(url: str, name: str, verb: Verb, delay: float) -> tuple[Said, httpx.Response]:
    """A turn, and a verb that starts ``delay`` seconds later (earlier where negative)."""
    with ThreadPoolExecutor(2) as pool:

        def late(seconds: float, call: Callable[[], Any]) -> Any:
            time.sleep(max(seconds, 0))
            return call()

        turn = pool.submit(late, -delay, lambda: ask(url, name, TEXT, stream=True))
        other = pool.submit(late, delay, lambda: verb(url, name))
        return turn.result(), other.result()


def delete(url: str, name: str) -> httpx.Response:
    return httpx.delete(f"{url}/v1/sessions/{name}", timeout=PATIENCE)


def fork(url: str, name: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/sessions/{name}/fork", json={"id": f"{name}-fork"}, timeout=PATIENCE)


def rewind(url: str, name: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/sessions/{name}/rewind", json={"turn": 1}, timeout=PATIENCE)


def export(url: str, name: str) -> httpx.Response:
    return httpx.get(f"{url}/v1/sessions/{name}/export", timeout=PATIENCE)


def refused(response: httpx.Response, *statuses: int) -> bool:
    """Whether it was turned down; any other failure is a bug."""
    assert response.status_code < 300 or response.status_code in (409, *statuses), response.text
    return response.status_code >= 400


def once_deleted(url: str, name: str, delay: float) -> None:
    past = begun(url, name)
    said, deleted = race(url, name, delete, delay)
    assert said.outcome is not Outcome.CUT
    held = messages_of(url, name)
    if refused(deleted):
        assert held == (after(url, past) if said.outcome is Outcome.ACKNOWLEDGED else past)
    elif said.outcome is Outcome.REFUSED:
        assert held is None
    else:  # the turn came first and went with the session, or it began the session anew
        assert held is None or held == after(url, [])
    delete(url, name)
    assert messages_of(url, name) is None


def once_forked(url: str, name: str, delay: float) -> None:
    past = begun(url, name)
    said, forked = race(url, name, fork, delay)
    whole = after(url, past)
    assert messages_of(url, name) == (whole if said.outcome is Outcome.ACKNOWLEDGED else past)
    copy = messages_of(url, f"{name}-fork")
    if refused(forked):
        assert copy is None
    else:
        assert copy in ([past, whole] if said.outcome is Outcome.ACKNOWLEDGED else [past])
        assert ask(url, f"{name}-fork", TEXT).text == after(url, copy)[-1][1]


def once_rewound(url: str, name: str, delay: float) -> None:
    past = begun(url, name)
    said, rewound = race(url, name, rewind, delay)
    held, turned = messages_of(url, name), said.outcome is Outcome.ACKNOWLEDGED
    if refused(rewound):
        assert turned
        assert held == after(url, past)
    elif turned:
        assert held in (past[:2], after(url, past[:2]))
    else:
        assert held == past[:2]
    assert held is not None
    assert ask(url, name, TEXT).text == after(url, held)[-1][1]


def once_exported(url: str, name: str, delay: float) -> None:
    past = begun(url, name)
    said, exported = race(url, name, export, delay)
    whole = after(url, past)
    assert messages_of(url, name) == (whole if said.outcome is Outcome.ACKNOWLEDGED else past)
    if refused(exported):
        return
    with zipfile.ZipFile(io.BytesIO(exported.content)) as capsule:
        assert capsule.testzip() is None
        json.loads(capsule.read("capsule.json"))
    imported = httpx.post(
        f"{url}/v1/sessions/import",
        params={"id": f"{name}-copy"},
        content=exported.content,
        headers={"content-type": "application/zip"},
        timeout=PATIENCE,
    )
    assert imported.status_code == 201, imported.text
    copy = messages_of(url, f"{name}-copy")
    assert copy in [past, whole]
    assert copy is not None
    assert ask(url, f"{name}-copy", TEXT).text == after(url, copy)[-1][1]


RACES = {"delete": once_deleted, "fork": once_forked, "rewind": once_rewound, "export": once_exported}


def twenty_at_once(url: str, name: str) -> None:
    """Equal turns at once: those that were answered are turns in a row, the others were refused."""
    past = begun(url, name)
    with ThreadPoolExecutor(20) as pool:
        said = list(pool.map(lambda n: ask(url, name, TEXT, stream=n % 2 == 0), range(20)))
    done = [one.text for one in said if one.outcome is Outcome.ACKNOWLEDGED]
    assert done
    assert {one.status for one in said if one.outcome is not Outcome.ACKNOWLEDGED} <= {409}
    held = past
    for _ in done:
        held = after(url, held)
    assert messages_of(url, name) == held
    assert sorted(done) == sorted(content for role, content in held[4:] if role == "assistant")


def all_rounds(url: str, kind: str, rounds: int) -> None:
    rng = random.Random(kind)
    for number in range(rounds):
        RACES[kind](url, f"{kind}-{rounds}-{number}", rng.uniform(-0.03, LATEST))
