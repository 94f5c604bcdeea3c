"""Parses the JSON object in a body, with limits on size and depth."""

from __future__ import annotations

from typing import Any

import msgspec

from server.errors import NAME, ApiError, bad_request

MAX_DEPTH = 64
MAX_PARTS = 100_000
MAX_INTEGER = 1 << 63
LARGE_BYTES = 8 * 1024 * 1024  # a larger body is mostly text: files, pictures
MAX_MARKS = 4_000_000  # commas and opening brackets of a larger body, in its texts too


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object in a body. Refuses bad UTF-8, NaN, infinities, lone surrogates and overlong integers; and a large
    body of many values before they take many times its size in memory.
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
    except msgspec.DecodeError:
        if not data:
            raise bad_request(
                "The body is empty: it must be a JSON object, at least {}.", code="invalid_json"
            ) from None
        raise bad_request("The body is not valid JSON.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    check_values(value)
    return value


def check_values(value: object) -> None:
    """Check iteratively that there are at most MAX_DEPTH levels, at most MAX_PARTS objects, lists and names (all are
    validated on the event loop), and only integers of 64 bits.
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
    """400."""
    return bad_request(f"The body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")
