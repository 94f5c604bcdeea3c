"""A kept session that is sent again, with a rule and without it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from agents.replay import replay
from agents.script import Reply, Script

from server.config.prompt_rules import PROMPT_RULES

WITHOUT = tuple(rule for rule in PROMPT_RULES if rule != "billing_line_folded")


def request(number: int, *messages: dict[str, Any]) -> dict[str, Any]:
    """A request whose front differs from the others' in its billing line only."""
    billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
    system = [billing, {"type": "text", "text": "You write code. " * 40}]
    body = {"model": "any", "max_tokens": 100, "system": system, "messages": [*messages]}
    return {"method": "POST", "path": "/v1/messages", "headers": {}, "body": body}


def test_the_share_of_a_session_falls_without_the_rule_that_keeps_it() -> None:
    asked, told = {"role": "user", "content": "STEP-one"}, {"role": "assistant", "content": "Done."}
    script = Script(steps={"one": Reply("Done."), "two": Reply("Done again.")})
    sent = [request(1, asked), request(2, asked, told, {"role": "user", "content": "STEP-two"})]
    kept = {"script": msgspec.to_builtins(script), "requests": sent}
    shares = [asyncio.run(replay(kept, "chatml", rules, 0.0)) for rules in (PROMPT_RULES, WITHOUT)]
    assert float(shares[0].rstrip("%")) > 90
    assert float(shares[1].rstrip("%")) < 20
