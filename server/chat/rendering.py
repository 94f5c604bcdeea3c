"""How a conversation is rendered besides its messages: which tools the model may read of, and what its chat template is
told. Both belong to a timeline: they hold from the message that brings them (its ``tools`` and ``template``) until
another one brings others, so forks, rewinds and edits carry them along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.log.timeline import Message

Scalar = str | int | float | bool


@dataclass(frozen=True)
class Rendering:
    """``tools`` as OpenAI's requests have them; ``template`` are further variables of the chat template."""

    tools: Sequence[Mapping[str, Any]] = ()
    template: Mapping[str, Scalar] = field(default_factory=dict)


PLAIN = Rendering()


@dataclass(frozen=True)
class RenderingChange:
    """What a turn asks for: other ``tools`` (None: those in force), other ``template`` variables (the rest stay as they
    are); ``forget``: earlier reasoning is left out of the prompt; ``goes_on``: the last message is the beginning of the
    reply."""

    tools: Sequence[Mapping[str, Any]] | None = None
    template: Mapping[str, Scalar] = field(default_factory=dict)
    forget: bool = False
    goes_on: bool = False

    def applied_over(self, before: Rendering) -> Rendering:
        """The manner of the turn, where ``before`` was in force."""
        return Rendering(before.tools if self.tools is None else self.tools, {**before.template, **self.template})


NO_CHANGE = RenderingChange()


def rendering_in_force(messages: Iterable[Message]) -> Rendering:
    """What holds behind ``messages``."""
    tools: Sequence[Mapping[str, Any]] = ()
    template: Mapping[str, Scalar] = {}
    for message in messages:
        tools = message.get("tools", tools)
        template = message.get("template", template)
    return Rendering(tools, template)


def mark_message(message: Message, before: Rendering, now: Rendering) -> Message:
    """``message`` as the one from which on ``now`` holds, where ``before`` did."""
    made = {key: value for key, value in message.items() if key not in ("tools", "template")}
    if [*now.tools] != [*before.tools]:
        made["tools"] = [*now.tools]
    if now.template != before.template:
        made["template"] = {**now.template}
    return made


def drop_reasoning(messages: Iterable[Message]) -> list[Message]:
    """The same conversation without what was thought."""
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]
