"""Converts text to the JSON value that a parameter's schema asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server import surrogates

KINDS: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
WORDS = {"True": True, "False": False, "None": None}


def parse_typed(text: str, schema: object) -> Any:
    """``text`` as a value of a type that ``schema`` (of one parameter) allows; the text itself if no type fits."""
    kinds = kinds_of(schema)
    if not kinds:
        return text
    try:
        value = WORDS[text.strip()] if text.strip() in WORDS else surrogates.read(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return int(value)
    fits = any(fits_kind(value, kind) for kind in kinds if kind in KINDS)
    return value if fits else text


def fits_kind(value: object, kind: str) -> bool:
    """Whether a value has a JSON type; booleans are not numbers."""
    return isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))


def kinds_of(schema: object) -> set[str]:
    """The types that a schema allows."""
    if not isinstance(schema, dict):
        return set()
    said = schema.get("type", [])
    kinds = {said} if isinstance(said, str) else {kind for kind in said if isinstance(kind, str)}
    for branch in ("anyOf", "oneOf"):
        for choice in schema.get(branch) or []:
            kinds |= kinds_of(choice)
    return kinds
