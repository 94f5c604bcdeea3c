"""Databases for the log: every test that asks for ``where`` runs on SQLite and on PostgreSQL."""

from pathlib import Path

import pytest
from postgres_server import PostgresServer


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where an empty log can be opened, as often as one likes."""
    if request.param == "sqlite":
        return tmp_path / "log.sqlite"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()
