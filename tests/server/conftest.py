"""Databases for the log: every test that asks for ``where`` or ``log`` runs on SQLite and on PostgreSQL."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer

from server.log.session_log import SessionLog


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where an empty log can be opened, as often as one likes."""
    if request.param == "sqlite":
        return tmp_path / "log.sqlite"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def log(where: Path | str, runner: asyncio.Runner) -> Iterator[SessionLog]:
    """An empty log on ``where``."""
    log = SessionLog(where)
    yield log
    runner.run(log.close())
