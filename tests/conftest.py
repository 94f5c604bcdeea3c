"""What several folders of tests share."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator

if "PYTEST_XDIST_WORKER" in os.environ:  # a core each; torch reads it when it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from postgres_server import PostgresServer, installed, postgres_server

REQUIRED = tuple(os.environ.get("TESTS_REQUIRE", "").split())  # programs and packages that have to be there


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch computes with two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A running server of PostgreSQL; the test is skipped where it is not installed."""
    programs = installed()
    if programs is None:
        pytest.skip("PostgreSQL is not installed here: Debian's package is called postgresql")
    with postgres_server(programs) as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that is skipped because something of ``REQUIRED`` is not installed has failed."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if REQUIRED and reason.startswith(REQUIRED) and "not installed" in reason:
            report.outcome, report.longrepr = "failed", reason
    return report


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the engine says from INFO on is caught; ``engine_kit.ours`` reads it."""
    caplog.set_level(logging.INFO, "warmturn.engine")
    return caplog
