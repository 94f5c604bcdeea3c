"""Pages, ``Page``, and the pool of all pages of the device and host tiers, ``PagePool``."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterable

from cache.memory.memory_tier import MemoryTier
from cache.pages.layers import Windows
from cache.tier import Tier


class Page:
    """``page_size`` tokens of one timeline, in all layers.

    ``refs`` sessions hold it. ``warm`` of these are running, or idle with their KV on the device. It lies in exactly
    one tier, at ``slot``.

    If pages are divided, the KV of windowed layers is its near part. It lies in the same tier at the slot ``near``, or
    nowhere (-1) if none of the sessions holds it; ``nears`` do.
    """

    __slots__ = ("near", "nears", "refs", "slot", "tier", "warm")

    def __init__(self, tier: MemoryTier, slot: int, near: int = -1) -> None:
        self.tier = tier
        self.slot = slot
        self.near = near
        self.nears = int(near >= 0)
        self.refs = 1
        self.warm = 1


class PagePool:
    """All pages of the engine, in a device tier and a host tier.

    Invariants between two calls of the session store: a page with ``warm`` > 0 is on the device; ``stranded`` are
    exactly the pages on the device that no warm session holds; a page with ``refs`` 0 does not exist.
    """

    def __init__(self, device: MemoryTier, host: MemoryTier, windows: Windows | None = None) -> None:
        """``windows``: the windowed layers, if pages are divided."""
        self.windows = windows if device.near_layers else None
        self.device = device
        self.host = host
        self.page_size = device.page_size
        self.stranded: dict[Page, None] = {}

    @property
    def tiers(self) -> dict[Tier, MemoryTier]:
        """The tiers in memory, nearest first."""
        return {Tier.DEVICE: self.device, Tier.HOST: self.host}

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.page_size * self.device.token_bytes

    @property
    def room(self) -> int:
        """The longest timeline in tokens that fits alone, with a page for copy-on-write."""
        fits = bisect(
            range(1, self.device.slots * max(self.device.frames.each) + 1), self.device.slots, key=self._frames
        )
        return max(0, fits - 1) * self.page_size

    def _frames(self, pages: int) -> int:
        return self.device.frames.count_needed(pages, pages if self.windows is not None else 0)

    def session_bytes(self, length: int) -> int:
        """Bytes of the KV that a session of ``length`` tokens keeps when memory is full."""
        near = self.device.near_token_bytes
        seen = length - (self.windows.first_kept(length) if self.windows is not None else 0)
        return (self.device.token_bytes - near) * length + near * seen

    def bytes_of(self, pages: Collection[Page]) -> int:
        """Bytes of these pages, with those near parts that exist."""
        near = self.page_size * self.device.near_token_bytes
        return len(pages) * (self.page_bytes - near) + near_parts(pages) * near

    def alloc(self) -> Page:
        """Allocate a page on the device, with one reference, which is warm and holds the near part. The caller has
        checked ``device.fits``.
        """
        if self.windows is None:
            return Page(self.device, self.device.alloc())
        return Page(self.device, self.device.alloc(), self.device.alloc(near=True))

    def share_near(self, pages: Iterable[Page]) -> None:
        """One more session holds the near parts of these pages, which some session holds."""
        for page in pages:
            assert page.near >= 0
            page.nears += 1

    def drop_near(self, pages: Iterable[Page]) -> None:
        """One session fewer holds the near parts of these pages; free those that none holds. Before ``drop``."""
        for page in pages:
            page.nears -= 1
            if page.nears == 0:
                page.tier.release(page.near, near=True)
                page.near = -1

    def share(self, pages: Iterable[Page]) -> None:
        """Add a reference to each of these pages (not a warm one: see ``hold_warm``)."""
        for page in pages:
            page.refs += 1

    def drop(self, pages: Iterable[Page], *, warm: bool) -> None:
        """Remove a reference of a session, warm or not, from each of these pages; free those without any."""
        for page in pages:
            page.refs -= 1
            if page.refs == 0:
                self.stranded.pop(page, None)
                page.tier.release(page.slot)
            elif warm:
                self._release_warm(page)

    def hold_warm(self, pages: Iterable[Page]) -> None:
        """One more session that holds these pages is warm. Call ``promote`` before they are read."""
        for page in pages:
            page.warm += 1
            self.stranded.pop(page, None)

    def release_warm(self, pages: Iterable[Page]) -> None:
        """One session fewer that holds these pages is warm."""
        for page in pages:
            self._release_warm(page)

    def _release_warm(self, page: Page) -> None:
        page.warm -= 1
        if page.warm == 0 and page.tier is self.device:
            self.stranded[page] = None

    def off_device(self, pages: Iterable[Page]) -> list[Page]:
        return [page for page in pages if page.tier is not self.device]

    def promote(self, pages: list[Page]) -> None:
        """Move pages from the host tier to the device. The caller has checked ``device.fits``."""
        self._move(pages, self.host, self.device)

    def demote(self) -> None:
        """Move the stranded pages to the host tier. The caller has checked ``host.fits``."""
        self._move(list(self.stranded), self.device, self.host)
        self.stranded.clear()

    def unshare(self, page: Page) -> Page:
        """Copy-on-write: a private copy of a shared warm ``page``, which loses one warm holder of all of it."""
        copy = self.alloc()
        self.device.copy_from(self.device, [page.slot], [copy.slot])
        if self.windows is not None:
            self.device.copy_from(self.device, [page.near], [copy.near], near=True)
            self.drop_near([page])
        self.drop([page], warm=True)
        return copy

    @staticmethod
    def _move(pages: list[Page], source: MemoryTier, target: MemoryTier) -> None:
        if not pages:
            return
        slots = sorted(target.alloc() for _ in pages)  # neighbours are copied together
        target.copy_from(source, [page.slot for page in pages], slots)
        if near := [page for page in pages if page.near >= 0]:
            places = sorted(target.alloc(near=True) for _ in near)
            target.copy_from(source, [page.near for page in near], places, near=True)
            for page, place in zip(near, places, strict=True):
                source.release(page.near, near=True)
                page.near = place
        for page, slot in zip(pages, slots, strict=True):
            source.release(page.slot)
            page.tier, page.slot = target, slot


def near_parts(pages: Iterable[Page]) -> int:
    """How many of ``pages`` have a near part."""
    return sum(page.near >= 0 for page in pages)
