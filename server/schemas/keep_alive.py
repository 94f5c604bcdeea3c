"""``keep_alive`` of Ollama's API: for how long a model, and here the KV of a conversation, is to stay where it is."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

LONGEST = 86_400  # seconds; a longer time counts as this one
PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s|us|µs|ns)")
WHOLE = re.compile(r"-?(?:\d{1,12}(?:\.\d{1,9})?(?:h|ms|m|s|us|µs|ns)){1,6}|-?\d{1,12}")
SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def readable(value: str | int | float) -> str | int | float:
    """The value, if it is a time. Raises ValueError."""
    if isinstance(value, str) and WHOLE.fullmatch(value.strip()) is None:
        raise ValueError('must be a number of seconds, or a time such as "10m" or "1h30m"')
    return value


KeepAlive = Annotated[str | int | float, AfterValidator(readable)]


def kept_seconds(value: KeepAlive | None) -> int:
    """The seconds of it, ``LONGEST`` at most: so too below 0, which means for ever. 0 for None."""
    if value is None:
        return 0
    if isinstance(value, str):
        text = value.strip()
        sign = -1.0 if text.startswith("-") else 1.0
        parts = [float(number) * SECONDS[unit] for number, unit in PART.findall(text)]
        value = sign * sum(parts) if parts else float(text)
    return LONGEST if value < 0 else int(min(value, LONGEST))
