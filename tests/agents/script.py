"""What a scripted model says: the reply to a prompt is found by the last mark in the prompt's text.

A mark is ``STEP-name``. The test writes one into each message of a user; the reply to it has the next one somewhere in
the arguments of its calls, so that the prompt with the tool's result ends with that one. Nothing else is needed to know
where in the session a request stands, whatever the client puts around it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

MARK = re.compile("STEP-([a-z]+)")
TAIL = 8000  # characters at the end of a prompt in which ``Rule.asks`` is looked for


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """``text`` and ``calls`` (``{"name", "arguments"}``) behind ``reasoning``, which only templates that know it show.

    ``otherwise``: the text where the first call's tool is not in the prompt, as in a request for a title.
    """

    text: str = ""
    calls: list[dict[str, Any]] = []
    reasoning: str = "I know what to do."
    otherwise: str = "A short title"


class Rule(msgspec.Struct, frozen=True):
    """The reply to a prompt whose last part matches the regular expression ``asks``. What its first group found stands
    for ``FOUND`` in the arguments of the calls.
    """

    asks: str
    reply: Reply


class Script(msgspec.Struct, frozen=True):
    """``rules`` are tried first, in order; then ``steps`` by the last mark."""

    steps: dict[str, Reply] = {}
    rules: list[Rule] = []
    unknown: Reply = Reply("I have nothing to add.")
    constrained: str = '{"title": "A short title"}'  # where a grammar decides the form

    @classmethod
    def read(cls, path: Path) -> Script:
        """A script that ``write`` has written."""
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def write(self, path: Path) -> None:
        """As JSON; a file that is read meanwhile is whole."""
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        new.replace(path)

    def reply_to(self, prompt: str) -> Reply:
        """The reply to the text of a prompt."""
        for rule in self.rules:
            if found := re.search(rule.asks, prompt[-TAIL:]):
                return _fill(rule.reply, found)
        marks = MARK.findall(prompt)
        reply = self.steps.get(marks[-1], self.unknown) if marks else self.unknown
        if reply.calls and not re.search(rf'"name": "{re.escape(reply.calls[0]["name"])}"', prompt):
            return Reply(reply.otherwise)
        return reply


def _fill(reply: Reply, found: re.Match[str]) -> Reply:
    """A rule's reply to what its expression has found."""
    calls = msgspec.json.encode(reply.calls).decode()
    for group in found.groups():
        calls = calls.replace("FOUND", group)
    return msgspec.structs.replace(reply, calls=msgspec.json.decode(calls))
