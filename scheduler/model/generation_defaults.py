"""Default sampling parameters and stop strings, from a generation config: the checkpoint's own or one that the operator
gives.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from scheduler.sampling_params import Generation

_READ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_strings")
log = logging.getLogger("warmturn.engine")

FILE = "generation_config.json"
_RANGES = {  # of what a request may ask for
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 10.0),
}
_STOPS, _STOP_CHARS = 16, 1000  # as many, and as long, as a request may have
_INT32 = 2**31 - 1


def read_generation(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file, or in ``generation_config.json`` of a folder. Raises ``ValueError``, also for a
    misspelt name.
    """
    try:
        said = json.loads((path / FILE if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise ValueError("--generation-config: a JSON file is needed") from None
    if not isinstance(said, dict):
        raise ValueError("--generation-config: the file must contain a JSON object")
    for name in said.keys() - vars(GenerationConfig()).keys():  # a checkpoint's may have more
        if near := difflib.get_close_matches(name, (*_READ, "do_sample", "eos_token_id"), 1, 0.8):
            raise ValueError(f"--generation-config: {name} is no parameter; did you mean {near[0]}?")
    return said


def generation_of(said: Mapping[str, Any], source: str) -> Generation:
    """What a generation config says of the parameters that requests have. Raises ``ValueError`` for a value that no
    request may have, if it is the operator's; a model's is left out, with a line in the log.

    ``do_sample: false`` is greedy, whatever ``temperature`` says. Absent, it says nothing: many checkpoints only name
    their end-of-sequence tokens, and ``transformers`` itself writes no value that is its default.
    """
    found: dict[str, Any] = {}
    for name in _READ:
        value = said.get(name)
        if value is None:
            continue
        try:
            found["stop" if name == "stop_strings" else name] = _check(name, value)
        except ValueError as error:
            if source != "model":
                raise ValueError(f"--generation-config: {name} {error}") from None
            log.warning("a value of the model's generation config is ignored: %s %s", name, error)
    if said.get("do_sample") is False:
        found["temperature"] = 0.0
    return Generation(source=source, **found)


def _check(name: str, value: Any) -> Any:
    if name == "stop_strings":
        return _stops([value] if isinstance(value, str) else value)
    if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else (int, float)):
        raise ValueError("must be a whole number" if name == "top_k" else "must be a number")
    if name == "top_k":
        if not -1 <= value <= _INT32:
            raise ValueError(f"must be from -1 to {_INT32}")
        return max(value, 0)
    least, most = _RANGES[name]
    if not least <= value <= most or (name == "repetition_penalty" and value == least):
        raise ValueError(f"must be {'above' if name == 'repetition_penalty' else 'from'} {least:g} to {most:g}")
    return float(value)


def _stops(texts: Any) -> tuple[str, ...]:
    if not isinstance(texts, list) or len(texts) > _STOPS:
        raise ValueError(f"must have at most {_STOPS} strings")
    if not all(isinstance(text, str) and 1 <= len(text) <= _STOP_CHARS for text in texts):
        raise ValueError(f"must have strings of 1 to {_STOP_CHARS} characters")
    return tuple(texts)
