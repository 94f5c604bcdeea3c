"""Error messages in one line for checkpoints that cannot be loaded."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from cache.error_line import first_line
from scheduler.extras import install_command

# Libraries that transformers needs for some checkpoints, by what its error says, and the extra that installs each.
_EXTRAS = {
    "gguf": "gguf",
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "compressed": "compressed-tensors",
    "gptq": "gptq",
    "awq": "gptq",
    "accelerate": "accelerate",
    "pil library": "media",
}
_LIBRARY = re.compile(r"requires the ([\w.-]+) library")  # as transformers says it of others
_JSON = ("*config.json", "tokenizer.json", "vocab.json", "special_tokens_map.json", "*.index.json")  # files it reads


def reason(error: BaseException, model: str) -> str:
    """What ``error`` says of ``model``, a folder, a file or a hub id."""
    if isinstance(error, ImportError):
        return _missing_library(error)
    if isinstance(error, SafetensorError):
        return _damaged_file(error, model)
    folder = folder_of(model)
    if folder.is_dir() and not (folder / "config.json").exists():
        return f"there is no config.json in {folder}"
    if (broken := _find_broken(folder)) is not None:
        return f"{broken} is not valid JSON"
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        return f"its configuration is not valid: {first_line(error.__cause__)}"
    if "ignore_mismatched_sizes" in str(error):  # an option of transformers, which has printed the sizes
        return "its weights have other sizes than its configuration says, see above"
    return first_line(error)


def folder_of(model: str) -> Path:
    """The folder with the model's files: itself, or where the hub's were downloaded to."""
    folder = Path(model)
    if not folder.is_dir():
        with suppress(ValueError):  # the hub has no such ids
            known = try_to_load_from_cache(model, "config.json")
            return Path(known).parent if isinstance(known, str) else folder
    return folder


def check_json(path: Path) -> None:
    """Raises ``ValueError``, which names the file, if it is there and is not JSON."""
    try:
        json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):  # a GGUF file has none beside it
        return
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not valid JSON") from None


def _find_broken(folder: Path) -> Path | None:
    """The first file of the model's that should hold JSON and does not."""
    for path in sorted(found for name in _JSON for found in folder.glob(name)):
        try:
            check_json(path)
        except ValueError:
            return path
    return None


def speechless(settings: Any) -> ValueError:
    """A configuration that no class which generates text takes."""
    kind = getattr(settings, "model_type", "") or type(settings).__name__
    return ValueError(f"transformers has no model of this architecture ({kind}) that generates text")


def _missing_library(error: ImportError) -> str:
    """Which extra brings the library that is missing, or its name."""
    text = str(error).lower()
    extra = next((extra for library, extra in _EXTRAS.items() if library in text), None)
    if extra is not None:
        return f"a library is missing: {install_command(extra)}"
    named = _LIBRARY.search(text)
    return first_line(error) if named is None else f"a library is missing: pip install {named[1]}"


def _damaged_file(error: SafetensorError, model: str) -> str:
    """Which of the weight files it is."""
    for path in sorted(folder_of(model).glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (OSError, SafetensorError) as found:
            return f"{path} is damaged or incomplete ({first_line(found)}): fetch it again"
    return f"a file of its weights is damaged ({first_line(error)})"
