"""Parses a reply with transformers' parser, by a declared response template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from server import surrogates
from server.chat.dialect_parser import new_call_id
from server.chat.reply_parser import ArgumentsPiece, CallStart, ContentPiece, Part, ReasoningPiece

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def check_response_template(template: object) -> ResponseTemplate:
    """A validated response template. Raises ValueError if transformers refuses it."""
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

    if not isinstance(template, (dict, ResponseTemplate)):
        raise ValueError("a response template is a JSON object")
    return load_response_template(template)


class DeclaredParser:
    """Parses with a response template. ``tools`` may be called; ``tail`` is the end of the prompt, as templates may
    write the beginning of a reply.
    """

    def __init__(self, template: ResponseTemplate, tools: Sequence[Mapping[str, Any]], tail: str) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        # Without its anchor the parser would take all of the tail for a part of the reply.
        prefix = tail if template.start_anchor_re.search(tail) else ""
        self._names = {tool["function"]["name"] for tool in tools}
        self._parser: ResponseParser | None = ResponseParser(template, prefix, tools=[dict(tool) for tool in tools])
        self._raw = ""  # of the region that is open, its opening mark left out
        self._calls = 0

    def feed(self, text: str) -> list[Part]:
        return self._read(text, final=False)

    def finish(self) -> list[Part]:
        return self._read("", final=True)

    def _read(self, text: str, final: bool) -> list[Part]:
        if self._parser is None:
            return [ContentPiece(text)] if text else []
        try:
            events = self._parser.finalize()[1] if final else self._parser.feed(text)
        except Exception:  # whatever a model writes, somebody's template cannot read: it is content from there on
            self._parser = None
            kept, self._raw = self._raw + text, ""
            return [ContentPiece(kept)] if kept else []
        return [part for event in events for part in self._parts(event)]

    def _parts(self, event: Mapping[str, Any]) -> list[Part]:
        kind, field = event["type"], event["field"]
        if kind == "region_chunk":
            if field == "content":
                return [ContentPiece(event["text"])]
            if field in THOUGHTS:
                return [ReasoningPiece(event["text"])]
            self._raw += event["text"]
        elif kind == "region_close" and field == "tool_calls":
            raw, self._raw = self._raw, ""
            return self._parse_call(event["value"]) or ([ContentPiece(raw)] if raw else [])
        return []

    def _parse_call(self, value: object) -> list[Part]:
        """The calls of a region; [] when one of them is none."""
        parts: list[Part] = []
        for item in value if isinstance(value, list) else [value]:
            function = item.get("function") if isinstance(item, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str) or name not in self._names:
                return []
            assert isinstance(function, dict)
            given = function.get("arguments", {})
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            text = surrogates.mend(surrogates.without(text))
            index = self._calls + len(parts) // 2
            parts += [CallStart(index, new_call_id(), name), ArgumentsPiece(index, text)]
        self._calls += len(parts) // 2
        return parts
