"""Work on threads, with a deadline: what hangs costs its own request, and only so many threads."""

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
from http_context import Site, served, until

from server.chat.chat_tokenizer import ChatTokenizer
from server.http.error_responses import as_api_error
from server.log.logged_message import LoggedMessage
from server.workers import NoWorkerFree, Workers, WorkTimedOut

PATIENCE = 20.0  # seconds until a test that hangs fails


async def test_results_and_exceptions_come_back() -> None:
    workers = Workers(2, 0, PATIENCE)
    assert await asyncio.gather(*(workers.run(partial(int, n)) for n in range(50))) == list(range(50))
    with pytest.raises(ValueError, match="invalid literal"):
        await workers.run(partial(int, "x"))
    workers.close()


async def test_what_hangs_is_told_and_its_thread_replaced() -> None:
    go = threading.Event()
    workers = Workers(1, 1, 0.5)
    with pytest.raises(WorkTimedOut):
        await workers.run(go.wait)
    assert workers.hung == 1
    assert await workers.run(lambda: "served") == "served"
    with pytest.raises(WorkTimedOut):
        await workers.run(go.wait)
    with pytest.raises(NoWorkerFree):  # there are no more threads than these
        await workers.run(lambda: "not served")
    go.set()
    await until(lambda: workers.hung == 0)
    assert await workers.run(lambda: "served again") == "served again"
    workers.close()


async def test_threads_do_not_grow_in_number() -> None:
    others = set(threading.enumerate())

    def ours() -> int:
        return sum(thread.name == "worker" and thread not in others for thread in threading.enumerate())

    workers = Workers(2, 2, 0.5)
    for _ in range(3):
        go = threading.Event()
        assert {
            type(e) for e in await asyncio.gather(*(workers.run(go.wait) for _ in range(2)), return_exceptions=True)
        } == {WorkTimedOut}
        assert ours() <= 4
        go.set()
        await until(lambda: workers.hung == 0)
    await until(lambda: ours() == 2)
    workers.close()
    await until(lambda: ours() == 0)


async def test_a_client_that_leaves_does_not_hide_what_hangs() -> None:
    go = threading.Event()
    workers = Workers(1, 1, 0.5)
    task = asyncio.create_task(workers.run(go.wait))
    await asyncio.sleep(0.02)
    task.cancel()
    await until(lambda: workers.hung == 1)
    assert await workers.run(lambda: "served") == "served"
    go.set()
    workers.close()


async def test_work_that_nobody_waits_for_any_more_is_not_begun() -> None:
    go, done = threading.Event(), []
    workers = Workers(1, 0, PATIENCE)
    first = asyncio.create_task(workers.run(go.wait))
    second = asyncio.create_task(workers.run(lambda: done.append("second")))
    await asyncio.sleep(0.02)
    second.cancel()
    await asyncio.sleep(0)
    go.set()
    assert await first
    assert await workers.run(lambda: "third") == "third"
    assert done == []
    workers.close()


def test_how_both_are_told() -> None:
    assert as_api_error(WorkTimedOut()).status_code == 400
    crowded = as_api_error(NoWorkerFree())
    assert (crowded.status_code, bool(crowded.headers and crowded.headers["retry-after"])) == (503, True)


@served()
async def test_a_template_that_hangs_costs_its_own_request(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    tokens = site.context.tokens
    render = type(tokens).render

    def hanging(self: ChatTokenizer, messages: list[LoggedMessage], **how: Any) -> str:
        if messages[-1].content == "hang":
            go.wait()
        text: str = render(self, messages, **how)
        return text

    monkeypatch.setattr(type(tokens), "render", hanging)
    monkeypatch.setattr(tokens, "_workers", Workers(3, 4, 1.0))
    hangs = [asyncio.create_task(site.chat(messages=[{"role": "user", "content": "hang"}])) for _ in range(3)]
    for response in await asyncio.gather(*hangs):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "invalid_prompt"), error
    assert (await site.chat()).status_code == 200
    go.set()
