"""The session store under pressure: who leaves the device, who comes back. Every token is marked: see ``Bench``."""

from __future__ import annotations

from array import array

from store_bench import SIZE, Bench

from cache.tier import Tier


def test_the_least_recently_used_session_goes_first() -> None:
    bench = Bench(8)
    sessions = [bench.turn([100 * i + j for j in range(2 * SIZE)]) for i in range(4)]
    again = bench.turn([*range(2 * SIZE), 9])  # session 0 is used again, and needs a third page: session 1 goes
    assert again is sessions[0]
    assert set(bench.sessions()) == {sessions[0], sessions[2], sessions[3]}
    bench.turn([500, 501])  # one page more fits
    assert set(bench.sessions()) > {sessions[0], sessions[2], sessions[3]}
    bench.turn([600, 601])
    assert sessions[2] not in bench.sessions()
    assert bench.store.residency.evictions[Tier.DEVICE] == 2


def test_being_a_trunk_counts_as_use() -> None:
    bench = Bench(6)
    trunk = bench.turn(list(range(8)))
    other = bench.turn(list(range(100, 108)))
    bench.turn([*range(8), 50])  # continues the trunk
    bench.turn([*range(4), 60])  # forks it
    bench.turn(list(range(200, 204)))
    assert other not in bench.sessions()
    assert trunk in bench.sessions()


def test_running_sessions_are_never_evicted() -> None:
    bench = Bench(8, host=8)
    first = bench.acquire(list(range(16)))
    second = bench.acquire(list(range(100, 116)))
    bench.feed(first.session, 16)
    assert bench.try_acquire([7]) is None
    assert not bench.store.reserve(first.session, 17)
    assert first.session.length == 16
    assert bench.store.residency.evictions[Tier.DEVICE] == 0
    bench.feed(second.session, 16)
    bench.store.release(second.session)
    assert bench.store.reserve(first.session, 17)
    bench.check()


def test_a_refusal_evicts_nobody() -> None:
    bench = Bench(8)
    idle = bench.turn(list(range(8)))
    bench.acquire(list(range(100, 116)))
    assert bench.try_acquire(list(range(200, 220))) is None
    assert idle in bench.sessions()
    assert list(idle.cached) == list(range(8))
    assert bench.store.residency.evictions[Tier.DEVICE] == 0


def test_a_session_goes_to_the_host_and_comes_back_with_a_receipt() -> None:
    bench = Bench(6, host=6)
    session = bench.turn(list(range(16)))
    bench.turn(list(range(100, 116)))
    assert session in bench.store.residency.hosted
    assert bench.pool.host.used == 4
    acquired = bench.acquire(list(range(18)))
    assert (acquired.session, acquired.reused, acquired.restored) == (session, 16, 16)


def test_only_what_lies_on_the_host_is_restored() -> None:
    bench = Bench(11, host=12)
    trunk = bench.turn(list(range(16)))
    branch = bench.turn([*range(8), *range(50, 58)])
    bench.turn([*range(8), *range(50, 58), 1])  # the branch is the most recent
    bench.turn(list(range(100, 120)))
    assert trunk in bench.store.residency.hosted
    assert branch in bench.store.residency.warm
    acquired = bench.acquire(list(range(18)))
    assert (acquired.reused, acquired.restored) == (16, 8)


def test_a_full_host_drops_its_least_recently_used() -> None:
    bench = Bench(4, host=8)
    sessions = [bench.turn([100 * i + j for j in range(16)]) for i in range(4)]
    assert list(bench.store.residency.hosted) == sessions[1:3]
    assert list(bench.store.residency.warm) == sessions[3:]
    assert bench.store.match("a", array("i", range(16))) == 0


def test_a_session_bigger_than_the_host_is_dropped_and_others_are_spared() -> None:
    bench = Bench(8, host=3)
    small = bench.turn(list(range(8)))
    large = bench.turn(list(range(100, 124)))
    bench.turn(list(range(200, 208)))  # the small one goes to the host
    assert small in bench.store.residency.hosted
    bench.turn(list(range(300, 332)))  # everybody has to go
    assert large not in bench.sessions()
    assert bench.store.match("a", array("i", range(9))) in (0, 8)
    bench.check()
    bench.empty()


def test_a_burst_off_one_trunk_stores_the_trunk_once() -> None:
    bench = Bench(64)
    bench.turn(list(range(40)))
    assert bench.pool.device.used == 10
    acquired = [bench.acquire([*range(40), 100 + i]) for i in range(12)]
    for got in acquired:
        assert got.reused == 40
        bench.feed(got.session, 1)
    assert bench.pool.device.used == 10 + 12


def test_a_shared_trunk_leaves_the_device_with_its_last_warm_holder() -> None:
    bench = Bench(10, host=20)
    bench.turn(list(range(16)))
    bench.turn([*range(16), 50])
    branch = bench.turn([*range(12), 60])
    trunk = branch.pages[0]
    bench.turn(list(range(100, 120)))  # pushes out the first, not the branch
    assert branch in bench.store.residency.warm
    assert trunk.tier is bench.pool.device
    bench.turn(list(range(200, 232)))
    assert branch in bench.store.residency.hosted
    assert trunk.tier is bench.pool.host
    assert trunk.refs == 2


def test_a_turn_as_long_as_all_but_one_page_always_runs_alone() -> None:
    bench = Bench(6, host=4)
    longest = 5 * SIZE
    for cut in range(longest):
        bench.turn([*range(longest)])
        acquired = bench.acquire([*range(cut), *range(100, 100 + longest - cut)])
        bench.feed(acquired.session, longest - acquired.reused)
        bench.store.release(acquired.session)
    bench.empty()


def test_a_turn_that_fed_nothing_leaves_nothing() -> None:
    bench = Bench(8)
    acquired = bench.acquire(list(range(9)), name="n")
    bench.store.release(acquired.session)
    bench.check()
    assert bench.sessions() == []
    bench.empty()


def test_a_session_that_waits_for_room_keeps_what_it_has() -> None:
    bench = Bench(8)
    session = bench.turn(list(range(8)), name="n")
    bench.acquire(list(range(100, 120)))
    assert bench.try_acquire(list(range(20)), name="n") is None
    assert list(session.cached) == list(range(8))
    assert bench.store._named["a", "n"] is session
    assert not session.running
    bench.check()
