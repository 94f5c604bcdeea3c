"""Recording of a response's stream events for later readers: in memory while it runs, then stored in the log."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncGenerator, Sequence

CHUNK = 256  # events that are packed together
HEAD = struct.Struct("<II")  # of a chunk: how many events, how many bytes packed
END = b"\n\n"  # of an event; there is none within one


class EventRecording:
    """Events in order; event ``n`` has the sequence number ``n``. All but the last few are compressed, to about ten
    bytes per token.
    """

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._loose: list[bytes] = []
        self._ended = False
        self._news = asyncio.Event()

    def add(self, data: bytes) -> None:
        """Append one or several events."""
        self._loose += split_events(data)
        while len(self._loose) >= CHUNK:
            self._packed.append(pack_events(self._loose[:CHUNK]))
            del self._loose[:CHUNK]
        self._tell()

    @property
    def count(self) -> int:
        """How many events there are, which is the number of the next one."""
        return CHUNK * len(self._packed) + len(self._loose)

    def end(self) -> None:
        """No more events follow."""
        self._ended = True
        self._tell()

    def whole(self, more: Sequence[bytes] = ()) -> bytes:
        """All events, and ``more`` after them, for ``read_recording``."""
        return b"".join([*self._packed, pack_events([*self._loose, *more])])

    async def follow(self, start: int) -> AsyncGenerator[bytes]:
        """The events from number ``start`` on, including future ones."""
        while True:
            news = self._news
            some = self._from(start)
            for data in some:
                yield data
            start += len(some)
            if not some and self._ended:
                return
            if not some:
                await news.wait()

    def _from(self, start: int) -> list[bytes]:
        """The events from a number on that are in one chunk."""
        number = start // CHUNK
        events = unpack_events(self._packed[number])[1] if number < len(self._packed) else self._loose
        return events[start % CHUNK if number <= len(self._packed) else len(events) :]

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def read_recording(data: bytes, start: int) -> list[bytes]:
    """The events of a whole recording, from number ``start`` on."""
    events: list[bytes] = []
    while data:
        size, some = unpack_events(data)
        events += some
        data = data[size:]
    return events[start:]


def pack_events(events: Sequence[bytes]) -> bytes:
    data = zlib.compress(b"".join(events))
    return HEAD.pack(len(events), len(data)) + data


def unpack_events(data: bytes) -> tuple[int, list[bytes]]:
    """The size of the first chunk of ``data``, and its events."""
    _, size = HEAD.unpack_from(data)
    return HEAD.size + size, split_events(zlib.decompress(data[HEAD.size : HEAD.size + size]))


def split_events(data: bytes) -> list[bytes]:
    return [event + END for event in data.split(END)[:-1]]
