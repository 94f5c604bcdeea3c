"""``BatchRecord``: the state of a batch as it is stored. ``BatchRecords``: all of them, in a folder of the data dir."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from cache.durable_files import replace_file
from server.batches.tenant_files import own_folder
from server.config.usage_error import UsageError

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["completed", "expired", "cancelled", "failed"]

WINDOW = "24h"  # the only completion window
WINDOW_SECONDS = 24 * 3600
KEPT_SECONDS = 30 * 86_400  # after its end a batch is told of; its files are kept as long unless their client says else


class BatchFault(msgspec.Struct, frozen=True):
    """Why a batch has failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, frozen=True):
    """A batch. ``key`` is the id of the API key that runs it. ``ending`` is how it is to end, from when that is certain
    until it has. Times are Unix seconds. ``output_file`` and ``error_file`` are the ids that its files get;
    ``has_output`` and ``has_errors``: they are there.
    """

    id: str
    tenant: str
    key: str
    endpoint: str
    input_file: str
    output_file: str
    error_file: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    ending: Ending | None = None
    metadata: dict[str, str] = {}
    output_seconds: int = KEPT_SECONDS
    total: int = 0
    completed: int = 0
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    faults: tuple[BatchFault, ...] = ()
    times: dict[str, int] = {}  # by status: when it began

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "expired", "cancelled", "failed")

    def to(self, status: Status, **changes: object) -> BatchRecord:
        """The record with a status that begins now."""
        return msgspec.structs.replace(self, status=status, times={**self.times, status: int(time.time())}, **changes)


class BatchRecords:
    """All batches, known by their tenant and id. Writes are blocking, durable, and raise OSError."""

    def __init__(self, folder: Path) -> None:
        """Open the folder, or create it. Raises UsageError."""
        self.folder = folder
        self._records: dict[str, BatchRecord] = {}
        try:
            own_folder(folder)
            for path in sorted(folder.glob("*.json")):
                with suppress(msgspec.DecodeError):
                    record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
                    if path.stem == record.id:
                        self._records[record.id] = record
        except OSError as error:
            raise UsageError(f"--data-dir: {folder.name} in it cannot be used: {error.strerror}") from None

    def get(self, tenant: str, id: str) -> BatchRecord | None:
        """A batch of this tenant; None: there is none."""
        record = self._records.get(id)
        return None if record is None or record.tenant != tenant else record

    def of_tenant(self, tenant: str) -> list[BatchRecord]:
        """The batches of a tenant, the newest first."""
        found = (record for record in self._records.values() if record.tenant == tenant)
        return sorted(found, key=lambda record: (record.created_at, record.id), reverse=True)

    def unfinished(self) -> list[BatchRecord]:
        """The batches that still have something to do, the oldest first."""
        return sorted((r for r in self._records.values() if not r.is_over), key=lambda r: (r.created_at, r.id))

    def uses(self, file: str) -> bool:
        """Whether a batch that is not over reads this file."""
        return any(record.input_file == file for record in self.unfinished())

    def put(self, record: BatchRecord) -> None:
        replace_file(self.folder / f"{record.id}.json", msgspec.json.encode(record))
        self._records[record.id] = record

    def note(self, record: BatchRecord) -> None:
        """Take counts that can be found again from the results: nothing is written."""
        self._records[record.id] = record

    def forget_old(self) -> None:
        """Delete what ended long ago."""
        before = time.time() - KEPT_SECONDS
        for record in [*self._records.values()]:
            if record.is_over and max(record.times.values(), default=record.created_at) < before:
                (self.folder / f"{record.id}.json").unlink(missing_ok=True)
                del self._records[record.id]
