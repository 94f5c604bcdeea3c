"""Measures what of a conversation a chat template moves, drops or refuses: system messages that are not in front, user
messages in a row, and the reasoning of earlier replies; and how it writes tools. Runs once, after the dialect is
measured; takes some 10 ms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from server.chat.dialect import PROBE_ID, Dialect, TemplateMessage
from server.chat.dialect_probe import (
    ARGUMENTS,
    FUNCTION,
    LONG_ID,
    QUESTION,
    RESULT,
    SAID,
    THOUGHT,
    USER,
    ProbedTemplate,
)
from server.chat.system_places import ANYWHERE, SystemPlaces

FIRST, SECOND, AGAIN = "zqsystem", "zqreminder", "zqagain"
REPLY: TemplateMessage = {"role": "assistant", "content": SAID}
USER_AGAIN: TemplateMessage = {"role": "user", "content": AGAIN}


def measure_places(template: ProbedTemplate, dialect: Dialect) -> SystemPlaces:
    """Where the template takes system messages, and which user messages in a row."""
    if not shows(template, [USER]):
        return ANYWHERE
    front, other = system(FIRST), system(SECOND)
    leading = shows(template, [front, USER])
    inside = all(
        shows(template, [*lead, *messages])
        for lead in ([], [front] if leading else [])
        for messages in ([USER, other], [USER, other, REPLY, USER_AGAIN], [USER, REPLY, other, USER_AGAIN])
    )
    places = SystemPlaces(
        leading,
        several=leading and shows(template, [front, other, USER]),
        only=not leading or shows(template, [front]),
        inside=inside,
        user_after_user=shows(template, [USER, USER_AGAIN]),
    )
    if not dialect.native:  # results are user messages then
        return replace(places, user_after_tool=places.user_after_user, reminder_after_tool=places.user_after_user)
    called = [USER, *call_and_result(dialect)]
    before = template.render(*called, tools=True) or ""
    after = template.render(*called, USER_AGAIN, tools=True) or ""
    return replace(
        places,
        inside=inside and shows(template, [*called, other], tools=True),
        user_after_tool=shows(template, [*called, USER_AGAIN], tools=True),
        reminder_after_tool=after.startswith(before.rstrip()),
    )


def measure_reasoning_switch(template: ProbedTemplate, dialect: Dialect, variables: Iterable[str]) -> dict[str, bool]:
    """The boolean variable of the template, with its value, that keeps the reasoning of replies before the last user
    message; {} if there is none, or it is kept anyway.
    """
    key = dialect.thought_key
    thinks: TemplateMessage = {**REPLY} if key is None else {**REPLY, key: THOUGHT}
    if key is None:
        if dialect.thought is None or not dialect.thought_inline:
            return {}
        marks = dialect.thought
        thinks["content"] = f"{marks.opening}\n{THOUGHT}\n{marks.closing}\n\n{SAID}"
    messages = [USER, thinks, USER_AGAIN]
    plain = render_prompt(template, messages, {})
    if plain is None or THOUGHT in plain:
        return {}
    for name in sorted(variables):
        for value in (True, False):
            kept = render_prompt(template, messages, {name: value}) or ""
            # Variables with another meaning may show it too, but change the front or the beginning of the reply.
            same_front = kept.partition(QUESTION)[0] == plain.partition(QUESTION)[0]
            same_end = kept.partition(AGAIN)[2] == plain.partition(AGAIN)[2]
            if same_front and same_end and are_in_order(kept, [THOUGHT, SAID, AGAIN]):
                return {name: value}
    return {}


def measure_typed_tools(template: ProbedTemplate) -> bool:
    """Whether the template writes a tool as it is given: as a JSON object of its type and its function."""
    listed = template.render(USER, tools=True) or ""
    return re.search(rf'"type":\s*"function",\s*"function":\s*\{{\s*"name":\s*"{FUNCTION}"', listed) is not None


def measure_leading_tools(template: ProbedTemplate) -> bool:
    """Whether the template writes tools in front of the conversation, not beside its newest message."""
    text = template.render(USER, REPLY, USER_AGAIN, tools=True) or ""
    return FUNCTION in text.partition(QUESTION)[0]


def render_prompt(
    template: ProbedTemplate, messages: Sequence[TemplateMessage], variables: Mapping[str, bool]
) -> str | None:
    """The prompt for a reply to ``messages``; None if the template refuses it."""
    try:
        return template.apply(messages, [], True, variables)
    except template.refused:
        return None


def shows(template: ProbedTemplate, messages: Sequence[TemplateMessage], *, tools: bool = False) -> bool:
    """Whether the template takes the messages, and writes the texts of all, in their order."""
    text = template.render(*messages, tools=tools)
    return text is not None and are_in_order(text, [message["content"] for message in messages])


def are_in_order(text: str, words: Sequence[str]) -> bool:
    """Whether ``words`` occur in ``text``, one behind the other."""
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return False
        at += len(word)
    return True


def system(text: str) -> TemplateMessage:
    return {"role": "system", "content": text}


def call_and_result(dialect: Dialect) -> list[TemplateMessage]:
    """A reply with reasoning that calls the probed function, and the result."""
    id = PROBE_ID if dialect.short_ids else LONG_ID
    arguments = json.dumps(ARGUMENTS) if dialect.text_arguments else ARGUMENTS
    call = {"id": id, "type": "function", "function": {"name": FUNCTION, "arguments": arguments}}
    calls: TemplateMessage = {"role": "assistant", "content": "", "tool_calls": [call]}
    if dialect.thought_key is not None:
        calls[dialect.thought_key] = THOUGHT
    return [calls, {"role": "tool", "tool_call_id": id, "content": RESULT}]
