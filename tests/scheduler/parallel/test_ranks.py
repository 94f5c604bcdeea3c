"""Pages whose heads lie on several ranks: here three, the others being threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
import torch

from cache.memory.frames import UNDIVIDED
from cache.memory.memory_tier import MemoryTier, PageShape, divide
from cache.pages.layers import AttentionLayer, Reach, Windows
from cache.pages.pool import PagePool
from cache.tiers import transfer
from scheduler.parallel.rank_commands import DEVICE, HOST, CopyPages, CreateTiers, FreeMemory, Ordered
from scheduler.parallel.rank_link import RankLink, line_pair
from scheduler.parallel.rank_tiers import RankTiers
from scheduler.parallel.ranks import RankedTier, RankLost, Ranks

SIZE = 4
CPU = torch.device("cpu")
RANKS = 3
SHAPES = {0: PageShape(2, 8, 2, 8, torch.bfloat16), 3: PageShape(2, 4, 1, 16, torch.float32, 6)}
SPLIT = frozenset({"0.key", "0.value", "3.key"})  # values of layer 3 and indexer keys are the same on every rank


class Other:
    """Another rank, which obeys on threads of its own; ``hold`` keeps it from what comes in order."""

    def __init__(self) -> None:
        self.share = RankTiers()
        self.hold = threading.Event()
        self.hold.set()
        self.ordered, ordered = line_pair()
        self.files, files = line_pair()
        self._ends = [RankLink(ordered), RankLink(files)]
        self._threads = [threading.Thread(target=work) for work in (self._obey, self._serve)]
        for thread in self._threads:
            thread.start()

    def _obey(self) -> None:
        decode = msgspec.msgpack.Decoder(Ordered).decode
        with suppress(EOFError):
            while True:
                command = decode(self._ends[0].receive())
                self.hold.wait(20)
                answer: bytes | None = None
                if isinstance(command, CreateTiers):
                    self.share.build(command, CPU)
                    answer = msgspec.msgpack.encode("")
                elif isinstance(command, CopyPages):
                    self.share.copy(command)
                elif isinstance(command, FreeMemory):
                    answer = msgspec.msgpack.encode(7)
                self.share.done()  # first: nobody may be there any more to hear the answer
                if answer is not None:
                    self._ends[0].send(answer)

    def _serve(self) -> None:
        with suppress(EOFError):
            self.share.serve(self._ends[1])

    def leave(self) -> None:
        for end in self._ends:
            end.close()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        self.leave()


class Scene:
    """Three ranks with 12 device and 12 host pages."""

    def __init__(self, shapes: dict[int, PageShape] = SHAPES, windows: Windows | None = None) -> None:
        """``windows``: pages have two parts."""
        self.others = [Other() for _ in range(RANKS - 1)]
        self.ranks = Ranks([other.ordered for other in self.others], [other.files for other in self.others])
        assert self.ranks.call(CreateTiers(12, 12, SIZE, False)) == ["", ""]
        for other in self.others:
            for tier in other.share.tiers:
                for layer, shape in shapes.items():
                    tier._create(layer, shape)
        split = divide(shapes, windows.layers, SIZE) if windows is not None else UNDIVIDED
        if windows is not None:
            assert self.ranks.call(CreateTiers(12, 12, SIZE, True, split)) == ["", ""]
        self.ranks.split = SPLIT if windows is None else frozenset(self.others[0].share.tiers[DEVICE].pools)
        device = RankedTier(self.ranks, DEVICE, 12, SIZE, CPU, shapes=shapes, division=split)
        host = RankedTier(self.ranks, HOST, 12, SIZE, CPU, shapes=shapes, division=split)
        self.pool = PagePool(device, host, windows)

    def go_on(self) -> None:
        """Nobody is held any more."""
        for other in self.others:
            other.hold.set()

    def filled(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Random tokens in these rows of the device's pages, and what is there then."""
        for name in self.pool.device.token_shapes:
            self.pool.device.scatter(rows, name, self.tensor(name, len(rows)))
        return self.pool.device.gather(rows)

    def close(self) -> None:
        self.ranks.close()
        for other in self.others:
            other.join()

    def tensor(self, name: str, tokens: int) -> torch.Tensor:
        """Random tokens as a file holds them."""
        shape, dtype = self.pool.device.token_shapes[name]
        return torch.randn(tokens, *shape).to(getattr(torch, dtype))


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def test_what_is_written_is_divided_and_read_as_a_whole(scene: Scene) -> None:
    pool = scene.pool
    assert len(scene.ranks) == RANKS
    assert pool.device.token_shapes["0.key"] == ((6, 8), "bfloat16")
    assert pool.device.token_shapes["3.value"] == ((1, 16), "float32")
    assert pool.device.token_shapes["3.index"] == ((6,), "float32")
    assert pool.device.token_bytes == 2 * 6 * 8 * 2 + 6 * 4 * 4 + 16 * 4 + 6 * 4
    pages = [pool.alloc() for _ in range(3)]
    rows = transfer.rows_of(pages, SIZE, 1, 10)
    given = {name: scene.tensor(name, 9) for name in pool.device.token_shapes}
    for name, tokens in given.items():
        pool.device.scatter(rows, name, tokens)
    found = pool.device.gather(rows)
    assert list(found) == list(given)
    assert all(torch.equal(found[name], given[name]) for name in given)
    for rank, tier in enumerate([pool.device, *(other.share.tiers[DEVICE] for other in scene.others)]):
        mine = MemoryTier.gather(tier, rows)
        assert torch.equal(mine["0.key"], given["0.key"][:, 2 * rank : 2 * rank + 2])
        assert torch.equal(mine["3.value"], given["3.value"])


def test_pages_move_on_every_rank(scene: Scene) -> None:
    pool = scene.pool
    pages = [pool.alloc() for _ in range(3)]
    before = scene.filled(transfer.rows_of(pages, SIZE, 0, 12))
    copy = pool.unshare(pages[1])
    at = transfer.rows_of([copy], SIZE, 0, SIZE)
    assert all(torch.equal(tokens, before[name][4:8]) for name, tokens in pool.device.gather(at).items())
    pool.release_warm([pages[0], pages[2]])
    pool.demote()
    below = pool.host.gather(transfer.rows_of([pages[2]], SIZE, 0, SIZE))
    assert all(torch.equal(tokens, before[name][8:]) for name, tokens in below.items())
    pool.hold_warm([pages[0], pages[2]])
    pool.promote([pages[0], pages[2]])
    back = pool.device.gather(transfer.rows_of([pages[0], copy, pages[2]], SIZE, 0, 12))
    assert all(torch.equal(back[name], before[name]) for name in before)


def test_pages_in_two_parts_move_on_every_rank() -> None:
    shapes = dict.fromkeys(range(3), PageShape(2, 8, 2, 8, torch.bfloat16))
    windows = Windows(frozenset({0, 2}), (AttentionLayer(Reach.SLIDING, 4, True),))
    scene = Scene(shapes, windows)
    try:
        pool = scene.pool
        assert pool.device.token_bytes == 3 * pool.session_bytes(1) // 3 == 3 * 2 * 6 * 8 * 2
        assert pool.device.near_token_bytes == 2 * 2 * 6 * 8 * 2
        pages = [pool.alloc() for _ in range(3)]
        pool.drop_near(pages[:1])
        rows = {near: transfer.rows_of(pages[near:], SIZE, 0, 12 - 4 * near, near) for near in (False, True)}
        given = {name: scene.tensor(name, len(rows[pool.device.is_near(name)])) for name in pool.device.pools}
        for name, tokens in given.items():
            pool.device.scatter(rows[pool.device.is_near(name)], name, tokens)
        pages[2] = pool.unshare(pages[2])
        pool.release_warm(pages)
        pool.demote()
        rows = {near: transfer.rows_of(pages[near:], SIZE, 0, 12 - 4 * near, near) for near in (False, True)}
        below = pool.host.gather(rows[False], rows[True])
        assert all(torch.equal(below[name], given[name]) for name in given)
        pool.hold_warm(pages)
        pool.promote(pages)
        rows = {near: transfer.rows_of(pages[near:], SIZE, 0, 12 - 4 * near, near) for near in (False, True)}
        back = pool.device.gather(rows[False], rows[True])
        assert all(torch.equal(back[name], given[name]) for name in given)
    finally:
        scene.close()


def test_a_file_is_read_after_what_was_told_before(scene: Scene) -> None:
    pool = scene.pool
    page = pool.alloc()
    before = scene.filled(transfer.rows_of([page], SIZE, 0, SIZE))
    for other in scene.others:
        other.hold.clear()
    copy = pool.alloc()
    pool.device.copy_from(pool.device, [page.slot], [copy.slot])
    later = threading.Timer(0.2, scene.go_on)
    later.start()
    found = pool.device.gather(transfer.rows_of([copy], SIZE, 0, SIZE))
    later.join()
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_what_ranks_have_of_their_own_is_found_out(scene: Scene) -> None:
    tier = scene.pool.device
    rows = torch.arange(5)
    for rank, one in enumerate([tier, *(other.share.tiers[DEVICE] for other in scene.others)]):
        for name in one.pools:
            seed = rank if name in SPLIT else 100
            tokens = torch.randn(5, *one.pools[name].shape[2:], generator=torch.Generator().manual_seed(seed))
            MemoryTier.scatter(one, rows, name, tokens.to(one.pools[name].dtype))
    scene.ranks.split = frozenset()
    plain = MemoryTier(tier.slots, SIZE, CPU)  # rank 0's part alone, as the probe has it
    plain.keys, plain.values, plain.indexes = tier.keys, tier.values, tier.indexes
    scene.ranks.compare(plain, rows)
    assert scene.ranks.split == SPLIT


def test_answers_come_from_all(scene: Scene) -> None:
    assert scene.ranks.call(FreeMemory()) == [7, 7]


def test_a_rank_that_is_gone_is_noticed(scene: Scene) -> None:
    scene.others[1].leave()
    with pytest.raises(RankLost):
        scene.ranks.call(FreeMemory())
    with pytest.raises(RankLost):
        scene.pool.device.gather(torch.arange(4))


def test_an_exchange_that_is_broken_off_is_the_last(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next one would read what was meant for this."""

    def full() -> None:
        raise MemoryError

    rows = torch.arange(4)
    with monkeypatch.context() as patch:
        patch.setattr(scene.pool.device, "settle", full)
        with pytest.raises(MemoryError):
            scene.pool.device.gather(rows)
    with pytest.raises(RankLost):
        scene.pool.device.gather(rows)
    with pytest.raises(RankLost):
        scene.ranks.broadcast(FreeMemory())


def test_it_is_known_for_how_long_others_have_been_waited_for(scene: Scene) -> None:
    assert scene.ranks.waited <= 0
    scene.others[0].hold.clear()
    asking = threading.Thread(target=lambda: scene.ranks.call(FreeMemory()))
    asking.start()
    deadline = time.monotonic() + 20
    while scene.ranks.waited < 0.1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    scene.others[0].hold.set()
    asking.join()
    assert scene.ranks.waited <= 0
