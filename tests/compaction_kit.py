"""A conversation that is compacted, and what then stands in front of its last message, in the demo model's form."""

from __future__ import annotations

from typing import Any

from server.chat.compaction import ASKED

LONG = "Tell me a story. " * 20
SUMMARY = "Hello there, friend."
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "First " + LONG},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "Second " + LONG},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Third"},
]


def turn_of(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


HEAD = turn_of("user", ASKED) + turn_of("assistant", SUMMARY)
