"""Bytes that a request holds itself: base64, alone or in a ``data:`` URL."""

from __future__ import annotations

import binascii

from server.media.media_limits import MAX_BYTES, MediaRefused, too_large

WHITESPACE = str.maketrans("", "", "\r\n\t ")


def from_data_url(url: str) -> bytes:
    """The bytes of a ``data:`` URL. The type that it names is not looked at. Raises MediaRefused."""
    head, comma, _ = url[:512].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaRefused("is not a data: URL with base64")
    return from_base64(url[len(head) + 1 :])


def from_base64(text: str) -> bytes:
    """The bytes of a base64 text. Raises MediaRefused."""
    if len(text) > MAX_BYTES * 3 // 2:
        raise too_large()
    try:
        data = binascii.a2b_base64(text.translate(WHITESPACE).encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise MediaRefused("is not valid base64") from None
    if len(data) > MAX_BYTES:
        raise too_large()
    if not data:
        raise MediaRefused("is empty")
    return data
