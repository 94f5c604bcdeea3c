"""Keys: asked for, kept in the tab or by the browser, and all that was written under one goes with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from browser_desk import KEYS, Desk

if TYPE_CHECKING:
    from playwright.sync_api import Route
    from server_process import ServerProcess

KEPT = "JSON.stringify(sessionStorage) + JSON.stringify(localStorage)"
REFUSED = {"error": {"message": "no", "type": "authentication_error", "param": None, "code": "invalid_api_key"}}


@pytest.fixture
def server(keyed_server: ServerProcess) -> ServerProcess:
    """One that wants keys."""
    return keyed_server


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(desk: Desk) -> None:
    desk.expected = ["401 (Unauthorized)"]
    urls: list[str] = []
    desk.tab.on("request", lambda request: urls.append(request.url))
    desk.open()
    dialog = desk.tab.get_by_role("dialog", name="API key")
    desk.tab.keyboard.press("Escape")  # there is nothing without a key
    dialog.get_by_label("Key").fill("wrong")
    desk.tab.keyboard.press("Enter")
    desk.tab.get_by_text("That key is not valid here.").wait_for()
    dialog.get_by_label("Key").fill(KEYS["ann"])
    dialog.get_by_role("button", name="Continue").click()
    desk.tab.get_by_text("Conversations stay here").wait_for()
    assert desk.say("My name is Walter.") == "Nice to meet you, Walter!"
    desk.tab.reload()
    desk.receipts.nth(0).wait_for()
    assert not any(KEYS["ann"] in url for url in urls)
    assert KEYS["ann"] not in desk.tab.evaluate("JSON.stringify(localStorage) + document.cookie")
    with desk.tab.expect_download() as download:
        desk.tab.get_by_role("button", name="Export").click()
        desk.tab.get_by_role("button", name="Without the cache").click()
    assert download.value.suggested_filename == f"{desk.session}.zip"


def test_a_key_and_all_that_was_written_with_it(desk: Desk) -> None:
    desk.expected = ["401 (Unauthorized)"]
    desk.open()
    field = desk.tab.get_by_role("dialog", name="API key").get_by_label("Key")
    for _ in range(3):
        field.wait_for()
        desk.tab.keyboard.press("Escape")
    field.fill("schlüssel")
    desk.tab.keyboard.press("Enter")
    desk.tab.get_by_text("A key has no spaces").wait_for()
    field.fill(KEYS["ann"])
    desk.tab.keyboard.press("Enter")
    desk.tab.get_by_text("Conversations stay here").wait_for()
    desk.tab.locator("#composer").fill("only for Ann")
    desk.tab.get_by_role("button", name="Settings").click()
    desk.tab.get_by_label("Instructions").fill("secrets of Ann")
    desk.tab.get_by_role("button", name="Save").click()
    assert "only for Ann" in desk.tab.evaluate(KEPT)
    desk.tab.get_by_role("button", name="Settings").click()
    desk.tab.get_by_role("button", name="Forget this key").click()
    field.fill(KEYS["bob"])
    desk.tab.keyboard.press("Enter")
    desk.tab.get_by_text("Conversations stay here").wait_for()
    assert desk.tab.locator("#composer").input_value() == ""
    assert "Ann" not in desk.tab.evaluate(KEPT)


def test_a_key_that_is_refused_takes_all_with_it_that_was_written_under_it(desk: Desk) -> None:
    """Whoever has the next key may be somebody else."""
    desk.expected = ["401 (Unauthorized)"]
    desk.open()
    field = desk.tab.get_by_role("dialog", name="API key").get_by_label("Key")
    field.fill(KEYS["ann"])
    desk.tab.keyboard.press("Enter")
    desk.tab.get_by_text("Conversations stay here").wait_for()
    desk.say("My name is Ann.")
    desk.tab.locator("#composer").fill("only for Ann")

    def refuse(route: Route) -> None:
        route.fulfill(status=401, body=json.dumps(REFUSED), content_type="application/json")

    desk.tab.route("**/v1/**", refuse)
    desk.tab.locator("#composer").press("Control+Enter")
    desk.tab.get_by_text("That key is not valid here.").wait_for()
    desk.tab.unroute("**/v1/**")
    field.fill(KEYS["bob"])
    with desk.tab.expect_navigation():
        desk.tab.keyboard.press("Enter")
    desk.tab.get_by_text("Conversations stay here").wait_for()
    assert desk.tab.locator("#composer").input_value() == ""
    assert desk.asked == []
    assert "Ann" not in desk.tab.evaluate(KEPT)
    assert KEYS["bob"] in desk.tab.evaluate(KEPT)
    assert desk.tab.locator(".row").count() == 0


def test_a_key_is_remembered_by_the_browser_if_one_says_so(desk: Desk) -> None:
    desk.expected = ["401 (Unauthorized)"]
    desk.open()
    desk.tab.get_by_label("Key", exact=True).fill(KEYS["ann"])
    desk.tab.get_by_label("Remember it in this browser").check()
    desk.tab.keyboard.press("Enter")
    desk.tab.get_by_text("Conversations stay here").wait_for()
    desk.tab.locator("#composer").fill("only for Ann")
    context = desk.tab.context
    desk.tab.close()
    desk.tab = context.new_page()
    desk.open()
    desk.tab.get_by_text("Conversations stay here").wait_for()
    assert desk.tab.locator("#composer").input_value() == "only for Ann"
    assert KEYS["ann"] not in desk.tab.url
    desk.tab.get_by_role("button", name="Settings").click()
    desk.tab.get_by_role("button", name="Forget this key").click()
    desk.tab.get_by_label("Key", exact=True).wait_for()
    assert KEYS["ann"] not in desk.tab.evaluate(KEPT)
    assert "Ann" not in desk.tab.evaluate(KEPT)
