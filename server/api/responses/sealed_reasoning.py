"""Reasoning that a client keeps for the server, as ``encrypted_content``: encoded, but not secret."""

from __future__ import annotations

import base64
import binascii
import zlib

SEAL = "wt1:"  # in front of reasoning that a client keeps for us
MAX_SEALED = 2**20  # bytes of it
MAX_RATIO = 16  # of a text to what it is packed as: a request can hold thousands, and is not to grow to gigabytes


def seal(text: str) -> str:
    """Reasoning as ``encrypted_content``: encoded, but not secret."""
    data = text.encode()
    packed = zlib.compress(data)
    if len(packed) * MAX_RATIO < len(data):
        packed = zlib.compress(data, level=0)
    return SEAL + base64.b64encode(packed).decode()


def unseal(told: str) -> str | None:
    """The inverse of ``seal``; None for other text, or if it is larger than a request may be."""
    try:
        packed = base64.b64decode(told.removeprefix(SEAL), validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, min(MAX_SEALED, max(1, MAX_RATIO * len(packed))))
        whole = told.startswith(SEAL) and unpacker.eof
        return data.decode() if whole else None
    except (binascii.Error, zlib.error, ValueError):
        return None
