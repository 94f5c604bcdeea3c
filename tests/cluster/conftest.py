"""Databases that several servers share: tests that ask for ``shared`` run on a file of SQLite and on PostgreSQL."""

import asyncio
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from cluster.lease_kit import NAMES
from postgres_server import PostgresServer

from server.log.session_log import SessionLog


@pytest.fixture(params=["sqlite", "postgresql"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty log."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shared.sqlite"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


def on_shared(server: str) -> Callable[..., Iterator[SessionLog]]:
    """A fixture: the log of a server on ``shared``."""

    @pytest.fixture
    def log(shared: str, runner: asyncio.Runner) -> Iterator[SessionLog]:
        log = SessionLog(shared, server=server)
        yield log
        runner.run(log.close())

    return log


one, two, three, four = map(on_shared, NAMES)


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
