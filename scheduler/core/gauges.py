"""Gauges and counters of the tiers below memory."""

from __future__ import annotations

from cache.tiers.archive import Archive


def below(archive: Archive | None) -> dict[str, int]:
    """By the names of ``messages.Stats``; nothing where there are no such tiers."""
    if archive is None:
        return {}
    remote = archive.remote_sync.remote if archive.remote_sync is not None else None
    return {
        "disk_bytes": archive.disk.used,
        "disk_bytes_total": archive.disk.budget,
        "disk_sessions": len(archive.disk.heads),
        "disk_evictions": archive.disk.evictions,
        "disk_saves": archive.write_behind.saves,
        "disk_written": archive.write_behind.written,
        "disk_read": archive.loader.read,
        "disk_errors": archive.errors,
        "disk_failing": int(archive.write_behind.trouble.is_there),
        "disk_damaged": archive.disk.damaged,
        "disk_pending": archive.write_behind.pending,
        "remote_bytes": remote.used if remote is not None else 0,
        "remote_bytes_total": archive.remote_sync.budget if archive.remote_sync is not None else 0,
    }
