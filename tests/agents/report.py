"""The table of clients: a line per session that was run, kept beside the installed clients."""

from __future__ import annotations

import json
import subprocess

from agents.agent import ROOT, Agent
from agents.desk import more_flags
from agents.proxy import Exchange
from agents.reuse import Reuse

PATH = ROOT / ".agents" / "report.json"
HEAD = (
    "| client | version | template and flags | requests | 4xx/5xx | prompt reused | of reusable | before compaction |"
)


def add(agent: Agent, template: str, exchanges: list[Exchange], late: Reuse, early: Reuse) -> None:
    """A line for a session; one of the same client and template is replaced."""
    lines = json.loads(PATH.read_text()) if PATH.exists() else {}
    refused = sum(exchange.status >= 400 for exchange in exchanges)
    told = " ".join([template, *more_flags()])
    lines[f"{agent.title} {told}"] = (
        f"| {agent.title} | {_version(agent)} | {told} | {len(exchanges)} | {refused} "
        f"| {late.reused / max(late.prompt, 1):.1%} | {late.share:.1%} | {early.share:.1%} |"
    )
    PATH.write_text(json.dumps(lines, indent=1))


def table() -> str:
    """All lines, as Markdown."""
    lines = json.loads(PATH.read_text()) if PATH.exists() else {}
    return "\n".join([HEAD, "|---" * HEAD.count(" | ") + "|---|", *(lines[key] for key in sorted(lines))])


def _version(agent: Agent) -> str:
    if agent.package is not None:
        return str(json.loads(agent.package.read_text())["version"])
    told = subprocess.run([agent.program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    words = [word for word in (told.stdout or told.stderr).split() if word[0].isdigit()]
    return words[0] if words else "?"
