"""Tool calls in chat completions, whole and as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from pydantic_core import from_json

from server import surrogates
from server.chat.partial_reply import ParsedCall
from server.chat.reply_parser import ArgumentsPiece, CallStart, Part
from server.schemas import objects
from server.schemas.custom_input import InputStream, input_of


def tool_call(call: ParsedCall, custom: bool) -> objects.ToolCall:
    """A whole call; ``custom``: of a custom tool, which gets text."""
    if custom:
        return objects.ToolCall(
            call.id, custom=objects.CalledCustom(call.name, input_of(call.arguments)), type="custom"
        )
    return objects.ToolCall(call.id, objects.CalledFunction(call.name, call.arguments))


def arguments_object(text: str) -> dict[str, Any]:
    """A call's arguments as an object; those of a reply that was cut off may be incomplete."""
    try:
        value = from_json(surrogates.mend(text), allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class CallDeltas:
    """Makes the deltas of the calls of one reply. The arguments of a custom tool's call are read while they come;
    where only the whole arguments tell its input, that comes when the next call begins or the reply ends.
    """

    def __init__(self, custom: Set[str]) -> None:
        """``custom``: the names of custom tools."""
        self._custom = custom
        self._index = -1  # of the custom call that is open
        self._input = InputStream()
        self._arguments = ""

    def take(self, parts: Sequence[Part]) -> list[objects.ToolCallDelta]:
        """The deltas for parsed parts, one per call, and the rest of the custom call before a new one."""
        deltas: list[objects.ToolCallDelta] = []
        starts = {part.index: part for part in parts if isinstance(part, CallStart)}
        texts = dict.fromkeys(starts, "")
        for part in parts:
            if isinstance(part, ArgumentsPiece):
                texts[part.index] = texts.get(part.index, "") + part.text
        for index, text in texts.items():
            start = starts.get(index)
            if start is not None:
                deltas += self.finish()
                if start.name in self._custom:
                    self._index, self._input, self._arguments = index, InputStream(), ""
            if index == self._index:
                deltas += self._custom_delta(index, start, text)
            else:
                deltas.append(function_delta(index, start, text))
        return deltas

    def finish(self) -> list[objects.ToolCallDelta]:
        """The open custom call's input, if nothing of it could be told before."""
        index, self._index = self._index, -1
        if index < 0 or self._input.begun or not (text := input_of(self._arguments)):
            return []
        return [objects.ToolCallDelta(index, custom=objects.CustomDelta(input=text))]

    def _custom_delta(self, index: int, start: CallStart | None, arguments: str) -> list[objects.ToolCallDelta]:
        """What more arguments add to the open custom call; ``start`` is given where it begins."""
        self._arguments += arguments
        text = self._input.feed(arguments)
        if start is not None:
            custom = objects.CustomDelta(start.name, text)
            return [objects.ToolCallDelta(index, custom=custom, id=start.id, type="custom")]
        return [objects.ToolCallDelta(index, custom=objects.CustomDelta(input=text))] if text else []


def function_delta(index: int, start: CallStart | None, arguments: str) -> objects.ToolCallDelta:
    """More of a function's call; ``start`` is given where it begins."""
    if start is None:
        return objects.ToolCallDelta(index, objects.FunctionDelta(arguments=arguments))
    return objects.ToolCallDelta(index, objects.FunctionDelta(start.name, arguments), id=start.id, type="function")
