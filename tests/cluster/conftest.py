"""Databases that several servers share: tests that ask for ``shared`` run on a file of SQLite and on PostgreSQL."""

import logging
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from postgres_server import PostgresServer


@pytest.fixture(params=["sqlite", "postgresql"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty log."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shared.sqlite"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture(scope="session")
def ray() -> Iterator[None]:
    """Ray's modules, whose import warns of much and puts handlers on loggers; skipped where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("ray", reason="Ray is not installed: the extra ray")
        for name in ("ray.serve", "ray.serve.schema", "server.cluster.router"):
            import_module(name)
    yield
    logging.getLogger("ray").handlers.clear()
