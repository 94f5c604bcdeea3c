"""``DiskFault``: whether KV can be written to disk now. A warning is logged when writing begins to fail, and another
when it works again.
"""

from __future__ import annotations

import logging

log = logging.getLogger("warmturn.engine")


class DiskFault:
    """Whether writes of KV fail (``is_there``). ``lacking``: the bytes for which there was no space, if that is the
    reason.
    """

    def __init__(self) -> None:
        self.is_there = False
        self.lacking = 0

    def record(self, reason: str, lacking: int = 0) -> None:
        """A write failed; ``reason`` is a few words. Sessions are still served."""
        if not self.is_there:
            log.warning(
                "KV is not written to disk: %s; turns still run, and KV that is evicted from memory is computed again",
                reason,
            )
        self.is_there, self.lacking = True, lacking

    def over(self) -> None:
        if self.is_there:
            log.warning("KV is written to disk again")
        self.is_there, self.lacking = False, 0
