"""``Dialect``: how a model writes reasoning and tool calls, and how its chat template takes them.

Measured from the template (``server.chat.dialect_probe``), or declared by a response template; models are not
identified by name. If a template does not support tools, they are described in the system message, and calls and
results are written as text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import structs

from server import surrogates
from server.chat.call_form import CallForm
from server.chat.call_rules import NO_CALLS, CallRules
from server.chat.declared_parser import DeclaredParser
from server.chat.dialect_parser import DialectParser, ReasoningMarks
from server.chat.late_tools import describe_tools, write_added_tools
from server.chat.rendering import Rendering
from server.chat.reply_parser import PlainParser, ReplyParser
from server.chat.system_places import ANYWHERE, SystemPlaces, place_messages
from server.chat.template_content import append, surround, template_content
from server.log.logged_message import LoggedCall, LoggedMessage

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

TemplateMessage = dict[str, Any]  # a message as chat templates take it

IN_WORDS = CallForm("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")
BRIEFING = """You may call functions. These are their names and the JSON schemas of their arguments:
<tools>
{tools}
</tools>
For each call write its name and arguments as JSON within <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>
What a call gives back comes within <tool_response></tool_response>."""
ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Dialect:
    """``form``: how calls are written; ``thought``: the marks around reasoning; ``declared`` reads replies instead.
    ``native``: the template itself takes tools, calls and results; ``text_arguments``: it wants the arguments of
    calls as text, ``short_ids``: their ids as nine letters; ``behind``: what it writes behind the last value of the
    last call of a message. ``thought_key``: the field of a message that it reads reasoning from;
    ``thought_inline``: it takes reasoning within the content; ``thought_end``: what it writes between reasoning and the
    answer (None: unknown, it writes no reasoning). ``takes_system``: it takes system messages. ``special``: the marks
    are special tokens, which a reply's text has to show. ``places``: where it takes system messages;
    ``reasoning_switch``: variables of the template with which it keeps the reasoning of older replies.
    ``typed_tools``: it writes a tool as a JSON object of a type and a function; ``tools_lead``: in front of all
    messages.
    """

    form: CallForm | None = IN_WORDS
    thought: ReasoningMarks | None = None
    declared: ResponseTemplate | None = None
    native: bool = False
    text_arguments: bool = False
    short_ids: bool = False
    behind: str = ""
    thought_key: str | None = None
    thought_inline: bool = False
    thought_end: str | None = None
    takes_system: bool = True
    special: bool = False
    places: SystemPlaces = ANYWHERE
    reasoning_switch: Mapping[str, bool] = field(default_factory=dict)
    typed_tools: bool = False
    tools_lead: bool = True

    def make_parser(self, tail: str, calls: CallRules = NO_CALLS, *, reasons: bool = True) -> ReplyParser:
        """A parser for one reply to a prompt that ends with ``tail``. ``reasons`` false: the reply begins with content,
        as when it continues content or a grammar constrains it.
        """
        if self.declared is not None:
            return DeclaredParser(self.declared, calls.tools, tail)
        thought = self.thought if reasons else None
        if thought is None and not (calls.tools and self.form):
            return PlainParser()
        return DialectParser(
            self.form, thought, calls.schemas, opened=thought is not None and self.opens_reasoning(tail)
        )

    def opens_reasoning(self, tail: str) -> bool:
        """Whether a prompt that ends with ``tail`` has already begun the reply's reasoning."""
        return self.thought is not None and tail.rstrip().endswith(self.thought.opening)

    # --- messages -----------------------------------------------------------------------------------------

    def to_template_messages(self, messages: Sequence[LoggedMessage], rendering: Rendering) -> list[TemplateMessage]:
        """Logged messages in the form that the template takes."""
        whole, _ = place_messages(
            [*write_added_tools(messages, self.form, told=bool(rendering.tools), typed=self.typed_tools)], self.places
        )
        made = [self._to_template_message(message) for message in whole]
        if self.native:
            return made
        if rendering.tools:
            made = self._add_briefing(made, write_briefing(rendering.tools))
        return describe_calls(made)

    def ending(self, reply: LoggedMessage, sentinel: str) -> tuple[LoggedMessage, str]:
        """A logged reply with ``sentinel`` at its end, and the part of it that the template writes after that."""
        if reply.tool_calls and self.native:
            *calls, last = reply.tool_calls
            function = structs.replace(last.function, arguments=json.dumps({"last": sentinel}))
            last = structs.replace(last, id=PROBE_ID, function=function)
            return structs.replace(reply, tool_calls=(*calls, last)), self.behind
        return structs.replace(reply, tool_calls=(), content=sentinel), ""

    def _to_template_message(self, message: LoggedMessage) -> TemplateMessage:
        made: TemplateMessage = {"role": message.role, "content": template_content(message)}
        if message.name:
            made["name"] = message.name
        if message.tool_calls:
            made["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.tool_call_id:
            made["tool_call_id"] = shorten_id(message.tool_call_id) if self.short_ids else message.tool_call_id
        thought = message.reasoning_content
        if thought and self.thought_key is not None:
            made[self.thought_key] = thought
        elif thought and self.thought is not None and self.thought_inline:
            made["content"] = f"{self.thought.opening}\n{thought}\n{self.thought.closing}\n\n{made['content']}"
        return made

    def _call(self, call: LoggedCall) -> dict[str, Any]:
        name, arguments = call.function.name, call.function.arguments
        return {
            "id": shorten_id(call.id) if self.short_ids else call.id,
            "type": "function",
            "function": {
                "name": name,
                "arguments": parse_arguments(arguments) if self.native and not self.text_arguments else arguments,
            },
        }

    def _add_briefing(self, messages: list[TemplateMessage], text: str) -> list[TemplateMessage]:
        """With ``text`` in the system message, or in front of the first other one where there can be none."""
        first = messages[0] if messages else {"role": "", "content": ""}
        if first["role"] in ("system", "developer"):
            return [{**first, "content": surround("", first["content"], f"\n\n{text}")}, *messages[1:]]
        if self.takes_system or first["role"] != "user":
            return [{"role": "system", "content": text}, *messages]
        return [{**first, "content": surround(f"{text}\n\n", first["content"], "")}, *messages[1:]]


PROBE_ID = "callprobe"


def write_briefing(tools: Sequence[Mapping[str, Any]]) -> str:
    """The description of tools for a model whose template does not support them."""
    return BRIEFING.format(tools=describe_tools(tools))


def describe_calls(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Calls and their results as text, for a template that supports neither. Successive results become one message, as
    many templates require users and assistants to alternate.
    """
    made: list[TemplateMessage] = []
    for message in messages:
        if message["role"] == "tool":
            result = surround("<tool_response>\n", message["content"], "\n</tool_response>")
            if made and made[-1].get("results"):
                made[-1] = {**made[-1], "content": append(made[-1]["content"], "\n", result)}
            else:
                made.append({"role": "user", "content": result, "results": True})
            continue
        calls = [write_call(call) for call in message.get("tool_calls", ())]
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls:
            plain["content"] = "\n".join(([message["content"]] if message["content"] else []) + calls)
        made.append(plain)
    return [{key: value for key, value in message.items() if key != "results"} for message in made]


def write_call(call: Mapping[str, Any]) -> str:
    """A call as text, in the form that the briefing describes."""
    function = call["function"]
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"] or "{}"
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def parse_arguments(arguments: str) -> Any:
    """Arguments as an object for the template; the text itself if it is not a JSON object."""
    try:
        value = surrogates.read(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def shorten_id(id: str) -> str:
    """An id of nine letters and digits, the same for equal ids; an id of that form is returned as it is."""
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    number = int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest())
    return "".join(ID_LETTERS[number // 36**place % 36] for place in range(9))
