"""The responses that a WebSocket can continue though they are not stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from server.log.logged_message import LoggedMessage
from server.log.timeline import NewTurn, SessionRecord

MOST = 32  # responses per connection; the least recently used one goes first


class SocketMemory:
    """The timelines of a connection's latest responses, by id; they end with the connection."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, tuple[SessionRecord, str | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def keep(self, id: str, turn: NewTurn, lane: str | None) -> None:
        """Keep a response that has ended; ``lane`` is where it ran."""
        self._put(id, SessionRecord("", [*turn.tokens], [*turn.messages], turn.fingerprint, 0), lane)

    def keep_prompt(self, id: str, messages: Sequence[LoggedMessage], fingerprint: str, lane: str | None) -> None:
        """Keep a prompt to which there is no reply: it is rendered again with what follows it."""
        self._put(id, SessionRecord("", [], [*messages], fingerprint, 0, rendered=0), lane)

    def find(self, id: str) -> SessionRecord | None:
        """The timeline of a response; None if it is not known (any more)."""
        found = self._records.get(id)
        if found is None:
            return None
        self._records.move_to_end(id)
        return found[0]

    def drop(self, id: str, lane: str | None) -> None:
        """Forget a response that could not be continued on its own lane; other lanes leave it to that one."""
        found = self._records.get(id)
        if found is not None and found[1] == lane:
            del self._records[id]

    def _put(self, id: str, record: SessionRecord, lane: str | None) -> None:
        self._records[id] = record, lane
        while len(self._records) > MOST:
            self._records.popitem(last=False)
