"""The responses that a WebSocket can continue though they are not stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.log.logged_message import LoggedMessage
from server.log.media_rows import NO_MEDIA
from server.log.timeline import NewTurn, SessionRecord
from server.media.media_limits import MAX_TOTAL

MOST = 32  # responses per connection; the least recently used one goes first


@dataclass(frozen=True)
class KeptResponse:
    """The timeline of a response, the lane where it ran, and the bytes of its media."""

    record: SessionRecord
    lane: str | None
    media: Mapping[str, bytes]


class SocketMemory:
    """The timelines of a connection's latest responses, by id; they end with the connection."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, id: str, turn: NewTurn, lane: str | None, media: Mapping[str, bytes] = NO_MEDIA) -> None:
        """Keep a response that has ended; ``lane`` is where it ran."""
        record = SessionRecord("", [*turn.tokens], [*turn.messages], turn.fingerprint, 0)
        self._put(id, KeptResponse(record, lane, media))

    def keep_prompt(
        self,
        id: str,
        messages: Sequence[LoggedMessage],
        fingerprint: str,
        lane: str | None,
        media: Mapping[str, bytes] = NO_MEDIA,
    ) -> None:
        """Keep a prompt to which there is no reply: it is rendered again with what follows it."""
        record = SessionRecord("", [], [*messages], fingerprint, 0, rendered=0)
        self._put(id, KeptResponse(record, lane, media))

    def find(self, id: str) -> SessionRecord | None:
        """The timeline of a response; None if it is not known (any more)."""
        found = self._kept.get(id)
        if found is None:
            return None
        self._kept.move_to_end(id)
        return found.record

    def media(self, id: str) -> Mapping[str, bytes]:
        """The bytes of the media of a response, by digest."""
        found = self._kept.get(id)
        return NO_MEDIA if found is None else found.media

    def drop(self, id: str, lane: str | None) -> None:
        """Forget a response that could not be continued on its own lane; other lanes leave it to that one."""
        found = self._kept.get(id)
        if found is not None and found.lane == lane:
            del self._kept[id]

    def _put(self, id: str, kept: KeptResponse) -> None:
        self._kept[id] = kept
        while len(self._kept) > MOST or self._size() > MAX_TOTAL:
            self._kept.popitem(last=False)

    def _size(self) -> int:
        return sum({name: len(data) for kept in self._kept.values() for name, data in kept.media.items()}.values())
