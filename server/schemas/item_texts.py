"""The texts within items: what a client said, what the model said or thought, with its log-probabilities."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """What a client said."""

    text: str


class ItemTopLogprob(msgspec.Struct, frozen=True):
    """One alternative."""

    token: str
    bytes: list[int]
    logprob: float


class ItemLogprob(msgspec.Struct, frozen=True):
    """One token of the answer."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[ItemTopLogprob]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """What the model said. Without log-probabilities the list is empty."""

    text: str
    annotations: list[None] = []
    logprobs: list[ItemLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str
