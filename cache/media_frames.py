"""Videos that clients send as pictures: one file of all their frames. Both processes need them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

FRAMES = b"WARMTURN FRAMES\0"  # begins such a file; a frame is 8 bytes with its length and an encoded picture


def join_frames(pictures: Iterable[bytes]) -> bytes:
    """One file of encoded pictures."""
    return FRAMES + b"".join(len(one).to_bytes(8, "big") + one for one in pictures)


def split_frames(data: bytes) -> Iterator[bytes]:
    """The encoded pictures of such a file. Raises ValueError if it is cut short."""
    at = len(FRAMES)
    while at < len(data):
        stop = at + 8 + int.from_bytes(data[at : at + 8], "big")
        if stop > len(data):
            raise ValueError("the video is cut short")
        yield data[at + 8 : stop]
        at = stop
