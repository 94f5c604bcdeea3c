"""Synthetic traces of coding agents, drawn from published distributions, and traces from a file.

TraceLab (arXiv 2606.30560; Claude Code and Codex, 4,265 sessions) gives the pauses, the steps and requests per session
and the generation times. The growth of the context is set to what vLLM and Mooncake report of Codex (80k tokens by turn
30), with a compaction when it is full.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

SYSTEM = 16_000  # tokens of the system prompt and the tools, which sessions of one tenant share
LONGEST = 180_000  # tokens after which a conversation is compacted
COMPACTED = 12_000  # tokens that are left of it, behind the system prompt
TENANTS = 4
TOOLS = 12
_TOOL_SIGMA = math.log(13.6 / 0.3) / NormalDist().inv_cdf(0.9)
_WITHIN = 1.6  # the part of it within one tool; the rest is between tools
_GENERATION_SIGMA = math.log(22.2 / 5.7) / NormalDist().inv_cdf(0.9)
_STEPS_SIGMA = math.log(135 / 15) / NormalDist().inv_cdf(0.9)
_PERSON = ((0.0, 2.0), (0.5, 84.0), (0.9, 1236.0), (0.99, 50040.0), (1.0, 172_800.0))  # shares and seconds


@dataclass(frozen=True)
class TraceTurn:
    """One request. ``gap``: seconds from the end of the turn before it. ``tokens``: new tokens of its prompt;
    ``kept``: tokens of the conversation that it goes on from, None: all (a compaction keeps the front only).
    ``output`` tokens are generated in ``seconds``. ``tools``: what it calls; none: it answers.
    """

    gap: float
    tokens: int
    output: int
    seconds: float
    tools: tuple[str, ...] = ()
    kept: int | None = None


@dataclass(frozen=True)
class TraceSession:
    """A conversation that begins at ``start`` (seconds)."""

    tenant: str
    start: float
    turns: tuple[TraceTurn, ...]


def draw(rng: random.Random, seconds: float, every: float, pace: float = 1.0) -> Iterator[TraceSession]:
    """Sessions that begin within ``seconds``, one ``every`` so many on average. All pauses are multiplied by
    ``pace``.
    """
    at = rng.expovariate(1 / every)
    while at < seconds:
        yield TraceSession(f"tenant{rng.randrange(TENANTS)}", at, tuple(_turns(rng, pace)))
        at += rng.expovariate(1 / every)


def _turns(rng: random.Random, pace: float) -> Iterator[TraceTurn]:
    requests = 1 if rng.random() < 0.585 else 2 + int(rng.expovariate(1 / 19.3))
    steps = max(requests, round(15 * math.exp(rng.gauss(0, _STEPS_SIGMA))))
    answers = {steps - 1, *rng.sample(range(steps - 1), requests - 1)}
    length, gap, first = 0, 0.0, SYSTEM + round(4000 * math.exp(rng.gauss(0, 0.5)))
    for step in range(steps):
        tokens, kept = (first if step == 0 else round(1000 * math.exp(rng.gauss(0, 1.2)))), None
        output = max(1, round(300 * math.exp(rng.gauss(0, 1.05))))
        if length + tokens + output > LONGEST:
            kept, tokens = SYSTEM, COMPACTED
            length = SYSTEM
        length += tokens + output
        seconds = 5.7 * math.exp(rng.gauss(0, _GENERATION_SIGMA))
        tools, wait = ((), _person(rng)) if step in answers else _tool(rng)
        yield TraceTurn(gap, tokens, output, seconds, tools, kept)
        gap = pace * wait


def _tool(rng: random.Random) -> tuple[tuple[str, ...], float]:
    """A call and how long it takes; each tool has a distribution of its own."""
    at = rng.randrange(TOOLS)
    between = math.sqrt(_TOOL_SIGMA**2 - _WITHIN**2)
    median = 0.3 * math.exp(between * NormalDist().inv_cdf((at + 0.5) / TOOLS))
    return (f"tool{at}",), median * math.exp(rng.gauss(0, _WITHIN))


def _person(rng: random.Random) -> float:
    """How long a person pauses."""
    share = rng.random()
    for (less, short), (more, long) in pairwise(_PERSON):
        if share <= more:
            return float(short * (long / short) ** ((share - less) / (more - less)))
    return _PERSON[-1][1]


def save(path: Path, sessions: Iterable[TraceSession]) -> None:
    """Write a trace: a JSON object a line, one per session."""
    path.write_text("".join(json.dumps(asdict(session)) + "\n" for session in sessions), encoding="utf-8")


def load(path: Path) -> list[TraceSession]:
    """Read a trace that ``save`` wrote, or one in its form. Raises ValueError, KeyError or TypeError if it is in
    another."""
    sessions = []
    for line in path.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        turns = tuple(TraceTurn(**{**turn, "tools": tuple(turn.get("tools", ()))}) for turn in found["turns"])
        sessions.append(TraceSession(found["tenant"], found["start"], turns))
    return sessions
