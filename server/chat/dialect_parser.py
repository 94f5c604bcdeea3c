"""Parses a reply by the marks of a measured dialect: splits streamed text into reasoning, content and tool calls.

The result depends on the text only, not on how it was split into deltas. A call is reported when its name is certain to
be a tool's, and then its arguments as they come; until then its text is held back, and text that turns out not to be a
call becomes content unchanged. Whitespace next to a mark belongs to the mark.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server import surrogates
from server.chat.call_form import CallForm, ParameterForm, parse_calls
from server.chat.json_scan import JsonScan
from server.chat.reply_parser import ArgumentsPiece, CallStart, ContentPiece, Part, ReasoningPiece
from server.chat.typed import parse_typed

MAX_KEY = 256  # characters of a parameter's name


@dataclass(frozen=True)
class ReasoningMarks:
    """The marks around reasoning, without space."""

    opening: str
    closing: str


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class DialectParser:
    """Parses with a dialect's marks. ``form`` is the call form and ``tools`` are the parameters of the tools that may
    be called (empty: nothing is a call); ``opened``: the prompt ends within the reasoning.
    """

    def __init__(
        self,
        form: CallForm | None,
        thought: ReasoningMarks | None,
        tools: Mapping[str, Mapping[str, Any]],
        opened: bool = False,
    ) -> None:
        self._form = form if tools else None
        self._thought = thought
        self._tools = tools
        self._text = ""  # what is not told yet
        self._parts: list[Part] = []
        self._final = False
        self._calls = 0
        self._scan: JsonScan | None = None
        self._head: Any = None  # the pattern of the call that begins
        self._lead = 0  # characters in front of it
        self._name = ""  # of the call that is read
        self._written = 0  # parameters of it
        self._sought = 0  # up to where its next mark is not
        self._closed = 0  # marks behind it
        self._space = False  # whether space is dropped until something else comes
        self._state: Callable[[], bool] = self._parse_beginning
        if opened:
            self._begin_reasoning()

    def feed(self, text: str) -> list[Part]:
        self._text += text
        return self._read()

    def finish(self) -> list[Part]:
        self._final = True
        return self._read()

    def _read(self) -> list[Part]:
        """Let the states take what they can: each says whether it got anywhere."""
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    # --- reasoning ----------------------------------------------------------------------------------------

    def _parse_beginning(self) -> bool:
        """Does the reply begin with reasoning?"""
        if self._thought is not None:
            at = self._behind_space(0)
            found = self._has(self._thought.opening, at)
            if found is None:
                return False
            if found:
                self._drop(at + len(self._thought.opening))
                self._begin_reasoning()
                return True
        self._state = self._first_content
        return True

    def _begin_reasoning(self) -> None:
        self._state = self._first_thought

    def _first_thought(self) -> bool:
        if not self._skip_space():
            return False
        self._state = self._parse_reasoning
        return True

    def _parse_reasoning(self) -> bool:
        assert self._thought is not None
        found, told = self._search(self._thought.closing)
        self._tell(ReasoningPiece, told)
        if not found:
            return False
        self._drop(self._behind_space(0) + len(self._thought.closing))
        self._space = True
        self._state = self._first_content
        return True

    # --- content ------------------------------------------------------------------------------------------

    def _first_content(self) -> bool:
        """The beginning of the answer, where calls without a mark of their own may stand."""
        if self._space and not self._skip_space():
            return False
        self._state = self._content
        if self._form is None or self._form.mark:
            return True
        at = self._behind_space(0)
        if at == len(self._text):
            self._state = self._first_content
            return self._release()
        if self._text[at] in "{[":
            self._begin_call(self._form.head)
        return True

    def _content(self) -> bool:
        if self._form is None or not self._form.mark:
            return self._release()
        found, told = self._search(self._form.mark)
        self._tell(ContentPiece, told)
        if found:
            self._begin_call(self._form.head)
        return found

    def _release(self) -> bool:
        """All that there is, is content: at once where nothing may be a call, else at the end."""
        if self._state == self._content or self._final:
            self._tell(ContentPiece, len(self._text))
        return False

    # --- calls --------------------------------------------------------------------------------------------

    def _begin_call(self, head: Any, lead: int = 0) -> None:
        """A call may begin behind ``lead`` characters and space."""
        self._head = head
        self._lead = lead
        self._scan = None
        self._state = self._parse_opening

    def _parse_opening(self) -> bool:
        """From the mark to where the arguments begin."""
        assert self._form is not None
        at = self._behind_space(self._lead)
        found = self._head.match(self._text, at, partial=not self._final)
        if found is not None and found.partial:
            return False
        if found is None:
            self._state = self._object if self._form.keys is not None else self._no_call
            return True
        if found["name"] not in self._tools:
            self._state = self._no_call
            return True
        self._name = found["name"]
        self._call(self._name)
        self._drop(found.end())
        self._scan = JsonScan()
        self._written = 0
        self._state = self._arguments if self._form.parameter is None else self._parameters
        return True

    def _no_call(self) -> bool:
        """It was the mark only, or without one just an object."""
        assert self._form is not None
        mark = self._form.mark if self._head is self._form.head else ""
        self._tell(ContentPiece, self._behind_space(self._lead) + max(1, len(mark)))
        self._state = self._content
        return True

    def _object(self) -> bool:
        """Calls as objects whose fields come in another order: read when they are whole."""
        assert self._form is not None
        assert self._form.keys is not None
        mark = self._form.mark if self._head is self._form.head else ""
        start = self._behind_space(self._behind_space(self._lead) + len(mark))
        if start == len(self._text) and not self._final:
            return False
        if self._text[start : start + 1] not in ("{", "["):
            return self._no_call()
        if self._scan is None:
            self._scan = JsonScan(start)
        end = self._scan.close(self._text)
        if end is None:
            return self._release()
        calls = parse_calls(self._text[start:end], self._form.keys, self._tools)
        if calls is None:
            self._tell(ContentPiece, end)
            self._state = self._content
            return True
        for name, arguments in calls:
            self._call(name)
            self._parts.append(ArgumentsPiece(self._calls - 1, arguments))
        self._drop(end)
        self._state = self._parse_closing
        return True

    def _arguments(self) -> bool:
        """One JSON object, told as it comes."""
        assert self._form is not None
        assert self._scan is not None
        end = self._scan.close(self._text)
        told = len(self._text) if end is None else end
        if end is None and not self._final:
            told = surrogates.settled_length(self._text)
        self._argue(surrogates.mend(self._text[:told]))
        self._drop(told)
        self._scan.at -= told
        if end is None:
            return False
        self._scan = None
        self._state = self._rest if self._form.keys is not None else self._parse_closing
        return True

    def _rest(self) -> bool:
        """What else the object of a call holds, an id perhaps."""
        at = self._behind_space(0)
        following = self._text[at : at + 1]
        if not following and not self._final:
            return False
        if following == ",":
            self._scan = self._scan or JsonScan(at, depth=1)
            end = self._scan.close(self._text)
            if end is None:
                return self._release()
            self._drop(end)
        elif following == "}":
            self._drop(at + 1)
        self._state = self._parse_closing
        return True

    def _parameters(self) -> bool:
        """Arguments one by one, each told when it is whole."""
        assert self._form is not None
        assert self._form.parameter is not None
        form = self._form.parameter
        at = self._behind_space(0)
        found = self._has(form.opening.strip(), at)
        if found is None or (self._final and at == len(self._text)):
            return False  # where the reply ends here, so do the arguments: unfinished
        if not found:
            self._argue("}" if self._written else "{}")
            self._state = self._parse_closing
            return True
        begins = at + len(form.opening.strip())
        middle = self._text.find(form.middle.strip(), begins)
        if middle - begins > MAX_KEY or (middle < 0 and (self._final or len(self._text) - begins > 2 * MAX_KEY)):
            self._tell(ContentPiece, begins)
            self._state = self._content
            return True
        return middle >= 0 and self._parameter(form, self._text[begins:middle].strip(), middle)

    def _parameter(self, form: ParameterForm, key: str, middle: int) -> bool:
        """The value of parameter ``key``, whose ``middle`` begins there."""
        begins = middle + len(form.middle.strip())
        closing = form.closing.strip()
        end = self._text.find(closing, max(begins, self._sought))
        if end < 0 and not self._final:
            self._sought = max(0, len(self._text) - len(closing))
            return False
        value = self._text[begins : end if end >= 0 else len(self._text)]
        value = value.removeprefix("\n") if form.middle.endswith("\n") else value
        self._argue(("," if self._written else "{") + json.dumps(key, ensure_ascii=False) + ":")
        self._written += 1
        self._sought = 0
        if end < 0:  # cut by the end of the reply
            self._argue(json.dumps(value, ensure_ascii=False)[:-1])
            self._drop(len(self._text))
            return False
        value = value.removesuffix("\n") if form.closing.startswith("\n") else value
        schema = self._tools[self._name].get("properties", {}).get(key)
        self._argue(json.dumps(parse_typed(value, schema), ensure_ascii=False))
        self._drop(end + len(closing))
        return True

    def _parse_closing(self) -> bool:
        """The marks behind a call; one that the model forgot is not missed."""
        assert self._form is not None
        for mark in self._form.closings[self._closed :]:
            at = self._behind_space(0)
            found = self._has(mark, at)
            if found is None:
                return False
            self._closed += 1
            if found:
                self._drop(at + len(mark))
        self._closed = 0
        self._state = self._between
        return True

    def _between(self) -> bool:
        """Behind a call: another one, the end of all calls, or content."""
        assert self._form is not None
        at, separator, end = self._behind_space(0), self._form.separator.strip(), self._form.end.strip()
        ends = bool(end) and self._has(end, at)
        if ends is None:
            return False
        if ends:
            self._drop(at + len(end))
        elif self._form.again:
            behind = self._has(separator, at)
            lead = self._behind_space(at + len(separator)) if behind else at
            found = behind and self._has(self._form.again, lead)
            if found is None:
                return False
            if found:
                self._begin_call(self._form.next_head, lead)
                return True
        self._state = self._more_content
        return True

    def _more_content(self) -> bool:
        """Content behind calls."""
        if not self._skip_space():
            return False
        self._state = self._content
        return True

    # --- text ---------------------------------------------------------------------------------------------

    def _tell(self, kind: type[ContentPiece] | type[ReasoningPiece], length: int) -> None:
        """The first ``length`` characters."""
        if length:
            self._parts.append(kind(self._text[:length]))
            self._drop(length)

    def _call(self, name: str) -> None:
        self._parts.append(CallStart(self._calls, new_call_id(), name))
        self._calls += 1

    def _argue(self, text: str) -> None:
        if text:
            self._parts.append(ArgumentsPiece(self._calls - 1, text))

    def _drop(self, length: int) -> None:
        self._text = self._text[length:]
        self._lead = 0

    def _behind_space(self, at: int) -> int:
        """Where the next thing but space is, or will be."""
        return len(self._text) - len(self._text[at:].lstrip())

    def _skip_space(self) -> bool:
        """Drop space; whether that is certain to be all of it."""
        self._drop(self._behind_space(0))
        return bool(self._text) or self._final

    def _has(self, mark: str, at: int) -> bool | None:
        """Whether ``mark`` is at ``at``; None: that cannot be told yet."""
        if self._text.startswith(mark, at):
            return True
        return None if not self._final and mark.startswith(self._text[at:]) else False

    def _search(self, mark: str) -> tuple[bool, int]:
        """Whether ``mark`` is there; how many characters in front neither may become it nor are space next to it."""
        found = self._text.find(mark)
        if found < 0 and self._final:
            return False, len(self._text)
        end = found if found >= 0 else len(self._text) - begun_length(self._text, mark)
        return found >= 0, len(self._text[:end].rstrip())


def begun_length(text: str, mark: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``mark``."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
