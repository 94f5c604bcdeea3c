"""What a client hears of a session that has lost rows."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from http_context import Site, served

from server.log.session_log import SessionLog

URL = "/v1/sessions"


@served()
async def test_a_damaged_session_is_refused_until_it_is_deleted(site: Site) -> None:
    for _ in range(2):
        assert (await site.chat(session_id="s")).status_code == 200
    await site.log.close()
    path = site.log._database._engine.url.database
    assert path is not None
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM turns WHERE number = 1")
        connection.commit()
    site.context = replace(site.context, log=SessionLog(Path(path)))
    for answer in (
        await site.chat(session_id="s"),
        await site.chat(session_id="s", stream=True),
        await site.http.get(f"{URL}/s/messages"),
        await site.http.post(f"{URL}/s/fork", json={"id": "t"}),
        await site.http.get(f"{URL}/s/export"),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (410, "session_damaged", "invalid_request_error")
    assert [one["id"] for one in (await site.http.get(URL)).json()["data"]] == ["s"]
    assert (await site.http.delete(f"{URL}/s")).status_code == 200
    assert (await site.chat(session_id="s")).status_code == 200
    site.log = site.context.log
