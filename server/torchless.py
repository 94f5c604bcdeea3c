"""Loads tokenizers in a process that never imports torch, which saves 0.1 GB of memory and seconds of start.

A server gets most tokenizers from its engine (``server.chat.plain_tokenizer``). What is left are those that are written
in Python, and `warmturn doctor`, which has no engine.

transformers takes torch for not installed here. The few files that it reads with torch's help are read once by a
process of its own (``python -m server.torchless MODEL FOLDER``), which saves the tokenizer as plain files; so are GGUF
files, by the engine's reader (``python -m scheduler.weights.gguf.tokenizer FILE FOLDER``).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scheduler.model_names import read_quickly

log = logging.getLogger("warmturn")

ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def without_torch() -> None:
    """Make torch unimportable in this process, unless it is imported already, so that transformers loads quickly."""
    read_quickly()
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # documented: importing it is an ImportError


def read_tokenizer(model: str) -> Any:
    """The tokenizer of a hub id, folder or GGUF file. Raises what transformers raises."""
    if Path(model).suffix == ".gguf":
        return _convert(model, "scheduler.weights.gguf.tokenizer")
    if sys.modules.get("torch", True) is not None:
        return _read(model)
    advised = os.environ.get(ADVICE)
    os.environ[ADVICE] = "1"  # transformers would say that models need torch
    try:
        return _read(model)
    except ImportError:
        log.info(f"the tokenizer of {model} cannot be loaded without torch: loading it in a separate process")
        return _convert(model, "server.torchless")
    finally:
        os.environ.pop(ADVICE)
        if advised is not None:
            os.environ[ADVICE] = advised


def _read(model: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

    tekken = (Path(model) / "tekken.json").is_file()
    found = None if tekken else AutoTokenizer.from_pretrained(model)
    usual = isinstance(found, PreTrainedTokenizer | PreTrainedTokenizerFast)
    return found if usual else _convert(model, "scheduler.weights.tekken_tokenizer")


def _convert(model: str, module: str) -> Any:
    """The tokenizer as another process, which runs ``module``, has read and saved it. Raises ImportError with what that
    process says."""
    root = Path(__file__).resolve().parent.parent
    with TemporaryDirectory() as folder:
        command = (sys.executable, "-P", "-m", module, model, folder)
        known = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, "PYTHONPATH": known}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise ImportError(next(reversed(done.stderr.strip().splitlines()), "its reader failed"))
        return _read(folder)


if __name__ == "__main__":
    try:
        _read(sys.argv[1]).save_pretrained(sys.argv[2])
    except Exception as error:
        print(next(iter(str(error).splitlines()), type(error).__name__), file=sys.stderr)
        sys.exit(1)
