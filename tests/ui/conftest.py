"""A real server with the demo model, and Chromium to look at its page with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from browser_desk import CHROMIUM, FLAGS, KEYS, Desk, desk_at
from server_process import ServerProcess
from workers import is_of_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is wide."""
    for item in items:
        if is_of_page(item.nodeid):
            item.add_marker("wide")


@pytest.fixture(scope="session")
def browser() -> Iterator[tuple[Browser, asyncio.AbstractEventLoop]]:
    """A browser, and the event loop of what drives it. Ask for ``chromium``."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        yield started, loop
        asyncio._set_running_loop(loop)
        started.close()


@pytest.fixture(scope="module")
def chromium(browser: tuple[Browser, asyncio.AbstractEventLoop]) -> Iterator[Browser]:
    """The browser for one module: what drives it takes an event loop for running in this thread, in which no other test
    could have its own.
    """
    started, loop = browser
    asyncio._set_running_loop(loop)
    yield started
    asyncio._set_running_loop(None)


@pytest.fixture(scope="module")
def server(chromium: Browser, request: pytest.FixtureRequest) -> ServerProcess:
    """Not started where there is no browser."""
    running: ServerProcess = request.getfixturevalue("demo_server")
    return running


@pytest.fixture
def slow_engine(server: ServerProcess) -> Iterator[None]:
    """A reply of 1,800 tokens lasts for seconds on any machine."""
    with server.slowed():
        yield


@pytest.fixture(scope="session")
def keyed_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that wants the keys of ``KEYS``, and shares. Ask for ``keyed_server``."""
    flags = [text for name, key in KEYS.items() for text in ("--api-key", f"{name}={key}")]
    with ServerProcess(None, tmp_path_factory.mktemp("keyed"), "--sharing", "on", *flags) as running:
        yield running


@pytest.fixture
def keyed_server(chromium: Browser, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """The same for every test that wants keys; each leaves it without sessions."""
    running: ServerProcess = request.getfixturevalue("keyed_process")
    yield running
    for key in KEYS.values():
        running.forget_sessions(key)


@pytest.fixture
def desk(chromium: Browser, server: ServerProcess) -> Iterator[Desk]:
    yield from desk_at(chromium, server)


@pytest.fixture
def dark(chromium: Browser, server: ServerProcess) -> Iterator[Desk]:
    yield from desk_at(chromium, server, color_scheme="dark", reduced_motion="reduce")


@pytest.fixture
def phone(chromium: Browser, server: ServerProcess) -> Iterator[Desk]:
    yield from desk_at(chromium, server, viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
