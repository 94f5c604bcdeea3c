"""``Frames``: which slots of a tier are free. A slot is the place of one part of a page; slots of the two parts share
one memory, which is divided into frames of equal size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Division(NamedTuple):
    """How a page is divided: the windowed layers ``near`` are its near part, the others its whole part.

    A frame of ``nbytes`` holds ``each[part]`` slots of one of the parts. Pools are views of one memory, and in a pool
    the first slot of frame ``n`` has the number ``n * stride[part]``. ``each`` 0: no layer belongs to that part.
    """

    near: frozenset[int] = frozenset()
    nbytes: int = 0
    each: tuple[int, int] = (1, 0)
    stride: tuple[int, int] = (1, 0)


UNDIVIDED = Division()


def division(near: Iterable[int], pools: dict[int, tuple[int, ...]]) -> Division:
    """The division of pages into the windowed layers ``near`` and the others. ``pools``: bytes of a page in each pool
    of every layer. ``UNDIVIDED`` if the pools of a part differ: their slots could have no common number.
    """
    layers = frozenset(near) & pools.keys()
    parts = [
        [size for at, sizes in pools.items() if (at in layers) is wanted for size in sizes] for wanted in (False, True)
    ]
    if not layers or any(len(set(part)) > 1 for part in parts):
        return UNDIVIDED
    grain = math.lcm(*(part[0] for part in parts if part))
    largest = -(-max(map(sum, parts)) // grain) * grain
    nbytes = min(range(largest, 9 * largest, largest), key=lambda size: _lost(size, parts) + size / largest / 100)
    each = [nbytes // sum(part) if part else 0 for part in parts]
    stride = [nbytes // part[0] if part else 0 for part in parts]
    return Division(layers, nbytes, (each[0], each[1]), (stride[0], stride[1]))


def _lost(nbytes: int, parts: list[list[int]]) -> float:
    """The largest share of a frame that is in no slot of a part."""
    return max((nbytes % sum(part) / nbytes for part in parts if part), default=0.0)


class Frames:
    """The free frames, and the free slots of frames that are in use. Part 0 of a page is the whole part, part 1 the
    near part.

    Invariant: a frame is free, or it belongs to one part and at least one of its slots is in use.
    """

    def __init__(self, count: int, each: tuple[int, int] = (1, 0), stride: tuple[int, int] = (1, 0)) -> None:
        self.count = count
        self.each = each
        self._stride = stride
        self._free = list(range(count - 1, -1, -1))
        self._partial: tuple[dict[int, list[int]], ...] = ({}, {})

    @property
    def free(self) -> int:
        return len(self._free)

    def alloc(self, part: int) -> int:
        """A slot for this part. The caller has checked ``fits``."""
        if not self.each[part]:
            return 0
        partial = self._partial[part]
        if not partial:
            frame = self._free.pop()
            first = frame * self._stride[part]
            if self.each[part] > 1:
                partial[frame] = list(range(first + self.each[part] - 1, first, -1))
            return first
        frame = next(reversed(partial))
        slot = partial[frame].pop()
        if not partial[frame]:
            del partial[frame]
        return slot

    def release(self, part: int, slot: int) -> None:
        if not self.each[part]:
            return
        frame = slot // self._stride[part]
        left = self._partial[part].setdefault(frame, [])
        left.append(slot)
        if len(left) == self.each[part]:
            del self._partial[part][frame]
            self._free.append(frame)

    def fits(self, whole: int, near: int) -> bool:
        """Whether there is room for that many slots of each part."""
        return self._count_lacking((whole, near), self._partial_slots) <= len(self._free)

    def fits_beside(self, held: tuple[set[int], set[int]], whole: int, near: int) -> bool:
        """Whether there would be room for that many slots if only those ``held`` were in use."""
        frames = self._frames(held)
        left = [len(frames[part]) * self.each[part] - len(held[part]) for part in (0, 1)]
        return self._count_lacking((whole, near), left) <= self.count - len(frames[0]) - len(frames[1])

    def count_used(self, held: tuple[set[int], set[int]]) -> int:
        """The frames of which ``held`` are slots."""
        return sum(len(frames) for frames in self._frames(held))

    def _frames(self, held: tuple[set[int], set[int]]) -> list[set[int]]:
        return [{slot // self._stride[part] for slot in held[part]} if self.each[part] else set() for part in (0, 1)]

    def pages(self, frames: int) -> int:
        """How many pages with both parts so many frames hold, about."""
        whole, near = self.each
        return frames * whole * near // (whole + near) if whole and near else frames * (whole or near)

    def count_needed(self, whole: int, near: int) -> int:
        """The frames that that many slots of each part take, at least."""
        return self._count_lacking((whole, near), (0, 0))

    @property
    def _partial_slots(self) -> tuple[int, int]:
        return sum(map(len, self._partial[0].values())), sum(map(len, self._partial[1].values()))

    def _count_lacking(self, wanted: tuple[int, int], left: tuple[int, int] | list[int]) -> int:
        rest = zip(wanted, left, self.each, strict=True)
        return sum(-(-max(0, want - have) // each) for want, have, each in rest if each)
