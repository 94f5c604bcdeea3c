"""``RowFiles``: what encoders have made of the pictures of sessions, on disk beside their KV."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from cache import whole_files
from cache.segments.chain import Owner
from cache.tiers.segment_folder import folder_of
from cache.whole_files import CorruptFile

log = logging.getLogger("warmturn.engine")

BUDGET = 1 << 30  # bytes
_CHECK = 16  # bytes of a file's checksum, in front


class RowFiles:
    """Files at ``folder / <session> / <picture>``. What several sessions show is one file with several names, so it is
    gone with the last session that had it. All of it can be made again, so nothing waits for a write and no failure
    matters. Files are written by a thread; the other methods are called on the engine's own.
    """

    def __init__(
        self, folder: Path, floor: int = 0, budget: int = BUDGET, changed: Callable[[int], None] | None = None
    ) -> None:
        """``floor``: bytes of the file system that stay free. ``budget``: bytes of all files, each counted once.
        ``changed`` is told how many these are.
        """
        self._folder, self._floor, self._budget, self._changed = folder, floor, budget, changed
        self._thread = ThreadPoolExecutor(1, "rows")
        self._places: OrderedDict[str, set[str]] = OrderedDict()  # of each picture the sessions, longest unused first
        self._sizes: dict[str, int] = {}
        self._leaving: list[tuple[Future[None], Callable[[], None]]] = []  # sessions whose files are being removed
        self._find()
        self._make_room()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, picture: str) -> bool:
        return picture in self._places

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def keep(self, owner: Owner, picture: str, rows: Sequence[torch.Tensor] | None) -> None:
        """Have a session keep a picture's rows; None: those that another session keeps, if one does."""
        name, sessions = folder_of(owner), self._places.get(picture, set())
        if name in sessions or (rows is None and not sessions):
            return
        other = next(iter(sessions), None)
        self._places.setdefault(picture, set()).add(name)
        copied: list[torch.Tensor] = []
        if other is None:
            assert rows is not None
            copied = [part.detach().to("cpu", copy=True).contiguous() for part in rows]
            self._sizes[picture] = sum(part.numel() * part.element_size() for part in rows)
            self._make_room()
        self._thread.submit(self._write, name, picture, other, copied)

    def load(self, picture: str) -> list[torch.Tensor] | None:
        """The rows of a picture; None if no session keeps them, or the file is damaged."""
        for name in sorted(self._places.get(picture, ())):
            try:
                data = (self._folder / name / picture).read_bytes()
                if hashlib.blake2b(data[_CHECK:], digest_size=_CHECK).digest() != data[:_CHECK]:
                    raise CorruptFile("other bytes than were written")
                parts = load(data[_CHECK:])
            except (OSError, CorruptFile, SafetensorError) as error:  # also where it is not written yet
                log.info("rows of a picture could not be read: %s", error)
                continue
            self._places.move_to_end(picture)
            return [parts[str(number)] for number in range(len(parts))]
        return None

    def forget(self, owner: Owner, told: Callable[[], None]) -> None:
        """Remove the files of a session; ``poll`` calls ``told`` when they are gone."""
        name = folder_of(owner)
        for picture in [picture for picture, sessions in self._places.items() if name in sessions]:
            self._drop(picture, name)
        self._make_room()
        removed = self._thread.submit(shutil.rmtree, self._folder / name, True)  # behind what is being written
        self._leaving.append((removed, told))

    @property
    def busy(self) -> bool:
        """Whether somebody waits for files to be removed."""
        return bool(self._leaving)

    def poll(self) -> None:
        """Tell of the sessions whose files are gone."""
        while self._leaving and self._leaving[0][0].done():  # they are removed in their order
            self._leaving.pop(0)[1]()

    def flush(self) -> None:
        """Wait until everything is written."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Write what is to be written, and end."""
        self._thread.shutdown()

    def _find(self) -> None:
        """The files that are there."""
        with suppress(OSError):
            found = [(entry.stat(), entry) for folder in self._folder.iterdir() for entry in folder.iterdir()]
            for stat, entry in sorted(found, key=lambda pair: pair[0].st_mtime):
                if entry.name.startswith("."):
                    entry.unlink()  # of a writer that was killed
                    continue
                self._places.setdefault(entry.name, set()).add(entry.parent.name)
                self._sizes[entry.name] = stat.st_size

    def _make_room(self) -> None:
        """Keep to the budget, and tell how much of it is used."""
        while self.nbytes > self._budget and len(self._places) > 1:
            picture, sessions = next(iter(self._places.items()))
            for name in [*sessions]:
                self._drop(picture, name)
                self._thread.submit(_unlink, self._folder / name / picture)
        if self._changed is not None:
            self._changed(self.nbytes)

    def _drop(self, picture: str, name: str) -> None:
        self._places[picture].discard(name)
        if not self._places[picture]:
            del self._places[picture], self._sizes[picture]

    def _write(self, name: str, picture: str, other: str | None, rows: Sequence[torch.Tensor]) -> None:
        """Name another session's file, or write one."""
        try:
            whole_files.make_folder(self._folder / name)
            if other is not None:
                with suppress(FileExistsError):
                    os.link(self._folder / other / picture, self._folder / name / picture)
                return
            data = save({str(number): part for number, part in enumerate(rows)})
            if shutil.disk_usage(self._folder).free - len(data) >= self._floor:
                check = hashlib.blake2b(data, digest_size=_CHECK).digest()
                whole_files.write_file(self._folder / name, picture, [check, data])
        except OSError as error:
            log.info("rows of a picture could not be written: %s", error.strerror)


def medium_name(*identity: str) -> str:
    """The name of a picture's file: a hash of all that its rows depend on, and of whose it is."""
    return hashlib.blake2b("\0".join(identity).encode(), digest_size=16).hexdigest()


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
