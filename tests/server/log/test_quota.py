"""Quotas: the sessions and bytes that a tenant may keep, counted in the log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from log_kit import opened, turn, user

from server.log import quota
from server.log.quota import NO_QUOTA, Quota, QuotaReached, begin_quota
from server.log.session_log import SessionLog


@pytest.fixture(autouse=True)
def _no_quota_afterwards() -> Iterator[None]:
    yield
    begin_quota(NO_QUOTA)


async def test_no_more_sessions_begin_than_are_allowed(log: SessionLog) -> None:
    begin_quota(Quota(sessions=2))
    await log.create("a", "one")
    await log.fork("a", "one", "two")
    for begin in (log.create("a", "three"), log.fork("a", "one", "three")):
        with pytest.raises(QuotaReached, match="2 sessions") as caught:
            await begin
    assert caught.value.status_code == 429
    assert caught.value.body.error.type == "insufficient_quota"
    with pytest.raises(QuotaReached):
        await log.restore("a", "three", await log.rows("a", "one"))
    await log.holdings.check("a", begins=False)
    await log.create("b", "another tenant's")
    await log.delete("a", "two")
    await log.create("a", "three")


async def test_expired_sessions_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "log.sqlite") as log:
        begin_quota(Quota(sessions=1))
        await log.create("a", "one", ttl=1)
        monkeypatch.setattr("server.log.quota.time.time", lambda: 2**40)
        await log.create("a", "two")


async def test_all_that_a_tenant_keeps_is_counted_in_bytes(log: SessionLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "PATIENCE", 0)
    await turn(log, "s", "ä" * 1000, "b")  # 1001 tokens of 4 bytes; the text in UTF-8
    small = await log.holdings.bytes("a")
    assert 4004 + 2001 <= small < 6500
    await log.create("a", "t", messages=[user("x" * 500)])
    assert 500 <= await log.holdings.bytes("a") - small < 600
    assert await log.holdings.bytes("b") == 0
    assert await log.holdings.bytes("%") == 0
    kept = await log.holdings.bytes("a")
    begin_quota(Quota(bytes=kept + 100))
    await log.holdings.check("a", begins=True, more=100)
    with pytest.raises(QuotaReached, match="bytes"):
        await log.holdings.check("a", begins=True, more=101)
    log.holdings.beside = lambda tenant: 51 if tenant == "a" else 0
    with pytest.raises(QuotaReached, match="bytes"):
        await log.holdings.check("a", begins=True, more=50)
    log.holdings.beside = lambda tenant: 0
    begin_quota(Quota(bytes=kept))
    with pytest.raises(QuotaReached):
        await log.holdings.check("a", begins=False)
    await log.delete("a", "s")
    await log.holdings.check("a", begins=False)


async def test_what_takes_long_to_measure_is_taken_for_true_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "log.sqlite") as log:
        monkeypatch.setattr(quota, "measure_bytes", lambda *_: (7, 1000.0))
        assert await log.holdings.bytes("a") == 7
        monkeypatch.undo()
        assert await log.holdings.bytes("a") == 7
        assert await log.holdings.bytes("b") == 0
