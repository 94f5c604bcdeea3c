"""Parses the JSON object in a body, with limits on size and depth."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from server import surrogates
from server.errors import NAME, ApiError, bad_request, dotted_path

MAX_DEPTH = 64
MAX_PARTS = 100_000
MAX_INTEGER = 1 << 63
LARGE_BYTES = 8 * 1024 * 1024  # a larger body is mostly text: files, pictures
PLACE = re.compile(r"\(byte (\d+)\)")  # in msgspec's messages
MAX_MARKS = 4_000_000  # commas and opening brackets of a larger body, in its texts too


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object in a body. Refuses bad UTF-8, NaN, infinities, lone surrogates and overlong integers; and a large
    body of many values before they take many times its size in memory. Raises a 400.
    """
    if len(data) > LARGE_BYTES and sum(map(data.count, (b",", b"[", b"{"))) > MAX_MARKS:
        raise bad_request(f"The body has more than {MAX_MARKS} commas and brackets.", code="invalid_json")
    try:
        value = msgspec.json.decode(data)
    except UnicodeDecodeError:
        raise bad_request("The body is not valid UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise too_deep() from None
    except msgspec.ValidationError:
        raise bad_request("The body has a number that is out of range.", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise malformed_error(data, str(error)) from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    check_values(value)
    return value


def malformed_error(data: bytes, found: str) -> ApiError:
    """400 for a body that was not read: where it is no JSON (``found`` is what the decoder says), or which text of it
    has half of a surrogate pair.
    """
    if not data:
        return bad_request("The body is empty: it must be a JSON object, at least {}.", code="invalid_json")
    text = data.decode(errors="replace")
    if surrogates.mend(text) != text:
        try:
            value = json.loads(text)  # it reads the halves
        except (ValueError, RecursionError):
            pass
        else:
            check_values(value)
            param = dotted_path(path_of_half(value))
            message = f"{param or 'The body'} has half of a surrogate pair, which is not valid text."
            return bad_request(message, param, "invalid_value")
    place = PLACE.search(found)
    where = f": see byte {place[1]}" if place else ", it ends too early" if "truncated" in found else ""
    return bad_request(f"The body is not valid JSON{where}.", code="invalid_json")


def path_of_half(value: object) -> list[str | int]:
    """Where the first text with half of a surrogate pair is; for a name, where its object is."""
    left: list[tuple[list[str | int], object]] = [([], value)]
    while left:
        path, item = left.pop()
        inside = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        texts = [item, *item] if isinstance(item, dict) else [item]
        if any(isinstance(text, str) and surrogates.without(text) != text for text in texts):
            return path
        left += [([*path, name], inner) for name, inner in inside][::-1]
    return []


def check_values(value: object) -> None:
    """Check iteratively that there are at most MAX_DEPTH levels, at most MAX_PARTS objects, lists and names (all are
    validated on the event loop), and only integers of 64 bits. Raises a 400.
    """
    level, parts = [value], 0
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        parts += len(level) + sum(len(container) for container in level if isinstance(container, dict))
        if parts > MAX_PARTS:
            raise too_many(value)
        for container in level:
            for item in container.values() if isinstance(container, dict) else container:  # type: ignore[attr-defined]
                if isinstance(item, (dict, list)):
                    below.append(item)
                elif isinstance(item, int) and not -MAX_INTEGER <= item < MAX_INTEGER:
                    raise bad_request("The body has a number that is out of range.", code="invalid_json")
        if not below:
            return
        level = below
    raise too_deep()


def too_many(body: object) -> ApiError:
    """400, which names the longest of the body's fields."""
    assert isinstance(body, dict)
    holding = [name for name, held in body.items() if isinstance(held, (dict, list))]
    longest = max(holding, key=lambda name: len(body[name]), default="")
    message = f"The body holds more than {MAX_PARTS} objects, lists and names."
    return bad_request(message, longest if NAME.match(longest) else None, "invalid_json")


def too_deep() -> ApiError:
    return bad_request(f"The body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")
