"""What the engine is told of the pauses of a conversation: tool calls, parents, side calls, announcements; and the
metric of these pauses.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from http_context import Site, served
from line_kit import CALL, Client, hermes, user
from real_port import Port, on_a_port
from websockets.asyncio.client import connect

from cache.tier import StopKind
from scheduler.protocol import Warm
from scheduler.turn_receipt import Receipt


def newest(site: Site) -> tuple[str | None, bool]:
    """The parent of the newest turn, and whether it is a side call."""
    return site.engine.submitted[-1].parent, site.engine.submitted[-1].side


@pytest.mark.parametrize("extra", [{}, {"stream": True}])
@served(tokens=hermes)
async def test_a_reply_with_tool_calls_tells_the_engine_which(site: Site, extra: dict[str, Any]) -> None:
    body = Client(site).body
    site.engine.reply = CALL
    await site.chat(messages=[user("Look.")], **body, **extra)
    assert site.engine.awaited == {site.engine.submitted[-1].turn: ("read",)}
    site.engine.reply = "Nothing there."
    await site.chat(messages=[user("Look.")], **body, **extra)
    assert len(site.engine.awaited) == 1


@served(tokens=hermes)
async def test_an_agent_names_the_line_that_waits_for_it_and_a_side_call_its_own(site: Site) -> None:
    main, agent = Client(site), Client(site)
    main.headers = {"x-claude-code-session-id": "s1"}
    agent.headers = {**main.headers, "x-claude-code-agent-id": "agent-7"}
    await main.ask(user("plan"))
    line = site.engine.submitted[-1].session
    assert line is not None
    assert newest(site) == (None, False)
    for text in ("explore", "more"):
        await agent.ask(user(text))
        assert newest(site) == (line, False)
    await site.chat(messages=[user("Title?")], headers={**main.headers, "x-app": "cli-bg"})
    assert newest(site) == (line, True)


@served()
async def test_a_pin_announces_the_session(site: Site) -> None:
    await site.http.post("/v1/sessions", json={"id": "s"})
    assert site.engine.announced == []
    shown = (await site.http.post("/v1/sessions/s", json={"pin_seconds": 100})).json()
    assert site.engine.announced == [Warm("default", "s", until=shown["pinned_until"])]
    await site.http.post("/v1/sessions/s", json={"pin_seconds": 0})
    assert len(site.engine.announced) == 1


@on_a_port(tokens=hermes)
async def test_a_socket_under_the_id_of_a_conversation_announces_its_newest_line(at: Port) -> None:
    client = Client(at.site)
    client.headers = {"thread-id": "t1"}
    await client.ask(user("plan"))
    line = at.site.engine.submitted[-1].session
    for thread in ("t2", "t1"):
        assert at.site.engine.announced == []
        url = f"ws://127.0.0.1:{at.number}/v1/responses"
        async with connect(url, additional_headers={"thread-id": thread}) as socket:
            await socket.send("{}")
            await socket.recv()
    assert at.site.engine.announced == [Warm("default", line)]


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        ("10m", 600),
        ("1h30m0s", 5400),
        ("2000ms", 2),
        ("9us", 0),
        (90, 90),
        ("90", 90),
        (0, 0),
        (-1, 86_400),
        ("-1m", 86_400),
        ("999h", 86_400),
    ],
)
@served()
async def test_keep_alive_pins_the_conversation(site: Site, keep_alive: Any, seconds: int) -> None:
    chat = {"messages": [user("Hi")], "keep_alive": keep_alive}
    answers = [await site.chat(**chat), await site.http.post("/api/chat", json={**chat, "model": "demo"})]
    assert [answer.status_code for answer in answers] == [200, 200]
    for submit in site.engine.submitted:
        assert submit.keep_until == (pytest.approx(time.time() + seconds, abs=20) if seconds else 0)


@served()
async def test_a_time_that_cannot_be_read_is_refused(site: Site) -> None:
    answer = await site.chat(messages=[user("Hi")], keep_alive="soon")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "keep_alive")
    assert "soon" not in error["message"]


@served()
async def test_pauses_are_counted_by_what_was_before_them(site: Site) -> None:
    site.engine.receipts = [Receipt(4, 3, after=StopKind.TOOL, idle=0.2), Receipt(4, 0)]
    for _ in range(2):
        await site.chat(messages=[user("Hi")])
    text = (await site.http.get("/metrics")).text
    assert 'warmturn_think_time_seconds_count{after="tool"} 1.0' in text
    assert 'warmturn_think_time_seconds_bucket{after="tool",le="0.1"} 0.0' in text
    assert 'warmturn_think_time_seconds_bucket{after="tool",le="0.3"} 1.0' in text
    assert 'warmturn_think_time_seconds_count{after="answer"} 0.0' in text
