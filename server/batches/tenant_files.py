"""``TenantFiles``: the files of tenants, in a folder of the data dir. A file has its content and, beside it, what is
told of it; it is there when both are.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from cache.durable_files import replace_file
from server.config.usage_error import UsageError

Purpose = Literal["batch", "batch_output"]


class StoredFile(msgspec.Struct, frozen=True):
    """What is told of a file. Times are Unix seconds; ``expires_at`` None: it stays until it is deleted."""

    id: str
    tenant: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int | None = None


class TenantFiles:
    """All files, known by their tenant and id: an id of another tenant is unknown. Methods that write are blocking and
    raise OSError; what they have done outlives a loss of power.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder, or create it. Raises UsageError."""
        self._folder = folder
        self._files: dict[str, StoredFile] = {}
        try:
            own_folder(folder)
            for path in sorted(folder.glob("*.json")):
                with suppress(msgspec.DecodeError):
                    file = msgspec.json.decode(path.read_bytes(), type=StoredFile)
                    if path.stem == file.id and self.content(file.id).is_file():
                        self._files[file.id] = file
            for path in folder.iterdir():
                if path.stem not in self._files:  # what a killed server has left
                    path.unlink()
        except OSError as error:
            raise UsageError(f"--data-dir: {folder.name} in it cannot be used: {error.strerror}") from None

    def content(self, id: str) -> Path:
        """Where the content of a file is, or is to be written before ``add``."""
        return self._folder / f"{id}.jsonl"

    def get(self, tenant: str, id: str) -> StoredFile | None:
        """A file of this tenant that has not expired; None: there is none."""
        file = self._files.get(id)
        return None if file is None or file.tenant != tenant or is_over(file) else file

    def of_tenant(self, tenant: str) -> list[StoredFile]:
        """The files of a tenant, the oldest first."""
        return sorted((f for f in self._files.values() if f.tenant == tenant and not is_over(f)), key=order_of)

    def bytes_of(self, tenant: str) -> int:
        return sum(file.bytes for file in self._files.values() if file.tenant == tenant)

    def add(self, file: StoredFile) -> None:
        """Add a file whose content is written and durable. A second time changes nothing."""
        replace_file(self._folder / f"{file.id}.json", msgspec.json.encode(file))
        self._files[file.id] = file

    def delete(self, id: str) -> None:
        """Delete a file, if it is there."""
        self._files.pop(id, None)
        for path in (self._folder / f"{id}.json", self.content(id)):
            path.unlink(missing_ok=True)

    def expired(self) -> list[StoredFile]:
        return [file for file in self._files.values() if is_over(file)]


def new_id(prefix: str) -> str:
    """An id that nobody guesses."""
    return f"{prefix}{secrets.token_hex(16)}"


def is_over(file: StoredFile) -> bool:
    return file.expires_at is not None and file.expires_at <= time.time()


def order_of(file: StoredFile) -> tuple[int, str]:
    return file.created_at, file.id


def own_folder(folder: Path) -> None:
    """Create a folder for this user only, or see that it is one. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(1, "it is no folder of this user")
