"""Structs of the answers about files and batches. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from server.batches.batch_record import WINDOW, BatchFault, BatchRecord
from server.batches.tenant_files import StoredFile
from server.errors import bad_request

T = TypeVar("T")
Shown = TypeVar("Shown")


class FileObject(msgspec.Struct, frozen=True):
    """A file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None
    object: str = "file"
    status: str = "processed"
    status_details: None = None

    @classmethod
    def of(cls, file: StoredFile) -> FileObject:
        return cls(file.id, file.bytes, file.created_at, file.filename, file.purpose, file.expires_at)


class FileDeleted(msgspec.Struct, frozen=True):
    """The answer to a deletion."""

    id: str
    object: str = "file"
    deleted: bool = True


class BatchFaults(msgspec.Struct, frozen=True):
    """Why a batch has failed."""

    data: Sequence[BatchFault]
    object: str = "list"


class BatchCounts(msgspec.Struct, frozen=True):
    """The requests of a batch: all, and those with a result, in the output file and in the error file."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, frozen=True):
    """A batch."""

    id: str
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None
    object: str = "batch"

    @classmethod
    def of(cls, record: BatchRecord) -> BatchObject:
        times = record.times
        return cls(
            record.id,
            record.endpoint,
            BatchFaults(record.faults) if record.faults else None,
            record.input_file,
            WINDOW,
            record.status,
            record.output_file if record.has_output else None,
            record.error_file if record.has_errors else None,
            record.created_at,
            times.get("in_progress"),
            record.expires_at,
            times.get("finalizing"),
            times.get("completed"),
            times.get("failed"),
            times.get("expired"),
            times.get("cancelling"),
            times.get("cancelled"),
            BatchCounts(record.total, record.completed, record.failed),
            record.metadata or None,
        )


class ObjectList(msgspec.Struct, Generic[Shown], frozen=True):
    """A page of objects."""

    data: Sequence[Shown]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def page_after(
    items: Sequence[T], after: str | None, limit: int, id_of: Callable[[T], str], show: Callable[[T], Shown]
) -> ObjectList[Shown]:
    """The items behind the one of the id ``after``, as far as ``limit``. Raises a 400 if there is none of that id."""
    ids = [id_of(item) for item in items]
    if after is not None and after not in ids:
        raise bad_request("after is no id of this list.", "after", "invalid_value")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    first, last = (id_of(page[0]), id_of(page[-1])) if page else (None, None)
    return ObjectList([show(item) for item in page], first, last, len(items) > start + limit)
