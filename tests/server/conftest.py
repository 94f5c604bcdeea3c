"""Databases for the log: every test that asks for ``where`` runs on SQLite and on PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer, installed, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A running server of PostgreSQL; the test is skipped where it is not installed."""
    programs = installed()
    if programs is None:
        pytest.skip("PostgreSQL is not installed here: Debian's package is called postgresql")
    with postgres_server(programs) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where an empty log can be opened, as often as one likes."""
    if request.param == "sqlite":
        return tmp_path / "log.sqlite"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()
