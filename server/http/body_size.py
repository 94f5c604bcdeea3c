"""The size of the largest body. Apart from what reads bodies, so that the command line can begin without FastAPI."""

from __future__ import annotations

MAX_BYTES = 64 * 1024 * 1024
