"""The session store: random histories, then who is continued, forked or named. Every token is marked: see ``Bench``."""

from __future__ import annotations

import random
from array import array

import pytest
from store_bench import SIZE, Bench

from cache.pages.session import SessionCache
from cache.store import SessionRunning
from cache.tier import Tier

# -- random histories -----------------------------------------------------------------------------------------------


def random_prompt(rng: random.Random, bench: Bench, longest: int) -> list[int]:
    """Often a continuation or an edit of what someone has cached."""
    known = bench.sessions()
    tokens = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
    if known and rng.random() < 0.8:
        trunk = list(rng.choice(known).token_ids)
        tokens = trunk[: rng.randint(0, len(trunk))] + tokens if rng.random() < 0.5 else trunk + tokens
    return tokens[:longest]


@pytest.mark.parametrize(
    ("seed", "device", "host"), [(1, 200, 0), (2, 16, 0), (3, 16, 8), (4, 16, 100), (5, 10, 3), (6, 10, 40)]
)
def test_random_histories(seed: int, device: int, host: int) -> None:
    rng = random.Random(seed)
    bench = Bench(device, host)
    longest = (device - 1) * SIZE
    running: list[SessionCache] = []
    refused = 0
    for _ in range(150 if device == 200 else 300):  # nothing is refused or evicted there, and all are looked at
        action = rng.random()
        if action < 0.4:
            name = rng.choice([None, None, "x", "y", "z"])
            tenant = rng.choice(["a", "a", "b"])
            prompt = random_prompt(rng, bench, longest)
            if name is not None and bench.store.busy(tenant, name):
                with pytest.raises(SessionRunning):
                    bench.acquire(prompt, name, tenant)
                continue
            promised = bench.store.match(tenant, array("i", prompt))
            before = {session: session.length for session in running}
            acquired = bench.try_acquire(prompt, name, tenant)
            assert {session: session.length for session in running} == before
            if acquired is None:
                refused += 1
                continue
            assert acquired.reused >= promised
            assert acquired.session not in running
            assert name is None or bench.store._named[tenant, name] is acquired.session
            running.append(acquired.session)
        elif action < 0.6 and running:
            session = rng.choice(running)
            left = len(session.token_ids) - session.length
            if left:
                bench.feed(session, rng.randint(1, left))
        elif action < 0.75 and running:
            session = rng.choice(running)
            bench.feed(session, len(session.token_ids) - session.length)
            more = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
            if session.length + len(more) <= longest:
                bench.grow(session, more)
        elif action < 0.8 and running:
            bench.store.publish(rng.choice(running))
        elif action < 0.97 and running:
            session = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.3:
                session.token_ids.append(5)  # a pending token is not kept
            bench.store.release(session)
        else:
            name, tenant = rng.choice("xyz"), rng.choice("ab")
            bench.store.forget(tenant, name)
            assert bench.store.busy(tenant, name) or (tenant, name) not in bench.store._named
        bench.check()
        assert all(session.running for session in running)
    if device < 200:
        assert bench.store.residency.evictions[Tier.DEVICE] > 0
        assert refused > 0
    bench.empty()


# -- who is continued, who is forked --------------------------------------------------------------------------------


def test_an_anonymous_session_that_is_a_prefix_is_continued() -> None:
    bench = Bench(32)
    first = bench.turn(list(range(10)))
    acquired = bench.acquire(list(range(13)))
    assert acquired.session is first
    assert acquired.reused == 10
    assert len(bench.store.residency) == 1


def test_an_anonymous_session_that_differs_later_is_forked_and_stays() -> None:
    bench = Bench(32)
    first = bench.turn(list(range(10)))
    acquired = bench.acquire([*range(7), 99, 98])
    assert acquired.session is not first
    assert acquired.reused == 7
    assert list(first.cached) == list(range(10))
    again = bench.acquire([*range(10), 1])
    assert again.reused == 10


@pytest.mark.parametrize("cut", range(1, 13))
def test_a_fork_at_any_token_shares_full_pages_and_copies_the_last(cut: int) -> None:
    bench = Bench(32)
    trunk = bench.turn(list(range(13)))
    used = bench.pool.device.used
    acquired = bench.acquire([*range(cut), 99])
    assert acquired.reused == cut
    full = cut // SIZE
    assert acquired.session.pages[:full] == trunk.pages[:full]
    assert not set(acquired.session.pages[full:]) & set(trunk.pages)
    assert bench.pool.device.used == used + 1
    bench.feed(acquired.session, 1)
    assert list(trunk.cached) == list(range(13))


def test_the_same_prompt_again_leaves_one_token_to_feed() -> None:
    bench = Bench(32)
    bench.turn(list(range(8)))
    acquired = bench.acquire(list(range(8)))
    assert acquired.reused == 7


def test_a_running_session_is_forked_never_taken() -> None:
    bench = Bench(32)
    first = bench.acquire(list(range(9)))
    bench.feed(first.session, 9)
    bench.store.publish(first.session)
    second = bench.acquire([*range(9), 50])
    assert second.session is not first.session
    assert second.reused == 9
    assert bench.grow(first.session, [60, 61])
    bench.feed(second.session, 1)


def test_what_a_running_session_has_fed_is_found_only_once_it_is_published() -> None:
    bench = Bench(32)
    first = bench.acquire(list(range(9)))
    bench.feed(first.session, 9)
    assert bench.store.match("a", array("i", range(12))) == 0
    bench.store.publish(first.session)
    assert bench.store.match("a", array("i", range(12))) == 9


def test_tenants_do_not_share() -> None:
    bench = Bench(32)
    bench.turn(list(range(9)), tenant="a")
    acquired = bench.acquire(list(range(12)), tenant="b")
    assert acquired.reused == 0
    bench.store.release(acquired.session)
    bench.turn(list(range(9)), name="n", tenant="a")
    assert not bench.store.busy("b", "n")
    bench.store.forget("b", "n")
    assert bench.store.match("a", array("i", range(12))) == 9


def test_reuse_can_be_declined() -> None:
    bench = Bench(32)
    named = bench.turn(list(range(9)), name="n")
    acquired = bench.store.acquire("a", "n", array("i", range(12)), reuse=False)
    assert acquired is not None
    assert acquired.reused == 0
    assert acquired.session is not named
    assert bench.store._named["a", "n"] is acquired.session
    assert named not in bench.sessions()
    bench.check()


# -- names ----------------------------------------------------------------------------------------------------------


def test_a_named_session_is_brought_in_line_with_an_edited_history() -> None:
    bench = Bench(32)
    named = bench.turn(list(range(12)), name="n")
    acquired = bench.acquire([*range(5), 99, 98], name="n")
    assert acquired.session is named
    assert acquired.reused == 5
    assert len(bench.store.residency) == 1


def test_a_named_session_is_not_continued_by_a_stranger() -> None:
    bench = Bench(32)
    named = bench.turn(list(range(8)), name="n")
    acquired = bench.acquire(list(range(12)))
    assert acquired.session is not named
    assert acquired.session.name is None
    assert acquired.reused == 8


def test_a_name_takes_over_the_longer_prefix_of_an_anonymous_session() -> None:
    bench = Bench(32)
    named = bench.turn([*range(4), 77], name="n")
    anonymous = bench.turn([*range(9)])
    acquired = bench.acquire(list(range(12)), name="n")
    assert acquired.session is anonymous
    assert acquired.session.name == "n"
    assert acquired.reused == 9
    assert named not in bench.sessions()


def test_a_name_forks_the_longer_prefix_of_another_name() -> None:
    bench = Bench(32)
    other = bench.turn(list(range(9)), name="m")
    acquired = bench.acquire(list(range(12)), name="n")
    assert acquired.session is not other
    assert acquired.reused == 9
    assert bench.store._named["a", "m"] is other


def test_a_running_name_is_busy() -> None:
    bench = Bench(32)
    acquired = bench.acquire([1, 2], name="n")
    assert bench.store.busy("a", "n")
    with pytest.raises(SessionRunning):
        bench.acquire([1, 2], name="n")
    bench.store.forget("a", "n")
    assert acquired.session in bench.sessions()
    bench.feed(acquired.session, 2)
    bench.store.release(acquired.session)
    assert not bench.store.busy("a", "n")
    bench.store.forget("a", "n")
    assert bench.sessions() == []


def test_hidden_tokens_stay_with_their_session_and_end_what_others_reuse() -> None:
    bench = Bench(32)
    acquired = bench.acquire(list(range(10)), name="n")
    bench.feed(acquired.session, 10)
    acquired.session.hide(4, 6)
    bench.store.release(acquired.session)
    stranger = bench.acquire(list(range(12)))
    assert stranger.reused == 4
    own = bench.acquire(list(range(12)), name="n")
    assert own.reused == 10
    assert own.session.hidden == 2
