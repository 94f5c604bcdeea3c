"""Coding agents as they are installed, each in a scripted session against a real server: `make test-agents`.

The forward and its KV are real, the replies are the script's. Every request has to be answered with 200, the calls have
to be executed, and nearly all of the tokens that a prompt has in common with earlier ones have to be reused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import report
from agents.agent import AGENTS, Agent
from agents.conversation import FIRST, GROUND, SECOND, compact, connect, interrupt, script_for, send, strike
from agents.desk import Desk, ScriptedServer, desk
from agents.recording import keep, record
from agents.reuse import measure

pytestmark = pytest.mark.slow
CASES: list[tuple[str, ...]] = [tuple(case.rsplit("-", 1)) for case in os.environ.get("AGENTS_CASES", "").split()] or [
    ("claude", "reasoning"),
    ("claude", "chatml"),
    ("codex", "chatml"),
    ("codex", "reasoning"),
    ("codex-websocket", "reasoning"),
    ("opencode", "reasoning"),
    ("opencode", "brackets"),
    ("qwen", "chatml"),
    ("qwen", "headers"),
    ("pi", "reasoning"),
    ("pi", "keeping"),
    ("aider", "brackets"),
    ("goose", "chatml"),
    ("continue", "chatml"),
    ("cline", "chatml"),
    ("librechat", "reasoning"),
]
LATE_TOOLS = [("claude", "reasoning"), ("codex", "reasoning")]
LEAST = 0.95  # of the reusable tokens
STEADY = {"claude": 0.98, "codex": 0.98}  # before the compaction


@pytest.fixture(params=CASES, ids="-".join)
def at_work(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Agent, str, Desk, ScriptedServer]]:
    """A client with its settings, and a server whose model has one of the templates."""
    name, template = request.param
    agent = AGENTS[name]
    if not agent.installed:
        pytest.skip(f"{name} is not installed: make test-agents")
    with desk(tmp_path, template) as (made, server):
        (made.project / GROUND).write_text("Solid ground. STEP-end\n")
        made.say(script_for(agent, made.project))
        connect(agent, made)
        yield agent, template, made, server
        if agent.leave:
            made.run(agent.program, *agent.leave)


def test_a_scripted_session(at_work: tuple[Agent, str, Desk, ScriptedServer]) -> None:
    agent, template, made, server = at_work
    send(agent, made, "Please write a file. STEP-write", first=True)
    first_turn = len(made.exchanges)
    send(agent, made, "What is there now? STEP-look")
    send(agent, made, "Let somebody else have a look. STEP-delegate")
    send(agent, made, "Read it yourself. STEP-read")
    interrupt(agent, made, "Tell me a long story. STEP-long")
    send(agent, made, "Enough of that. Write another file. STEP-more")
    server.restart()
    send(agent, made, "Is it good? STEP-brief")
    send(agent, made, "Read it again. STEP-read")
    steady = len(made.exchanges)
    if agent.compact:
        compact(agent, made)
    printed = send(agent, made, "Show me the second file. STEP-after")

    late = measure(made.exchanges, since=first_turn)
    early = measure(made.exchanges, since=first_turn, until=steady)
    refused = [exchange for exchange in made.exchanges if exchange.status >= 400 and exchange.method != "HEAD"]
    if "AGENTS_RECORD" in os.environ:
        record(agent.title, made.exchanges, made.folder)
    keep(f"{agent.title}-{template}", made.exchanges, made.folder / "script.json")
    report.add(agent, template, made.exchanges, late, early)
    assert [(exchange.path, exchange.status, exchange.answer[:500]) for exchange in refused] == []
    assert "first line" in (made.project / FIRST).read_text()
    assert "second file" in (made.project / SECOND).read_text()
    assert agent.tools is None or re.search("done|second file", printed)
    assert agent.variant != "websocket" or any(exchange.socket for exchange in made.exchanges)
    assert early.requests >= 9 or agent.tools is None
    assert late.share >= LEAST
    assert early.share >= STEADY.get(agent.name, LEAST)


@pytest.mark.parametrize("at_work", LATE_TOOLS, indirect=True, ids="-".join)
def test_a_tool_that_comes_in_the_middle(at_work: tuple[Agent, str, Desk, ScriptedServer]) -> None:
    """From the third message on the client has an MCP server: its tool is called, and what was before is reused."""
    agent, template, made, _ = at_work
    send(agent, made, "Please write a file. STEP-write", first=True)
    send(agent, made, "What is there now? STEP-look")
    before = len(made.exchanges)
    printed = [strike(agent, made, f"{text} STEP-strike") for text in ("What time is it?", "And now?")]

    late = measure(made.exchanges, since=before)
    keep(f"{agent.title}-{template}-late-tool", made.exchanges, made.folder / "script.json")
    report.add(agent, f"{template}, tool in the middle", made.exchanges, late, late)
    assert [exchange.answer[:500] for exchange in made.exchanges if exchange.status >= 400] == []
    assert all("It struck" in text for text in printed)
    assert late.requests >= 4
    assert late.reused / late.prompt >= LEAST
