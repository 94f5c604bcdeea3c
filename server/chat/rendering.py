"""The tools and chat template variables with which a conversation is rendered. Both belong to a timeline: a message
that changes them stores the new ones (its ``tools`` and ``template``), and they hold until another message changes
them. Forks, rewinds and edits thus keep them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from server.log.logged_message import LoggedMessage, Scalar


@dataclass(frozen=True)
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

    def applied_over(self, before: Rendering) -> Rendering:
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


def drop_reasoning(messages: Iterable[LoggedMessage]) -> list[LoggedMessage]:
    """The messages without their reasoning."""
    return [structs.replace(message, reasoning_content="") for message in messages]
