"""The tree of segments: which file holds which tokens of which session's timeline.

A segment is one immutable file with the KV of tokens ``[first, stop)``. Its parent is the segment that holds the tokens
before ``first``; tokens of the parent from ``first`` on are not part of its timeline. So a turn writes only its new
tokens, and after a rewind or a fork the new segment has an older segment, or one of another session, as its parent. The
tree is stored in the files themselves: each names its parent and the hash of the timeline before its first token.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from cache.segments.segment_file import Header, lengths_of, timeline_hash
from cache.tier import Tier

Place = tuple[str, str]  # folder and name of a file


class Owner(NamedTuple):
    """The session whose timeline a segment belongs to: a session name, or a generated id of an anonymous session."""

    tenant: str
    session: str
    named: bool


@dataclass(eq=False, slots=True)
class Segment:
    """One segment file.

    ``states`` are the lengths at which it holds checkpoints. ``refs`` counts children, heads and readers: a segment
    without any is removed. ``dead``: its file is gone, was never completed, or cannot be trusted; its descendants are
    lost with it.
    """

    owner: Owner
    folder: str
    name: str
    sequence: int  # newer segments of an owner have higher ones
    parent: Segment | None
    first: int
    tokens: array[int]
    mask: bytes
    after: bytes  # hash of the whole timeline [0, stop)
    states: tuple[int, ...] = ()
    long: bool = False
    private: bool = False
    orphan: bool = False  # its session was deleted: no head, kept because other sessions depend on it
    nbytes: int = 0
    refs: int = 0
    dead: bool = False
    local: bool = False  # the file is on disk, complete
    copies: frozenset[Tier] = frozenset()  # the tiers below the disk that have a copy of it

    @property
    def stop(self) -> int:
        """The end of its token range: the length of the timeline that ends here."""
        return self.first + len(self.tokens)

    def chain(self) -> list[Segment]:
        """The segments from the root to this one."""
        found: list[Segment] = []
        segment: Segment | None = self
        while segment is not None:
            found.append(segment)
            segment = segment.parent
        return found[::-1]

    def extents(self, length: int | None = None) -> list[Extent]:
        """Which segment holds which tokens of the timeline, cut to ``length``, in order."""
        stop = self.stop if length is None else min(length, self.stop)
        found: list[Extent] = []
        for segment in reversed(self.chain()):
            if segment.first < stop:
                found.append(Extent(segment, segment.first, stop))
                stop = segment.first
        return found[::-1]

    def timeline(self, length: int | None = None) -> tuple[array[int], bytearray]:
        """Token ids and mask of ``[0, stop)``, or of the first ``length`` of them."""
        ids: array[int] = array("i")
        mask = bytearray()
        for segment, first, stop in self.extents(length):
            ids += segment.tokens[: stop - first]
            mask += segment.mask[: stop - first]
        return ids, mask

    def reach(self, length: int, stateful: bool) -> int:
        """The longest length, at most ``length``, that can be loaded: any, or if ``stateful`` one with a checkpoint."""
        if not stateful:
            return min(length, self.stop)
        kept = (at for segment, _, stop in self.extents(length) for at in segment.states if at <= min(stop, length))
        return max(kept, default=0)

    def cut(self, stop: int) -> None:
        """Drop the tokens from ``stop`` on; the caller cuts the file."""
        ids, mask = self.timeline(stop)
        self.tokens, self.mask = self.tokens[: stop - self.first], self.mask[: stop - self.first]
        self.after = timeline_hash(ids.tobytes(), bytes(mask))
        self.states = tuple(length for length in self.states if length <= stop)

    @property
    def lost(self) -> bool:
        """Whether this segment or an ancestor is dead."""
        return any(segment.dead for segment in self.chain())

    def at(self, length: int) -> Segment | None:
        """The segment of this chain that holds token ``length - 1``."""
        return next((segment for segment in reversed(self.chain()) if segment.first < length), None)


class Extent(NamedTuple):
    """Tokens ``[first, stop)`` of a timeline, all of them in ``segment``."""

    segment: Segment
    first: int
    stop: int


@dataclass(eq=False)
class ChainHead:
    """The head of an owner: its newest segment, which defines what is stored of the session."""

    owner: Owner
    tip: Segment
    used: float  # Unix seconds
    pinned_until: float = 0.0
    # Maybe its beginning only, kept for others or left by damage: the tiers that may hold more, and were not asked yet.
    unasked: frozenset[Tier] = frozenset()
    source: Tier = Tier.DISK  # where its files have come from, until a turn uses them

    @property
    def tenant(self) -> str:
        return self.owner.tenant

    @property
    def shareable(self) -> array[int]:
        """The tokens whose KV may be reused by any other timeline with the same beginning, see ``PrefixIndex``."""
        if self.tip.private:
            return array("i")
        ids, mask = self.tip.timeline()
        hidden = mask.find(0)
        return ids if hidden < 0 else ids[:hidden]


class LooseSegment(NamedTuple):
    """A segment that was read from a file and is not linked to its parent yet."""

    segment: Segment
    parent: Place | None
    before: bytes  # hash of the timeline up to its first token
    created: float  # Unix seconds

    def joins(self, before: Segment | None) -> bool:
        """Link it to ``before`` as its parent, and return True, if the hashes and ranges match."""
        segment, ids, mask = self.segment, b"", b""
        if before is None:
            if self.parent is not None or segment.first:
                return False
        elif segment.first > before.stop or (before.owner.tenant, before.long) != (segment.owner.tenant, segment.long):
            return False
        else:
            kept, flags = before.timeline(segment.first)
            ids, mask = kept.tobytes(), bytes(flags)
        segment.parent = before
        after = timeline_hash(ids + segment.tokens.tobytes(), mask + segment.mask)
        return timeline_hash(ids, mask) == self.before and after == segment.after


def read_segment(header: Header, place: Place) -> LooseSegment:
    folder, _, name = (header.parent or "").partition("/")
    segment = Segment(
        owner=Owner(header.tenant, header.session, header.named),
        folder=place[0],
        name=place[1],
        sequence=header.sequence,
        parent=None,
        first=header.first,
        tokens=array("i", header.tokens),
        mask=header.mask,
        after=header.after,
        states=lengths_of((*(entry.name for entry in header.tensors), *header.facts)),
        long=header.long,
        private=header.private,
        orphan=header.orphan,
        nbytes=header.size,
        local=True,
    )
    return LooseSegment(segment, (folder, name) if header.parent is not None else None, header.before, header.created)
