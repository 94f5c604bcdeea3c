"""The tools and chat template variables with which a conversation is rendered. Both belong to a timeline: a message
that changes them stores the new ones (its ``tools`` and ``template``), and they hold until another message changes
them. Forks, rewinds and edits thus keep them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from server.log.logged_message import LoggedMessage, Scalar


@dataclass(frozen=True, slots=True)
class Rendering:
    """``tools`` as in OpenAI's requests; ``template``: additional variables of the chat template."""

    tools: Sequence[Mapping[str, Any]] = ()
    template: Mapping[str, Scalar] = field(default_factory=dict)


PLAIN = Rendering()


@dataclass(frozen=True)
class RenderingChange:
    """What a turn changes: new ``tools`` (None: unchanged), new values of ``template`` variables (others are
    unchanged); ``forget``: earlier reasoning is left out of the prompt; ``goes_on``: the last message is the beginning
    of the reply. ``whole``: the request states all of its rendering, so what it leaves out is not in force.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    template: Mapping[str, Scalar] = field(default_factory=dict)
    forget: bool = False
    goes_on: bool = False
    whole: bool = False

    def apply_over(self, before: Rendering) -> Rendering:
        """The rendering of the turn, after ``before``."""
        if self.whole:
            return Rendering(self.tools or (), self.template)
        return Rendering(before.tools if self.tools is None else self.tools, {**before.template, **self.template})


NO_CHANGE = RenderingChange()


def rendering_in_force(messages: Iterable[LoggedMessage]) -> Rendering:
    """The rendering after ``messages``."""
    tools: Sequence[Mapping[str, Any]] = ()
    template: Mapping[str, Scalar] = {}
    for message in messages:
        tools = tools if message.tools is None else message.tools
        template = template if message.template is None else message.template
    return Rendering(tools, template)


def mark_message(message: LoggedMessage, before: Rendering, now: Rendering) -> LoggedMessage:
    """``message`` with the change from ``before`` to ``now`` stored in it."""
    tools = None if [*now.tools] == [*before.tools] else [dict(tool) for tool in now.tools]
    template = None if now.template == before.template else {**now.template}
    return structs.replace(message, tools=tools, template=template)


def order_tools(messages: Iterable[LoggedMessage], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """``tools`` in the order in which ``messages`` first had them, new ones behind. A definition that only has its keys
    in another order is returned as it was logged.
    """
    met: dict[str, Mapping[str, Any]] = {}
    for message in messages:
        met |= {tool["function"]["name"]: tool for tool in message.tools or ()}
    given = {tool["function"]["name"]: tool for tool in tools}
    known = {name: met[name] if same_json(met[name], given[name]) else given[name] for name in met if name in given}
    return [*known.values(), *(tool for name, tool in given.items() if name not in known)]


def tool_names(tools: Iterable[Mapping[str, Any]]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


def same_json(one: object, other: object) -> bool:
    """Whether two JSON values differ in the order of keys at most."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def drop_reasoning(messages: Iterable[LoggedMessage]) -> list[LoggedMessage]:
    return [structs.replace(message, reasoning_content="") for message in messages]
