"""The commands that rank 0 sends to the other ranks."""

from __future__ import annotations

import msgspec

from cache.memory.frames import UNDIVIDED, Division

DEVICE, HOST = 0, 1  # the numbers of the two tiers


class PlainForward(msgspec.Struct, tag=True, frozen=True):
    """A forward of one timeline without our cache, as the load-time probe makes them."""

    ids: list[int]
    positions: list[int] | None
    use_cache: bool


class SetMode(msgspec.Struct, tag=True, frozen=True):
    """How steps are run from now on: what the probe has found out (``Trace``, ``Mode.in_place``)."""

    argument: str
    first_position: int
    by_row: bool
    in_place: list[int]


class PackedForward(msgspec.Struct, tag=True, frozen=True):
    """A packed forward: ``counts`` tokens of each session, which holds ``lengths`` so far; ``tokens`` are int32,
    slots of pages and rows int64.

    ``tables`` and ``masks`` are rows (places in the batch) that have another page table than in the step before, and
    those with hidden tokens. The logits of the rows in ``keep`` are wanted; ``long`` is the side of a RoPE threshold.
    """

    lengths: list[int]
    counts: list[int]
    tokens: bytes
    tables: dict[int, bytes]
    masks: dict[int, bytes]
    keep: bytes
    long: bool
    near_tables: dict[int, bytes] = {}  # of the near parts, if pages are divided


class CreateTiers(msgspec.Struct, tag=True, frozen=True):
    """New, empty tiers; ``known``: with the shapes that the last ones have learned. Answered with what went wrong.

    ``division``: how rank 0 divides pages, if it does; ``slots`` and ``host_slots`` are then frames.
    """

    slots: int
    host_slots: int
    page_size: int
    known: bool
    division: Division = UNDIVIDED


class FreeMemory(msgspec.Struct, tag=True, frozen=True):
    """How many bytes are there for KV? Answered with the number."""


class CopyPages(msgspec.Struct, tag=True, frozen=True):
    """Pages from one tier to another or the same: their whole or ``near`` parts, if they are divided."""

    source: int
    target: int
    there: list[int]
    here: list[int]
    near: bool = False


class Gather(msgspec.Struct, tag=True, frozen=True):
    """The tokens at ``rows``, once ``after`` commands have been done; answered by a tensor for each of ``names``.
    ``near``: their rows in the pools of windowed layers, if pages are divided.
    """

    after: int
    tier: int
    names: list[str]
    rows: bytes
    near: bytes = b""


class Scatter(msgspec.Struct, tag=True, frozen=True):
    """Put the tensor that follows at ``rows``, once ``after`` commands have been done; answered when it is there."""

    after: int
    tier: int
    name: str
    rows: bytes


Ordered = PlainForward | SetMode | PackedForward | CreateTiers | FreeMemory | CopyPages
FileCommand = Gather | Scatter
