"""A coding agent for tests of lines: it sends its whole history with every request, and an id of its conversation."""

from __future__ import annotations

import functools
import json
from typing import Any

from http_context import Site
from template_styles import HERMES, tokens_with

from scheduler.protocol import Submit, unpack_ids
from server.turns.side_call_counts import LINE

hermes = functools.partial(tokens_with, HERMES)  # it leaves reasoning out of all replies but the last
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
CALL = (
    '<think>\nI should look.\n</think>\n\n<tool_call>\n{"name":"read","arguments":{"path":"a","all":1}}\n</tool_call>'
)
HINT = {"thread-id": "t1"}
SYSTEM = {"role": "system", "content": "You write code."}
Message = dict[str, Any]


class Client:
    """A coding agent: it sends all messages every time, without the reasoning that it got, its calls written anew."""

    def __init__(self, site: Site, **body: Any) -> None:
        self.site = site
        self.messages: list[Message] = [SYSTEM]
        self.body = {"tools": [TOOL], **body}
        self.headers: dict[str, str] = HINT

    async def ask(self, *new: Message, reply: str = "Done.") -> dict[str, Any]:
        """The answer to the history with ``new`` messages; it becomes a part of the history."""
        self.site.engine.reply = reply
        self.messages += new
        answer = await self.site.chat(messages=self.messages, headers=self.headers, **self.body)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        said = body["choices"][0]["message"]
        self.messages.append({"role": "assistant", "content": said["content"]})
        if calls := said.get("tool_calls"):
            for call in calls:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)
            self.messages[-1]["tool_calls"] = calls
        return body

    def result(self, text: str = "nothing") -> Message:
        """The result of the call in the last reply."""
        return {"role": "tool", "tool_call_id": self.messages[-1]["tool_calls"][0]["id"], "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def ids_of(submit: Submit) -> list[int]:
    return list(unpack_ids(submit.prompt))


def goes_on(site: Site) -> bool:
    """Whether the last prompt begins with the prompt and the reply before it, token by token."""
    prompt = ids_of(site.engine.submitted[-2])
    before = min((ids for _, ids in site.engine._timelines if ids[: len(prompt)] == prompt), key=len)
    assert len(before) > len(prompt)
    return ids_of(site.engine.submitted[-1])[: len(before)] == before


def line_of(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["cache"]["line"]
    return found


async def lines(site: Site) -> list[dict[str, Any]]:
    listed = (await site.http.get("/v1/sessions", params={"prefix": LINE})).json()
    found: list[dict[str, Any]] = listed["data"]
    return found
