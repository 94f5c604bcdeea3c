"""Gauges and counters of the disk tier."""

from __future__ import annotations

from cache.tiers.archive import Archive


def disk_gauges(archive: Archive | None) -> dict[str, int]:
    """By their names in ``Stats``; nothing where there is no disk tier."""
    if archive is None:
        return {}
    return {
        "disk_sessions": len(archive.disk.heads),
        "disk_saves": archive.write_behind.saves,
        "disk_written": archive.write_behind.written,
        "disk_read": archive.loader.read,
        "disk_errors": archive.errors,
        "disk_failing": int(archive.write_behind.fault.is_there),
        "disk_damaged": archive.disk.damaged,
        "disk_pending": archive.write_behind.pending,
    }
