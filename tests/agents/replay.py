"""What each rule of ``docs/prompt_front.md`` is for, per client: kept sessions are sent again, with it and without it.

    PYTHONPATH=.:tests python -m agents.replay

``make test-agents`` keeps the requests of its sessions in .agents/kept. They are sent once more, one after the other,
to the server in this process. In place of a model there is the session's script; whatever a prompt has in common with
an earlier one and its reply counts as reused, as in a cache without a limit. So nothing is measured but the prompts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from agents.proxy import Exchange
from agents.recording import KEPT
from agents.script import Reply, Script
from agents.tiny_llama import CONTEXT, KEEPING, template_text
from fake_engine import END, FACTS
from http_context import Site, site
from template_styles import tokens_with

from scheduler.protocol import Submit, unpack_ids
from server.chat.chat_tokenizer import ChatTokenizer
from server.config.prompt_rules import PROMPT_RULES
from server.engine.mailbox import Mailbox
from server.log.logged_message import LoggedCall, LoggedFunction, LoggedMessage
from tools.bench_prompt_front import write_reply
from tools.tables import table

TRIED = ("reasoning", KEEPING)
LINE = 86_400.0  # seconds that lines are kept
CHOICES = {"all": PROMPT_RULES, "none": ()} | {
    f"all but {rule}": tuple(kept for kept in PROMPT_RULES if kept != rule) for rule in PROMPT_RULES
}


def replied(tokens: ChatTokenizer, reply: Reply, prompt: str) -> list[int]:
    """The ids of a reply in the script, behind a prompt."""
    calls = tuple(
        LoggedCall(f"call{number:05}", "function", LoggedFunction(call["name"], json.dumps(call["arguments"])))
        for number, call in enumerate(reply.calls)
    )
    text = write_reply(tokens, LoggedMessage("assistant", reply.text, "", reply.reasoning, calls))
    text = text[: text.rindex("<|im_end|>")]
    if prompt.endswith("</think>\n\n"):
        text = text.rpartition("</think>\n\n")[2]
    return [*tokens.encode(text, special=False), END]


def follow(made: Site, tokens: ChatTokenizer, script: Script) -> None:
    """Let the engine answer as the script says, and find cached tokens fast."""
    engine, submit = made.engine, made.engine.submit
    engine.facts = msgspec.structs.replace(FACTS, max_context=4 * CONTEXT)
    timelines: list[tuple[str, list[int]]] = vars(engine)["_timelines"]

    def answer(request: Submit) -> Mailbox:
        prompt = tokens.decode(list(unpack_ids(request.prompt)))
        reply = Reply(script.constrained) if request.grammar is not None else script.reply_to(prompt)
        engine.ids = replied(tokens, reply, prompt)
        return submit(request)

    def cached(tenant: str, prompt: Sequence[int]) -> int:
        return max((shared(prompt, timeline) for _, timeline in timelines), default=0)

    vars(engine).update(submit=answer, _cached=cached)


def shared(prompt: Sequence[int], timeline: Sequence[int]) -> int:
    """How many tokens of a prompt another one begins with; its last one is always computed."""
    length = min(len(prompt) - 1, len(timeline))
    differ = np.asarray(prompt[:length]) != np.asarray(timeline[:length])
    return int(differ.argmax()) if differ.any() else length


async def replay(kept: dict[str, Any], template: str, rules: Sequence[str], line_seconds: float) -> str:
    """The share of the prompts from the second request on that was there before; or the first refusal."""
    script = msgspec.convert(kept["script"], Script)
    steps = {name: msgspec.structs.replace(step, text=step.text[:200]) for name, step in script.steps.items()}
    tokens = tokens_with(template_text(template), rules=rules)
    prompt = reused = 0
    async with site(tokens=tokens, any_model=True, line_seconds=line_seconds) as made:
        follow(made, tokens, msgspec.structs.replace(script, steps=steps))
        for number, sent in enumerate(kept["requests"]):
            if sent["method"] != "POST":
                continue
            answer = await made.http.request("POST", sent["path"], headers=sent["headers"], json=sent["body"])
            if answer.status_code >= 400:
                return str(answer.status_code)
            receipt = Exchange("POST", sent["path"], {}, None, answer=answer.text).receipt
            if receipt is not None and number:
                prompt += receipt["prompt_tokens"]
                reused += sum(receipt["reused"].values())
    tokens.close()
    return f"{reused / prompt:.1%}"


def main(say: Callable[[str], None] = print) -> None:
    """The table of all kept sessions: with lines, and in brackets without them."""
    rows = []
    for path in sorted(KEPT.glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        for template in TRIED:
            row = [path.stem, template]
            for rules in CHOICES.values():
                shares = [asyncio.run(replay(kept, template, rules, seconds)) for seconds in (LINE, 0.0)]
                row.append(shares[0] if shares[0] == shares[1] else f"{shares[0]} ({shares[1]})")
            rows.append(row)
            say(" | ".join(row))
    say(table(" | ".join(["session", "template", *CHOICES]), rows))


if __name__ == "__main__":
    main()
