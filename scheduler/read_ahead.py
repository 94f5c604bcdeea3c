"""Asks the system to read the files of a model while modules are still imported."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread

from scheduler.weights.gguf_header import GgufError, split_names

_MEMORY = Path("/proc/meminfo")


def read_ahead(model: str) -> Thread | None:
    """Begin to read the weights of ``model``, a GGUF file or a folder. None where it is neither, where the system
    cannot be asked, or where they would take more than half of the memory that is available.
    """
    files = [file for file in _weights(Path(model)) if file.is_file()]
    if not files or not hasattr(os, "posix_fadvise") or sum(file.stat().st_size for file in files) > _available() // 2:
        return None
    thread = Thread(target=_ask, args=(files,), name="read ahead", daemon=True)
    thread.start()
    return thread


def _weights(path: Path) -> Iterable[Path]:
    if path.suffix == ".gguf":
        with suppress(GgufError):
            return [path.with_name(name) for name in split_names(path.name)]
    return sorted(path.glob("*.safetensors"))


def _ask(files: list[Path]) -> None:
    for file in files:
        with suppress(OSError), file.open("rb") as opened:  # whoever loads the model says what is wrong with it
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _available() -> int:
    """Bytes of memory that can be had; 0 where that is not known."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
