"""How much of a disk stays free, whatever is written to it, unless ``--disk-floor`` says otherwise.

Used by both processes. Imports nothing of this project.
"""

from __future__ import annotations

_MOST = 5 << 30  # bytes


def floor(total: int) -> int:
    """Bytes that stay free of a disk of ``total``: a twentieth, at most 5 GiB."""
    return min(total // 20, _MOST)
