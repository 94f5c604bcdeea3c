"""What is done while nobody asks: expiry, tombstones, pins."""

import asyncio
import time

import pytest
from http_context import Site, served, until

from server.housekeeping import Housekeeper
from server.log.database import LogUnavailable
from server.log.leases import LeaseChanges

PAST = int(time.time()) - 10


async def settled(keeper: Housekeeper) -> None:
    """Until what was begun is done."""
    while keeper._tasks:
        await asyncio.gather(*keeper._tasks)
        await asyncio.sleep(0)


@served()
async def test_a_session_past_its_time_goes_and_the_engine_hears_of_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Housekeeper(site.engine, site.log)
    await site.log.create("default", "short", ttl=1)
    await site.log.create("default", "long", ttl=1000)
    await site.log.create("default", "held", ttl=1)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 100)
    with site.log.claim("default", "held"):
        await keeper.sweep()
    assert site.engine.forgotten == [("default", "short")]
    assert (await site.http.get("/v1/sessions/short")).status_code == 404
    assert [s["id"] for s in (await site.http.get("/v1/sessions")).json()["data"]] == ["long"]
    await keeper.sweep()
    assert site.engine.forgotten[1:] == [("default", "held")]


@served()
async def test_a_tombstone_stays_until_the_engine_has_nothing_left(site: Site) -> None:
    keeper = Housekeeper(site.engine, site.log)
    await site.log.create("default", "s")
    await site.http.delete("/v1/sessions/s")
    assert [*await site.log.tombstones()] == [("default", "s")]
    site.engine.forgotten.clear()
    keeper.ready()  # an engine that was not there when it was deleted
    await settled(keeper)
    assert site.engine.forgotten == [("default", "s")]
    assert [*await site.log.tombstones()] == [("default", "s")]
    assert site.engine.lives[-1] is not None
    keeper.forgotten("default", "s", site.engine.lives[-1])
    await settled(keeper)
    assert [*await site.log.tombstones()] == []
    await keeper.close()


@served()
async def test_a_deletion_is_over_when_the_engine_says_so(site: Site) -> None:
    keeper = Housekeeper(site.engine, site.log)
    site.engine.on_forgotten = keeper.forgotten
    await site.log.create("default", "s")
    await site.http.delete("/v1/sessions/s")
    await settled(keeper)
    assert [*await site.log.tombstones()] == []


@served()
async def test_a_fresh_engine_hears_of_the_pins(site: Site) -> None:
    keeper = Housekeeper(site.engine, site.log)
    until = int(time.time()) + 1000
    await site.log.create("default", "s", pinned_until=until)
    await site.log.create("default", "was", pinned_until=PAST)
    await site.log.create("default", "never")
    keeper.ready()
    await settled(keeper)
    assert site.engine.pinned == {("default", "s"): until}
    await keeper.close()


@served()
async def test_a_log_that_fails_is_tried_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.housekeeping.SWEEP_SECONDS", 0.001)
    calls = []

    async def failing(moment: float) -> list[tuple[str, str]]:
        calls.append(moment)
        raise LogUnavailable("gone")

    monkeypatch.setattr(site.log, "expire", failing)
    monkeypatch.setattr(site.log, "tombstones", failing)
    keeper = Housekeeper(site.engine, site.log)
    keeper.ready()
    running = asyncio.create_task(keeper.run())
    await until(lambda: len(calls) >= 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await keeper.close()


@served()
async def test_a_turn_whose_session_another_server_has_taken_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Housekeeper(site.engine, site.log)
    await site.chat(session_id="s")
    site.engine.pause_after = 2
    asking = asyncio.create_task(site.chat(session_id="s"))
    await until(lambda: site.engine.running)

    async def taken() -> LeaseChanges:
        return LeaseChanges(lost=frozenset({("default", "s")}))

    monkeypatch.setattr(site.log, "beat", taken)
    await keeper.beat()
    answer = await asking  # though the engine would go on
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
    assert site.engine.forgotten == []  # what is cached of it stays true
    assert not site.engine.running
