"""`warmturn chat`: a conversation in the terminal with a running server, on one session."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO
from urllib.parse import quote

import httpx

from server.config.serve_options import ChatConfig, UsageError

STOP_SECONDS = 15.0  # for a server to stop a turn
TIMEOUT = httpx.Timeout(10.0, read=None)  # a long prompt may take its time until the first token
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class TurnFailed(Exception):
    """The server did not answer this turn; its message is one line for the user."""


@dataclass
class TurnAnswer:
    """The result of one turn. Seconds count from the request; ``usage`` is OpenAI's object, ``cache`` the receipt."""

    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
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


def chat(config: ChatConfig, client: httpx.Client | None = None, terminal: TextIO | None = None) -> int:
    """Talk until the input ends; the exit status. Raises UsageError when no server answers or the key is wrong."""
    out = terminal or sys.stdout
    headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    with client or httpx.Client(
        base_url=config.url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=TIMEOUT
    ) as http:
        model = config.model or first_model(http, config.url)
        dim(out, f"{model} · session {config.session} · Ctrl-C stops a reply, Ctrl-D leaves")
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        for line in lines(out):
            body: dict[str, Any] = {
                "model": model,
                "session_id": config.session,
                "messages": [*system, {"role": "user", "content": line}],
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            if config.temperature is not None:
                body["temperature"] = config.temperature
            if turn(http, body, out):
                system = []  # it is part of the session now
    return 0


def turn(http: httpx.Client, body: dict[str, Any], out: TextIO) -> bool:
    """Print one reply as it is generated, and its cost. Returns whether the turn is part of the session."""
    reply = TurnAnswer()
    try:
        with stopping(http, body["session_id"]):
            for text in stream(http, body, reply):
                out.write(text)
                out.flush()
    except KeyboardInterrupt:
        dim(out, "\nstopped; this turn is not part of the session")
        return False
    except TurnFailed as error:
        dim(out, f"\n{error}" if reply.first_token else str(error))
        return False
    stopped = "stopped; the reply so far is kept · " if reply.finish == "cancelled" else ""
    dim(out, f"\n{stopped}{reply.summary()}")
    return True


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


def stream(http: httpx.Client, body: dict[str, Any], reply: TurnAnswer) -> Iterator[str]:
    """The reply's text, piece by piece; ``reply`` is filled on the way. Raises TurnFailed."""
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise TurnFailed(explain(response))
            for event in events(response):
                reply.usage = event.get("usage") or reply.usage
                reply.cache = event.get("cache") or reply.cache
                for choice in event["choices"]:
                    reply.finish = choice.get("finish_reason") or reply.finish
                    if text := choice["delta"].get("content"):
                        reply.first_token = reply.first_token or time.monotonic()
                        yield text
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


def first_model(http: httpx.Client, url: str) -> str:
    """The model to talk to. Raises UsageError when there is no server, no access or no model yet."""
    try:
        response = http.get("/v1/models")
    except httpx.HTTPError:
        raise UsageError(f"no server answers at {url}; `warmturn serve` starts one") from None
    if response.status_code == 401:
        raise UsageError("--api-key: the server refused this key, or needs one")
    if response.status_code != 200:
        raise UsageError(f"the server at {url} says: {explain(response)}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"--url: the program at {url} does not have OpenAI's API") from None


def explain(response: httpx.Response) -> str:
    """An error response in one line."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(response.json()["error"]["message"])
    return f"HTTP {response.status_code}"


def lines(out: TextIO) -> Iterator[str]:
    """The user's lines until Ctrl-D; without a prompt if the input is not a terminal."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() its line editing and history
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            if prompt:
                out.write("\n")
            return
        except KeyboardInterrupt:  # clears the line
            out.write("\n")
            continue
        if line:
            yield line


def dim(out: TextIO, text: str) -> None:
    """Print a line in dim text."""
    plain = not out.isatty()
    out.write(f"{text}\n" if plain else f"{DIM}{text}{PLAIN}\n")
    out.flush()
