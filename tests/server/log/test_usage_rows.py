"""Usage in the log: added up by key and day, also across restarts, salvages and servers; tenants apart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from log_kit import Where, as_format_8, opened, sqlite, turn

from server.log.database import LogFull
from server.log.session_log import SessionLog
from server.log.tables import FORMAT
from server.log.usage_rows import DayOfKey, Spent, today

DAY = ("0001-01-01", "9999-12-31")
ONE = Spent(1, 10, 20, 5, 0.5)


async def told(log: SessionLog, tenant: str = "a") -> dict[str, Spent]:
    """What each key has used today."""
    days = await log.usage.days(tenant, *DAY)
    assert {place[::2] for place, _ in days} <= {(tenant, today())}
    return {place.key: spent for place, spent in days}


async def test_usage_is_added_up_by_key_and_outlives_the_server(where: Where) -> None:
    async with opened(where) as log:
        log.usage.add("a", "k", ONE)
        log.usage.add("a", "k", ONE)
        log.usage.add("a", "l", ONE)
        log.usage.add("b", "k", ONE)
        assert await told(log) == {"k": Spent(2, 20, 40, 10, 1.0), "l": ONE}
        assert await told(log, "b") == {"k": ONE}
        assert await told(log, "c") == {}
        log.usage.add("a", "k", ONE)  # written when the log is closed
    async with opened(where) as log:
        assert (await told(log))["k"] == Spent(3, 30, 60, 15, 1.5)


async def test_usage_is_written_without_being_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.log.usage_rows.WRITE_SECONDS", 0.01)
    async with opened(tmp_path / "log.sqlite") as log:
        log.usage.add("a", "k", ONE)
        await asyncio.sleep(0.1)
        assert sqlite(tmp_path / "log.sqlite", "SELECT requests, seconds FROM key_usage") == [(1, 0.5)]


async def test_servers_of_one_log_add_to_the_same_rows(where: Where) -> None:
    async with opened(where) as one, opened(where) as two:
        for log in (one, two, one):
            log.usage.add("a", "k", ONE)
            await told(log)
        assert (await told(two))["k"].requests == 3


async def test_usage_that_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "log.sqlite") as log:

        def full(_: object) -> None:
            raise LogFull("no room")

        with monkeypatch.context() as patch:
            patch.setattr(log._database, "write", full)
            log.usage.add("a", "k", ONE)
            assert await told(log) == {}
        log.usage.add("a", "k", ONE)
        assert (await told(log))["k"].requests == 2


async def test_only_the_days_that_are_asked_for_are_told(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await turn(log, "s", "a", "b")
    days = ["2026-01-30", "2026-01-31", "2026-02-01"]
    values = ", ".join(f"('a', 'k', '{day}', 1, 2, 3, 4, 5)" for day in days)
    sqlite(path, f"INSERT INTO key_usage VALUES {values}")
    async with opened(path) as log:
        found = await log.usage.days("a", "2026-01-31", "2026-02-01")
        assert found == [(DayOfKey("a", "k", day), Spent(1, 2, 3, 4, 5)) for day in days[1:]]


async def test_a_log_of_format_8_is_upgraded(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await turn(log, "s", "a", "b")
    as_format_8(path)
    async with opened(path) as log:
        assert log.salvage is None
        log.usage.add("a", "k", ONE)
        assert (await told(log))["k"] == ONE
    assert sqlite(path, "SELECT version FROM log_format") == [(FORMAT,)]


async def test_usage_is_salvaged(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await turn(log, "s", "a", "b")
        log.usage.add("a", "k", ONE._replace(seconds=2.0))
    with path.open("r+b") as file:
        file.write(bytes(4096))  # the schema, and where every table begins
    async with opened(path) as log:
        assert log.salvage is not None
        assert (await told(log))["k"] == ONE._replace(seconds=2.0)
