"""The tokenizer of a checkpoint that has Mistral's ``tekken.json``. transformers makes a usual tokenizer of it, with a
chat template where one lies beside it or mistral-common (extra ``mistral``) is installed. By itself it gives one of
that library then, which takes no special tokens in text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from scheduler.model_names import read_quickly

TEKKEN = "tekken.json"
_OTHERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def read_usual(model: str, **options: Any) -> Any:
    """The tokenizer of a hub id or folder, of the kind that transformers makes itself. Raises what that raises."""
    from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

    if not options and (tekken := _convert(model)) is not None:
        return tekken
    found = AutoTokenizer.from_pretrained(model, **options)
    usual = isinstance(found, PreTrainedTokenizer | PreTrainedTokenizerFast)
    return found if usual else AutoTokenizer.from_pretrained(model, mistral_format=False, **options)


def _convert(model: str) -> Any:
    """The tokenizer of a model that has no other one; None where it has, or this transformers knows no such file."""
    found = None if any(_find(model, name) for name in _OTHERS) else _find(model, TEKKEN)
    if found is None:
        return None
    try:
        from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer
    except ImportError:
        return None
    return convert_tekken_tokenizer(found)


def _find(model: str, name: str) -> str | None:
    """The path of a file of the model; None: it has none."""
    folder = Path(model)
    if folder.is_dir():
        return str(folder / name) if (folder / name).is_file() else None
    from transformers.utils import cached_file

    try:
        found: str | None = cached_file(model, name)
    except OSError:  # it is not there, or nobody can say
        return None
    return found


if __name__ == "__main__":
    read_quickly()
    try:
        read_usual(sys.argv[1]).save_pretrained(sys.argv[2])
        (Path(sys.argv[2]) / TEKKEN).unlink(missing_ok=True)  # what was made of it is there
    except Exception as error:
        print(next(iter(str(error).splitlines()), type(error).__name__), file=sys.stderr)
        sys.exit(1)
