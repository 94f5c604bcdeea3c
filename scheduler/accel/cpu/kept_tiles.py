"""`KeptTiles`: weights of one model in tiles that an earlier start has kept, or that this one keeps for the next."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from cache.whole_files import CorruptFile, check_private, clear_temporaries, lock, make_private, write_file
from scheduler import tile_space
from scheduler.accel.cpu.tile_file import KeptWeight, SmallPages, Tiled, TileFile, chunks, keeps_huge_pages
from scheduler.weights.known_files import note_tiles

log = logging.getLogger("warmturn.engine")

_WORTH = 1.0  # seconds of packing: what takes less is packed again
_POLITE = 10  # by so much the thread that writes stands back for others


class TilePlace:
    """Where the tiles of one weight are kept, by the weight's name."""

    def __init__(self, tiles: KeptTiles, name: str) -> None:
        self._tiles, self._name = tiles, name

    def take(self, weight: Tiled) -> tuple[KeptWeight, torch.Tensor] | None:
        """What is kept of a weight of this shape, and its data, uint8; None where it is not kept."""
        return self._tiles.take(self._name, weight)

    def note(self, weight: Tiled, seconds: float) -> None:
        """The ``weight`` was not kept, and took that long to make."""
        self._tiles.note(self._name, weight, seconds)


class KeptTiles:
    """The file of one model."""

    def __init__(self, digest: str, made_by: str, space: int | None, files: str = "") -> None:
        """``digest`` of the weights, ``made_by`` of what else their tiles depend on: this program and its kernel.
        ``space``: bytes that the files of all models may take; None: see ``tile_space.allowed``, 0: nothing is kept.
        ``files``: the digest of the files that the weights came from.
        """
        self._files, self._space = files, space
        self._name = f"{digest}-{made_by}{tile_space.SUFFIX}"
        self._used: dict[str, weakref.ref[Tiled]] = {}
        self._seconds = 0.0
        self._slow = False  # the file is there, in small pages
        self._file = self._open() if space != 0 else None

    @property
    def nbytes(self) -> int:
        """Bytes that are mapped, 0 without a file."""
        return 0 if self._file is None else self._file.nbytes

    def take(self, name: str, weight: Tiled) -> tuple[KeptWeight, torch.Tensor] | None:
        """See ``TilePlace``."""
        found = None if self._file is None else self._file.table.get(name)
        if self._file is None or found is None or found.shape != weight.shape:
            return None
        self._used[name] = weakref.ref(weight)
        return found, self._file.data(found)

    def note(self, name: str, weight: Tiled, seconds: float) -> None:
        """See ``TilePlace``."""
        self._used[name] = weakref.ref(weight)
        self._seconds += seconds

    def keep(self) -> None:
        """Write the weights for the next start, if making some of them took long, in a thread of its own."""
        if self._space != 0 and not self._slow and self._seconds >= _WORTH:
            threading.Thread(target=self._keep, name="keep packed weights", daemon=True).start()

    def _open(self) -> TileFile | None:
        found = None
        try:
            folder = tile_space.folder()
            if folder.is_dir():
                check_private(folder)
                _clear_temporaries(folder)
            found = TileFile(folder, self._name)
            tile_space.note_use(self._name)
            log.info("packed weights of an earlier start are mapped: %.1f GB", found.nbytes / 1e9)
        except SmallPages:
            self._slow = True
            log.info("packed weights of an earlier start are not used: their file is not in huge pages")
        except (OSError, CorruptFile) as error:
            missing = isinstance(error, CorruptFile) and error.reason == "missing"
            level = logging.DEBUG if missing else logging.INFO
            log.log(level, "no packed weights of an earlier start are used: %s", _reason(error))
        if self._files:
            note_tiles(self._files, "" if found is None else self._name)
        return found

    def _keep(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _POLITE)
        try:
            used = {name: weight for name, found in self._used.items() if (weight := found()) is not None}
            if used:  # else no mode was right with them
                self._write(used)
        except (OSError, CorruptFile) as error:
            log.info("packed weights are not kept for the next start: %s", _reason(error))

    def _write(self, weights: Mapping[str, Tiled]) -> None:
        folder, nbytes = make_private(tile_space.folder()), sum(one.data.nbytes for one in weights.values())
        held = lock(folder, 0.0)
        try:
            clear_temporaries(folder)
            if _has(folder, self._name, weights.keys()):  # another process was faster
                return
            if not keeps_huge_pages(folder):
                log.info("packed weights are not kept: files of the user's cache folder are not in huge pages")
                return
            if not tile_space.make_room(nbytes, self._space, self._name):
                most = tile_space.allowed(self._space)
                log.info("packed weights of %.1f GB are not kept: --packed-space has %.1f", nbytes / 1e9, most / 1e9)
                return
            began = time.monotonic()
            write_file(folder, self._name, chunks(weights))
            note_tiles(self._files, self._name)
            seconds = time.monotonic() - began
            log.info("packed weights are kept for the next start: %.1f GB, written in %.0f s", nbytes / 1e9, seconds)
        finally:
            os.close(held)


def _clear_temporaries(folder: Path) -> None:
    """What writers left that were killed, if nobody writes now."""
    with suppress(OSError):
        held = lock(folder, 0.0)
        try:
            clear_temporaries(folder)
        finally:
            os.close(held)


def _has(folder: Path, name: str, weights: Collection[str]) -> bool:
    """Whether there is a file with these weights. Raises ``OSError``."""
    try:
        return TileFile(folder, name).table.keys() >= set(weights)
    except SmallPages:
        return True
    except CorruptFile:
        return False


def _reason(error: OSError | CorruptFile) -> str:
    if isinstance(error, CorruptFile):
        return f"the file is {error.reason}"
    return error.strerror or type(error).__name__
