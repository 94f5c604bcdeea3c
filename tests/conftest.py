"""What several folders of tests share."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING
from zlib import crc32

if "PYTEST_XDIST_WORKER" in os.environ:  # a core each; torch reads it when it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("SSL_CERT_FILE", None)  # each client of HTTP reads all certificates that it trusts, 25 ms: here, none
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)
os.environ["TILE_CACHE_DIR"] = tempfile.mkdtemp()  # packed weights and digests of models: not among the user's

import pytest
from postgres_server import PostgresServer, installed, postgres_server
from server_process import ServerProcess
from shared_statements import share_statements
from workers import FilesAndPage, compile_share, longest_first

from scheduler.model_names import read_quickly

if TYPE_CHECKING:
    from xdist.remote import Producer

read_quickly()  # the names of transformers' models, a second of each process that imports it
PATIENCE = 120.0  # seconds until a coroutine test that hangs fails
REQUIRED = tuple(os.environ.get("TESTS_REQUIRE", "").split())  # programs and packages that have to be there


def pytest_configure(config: pytest.Config) -> None:
    """No garbage collection while tests are imported and collected: there is next to no garbage then."""
    gc.disable()
    share_statements()
    compile_share(config)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["TILE_CACHE_DIR"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """What was imported stays: later collections need not look through its millions of objects.

    Torch's forty loggers do not propagate, and pytest puts handlers on each logger that does not, six times a test.
    """
    for name in logging.root.manager.loggerDict:
        if name.partition(".")[0] == "torch":
            logging.getLogger(name).propagate = True
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With TESTS_THIRD=1, 2 or 3 only the files of that third, whichever others there are."""
    if third := os.environ.get("TESTS_THIRD"):
        items[:] = [item for item in items if crc32(item.nodeid.partition("::")[0].encode()) % 3 == int(third) - 1]
    longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesAndPage | None:
    """One worker opens the page, the others share all other files; None where no files were asked for."""
    return FilesAndPage(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in an event loop, that of the fixture ``runner`` if it is asked for."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    runner = pyfuncitem.funcargs.get("runner")
    run = runner.run if isinstance(runner, asyncio.Runner) else asyncio.run
    run(asyncio.wait_for(test(**given), PATIENCE))
    return True


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of the test, for fixtures that end in it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def two_threads() -> Iterator[None]:
    import torch  # seconds, of which the process that divides the tests has no need

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


@pytest.fixture(scope="session")
def demo_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with the demo model and no flags. Ask for ``demo_server``."""
    with ServerProcess(None, tmp_path_factory.mktemp("demo")) as running:
        yield running


@pytest.fixture(scope="module")
def demo_server(demo_process: ServerProcess) -> Iterator[ServerProcess]:
    """The same server for every module that wants a plain one; each leaves it without sessions."""
    yield demo_process
    demo_process.forget_sessions()


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
