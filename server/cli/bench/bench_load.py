"""The load of `warmturn bench`: clients that send their whole history with each turn, with any OpenAI-compatible
server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from server.engine.process_tree import cpu_seconds

WORDS = (
    "about above again because before between could during every first found great house large later "
    "learn light little might never night other paper place plant point right river school small sound "
    "still story study their there these thing think three under until water where which while white "
    "world would write young answer animal mother number"
).split()
# What makes replies equally long and tells their length; a server that refuses one of these goes without it.
OPTIONS: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}, "temperature": 0}
LENGTHS = ("max_tokens", "max_completion_tokens")
Request = Callable[[], AbstractAsyncContextManager[httpx.Response]]
SAID = ("content", "reasoning_content", "reasoning")  # where servers put what was generated; the first is history
PROBES = 3  # turns at each length of history


class NoAnswer(Exception):
    """The server did not answer as one of OpenAI's API does; one line for people."""


@dataclass
class TimedTurn:
    """What one turn showed: seconds to the first token and in all, token counts from ``usage`` (else ``output`` in
    pieces of text), seconds between pieces. ``error``: why it was not answered; ``answered``: an answer has begun."""

    first: float = 0.0
    total: float = 0.0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    text: str = ""
    gaps: list[float] = field(default_factory=list)
    error: str | None = None
    answered: bool = False


@dataclass
class BenchLoad:
    """One load: seconds of wall time, of the server's CPU time where that can be told, and its turns by chat."""

    name: str
    wall: float
    cpu: float | None
    chats: list[list[TimedTurn]]


class Client:
    """A server, spoken to in the form that it takes. ``left_out``: fields that it refused."""

    def __init__(self, http: httpx.AsyncClient, model: str, pid: int | None, session_header: str | None = None) -> None:
        self._http = http
        self._model = model
        self._pid = pid
        self._header = session_header
        self._options = dict(OPTIONS)
        self._length = LENGTHS[0]
        self._run = f"{random.getrandbits(32):08x}"  # chats of another run are others

    @property
    def left_out(self) -> list[str]:
        """Which fields the server did not take."""
        return [name for name in OPTIONS if name not in self._options]

    async def facts(self) -> dict[str, Any]:
        """What the server tells of the model beyond OpenAI's fields; nothing where it is another server."""
        try:
            answer = await self._http.get(f"models/{self._model}")
            told = answer.json().get("warmturn")
        except (httpx.HTTPError, ValueError, AttributeError):
            return {}
        return told if isinstance(told, dict) else {}

    async def warm_up(self) -> None:
        """A first turn, in the form with most fields that the server takes. Raises NoAnswer."""
        said = ""
        for left in itertools.chain.from_iterable(itertools.combinations(OPTIONS, n) for n in range(len(OPTIONS) + 1)):
            for self._length in LENGTHS:
                self._options = {name: value for name, value in OPTIONS.items() if name not in left}
                turn = await self.turn([say(random.Random(0), 24)], 16, "warm-up")
                if turn.error is None:
                    return
                said = said or turn.error
                if not turn.error.startswith(("HTTP 400", "HTTP 422")):
                    raise NoAnswer(turn.error)
        raise NoAnswer(said)

    async def turn(self, messages: list[dict[str, str]], tokens: int, chat: str) -> TimedTurn:
        """One streamed turn of exactly so many tokens where the server allows it."""
        body = {"model": self._model, "messages": messages, "stream": True, self._length: tokens, **self._options}
        headers = {self._header: f"bench-{self._run}-{chat}"} if self._header else {}
        request = partial(self._http.stream, "POST", "chat/completions", json=body, headers=headers)
        turn, began = TimedTurn(), time.perf_counter()
        try:
            try:
                await self._ask(request, turn, began)
            except httpx.RemoteProtocolError:
                if turn.answered:
                    raise
                began = time.perf_counter()  # the server had closed the connection on which this was sent
                await self._ask(request, turn, began)
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            turn.error = f"{type(error).__name__}: {error}"[:200]
        turn.total = time.perf_counter() - began
        turn.first = turn.first or turn.total
        return turn

    async def _ask(self, request: Request, turn: TimedTurn, began: float) -> None:
        async with request() as response:
            turn.answered = True
            if response.status_code == 200:
                await self._read(response, turn, began)
            else:
                turn.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"

    async def _read(self, response: httpx.Response, turn: TimedTurn, began: float) -> None:
        """Fill ``turn`` from the events of a stream."""
        pieces, last = 0, 0.0
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if data == line or not data.startswith("{"):
                continue
            chunk: dict[str, Any] = json.loads(data)
            if "error" in chunk:
                turn.error = str(chunk["error"])[:200]
                return
            deltas = [choice["delta"] for choice in chunk["choices"]]
            if any(delta.get(name) for delta in deltas for name in SAID):
                now = time.perf_counter() - began
                turn.gaps += [now - last] if turn.first else []
                turn.first, last, pieces = turn.first or now, now, pieces + 1
            turn.text += "".join(delta.get("content") or "" for delta in deltas)
            if usage := chunk.get("usage"):
                turn.prompt, turn.output = usage["prompt_tokens"], usage["completion_tokens"]
                turn.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        turn.output = turn.output or pieces

    async def chats(self, sessions: int, turns: int) -> BenchLoad:
        """``sessions`` chats at once."""
        cpu, began = cpu_seconds(self._pid), time.perf_counter()
        done = await asyncio.gather(*(self._chat(100 * sessions + i, turns) for i in range(sessions)))
        wall = time.perf_counter() - began
        return BenchLoad(f"{sessions} sessions, {turns} turns", wall, self._since(cpu), list(done))

    async def _chat(self, seed: int, turns: int) -> list[TimedTurn]:
        """One chat: 20 to 60 words in, 32 to 96 tokens out, the reply appended as it came. Its first error ends it."""
        rng = random.Random(seed)
        messages: list[dict[str, str]] = []
        done: list[TimedTurn] = []
        while len(done) < turns and not (done and done[-1].error):
            messages.append(say(rng, rng.randint(20, 60)))
            done.append(await self.turn(messages, rng.randint(32, 96), str(seed)))
            messages.append({"role": "assistant", "content": done[-1].text})
        return done

    async def history(self, size: int) -> BenchLoad:
        """Turns of 16 words on about ``size`` tokens of history."""
        rng, chat = random.Random(size), f"history-{size}"
        messages = [say(rng, size // 2)]
        reply = await self.turn(messages, 2, chat)
        while reply.error is None and 0 < reply.prompt < size - 32:
            messages += [{"role": "assistant", "content": reply.text}, say(rng, max(8, (size - reply.prompt) // 3))]
            reply = await self.turn(messages, 2, chat)
        cpu, began, warm = cpu_seconds(self._pid), time.perf_counter(), [] if reply.error is None else [reply]
        while reply.error is None and len(warm) < PROBES:
            messages += [{"role": "assistant", "content": reply.text}, say(rng, 16)]
            reply = await self.turn(messages, 1, chat)
            warm.append(reply)
        wall, spent = time.perf_counter() - began, self._since(cpu)
        each = f", {1000 * spent / len(warm):.0f} CPU ms" if spent else ""
        return BenchLoad(f"16 words on {reply.prompt} tokens{each}", wall, spent, [warm])

    def _since(self, before: float | None) -> float | None:
        now = cpu_seconds(self._pid)
        return None if before is None or now is None else now - before


def say(rng: random.Random, words: int) -> dict[str, str]:
    """A message of made-up words."""
    return {"role": "user", "content": " ".join(rng.choices(WORDS, k=words))}
