"""``BatchStorage``: where files and batches are in the data dir."""

from __future__ import annotations

from pathlib import Path

from server.batches.batch_record import BatchRecords
from server.batches.tenant_files import TenantFiles


class BatchStorage:
    """The files of tenants and the records of their batches, in two folders of the data dir."""

    def __init__(self, folder: Path) -> None:
        """Open or create both folders. Raises UsageError."""
        self.files = TenantFiles(folder / "files")
        self.records = BatchRecords(folder / "batches")
