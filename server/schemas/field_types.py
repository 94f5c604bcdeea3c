"""The types of request fields: limits, stop strings, biases, ids of tokens."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
INT32 = 2**31 - 1
INT64 = 2**63 - 1
TOKEN_ID = re.compile(r"(0|[1-9][0-9]{0,9})\Z")


def bias(value: object) -> object:
    """``logit_bias`` by token id; ids outside the vocabulary are refused later, when the model is known.
    Raises ValueError.
    """
    if not isinstance(value, dict):
        raise ValueError("must be an object with token ids as keys and numbers as values")
    biases = {}
    for key, amount in value.items():
        if not isinstance(key, (str, int)) or not TOKEN_ID.match(str(key)):
            raise ValueError("must have token ids as keys")
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not -100 <= amount <= 100:
            raise ValueError("must have numbers from -100 to 100 as values")
        biases[int(key)] = float(amount)
    return biases


def stops(value: object) -> object:
    """``stop`` as a list. Raises ValueError for too many, or for one of another length."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list):
        if len(texts) > MAX_STOPS:
            raise ValueError(f"can have at most {MAX_STOPS} strings")
        if not all(isinstance(text, str) and 1 <= len(text) <= MAX_STOP_CHARS for text in texts):
            raise ValueError(f"must have strings of 1 to {MAX_STOP_CHARS} characters")
    return texts


Limit = Annotated[  # -1: no limit, as llama.cpp and others have it
    Annotated[int, Field(ge=1, le=INT32)] | None, BeforeValidator(lambda value: None if value == -1 else value)
]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Stops = Annotated[
    list[str],
    BeforeValidator(stops),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                    "maxItems": MAX_STOPS,
                },
            ]
        }
    ),
]
Bias = Annotated[
    dict[int, float],
    BeforeValidator(bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
