"""Tools that a conversation gets after it has begun. A message adds them (its ``added_tools``), or a request has more
tools than the one before: their definitions are rendered as text where they come, so that the prompt before it stays as
it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from server.chat.call_form import CallForm
from server.chat.rendering import Rendering
from server.log.logged_message import LoggedMessage

ADDED = """From here on, these functions can be called too. Their names and the JSON schemas of their arguments:
<tools>
{tools}
</tools>"""
REMOVED = "From here on, these functions can no longer be called: {names}."
FORM = "A call is written like this:\n"


def callable_tools(front: Sequence[Mapping[str, Any]], messages: Iterable[LoggedMessage]) -> list[Mapping[str, Any]]:
    """The tools at the ``front`` of the prompt and those that ``messages`` add, as in OpenAI's requests, without those
    that they remove; of tools with the same name the last definition.
    """
    tools = {tool["function"]["name"]: tool for tool in front}
    for message in messages:
        tools.update({tool["function"]["name"]: tool for tool in message.added_tools})
        for name in message.removed_tools:
            tools.pop(name, None)
    return [*tools.values()]


def tools_in_front(rendering: Rendering, messages: Sequence[LoggedMessage]) -> tuple[Rendering, list[LoggedMessage]]:
    """A conversation with the tools that its messages add among those at the front of the prompt."""
    tools = callable_tools(rendering.tools, messages)
    return Rendering(tools, rendering.template), [
        structs.replace(message, added_tools=(), removed_tools=()) for message in messages
    ]


def placed_tools(
    messages: Sequence[LoggedMessage], tools: Sequence[Mapping[str, Any]]
) -> dict[int, list[Mapping[str, Any]]]:
    """Of the ``tools`` of a conversation, those that it got while it had others already, by the number of the message
    in which they are defined: the first one then that no assistant has written. Tools that were changed, left out or
    put into another order meanwhile are all at the front again.
    """
    known: list[Mapping[str, Any]] = []
    placed: dict[int, list[Mapping[str, Any]]] = {}
    for number, message in enumerate(messages):
        if message.tools is None:
            continue
        names = {tool["function"]["name"] for tool in known}
        new = [tool for tool in message.tools if tool["function"]["name"] not in names]
        at = next((i for i in range(number, len(messages)) if messages[i].role != "assistant"), None)
        if not known or at is None or known != [tool for tool in message.tools if tool["function"]["name"] in names]:
            known, placed = [*message.tools], {}
        elif new:
            known = [*known, *new]
            placed.setdefault(at, []).extend(new)
    found = {at: [tool for tool in new if tool in tools] for at, new in placed.items()}
    return {at: new for at, new in found.items() if new}


def tools_where_they_came(
    rendering: Rendering, messages: Sequence[LoggedMessage]
) -> tuple[Rendering, Sequence[LoggedMessage]]:
    """A conversation with the tools of ``placed_tools`` among those that its messages add; what a message before them
    has added already is not defined again.
    """
    placed = placed_tools(messages, rendering.tools)
    if not placed:
        return rendering, messages
    late = [tool for new in placed.values() for tool in new]
    made = [*messages]
    for at, new in placed.items():
        told = [tool for message in messages[: at + 1] for tool in message.added_tools]
        added = [dict(tool) for tool in new if tool not in told]
        made[at] = structs.replace(made[at], added_tools=(*made[at].added_tools, *added))
    return Rendering([tool for tool in rendering.tools if tool not in late], rendering.template), made


def write_added_tools(
    messages: Iterable[LoggedMessage], form: CallForm | None, told: bool, typed: bool = False
) -> Iterator[LoggedMessage]:
    """The messages with the definitions of the tools they add at the end of their content, and the names of those they
    remove. ``told``: the prompt says how calls are written already; otherwise the first definitions say it, if ``form``
    is known. ``typed``: see ``describe_tools``.
    """
    for message in messages:
        if message.added_tools:
            text = ADDED.format(tools=describe_tools(message.added_tools, typed))
            if not told and form is not None:
                text += f"\n{FORM}{example_call(form)}"
            told = True
            message = structs.replace(append_text(message, text), added_tools=())
        if message.removed_tools:
            text = REMOVED.format(names=", ".join(message.removed_tools))
            message = structs.replace(append_text(message, text), removed_tools=())
        yield message


def append_text(message: LoggedMessage, text: str) -> LoggedMessage:
    return structs.replace(message, content=f"{message.content}\n\n{text}" if message.content else text)


def describe_tools(tools: Iterable[Mapping[str, Any]], typed: bool = False) -> str:
    """The definitions, one JSON object per line: functions, or with ``typed`` objects of a type and a function."""
    return "\n".join(json.dumps(tool if typed else tool["function"], ensure_ascii=False) for tool in tools)


def example_call(form: CallForm) -> str:
    """What a call looks like in ``form``, with names in angle brackets for what differs."""
    arguments = "<arguments as a JSON object>"
    if form.parameter is not None:
        arguments = f"{form.parameter.opening}<parameter>{form.parameter.middle}<value>{form.parameter.closing}"
    return f"{form.start}{form.opening}<name>{form.middle}{arguments}{form.closing}{form.end}".strip()
