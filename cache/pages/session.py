"""``SessionCache``: token ids, attention mask, pages and states of one session."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cache.media_ids import uncut
from cache.memory.stream import put
from cache.pages import state as states
from cache.pages.layers import Windows
from cache.pages.pool import Page
from cache.pages.retention import Stop
from cache.pages.timeline_key import TimelineKey
from cache.pages.timeline_media import TimelineMedia
from cache.segments.chain import Owner, Segment

CHECKPOINTS = 8  # per session, the newest: turns that can be edited or regenerated without a full recompute


def common_prefix(a: array[int], b: array[int]) -> int:
    """How many leading tokens two timelines share."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differ = np.frombuffer(a, np.int32, n) != np.frombuffer(b, np.int32, n)
    first = int(differ.argmax())
    return first if differ[first] else n


class Position(NamedTuple):
    """Where a session is: its length, and its state there if it has one."""

    length: int
    state: Any


class SessionCache:
    """The cache of one session: its timeline's tokens and the KV that was computed from them.

    Invariants: ``length == len(mask)`` tokens have been fed, and ``token_ids[:length]`` are exactly those; ``pages``
    cover at least ``length`` tokens. ``token_ids[length:]`` are still to be fed: the rest of a prompt, or the pending
    token. ``mask`` holds one flag per fed token: 1, or 0 for a hidden one. With a ``key`` it has marked
    the first of ``token_ids``.

    A ``stateful`` session also has a ``state`` at ``length`` that is not in pages (recurrent layers, a model's own
    cache object). It can be rewound only to its ``checkpoints``: clones of the state at turn boundaries, which are
    never changed.

    If pages are divided, it holds the near parts of all pages but the first ``released``: these lie before what its
    next token sees.

    The first ``saved_length`` tokens are also stored below memory, up to the segment ``saved``, or will be when the
    write in progress is complete. A ``private`` session's KV was imported by a client, and no other session may reuse
    it.
    """

    def __init__(self, tenant: str, name: str | None, stateful: bool = False) -> None:
        self.tenant = tenant
        self.name = name  # None: anonymous
        self.token_ids: array[int] = array("i")
        self.mask = bytearray()
        self.pages: list[Page] = []
        self.released = 0
        self.began = 0  # length at which the newest turn began
        self.running = False
        self.counted = 0  # pages for which our tenant is accountable
        self.warm = False  # our pages count us as warm: running, or idle on the device
        self.hidden = 0  # zeros in the mask
        self.long = False  # computed on the long side of a RoPE threshold
        self.source: array[int] | None = None  # what the encoder of an encoder-decoder model reads
        self.key: TimelineKey | None = None  # of the adapter with which the running turn computes
        self.media: TimelineMedia | None = None  # of the prompt that runs on it, if it has pictures
        self.stateful = stateful
        self.state: Any = None
        self.checkpoints: dict[int, Any] = {}
        self.saved: Segment | None = None
        self.saved_length = 0
        self.private = False
        self.asked = 0  # tokens of the newest turn's prompt
        self.continued = False  # a turn has gone on from what another one left
        self.pinned_until = 0.0  # Unix seconds: idle KV is evicted last until then
        self.stop: Stop | None = None  # the turn's end from which it goes on; None while it runs
        self.spared: tuple[SessionCache, ...] = ()  # while it runs: idle sessions that are not evicted for its sake
        self.aside = False  # for its turn these never leave the device before the host or the disk has their KV
        self.urged = 0  # the length at which it was to be written for such a turn
        self._anonymous = uuid.uuid4().hex
        self._tables: dict[bool, torch.Tensor] = {}
        self._slots: np.ndarray[Any, Any] | None = None
        self._near_slots: np.ndarray[Any, Any] | None = None

    @property
    def length(self) -> int:
        """Tokens whose KV is stored."""
        return len(self.mask)

    @property
    def cached(self) -> array[int]:
        return self.token_ids[: self.length]

    def next_tokens(self, count: int) -> array[int]:
        """The next ``count`` tokens to feed, int32, as the model knows them."""
        return self.plain(self.length, self.length + count)

    def plain(self, start: int, stop: int) -> array[int]:
        """The tokens ``start..stop``, int32, as the model knows them."""
        ids = self.token_ids[start:stop]
        return ids if self.key is None else self.key.plain(ids, start)

    def append(self, ids: Sequence[int]) -> None:
        """Tokens that are to be fed behind the others."""
        self.token_ids.extend(ids if self.key is None else self.key.mark(ids, len(self.token_ids)))

    @property
    def owner(self) -> Owner:
        """The name under which this session is stored below memory."""
        return Owner(self.tenant, self.name or self._anonymous, self.name is not None)

    @property
    def shareable(self) -> array[int]:
        """The cached tokens whose KV may be reused by any other timeline with the same beginning: those before the
        first hidden one; none of a private session.
        """
        if self.private:
            return array("i")
        return self.token_ids[: self.mask.find(0) if self.hidden else self.length]

    def reachable(self, prompt: array[int]) -> int:
        """The length of the common prefix of ``prompt`` and the cached tokens, less than the prompt's length, since one
        token must be left to feed. It ends in no medium.
        """
        return uncut(prompt, min(common_prefix(self.cached, prompt), len(prompt) - 1))

    def reach(self, length: int) -> int:
        """The longest length, at most ``length``, to which this cache can be rewound."""
        if not self.stateful or length >= self.length:
            return min(length, self.length)
        return max((at for at in self.checkpoints if at <= length), default=0)

    def checkpoint(self) -> None:
        """Keep a checkpoint of the state at this length; the oldest ones beyond ``CHECKPOINTS`` are dropped."""
        if self.stateful and self.length and self.length not in self.checkpoints:
            self.checkpoints[self.length] = states.copy_to_host(self.state)
            while len(self.checkpoints) > CHECKPOINTS:
                del self.checkpoints[min(self.checkpoints)]

    @property
    def state_bytes(self) -> int:
        """Bytes of the state and its checkpoints; checkpoints that sessions share are counted for each of them."""
        return states.nbytes([self.state, *self.checkpoints.values()]) if self.stateful else 0

    def on_fed(self, count: int) -> None:
        """A step has fed the next ``count`` of ``token_ids``."""
        assert self.length + count <= len(self.token_ids), (self.length, count, len(self.token_ids))
        self.mask.extend(b"\x01" * count)

    def draft(self, ids: Sequence[int]) -> Position:
        """Append tokens that the next step feeds behind the pending one and that ``undraft`` removes. Returns where the
        session is before that step.
        """
        self.append(ids)
        return Position(self.length, states.clone(self.state) if self.stateful else None)

    def undraft(self, before: Position, length: int) -> Position:
        """Keep the first ``length`` tokens: those behind it were drafted. Their keys and values stay in the pages, for
        ``fed`` to count those that turn out to be right. A state that has read a wrong token is of no use: a stateful
        session goes back to where it was ``before`` the step. Returns where the step has left it, for ``advance``.
        """
        # A copy, since the state may lie in a row of a batch, which another session takes then (see ``StateRows``).
        after = Position(self.length, states.clone(self.state) if self.stateful else None)
        del self.token_ids[length:]
        del self.mask[before.length if self.stateful else length :]
        if self.stateful:
            self.state = before.state
        return after

    def advance(self, after: Position) -> None:
        """All drafted tokens turned out to be right: a stateful session is where the step has left it."""
        self.on_fed(after.length - self.length)
        self.state = after.state

    def hide(self, start: int, stop: int) -> None:
        """Hide tokens ``start..stop`` from later tokens; they keep their positions."""
        stop = min(stop, self.length)
        self.mask[start:stop] = bytes(stop - start)
        self.hidden = self.mask.count(0)
        if start < min(stop, self.saved_length):  # the stored mask differs now
            self.saved = self.saved.at(start) if self.saved is not None else None
            self.saved_length = start if self.saved is not None else 0

    def cut(self, length: int) -> None:
        """Drop all tokens from ``length`` on; the store drops the pages behind it. ``length`` must be in ``reach``."""
        if self.stateful and length < self.length:
            self.checkpoints = {at: state for at, state in self.checkpoints.items() if at <= length}
            self.state = states.clone(self.checkpoints[length]) if length else None
        del self.mask[length:]
        del self.token_ids[length:]
        self.hidden = self.mask.count(0) if self.hidden else 0
        self.settle()

    def settle(self) -> None:
        """Update ``saved`` after tokens were cut off, or segments were lost."""
        while self.saved is not None and (self.saved.first >= self.length or self.saved.lost):
            self.saved_length = min(self.saved_length, self.saved.first)
            self.saved = self.saved.parent
        self.saved_length = min(self.saved_length, self.length, self.saved.stop) if self.saved is not None else 0

    @property
    def slots(self) -> np.ndarray[Any, Any]:
        """The page table: device slots of the pages in order, ``[pages]`` int64. The same array object as long as it is
        unchanged.
        """
        if self._slots is None:
            self._slots = np.array([page.slot for page in self.pages], np.int64)
        return self._slots

    @property
    def near_slots(self) -> np.ndarray[Any, Any]:
        """The same for the near parts; -1 for one that does not exist."""
        if self._near_slots is None:
            self._near_slots = np.array([page.near for page in self.pages], np.int64)
        return self._near_slots

    def table(self, device: torch.device, near: bool = False) -> torch.Tensor:
        """``slots`` or ``near_slots`` on ``device``, ``[pages]`` int64."""
        if near not in self._tables:
            self._tables[near] = put(self.near_slots if near else self.slots, device)
        return self._tables[near]

    def sees_all(self, length: int, windows: Windows, page_size: int) -> bool:
        """Whether the near parts that the token behind ``length`` others sees exist."""
        first, stop = windows.first_key(length) // page_size, -(-length // page_size)
        return all(page.near >= 0 for page in self.pages[first:stop])

    def seen_reach(self, length: int, windows: Windows, page_size: int) -> int:
        """The longest length, at most ``length``, for which ``sees_all``."""
        last = -(-length // page_size)  # pages
        begins, begin = [], 0  # for each page the first of the run of pages with a near part that ends with it
        for number, page in enumerate(self.pages[:last]):
            begin = begin if page.near >= 0 else number + 1
            begins.append(begin)
        while length > 0 and windows.first_key(length) // page_size < begins[-(-length // page_size) - 1]:
            length = (length - 1) // page_size * page_size
        return length

    def move(self, device: torch.device) -> None:
        """Move the state to ``device``; checkpoints stay in host memory."""
        if self.stateful:
            self.state = states.move(self.state, device)

    def on_pages_moved(self) -> None:
        """Call it when the list of pages or a page's slot has changed: the page table is rebuilt on the next read."""
        self._slots = self._near_slots = None
        self._tables = {}
