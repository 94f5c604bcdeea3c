"""Vectors of sessions in the log: which are due, whose they are, and a log of the format before them."""

from __future__ import annotations

import sqlalchemy as sql
from log_kit import Where, as_format_10, opened, turn

from server.log.session_log import SessionLog
from server.log.tables import FORMAT, log_format

ONE, TWO = b"\0\0\x80?", b"\0\0\0@"


async def put(log: SessionLog, name: str, vector: bytes, tenant: str = "a", model: str = "m") -> None:
    """Keep a vector of a session as it is now."""
    rows = dict(await log.vectors.missing(tenant, model, 10))
    await log.vectors.put(tenant, name, rows[name], model, vector)


async def test_a_vector_is_due_until_it_is_made_and_after_each_change(log: SessionLog) -> None:
    for name in ("s", "t"):
        await turn(log, name, "hello", "there")
    await turn(log, "s", "hello", "there", tenant="b")
    assert [name for name, _ in await log.vectors.missing("a", "m", 10)] == ["t", "s"]
    assert [name for name, _ in await log.vectors.missing("a", "m", 1)] == ["t"]
    await put(log, "s", ONE)
    await put(log, "t", b"")  # nothing was said
    assert await log.vectors.missing("a", "m", 10) == []
    assert await log.vectors.of("a", "m") == [("s", ONE)]
    assert await log.vectors.of("b", "m") == []
    assert [name for name, _ in await log.vectors.missing("b", "m", 10)] == ["s"]
    await turn(log, "s", "and", "now")
    assert [name for name, _ in await log.vectors.missing("a", "m", 10)] == ["s"]
    assert await log.vectors.of("a", "m") == [("s", ONE)]  # until there is a newer one
    await put(log, "s", TWO, model="another")
    assert (await log.vectors.of("a", "m"), await log.vectors.of("a", "another")) == ([], [("s", TWO)])
    await log.delete("a", "s")
    await log.vectors.put("a", "s", 1, "m", ONE)
    assert await log.vectors.of("a", "another") == await log.vectors.of("a", "m") == []


async def test_a_log_of_format_10_goes_on(where: Where) -> None:
    async with opened(where) as log:
        await turn(log, "s", "hello", "there")

        def drop(connection: sql.Connection) -> None:
            connection.exec_driver_sql("DROP TABLE session_vectors")
            connection.exec_driver_sql("UPDATE log_format SET version = 10")

        if isinstance(where, str):
            await log._thread.write(drop)
    if not isinstance(where, str):
        as_format_10(where)
    async with opened(where) as log:
        record = await log.get("a", "s")
        assert record is not None
        assert [message.content for message in record.messages] == ["hello", "there"]
        await turn(log, "s", "and", "now")
        await put(log, "s", ONE)
        assert await log.vectors.of("a", "m") == [("s", ONE)]
        version = await log._thread.read(lambda connection: connection.execute(sql.select(log_format.c.version)))
        assert [*version] == [(FORMAT,)]
