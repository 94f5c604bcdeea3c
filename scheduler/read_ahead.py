"""Asks the system to read the files of a model while modules are still imported: its weights, or what an earlier start
has kept of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread

from scheduler import tile_space
from scheduler.weights import known_files
from scheduler.weights.gguf.header import GgufError, split_names

_MEMORY = Path("/proc/meminfo")
_POPULATE_READ = 22  # MADV_POPULATE_READ, of Linux 5.14
_PART = 64 << 20  # bytes that are asked for at a time


def read_ahead(model: str, packed_space: int | None = None) -> Thread | None:
    """Begin to read the weights of ``model``, a GGUF file or a folder, or the file that has them packed if that is used
    (``packed_space`` is not 0). None where it is neither, where the system cannot be asked, or where they would take
    more than half of the memory that is available.
    """
    with suppress(OSError):
        files = [file for file in _weights(Path(model)) if file.is_file()]
        packed = _packed(files) if packed_space != 0 else None
        wanted = files if packed is None else [packed]
        if not files or not hasattr(os, "posix_fadvise") or _nbytes(wanted) > _available() // 2:
            return None
        work = partial(_ask, files) if packed is None else partial(_read_in_huge_pages, packed)
        thread = Thread(target=work, name="read ahead", daemon=True)
        thread.start()
        return thread
    return None


def _packed(files: list[Path]) -> Path | None:
    """The file that has these packed, if there is one. Raises ``OSError``."""
    known = known_files.known_of(files) if files else None
    path = tile_space.folder() / known.tiles if known is not None and known.tiles else None
    return path if path is not None and path.is_file() else None


def _nbytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _weights(path: Path) -> Iterable[Path]:
    if path.suffix == ".gguf":
        with suppress(GgufError):
            return [path.with_name(name) for name in split_names(path.name)]
    return sorted(path.glob("*.safetensors"))


def _ask(files: list[Path]) -> None:
    for file in files:
        with suppress(OSError), file.open("rb") as opened:  # whoever loads the model says what is wrong with it
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _read_in_huge_pages(file: Path) -> None:
    """As ``cache.memory.huge`` maps a file: pages that are read one by one stay small."""
    with suppress(OSError, ValueError, AttributeError), file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        memory = mmap.mmap(opened.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        memory.madvise(mmap.MADV_HUGEPAGE)
        first = ctypes.c_char.from_buffer(memory)
        populate, address = ctypes.CDLL(None).madvise, ctypes.addressof(first)  # ctypes lets other threads run
        for at in range(0, size, _PART):
            if populate(ctypes.c_void_p(address + at), ctypes.c_size_t(min(_PART, size - at)), _POPULATE_READ):
                break
        del first
        memory.close()


def _available() -> int:
    """Bytes of memory that can be had; 0 where that is not known."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
