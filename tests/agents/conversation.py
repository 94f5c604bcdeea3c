"""The scripted session that every client goes through."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from agents.agent import ROOT, Agent, call
from agents.desk import Desk
from agents.script import Reply, Rule, Script

DONE = Reply("All done. STEP-end")
WORDS = " ".join(f"word {number}," for number in range(4000))  # a reply that is long enough to be interrupted
SUMMARY = "<state_snapshot>The user asked for two files, and they were written.</state_snapshot>"
LOOKS = "abcdefg"  # calls for one message, where a client forgets what was before it
FIRST, SECOND, GROUND = "notes.txt", "more.txt", "ground.txt"


def script_for(agent: Agent, project: Path) -> Script:
    """The replies to every message of the session."""
    first, second, ground = project / FIRST, project / SECOND, project / GROUND
    tools = agent.tools
    steps = {"end": DONE, "long": Reply(WORDS), "brief": Reply("Good. STEP-end")}
    if tools is None:
        steps["write"] = Reply(f"Here it is.\n\n{FIRST}\n```\nThe first line.\n```\n")
        steps["more"] = Reply(f"Here it is.\n\n{SECOND}\n```\nThe second file.\n```\n")
        steps |= dict.fromkeys(("look", "delegate", "read", "after"), DONE)
        return Script(steps=steps)
    steps |= {
        "write": Reply("I write it.", [tools.write(first, "The first line. STEP-wrote")], "The user wants a file."),
        "wrote": Reply("I look at it.", [tools.shell(f"cat {first} && echo STEP-end")], "I should check the file."),
        "look": Reply("", [tools.shell("ls && echo STEP-end")], "A listing will do."),
        "read": Reply("I read it.", [tools.read(ground)]),
        "more": Reply("", [tools.write(second, "The second file. STEP-end")], "Another file."),
        "after": Reply("", [tools.shell(f"cat {second} && echo STEP-end")]),
        "sub": Reply("", [tools.read(ground)], "I am a sub-agent."),
        "delegate": DONE,
    }
    if agent.forgets:
        marks = ["look", *(f"look{letter}" for letter in LOOKS), "end"]
        for mark, after in pairwise(marks):
            steps[mark] = Reply(f"I {mark}.", [tools.shell(f"ls {first} && echo STEP-{after}")], "Once more.")
    if agent.strike:
        steps["found"] = Reply("I ask the clock.", [call(agent.strike, note="STEP-struck")], "What time is it?")
        steps["strike"] = steps["found"] if agent.find is None else Reply("", [agent.find], "There is a clock.")
        steps["struck"] = Reply("It struck. STEP-end", [], "Five it is.")
    if tools.delegate is not None:
        steps["delegate"] = Reply("", [tools.delegate("Read the file and report. STEP-sub")])
    return Script(steps=steps, rules=[Rule(agent.asks, Reply(SUMMARY)), *agent.awaits])


def strike(agent: Agent, desk: Desk, text: str) -> str:
    """One message of a run that has one tool more than those before it; what was printed."""
    flags = (*agent.again[:1], *agent.with_clock, *agent.again[1:])
    return desk.run(*_command(agent, desk, text, flags))


def connect(agent: Agent, desk: Desk) -> None:
    """The client's settings, as `warmturn connect` writes them."""
    command = [sys.executable, "-m", "server", "connect", agent.name, "--write", "--url", desk.proxy.url]
    environment = {"HOME": str(desk.home), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
    desk.environment |= agent.environment
    for path in desk.home.glob(".*/warmturn.env"):  # what a shell would read
        for line in path.read_text().splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            desk.environment[name] = value
    if agent.login:
        desk.run(agent.program, *(part.replace("{url}", desk.proxy.url) for part in agent.login))
    desk.exchanges.clear()


def send(agent: Agent, desk: Desk, text: str, first: bool = False) -> str:
    """One message, and the client's work for it; what it printed."""
    return desk.run(*_command(agent, desk, text, agent.first if first else agent.again))


def interrupt(agent: Agent, desk: Desk, text: str) -> str:
    """A message whose reply is cut short by Ctrl-C."""
    return desk.interrupt(*_command(agent, desk, text, agent.again), when=desk.replying)


def compact(agent: Agent, desk: Desk) -> str:
    """The client summarises its history; what it printed."""
    *flags, text = agent.compact
    desk.environment |= agent.tight
    printed = desk.run(*_command(agent, desk, text, (*agent.again, *flags)))
    for name in agent.tight:
        del desk.environment[name]
    return printed


def _command(agent: Agent, desk: Desk, text: str, flags: tuple[str, ...]) -> list[str | Path]:
    return [agent.program, *(flag.replace("{home}", str(desk.home)) for flag in flags), text]
