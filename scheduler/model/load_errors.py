"""Error messages in one line for checkpoints that cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from cache.errors import first_line
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
}


def reason(error: BaseException, model: str) -> str:
    """What ``error`` says of ``model``, a folder, a file or a hub id."""
    if isinstance(error, ImportError):
        return _missing(error)
    if isinstance(error, SafetensorError):
        return _damaged(error, model)
    return first_line(error)


def speechless(settings: Any) -> ValueError:
    """A configuration that no class which generates text takes."""
    kind = getattr(settings, "model_type", "") or type(settings).__name__
    return ValueError(f"transformers has no model of this architecture ({kind}) that generates text")


def _missing(error: ImportError) -> str:
    """Which extra brings the library that is missing."""
    text = str(error).lower()
    extra = next((extra for library, extra in _EXTRAS.items() if library in text), None)
    return f"a library is missing: {install_command(extra)}" if extra else first_line(error)


def _damaged(error: SafetensorError, model: str) -> str:
    """Which of the weight files it is."""
    folder = Path(model)
    if not folder.is_dir():
        known = try_to_load_from_cache(model, "config.json")
        folder = Path(known).parent if isinstance(known, str) else folder
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (OSError, SafetensorError) as found:
            return f"{path} is damaged or incomplete ({first_line(found)}): fetch it again"
    return f"a file of its weights is damaged ({first_line(error)})"
