"""What of a client's prompts could have been reused, and what was: measured on its requests.

A request is a list of parts: system texts, tools, messages, calls, results. Whatever it has in common at its beginning
with an earlier request, together with the reply to that one, could have been reused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agents.proxy import Exchange

BILLING = "x-anthropic-billing-header:"
CHANGING = {"cache_control", "id", "call_id", "tool_call_id", "tool_use_id", "status", "internal_chat_message_metadata"}
Part = tuple[str, str]  # whose it is, and its text


@dataclass(frozen=True)
class Reuse:
    """Of some requests: how many, and the tokens of their prompts, those reused, and those that could have been."""

    requests: int = 0
    prompt: int = 0
    reused: int = 0
    reusable: int = 0

    @property
    def share(self) -> float:
        """The part of the reusable tokens that was reused."""
        return self.reused / self.reusable if self.reusable else 1.0


def parts_of(body: dict[str, Any]) -> list[Part]:
    """The parts of a request of any of the three APIs, in the order in which a template writes them."""
    tools = sorted(_text(tool) for tool in body.get("tools") or [])
    parts = [
        ("system", text)
        for system in (body.get("instructions"), body.get("system"))
        for text in _contents(system)
        if BILLING not in text
    ]
    parts += [("tools", text) for text in tools]
    messages = body.get("messages") if "messages" in body else body.get("input")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    for message in messages or []:
        role = str(message.get("role") or ("assistant" if "output" not in message else "tool"))
        parts += [(role, text) for text in _contents(message.get("content"))]
        rest = {key: message[key] for key in ("tool_calls", "name", "arguments", "input", "output") if message.get(key)}
        if rest:
            parts.append((role, _text(rest)))
    return parts


def measure(exchanges: list[Exchange], since: int = 0, until: int | None = None) -> Reuse:
    """The requests from ``since`` to ``until`` that have a receipt. What one could reuse is the longest beginning that
    it shares with any before."""
    total, before, known = Reuse(), list[list[Part]](), dict[str, list[Any]]()
    for at, exchange in enumerate(exchanges[:until]):
        one = _measure_one(exchange, before, known)
        if one is not None and at >= since:
            total = Reuse(
                total.requests + 1,
                total.prompt + one.prompt,
                total.reused + one.reused,
                total.reusable + max(one.reusable, one.reused),
            )
    return total


def _measure_one(exchange: Exchange, before: list[list[Part]], known: dict[str, list[Any]]) -> Reuse | None:
    """One request after those of ``before``, to which it is added. ``known``: the items up to the end of each response
    that a later request may name.
    """
    if exchange.method != "POST" or not isinstance(exchange.body, dict):
        return None
    parts, receipt = parts_of(_whole(exchange, known)), exchange.receipt
    shared = max((_shared(parts, earlier) for earlier in before), default=0)
    before.append(parts)
    if receipt is None or not parts:
        return None
    tokens = receipt["prompt_tokens"]
    reusable = min(round(tokens * shared / sum(len(text) for _, text in parts)), tokens - 1)
    return Reuse(1, tokens, sum(receipt["reused"].values()), reusable)


def _whole(exchange: Exchange, known: dict[str, list[Any]]) -> dict[str, Any]:
    """The body of a request with the items of the response that it follows, which did not travel with it."""
    body, response = exchange.body, exchange.response
    new = body.get("input")
    if not isinstance(new, list):
        return dict(body)
    items = [*known.get(body.get("previous_response_id") or "", []), *new]
    if response is not None:
        known[response["id"]] = [*items, *response["output"]]
    return {**body, "input": items}


def _shared(parts: list[Part], earlier: list[Part]) -> int:
    """Characters of the beginning that two requests share; with the reply that follows it, where the whole earlier one
    is shared."""
    same = 0
    for at, (part, other) in enumerate(zip(parts, earlier, strict=False)):
        if part != other:
            if part[0] == other[0]:
                same += _same_beginning(part[1], other[1])
            return same
        same += len(part[1])
        if at + 1 == len(earlier):
            for role, text in parts[at + 1 :]:
                if role != "assistant":
                    break
                same += len(text)
    return same


def _same_beginning(text: str, other: str) -> int:
    length = min(len(text), len(other))
    return next((at for at in range(length) if text[at] != other[at]), length)


def _contents(content: Any) -> list[str]:
    """The texts of a message's content, whichever form it has."""
    if not content:
        return []
    if isinstance(content, str):
        return [content]
    return [_block_text(block) for block in content]


def _block_text(block: dict[str, Any]) -> str:
    text = block.get("text")
    return text if isinstance(text, str) else _text(block)


def _text(value: Any) -> str:
    """JSON without what changes from one request to the next and is not in the prompt."""
    return json.dumps(_stable(value), ensure_ascii=False)


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stable(part) for key, part in value.items() if key not in CHANGING}
    return [_stable(part) for part in value] if isinstance(value, list) else value
