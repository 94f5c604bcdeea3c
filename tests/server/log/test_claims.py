"""Who holds a session: one at a time, and whoever waits for it is next."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from server.log.claims import Claims, SessionBusy

S, T = ("a", "s"), ("a", "t")
LONG = 20.0


async def test_whoever_waits_holds_it_next() -> None:
    claims = Claims()
    order = []

    async def waits(name: str) -> None:
        async with claims.claim_when_free(S, LONG):
            order.append(name)
            assert S in claims.claimed_keys()
            await asyncio.sleep(0)

    with claims.claim(S):
        waiting = [asyncio.create_task(waits(name)) for name in ("one", "two")]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == []
    with pytest.raises(SessionBusy), claims.claim(S):  # nothing gets in between
        pass
    with claims.claim(T):
        await asyncio.gather(*waiting)
    assert order == ["one", "two"]
    assert claims.claimed_keys() == frozenset()
    with claims.claim(S):
        pass


async def test_what_is_free_is_held_at_once() -> None:
    claims = Claims()
    async with claims.claim_when_free(S, 0.0):
        with pytest.raises(SessionBusy), claims.claim(S):
            pass
    assert claims.claimed_keys() == frozenset()


@pytest.mark.parametrize("how", ["too long", "cancelled"])
async def test_whoever_stops_waiting_leaves_it_free(how: str) -> None:
    claims = Claims()

    async def waits(seconds: float) -> None:
        async with claims.claim_when_free(S, seconds):
            raise AssertionError

    async with AsyncExitStack() as stack:
        stack.enter_context(claims.claim(S))
        if how == "too long":
            with pytest.raises(SessionBusy):
                await waits(0.01)
        else:
            waiting = asyncio.create_task(waits(LONG))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert claims.claimed_keys() == {S}
    assert claims._awaited == {}
    with claims.claim(S):
        pass


async def test_a_failure_inside_frees_it() -> None:
    claims = Claims()
    with pytest.raises(ZeroDivisionError):
        async with claims.claim_when_free(S, LONG):
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), claims.claim(S):
        raise ZeroDivisionError
    assert claims.claimed_keys() == frozenset()
