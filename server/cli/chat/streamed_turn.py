"""One turn over HTTP: its stream, its end and its cost; Ctrl-C stops it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

from server.cli.remote_server import explain

STOP_SECONDS = 15.0  # for a server to stop a turn


class TurnFailed(Exception):
    """The server did not answer this turn; its message is one line for the user."""


class ReplyPiece(NamedTuple):
    """A piece of a reply: of its reasoning or of its text."""

    text: str
    reasoning: bool = False


@dataclass
class TurnAnswer:
    """The result of one turn. Seconds count from the request; ``usage`` is OpenAI's object, ``cache`` the receipt."""

    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    usage: dict[str, Any] | None = None
    cache: dict[str, Any] | None = None
    finish: str | None = None

    def summary(self) -> str:
        """The turn's cost in one line."""
        if self.usage is None:
            return "no usage reported"
        prompt, out = self.usage["prompt_tokens"], self.usage["completion_tokens"]
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        parts = [f"reused {cached} of {prompt} prompt tokens", f"{prompt - cached} new"]
        if self.cache is not None:
            parts = [costs(self.cache)]
        parts.append(f"{out} out")
        if self.first_token is not None:
            parts.append(f"first token {1000 * (self.first_token - self.started):.0f} ms")
            assert self.last_token is not None
            if out > 1 and (seconds := self.last_token - self.first_token) > 0.05:
                parts.append(f"{(out - 1) / seconds:.0f} tokens/s")
        return " · ".join(parts)


def costs(cache: dict[str, Any]) -> str:
    """A cache receipt in a few words."""
    tiers = sorted(((tokens, tier) for tier, tokens in cache["reused"].items() if tokens), reverse=True)
    reused = f"reused {sum(tokens for tokens, _ in tiers)} of {cache['prompt_tokens']}"
    if tiers:
        reused += f" ({', '.join(f'{tier} {tokens}' for tokens, tier in tiers)})"
    items = [reused]
    if cache["recomputed"]:
        items.append(f"{cache['recomputed']} recomputed")
    items.append(f"{cache['new']} new")
    if cache["load_ms"]:
        items.append(f"loaded in {cache['load_ms']:.0f} ms")
    if cache["miss"] is not None:
        items.append(f"miss: {cache['miss']['reason'].replace('_', ' ')} at token {cache['miss']['at']}")
    return ", ".join(items)


def stream(http: httpx.Client, path: str, body: dict[str, Any], reply: TurnAnswer) -> Iterator[ReplyPiece]:
    """The reply, piece by piece; ``reply`` is filled on the way. Raises TurnFailed."""
    try:
        with http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
                raise TurnFailed(explain(response))
            for event in events(response):
                reply.usage = event.get("usage") or reply.usage
                reply.cache = event.get("cache") or reply.cache
                for choice in event["choices"]:
                    reply.finish = choice.get("finish_reason") or reply.finish
                    for name in ("reasoning_content", "content"):
                        if text := choice["delta"].get(name):
                            reply.last_token = time.monotonic()
                            reply.first_token = reply.first_token or reply.last_token
                            yield ReplyPiece(text, name != "content")
    except httpx.HTTPError as error:
        raise TurnFailed(f"the connection to the server was lost ({type(error).__name__})") from None


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream up to its [DONE]. Raises TurnFailed on an error event or a missing end."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise TurnFailed(str(event["error"].get("message", "the server reported an error")))
        yield event
    raise TurnFailed("the server ended the reply early")


@contextlib.contextmanager
def stopping(http: httpx.Client, session: str) -> Iterator[None]:
    """Within this context, the first Ctrl-C asks the server to stop the turn, whose stream then ends. A second one, or
    the first if the server cannot stop it, raises KeyboardInterrupt.
    """
    asked = False

    def ask() -> None:
        try:
            answer = http.post(f"/v1/sessions/{quote(session, safe='')}/cancel", timeout=STOP_SECONDS)
            known = answer.status_code == 200
        except httpx.HTTPError:
            known = False
        if not known:
            os.kill(os.getpid(), signal.SIGINT)  # which also ends a wait for the network

    def interrupted(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        threading.Thread(target=ask, daemon=True).start()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
