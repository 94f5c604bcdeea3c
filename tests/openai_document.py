"""OpenAI's document, as far as it concerns us: whether a body, or an event of a stream, is what it says.

The pinned copy is ``openai_schema/openai.json``, made by ``tools/openai_schema.py``; the variable OPENAI_SCHEMA names
another one, made from the published document itself. Objects are open in both, so our extensions (``cache``,
``session_id``, ``warmturn``) are no offence.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

PINNED = Path(__file__).parent / "openai_schema" / "openai.json"
STREAMS = {
    "/v1/chat/completions": "CreateChatCompletionStreamResponse",
    "/v1/completions": "CreateCompletionResponse",
    "/v1/responses": "ResponseStreamEvent",
}


@functools.cache
def document() -> dict[str, Any]:
    """The file as it is: ``source``, ``schemas`` by the document's names, and what these refer to."""
    made: dict[str, Any] = json.loads(Path(os.environ.get("OPENAI_SCHEMA", PINNED)).read_text(encoding="utf-8"))
    return made


@functools.cache
def validator(name: str) -> Draft202012Validator:
    whole = document()
    return Draft202012Validator({**whole["schemas"][name], "$defs": whole["$defs"]})


def faults(name: str, value: object) -> list[str]:
    """What of ``value`` is not as the document says under ``name``: a place and a sentence each."""
    found = []
    for error in validator(name).iter_errors(value):
        deepest = max(error.context, key=lambda e: len(e.absolute_path)) if error.context else error
        found.append(f"{deepest.json_path}: {deepest.message[:300]}")
    return found


def stream_faults(name: str, text: str, done: bool = True) -> list[str]:
    """The same of every event of a stream; one that fails ends with an error, which is as every error is. ``done``:
    the stream ends with ``[DONE]``."""
    found = []
    lines = [line for line in text.splitlines() if line and not line.startswith(":")]
    if strange := [line for line in lines if not line.startswith(("data: ", "event: "))]:
        found.append(f"no event: {strange[0][:100]}")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    failed = False
    for number, event in enumerate(data):
        if event == "[DONE]":
            if number != len(data) - 1 or not done:
                found.append("[DONE] where it should not be")
            continue
        value = json.loads(event)
        failed = "error" in value and "type" not in value
        found += [f"event {number}: {fault}" for fault in faults("ErrorResponse" if failed else name, value)]
    if done and not failed and (not data or data[-1] != "[DONE]"):
        found.append("no [DONE] at the end")
    return found
