"""One turn over HTTP, and what its client may conclude from what came back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx

PATIENCE = 120.0  # seconds for an answer


class Outcome(Enum):
    """What a client knows of its turn."""

    ACKNOWLEDGED = "acknowledged"  # the terminal event, or the whole body: it is in the log
    REFUSED = "refused"  # the server said that it failed: it is not in the log
    CUT = "cut"  # the connection ended: it is there whole, or not at all


@dataclass(frozen=True)
class Said:
    """``text``: the reply as far as it was seen. ``tokens``: length of the session's timeline, once acknowledged."""

    outcome: Outcome
    text: str = ""
    tokens: int = 0
    cached: int = 0
    status: int = 0
    replayed: bool = False


def say(
    url: str, session: str | None, messages: list[dict[str, str]], max_tokens: int, stream: bool, key: str | None = None
) -> Said:
    """Greedy reply to ``messages``: to what is new in ``session``, or to a whole conversation without one."""
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": max_tokens, "stream": stream}
    if session is not None:
        body["session_id"] = session
    if stream:
        body["stream_options"] = {"include_usage": True}
    headers = {} if key is None else {"idempotency-key": key}
    seen = _Seen()
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE) as answer:
            seen.status = answer.status_code
            seen.replayed = "idempotent-replayed" in answer.headers
            if answer.status_code != 200:
                answer.read()
                return seen.said(Outcome.REFUSED)
            if stream:
                for line in answer.iter_lines():
                    seen.line(line)
            else:
                seen.body(json.loads(answer.read()))
    except httpx.TransportError:
        return seen.said(Outcome.ACKNOWLEDGED if seen.finished else Outcome.CUT)
    if seen.finished:
        return seen.said(Outcome.ACKNOWLEDGED)
    return seen.said(Outcome.REFUSED if seen.failed else Outcome.CUT)


class _Seen:
    def __init__(self) -> None:
        self.status = 0
        self.replayed = False
        self.finished = False
        self.failed = False
        self._text = ""
        self._usage: dict[str, Any] = {}

    def line(self, line: str) -> None:
        if not line.startswith("data: {"):
            return
        event = json.loads(line[len("data: ") :])
        self.failed |= "error" in event
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            self._text += choice["delta"].get("content") or ""
            self.finished |= choice["finish_reason"] is not None

    def body(self, body: dict[str, Any]) -> None:
        self._text = body["choices"][0]["message"]["content"]
        self._usage = body["usage"]
        self.finished = True

    def said(self, outcome: Outcome) -> Said:
        tokens = self._usage.get("prompt_tokens", 0) + self._usage.get("completion_tokens", 0)
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Said(outcome, self._text, tokens, cached, self.status, self.replayed)


def messages_of(url: str, session: str) -> list[tuple[str, str]] | None:
    """Role and content of what the server holds of a session; None where it knows none of that name."""
    answer = httpx.get(f"{url}/v1/sessions/{session}/messages", timeout=PATIENCE)
    if answer.status_code == 404:
        return None
    answer.raise_for_status()
    return [(message["role"], message["content"]) for message in answer.json()["data"]]


def facts_of(url: str, session: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/v1/sessions/{session}", timeout=PATIENCE)
    answer.raise_for_status()
    facts: dict[str, Any] = answer.json()
    return facts
