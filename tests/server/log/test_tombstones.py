"""Deletions that several servers have to hear of."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from http_context import demo_tokens
from log_kit import Where, opened, turn

from server.housekeeping import Housekeeper
from server.log.servers import AWAY_SECONDS
from server.log.session_log import SessionLog

S = ("a", "s")


async def settled(keeper: Housekeeper) -> None:
    """Until what was begun is done."""
    while keeper._tasks:
        await asyncio.gather(*keeper._tasks)
        await asyncio.sleep(0)


async def test_every_server_forgets_what_one_has_deleted(where: Where) -> None:
    logs = [SessionLog(where, server=name) for name in ("one", "two")]
    engines = [FakeEngine(demo_tokens()) for _ in logs]
    keepers = [Housekeeper(engine, log) for engine, log in zip(engines, logs, strict=True)]
    await turn(logs[0], "s", "a", "b")
    await logs[0].delete(*S)
    await keepers[0].sweep()
    (life,) = (await logs[0].tombstones()).values()
    keepers[0].forgotten(*S, life)
    await settled(keepers[0])
    assert [[*await log.tombstones()] for log in logs] == [[], [S]]
    with logs[1].claim(*S):  # begun anew: its turn is not ended
        await keepers[1].sweep()
    assert engines[1].forgotten == []
    for _ in range(3):  # once, also while the engine has not answered
        await keepers[1].sweep()
    assert [engine.forgotten for engine in engines] == [[S], [S]]
    keepers[1].ready()  # a fresh engine has been told nothing
    await settled(keepers[1])
    assert engines[1].forgotten == [S, S]
    await logs[1].close()
    logs[1] = SessionLog(where, server="two")  # died before its engine answered
    keepers[1] = Housekeeper(engines[1], logs[1])
    keepers[1].ready()
    await settled(keepers[1])
    assert engines[1].forgotten == [S, S, S]
    keepers[1].forgotten(*S, life)
    await settled(keepers[1])
    assert [await log.tombstones() for log in logs] == [{}, {}]
    for log in logs:
        await log.close()


async def test_a_name_that_is_deleted_again_is_forgotten_again(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes its time, as its remote tier does; meanwhile the session begins anew, and another server deletes
    it."""
    one, two = (SessionLog(where, server=name) for name in ("one", "two"))
    engine = FakeEngine(demo_tokens())
    keeper = Housekeeper(engine, one)
    lives = []
    for _ in range(2):
        await turn(two, "s", "a", "b")
        lives.append(await two.delete(*S))
        await keeper.sweep()
    assert engine.lives == lives
    assert None not in lives
    assert len({*lives}) == 2
    first, second = [life for life in lives if life is not None]
    keeper.forgotten(*S, first)  # that there was nothing left of the first one says nothing of the second
    await settled(keeper)
    assert [*await one.tombstones()] == [S]
    await keeper.sweep()
    assert engine.lives == lives
    monkeypatch.setattr("server.housekeeping.AGAIN_SECONDS", 0.0)  # it never answered: its remote tier failed
    await keeper.sweep()
    assert engine.lives == [*lives, second]
    keeper.forgotten(*S, second)
    await settled(keeper)
    assert await one.tombstones() == {}
    await one.close()
    await two.close()


async def test_a_server_that_was_away_too_long_empties_its_cache(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_700_000_000.0]
    monkeypatch.setattr("server.log.session_log.now", lambda: clock[0])
    emptied: list[str] = []

    def opened(name: str) -> SessionLog:
        return SessionLog(where, server=name, on_unregistered=lambda: emptied.append(name))

    one, two = opened("one"), opened("two")
    assert emptied == ["one", "two"]  # new here
    await two.close()
    await turn(one, "s", "a", "b")
    await one.delete(*S)
    clock[0] += AWAY_SECONDS - 1
    await one.expire(clock[0])
    two = opened("two")
    assert emptied == ["one", "two"]
    assert [*await two.tombstones()] == [S]
    await two.close()
    await one.swept(*S, (await one.tombstones())[S])
    clock[0] += AWAY_SECONDS + 1
    await one.expire(clock[0])
    two = opened("two")
    assert emptied == ["one", "two", "two"]
    assert await two.tombstones() == {}
    await one.close()
    await two.close()


def test_what_could_not_be_emptied_is_tried_again(tmp_path: Path) -> None:
    def failing() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        SessionLog(tmp_path / "log.sqlite", server="one", on_unregistered=failing)
    emptied: list[int] = []
    SessionLog(tmp_path / "log.sqlite", server="one", on_unregistered=lambda: emptied.append(1))._database.close()
    SessionLog(tmp_path / "log.sqlite", server="one", on_unregistered=lambda: emptied.append(2))._database.close()
    assert emptied == [1]


async def test_a_known_server_starts_without_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "log.sqlite") as log:
        monkeypatch.setattr(log._database, "write", None)
        log._servers.register(time.time())
