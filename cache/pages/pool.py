"""Pages, ``Page``, and the pool of all pages of the device and host tiers, ``PagePool``."""

from __future__ import annotations

from collections.abc import Iterable

from cache.memory.tier import MemoryTier
from cache.tier import Tier


class Page:
    """``page_size`` tokens of one timeline, in all layers.

    ``refs`` sessions hold it. ``warm`` of these are running, or idle with their KV on the device. It lies in exactly
    one tier, at ``slot``.
    """

    __slots__ = ("refs", "slot", "tier", "warm")

    def __init__(self, tier: MemoryTier, slot: int) -> None:
        self.tier = tier
        self.slot = slot
        self.refs = 1
        self.warm = 1


class PagePool:
    """All pages of the engine, in a device tier and a host tier.

    Invariants between two calls of the session store: a page with ``warm`` > 0 is on the device; ``stranded`` are
    exactly the pages on the device that no warm session holds; a page with ``refs`` 0 does not exist.
    """

    def __init__(self, device: MemoryTier, host: MemoryTier) -> None:
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

    def alloc(self) -> Page:
        """Allocate a page on the device, with one reference, which is warm. The caller has checked ``device.free``."""
        return Page(self.device, self.device.alloc())

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
        """Those of ``pages`` that are not on the device."""
        return [page for page in pages if page.tier is not self.device]

    def promote(self, pages: list[Page]) -> None:
        """Move pages from the host tier to the device. The caller has checked ``device.free``."""
        self._move(pages, self.host, self.device)

    def demote(self) -> None:
        """Move the stranded pages to the host tier. The caller has checked ``host.free``."""
        self._move(list(self.stranded), self.device, self.host)
        self.stranded.clear()

    def unshare(self, page: Page) -> Page:
        """Copy-on-write: a private copy of a shared warm ``page``, which loses one warm holder."""
        copy = self.alloc()
        self.device.copy_from(self.device, [page.slot], [copy.slot])
        self.drop([page], warm=True)
        return copy

    @staticmethod
    def _move(pages: list[Page], source: MemoryTier, target: MemoryTier) -> None:
        if not pages:
            return
        slots = sorted(target.alloc() for _ in pages)  # neighbours are copied together
        target.copy_from(source, [page.slot for page in pages], slots)
        for page, slot in zip(pages, slots, strict=True):
            source.release(page.slot)
            page.tier, page.slot = target, slot
