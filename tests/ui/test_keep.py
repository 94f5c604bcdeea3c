"""What one takes away of a conversation: a link for others, a file, a print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser_desk import KEYS, Desk, desk_at, violations

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from server_process import ServerProcess

KEY = KEYS["ann"]


@pytest.fixture
def server(keyed_server: ServerProcess) -> ServerProcess:
    """One that shares, and wants keys."""
    return keyed_server


@pytest.fixture
def ann(desk: Desk) -> Desk:
    """A conversation of somebody who has the key."""
    desk.tab.add_init_script(f"sessionStorage.setItem('warmturn-api-key', '{KEY}')")
    desk.open()
    desk.say("My name is Walter.")
    desk.say("What is my name?")
    return desk


def link_to(desk: Desk, turn: int) -> str:
    """A new link up to a turn."""
    desk.tab.locator(".turn").nth(turn - 1).click()
    desk.tab.get_by_role("region", name=f"Turn {turn}").get_by_role("button", name="Share").click()
    desk.tab.get_by_role("button", name="Make a link").click()
    return desk.tab.locator(".share-link").input_value()


def test_a_link_shows_a_branch_without_a_key_until_it_is_revoked(
    ann: Desk, chromium: Browser, server: ServerProcess
) -> None:
    address = link_to(ann, 1)
    assert KEY not in address
    assert violations(ann) == []
    asked: list[str] = []
    for reader in desk_at(chromium, server, color_scheme="dark", viewport={"width": 375, "height": 700}):
        reader.tab.on("request", lambda request: asked.append(request.url))
        reader.tab.goto(address)
        reader.tab.get_by_text("Nice to meet you, Walter!").wait_for()
        assert reader.asked == ["My name is Walter."]
        assert reader.tab.locator(".message.assistant").count() == 1
        assert reader.tab.locator("textarea, input, button:not(.code-copy)").count() == 0
        assert reader.overflow() == 0
        assert violations(reader) == []
        secret = address.rpartition("#")[2]
        assert not any(secret in url for url in asked)
        ann.tab.get_by_role("button", name="Revoke").click()
        ann.tab.locator(".share-links li").wait_for(state="detached")
        reader.expected = ["404 (Not Found)"]
        reader.tab.reload()
        reader.tab.get_by_role("alert").get_by_text("This link leads nowhere").wait_for()


def test_a_conversation_is_saved_as_text_that_others_read(ann: Desk) -> None:
    saved = {}
    for kind in ("Markdown", "JSON"):
        ann.tab.get_by_role("button", name="Export").click()
        with ann.tab.expect_download() as download:
            ann.tab.get_by_role("dialog").get_by_role("button", name=kind).click()
        saved[Path(download.value.suggested_filename).suffix] = Path(download.value.path()).read_text()
    assert saved[".md"].startswith(
        "# My name is Walter.\n\n## You\n\nMy name is Walter.\n\n## Reply\n\nNice to meet you"
    )
    messages = json.loads(saved[".json"])["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    chat = {"messages": messages[:3], "temperature": 0}
    again = ann.server.post("/v1/chat/completions", chat, authorization=f"Bearer {KEY}").json()
    assert again["choices"][0]["message"]["content"] == messages[3]["content"]


def test_on_paper_stands_what_was_said_and_nothing_else(ann: Desk) -> None:
    ann.tab.evaluate("window.print = () => { window.printed = true }")
    ann.tab.get_by_role("button", name="Export").click()
    ann.tab.get_by_role("dialog").get_by_role("button", name="Print").click()
    ann.tab.wait_for_function("window.printed")
    ann.tab.evaluate("document.documentElement.dataset.theme = 'dark'")
    ann.tab.emulate_media(media="print", color_scheme="dark")
    assert ann.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for hidden in (".sidebar", ".panel", ".composer", ".receipt"):
        assert not ann.tab.locator(hidden).first.is_visible()
    assert ann.tab.locator(".bubble").nth(1).is_visible()
    scrolls = "getComputedStyle(document.querySelector('.scroll')).overflowY"
    assert ann.tab.evaluate(scrolls) == "visible"
