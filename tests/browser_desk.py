"""A tab of Chromium with the page in it, and what a person does there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from server_process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")  # the first has no window to draw around its pages
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage""".split()
PARTS = "html, .drawer, .sidebar, .scroll, .conversations, .turns, .detail, .detail-body, .live"
AT_REST = """() => document.getAnimations().every(
  (one) => one.playState !== "running" || one.effect.getTiming().iterations === Infinity)"""
KEYS = {"ann": "a-key-of-ann", "bob": "a-key-of-bob"}  # of a server that wants keys
SECONDS = 60.0  # for anything, on a machine that has much else to do


@dataclass
class Desk:
    """A tab with the page in it, and what it did besides. ``expected``: parts of console errors that a test wants."""

    tab: Page
    server: ServerProcess
    troubles: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Note everything that no page of ours does."""
        self.tab.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        self.tab.on("console", lambda said: self._heard(said.type, said.text))
        self.tab.on("request", lambda request: self._local(request.url))

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.troubles.append(text)

    def _local(self, url: str) -> None:
        if not url.startswith((self.server.url + "/", "data:", "blob:")):
            self.troubles.append(f"asked for {url}")

    def is_well(self) -> None:
        unexpected = [said for said in self.troubles if not any(part in said for part in self.expected)]
        assert not unexpected, unexpected

    def open(self, fragment: str = "") -> None:
        """The page, ready to write in."""
        self.tab.goto(f"{self.server.url}/ui/{fragment}")
        self.tab.locator(".model-name, [aria-label=Conversations]").first.wait_for()

    def say(self, text: str) -> str:
        """One turn; the reply once it is kept."""
        before = self.receipts.count()
        self.tab.locator("#composer").fill(text)
        self.tab.locator("#composer").press("Control+Enter")  # on a phone, Enter begins a line
        return self.reply(before)

    def reply(self, number: int) -> str:
        """Of a turn (from 0) that was asked for, once it is kept."""
        self.receipts.nth(number).wait_for()
        self.tab.get_by_role("button", name="Send", exact=True).wait_for()
        return self.replies[number]

    def told(self, text: str) -> None:
        """Wait for something to be said at the foot of the page."""
        self.tab.locator(".toast", has_text=text).wait_for()

    @property
    def receipts(self) -> Locator:
        return self.tab.locator(".receipt")

    @property
    def replies(self) -> list[str]:
        return self.tab.locator(".message.assistant .markdown").all_inner_texts()

    @property
    def asked(self) -> list[str]:
        return self.tab.locator(".bubble").all_inner_texts()

    @property
    def session(self) -> str:
        """The id of the session that is open, as the address tells it."""
        found = re.search(r"#/(.+)$", self.tab.url)
        assert found is not None
        return found[1]

    def overflow(self) -> int:
        """By how many pixels the page, or a part of it that scrolls down, would scroll sideways too."""
        beyond = "all => Math.max(...all.map(node => node.scrollWidth - node.clientWidth))"
        wide: int = self.tab.locator(PARTS).evaluate_all(beyond)
        return wide

    def rest(self, path: str) -> Any:
        response = httpx.get(f"{self.server.url}/v1/{path}", timeout=SECONDS)
        assert response.status_code == 200, response.text
        return response.json()


# The settings of this browser: the likeliest tokens, so that a page gets the same words each time.
LIKELIEST = """for (const place of [localStorage, sessionStorage])
  if (!place.getItem("warmturn-settings")) place.setItem("warmturn-settings", '{"temperature": "0"}');"""


def desk_at(chromium: Browser, server: ServerProcess, **how: Any) -> Iterator[Desk]:
    """A tab of its own, with nothing of other tests in it."""
    context = chromium.new_context(**{"viewport": {"width": 1360, "height": 900}, **how})
    context.set_default_timeout(SECONDS * 1000)
    context.add_init_script(LIKELIEST)
    made = Desk(context.new_page(), server)
    made.watch()
    yield made
    context.close()
    made.is_well()


def endless(route: Route) -> None:
    """The same request, for a reply that does not end by itself; the fixture ``slow_engine`` makes it last."""
    body = json.loads(route.request.post_data or "{}")
    route.continue_(post_data=json.dumps({**body, "ignore_eos": True, "max_tokens": 1800}))


def violations(desk: Desk) -> list[Any]:
    """What axe finds that is serious."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    desk.tab.wait_for_function(AT_REST)  # what fades in has little contrast at first
    found = axe.run(desk.tab).response["violations"]
    return [
        (rule["id"], [node["html"] for node in rule["nodes"]])
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]
