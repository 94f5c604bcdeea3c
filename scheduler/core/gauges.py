"""Gauges and counters of the tiers below memory."""

from __future__ import annotations

from cache.tiers.archive import Archive


def below(archive: Archive | None) -> dict[str, int]:
    """By the names of ``messages.Stats``; nothing where there are no such tiers."""
    if archive is None:
        return {}
    remote = archive.courier.remote if archive.courier is not None else None
    return {
        "disk_bytes": archive.disk.used,
        "disk_bytes_total": archive.disk.budget,
        "disk_sessions": len(archive.disk.heads),
        "disk_evictions": archive.disk.evictions,
        "disk_saves": archive.saver.saves,
        "disk_written": archive.saver.written,
        "disk_read": archive.loader.read,
        "disk_errors": archive.errors,
        "disk_failing": int(archive.saver.trouble.is_there),
        "disk_damaged": archive.disk.damaged,
        "disk_pending": archive.saver.pending,
        "remote_bytes": remote.used if remote is not None else 0,
        "remote_bytes_total": archive.courier.budget if archive.courier is not None else 0,
    }
