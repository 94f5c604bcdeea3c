"""``Task``: what a checkpoint was made for, as its own files say it. Imported by both processes.

sentence-transformers describes a model as a chain of modules (``modules.json``); one with a pooling module embeds. A
cross-encoder is saved with a class for classifying sequences. A GGUF file says how it pools. Whether a model with an
encoder of sounds transcribes them is known once it is loaded. Anything else generates text.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from scheduler.gguf_pooling import pooling_of
from scheduler.gguf_reader import read_header

Task = Literal["generate", "embed", "score", "transcribe"]

MODULES = "modules.json"
POOLING = "Pooling"  # the module of sentence-transformers, whatever package it is in
CLASSIFIER = "ForSequenceClassification"  # how transformers ends the names of such classes


def task_of(read: Callable[[str], Any]) -> Task:
    """What a checkpoint is for. ``read`` gives the value in one of its JSON files by its name; None: there is none."""
    if POOLING in kinds_of(read(MODULES)):
        return "embed"
    settings = read("config.json")
    names = settings.get("architectures") if isinstance(settings, dict) else None
    if any(name.endswith(CLASSIFIER) for name in names or () if isinstance(name, str)):
        return "score"
    return "generate"


def may_transcribe(read: Callable[[str], Any]) -> bool:
    """Whether a checkpoint has an encoder, a decoder, and sounds that are prepared for it."""
    settings, sounds = read("config.json"), read("preprocessor_config.json")
    is_both = isinstance(settings, dict) and settings.get("is_encoder_decoder") is True
    return is_both and isinstance(sounds, dict) and "sampling_rate" in sounds


def kinds_of(modules: Any) -> list[str]:
    """The kinds of the modules that a ``modules.json`` lists, without their packages."""
    listed = modules if isinstance(modules, list) else []
    return [str(one.get("type", "")).rpartition(".")[2] for one in listed if isinstance(one, dict)]


def task_of_files(source: str) -> Task | None:
    """What the model of a folder is for, or that of a hub id as far as its files were downloaded before; None where
    they were not, or do not tell. Reads no weights and reaches no network.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        file = path if path.is_file() else _downloaded(str(path.parent), path.name)
        return None if file is None else _task_of_gguf(file)
    if path.is_file():
        return "generate"
    if path.is_dir():
        return told_by(lambda name: read_json(path / name))

    def cached(name: str) -> Any:
        found = _downloaded(source, name)
        return None if found is None else read_json(found)

    return None if cached("config.json") is None else told_by(cached)


def _downloaded(source: str, name: str) -> Path | None:
    """A file of a hub id that was downloaded before; None if it was not."""
    from huggingface_hub import try_to_load_from_cache  # it takes long to import

    try:
        found = try_to_load_from_cache(source, name)
    except ValueError:  # the hub has no such ids
        return None
    return Path(found) if isinstance(found, str) else None


def _task_of_gguf(path: Path) -> Task:
    """What the model in a file is for; loading it tells what is wrong with it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return "generate" if pooling_of(read_header(data).metadata) is None else "embed"
    except (OSError, ValueError):
        return "generate"


def told_by(read: Callable[[str], Any]) -> Task | None:
    """``task_of``; None where only loading tells whether the model generates or transcribes."""
    task = task_of(read)
    return None if task == "generate" and may_transcribe(read) else task


def read_json(path: Path) -> Any:
    """The value in a JSON file; None where there is none that can be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
