"""What was written and not sent: it stays where it was written, comes back where a turn came to nothing, and is nobody
else's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from browser_desk import Desk, desk_at
from server_process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

KEYS = {"ann": "a-key-of-ann", "bob": "a-key-of-bob"}
KEPT = "JSON.stringify(sessionStorage) + JSON.stringify(localStorage)"
REFUSED = {"error": {"message": "no", "type": "authentication_error", "param": None, "code": "invalid_api_key"}}


def written(desk: Desk) -> str:
    """What stands where one writes."""
    return desk.tab.locator("#composer").input_value()


def test_a_draft_stays_with_its_conversation_also_over_a_reload(desk: Desk) -> None:
    desk.open()
    desk.say("My name is Walter.")
    desk.tab.locator("#composer").fill("for Walter")
    desk.tab.get_by_role("button", name="New conversation").click()
    desk.tab.get_by_text("A conversation that stays").wait_for()
    assert written(desk) == ""
    desk.tab.locator("#composer").fill("for nobody yet")
    desk.tab.locator(".row-main", has_text="My name is Walter.").first.click()
    desk.receipts.nth(0).wait_for()
    assert written(desk) == "for Walter"
    desk.tab.reload()
    desk.receipts.nth(0).wait_for()
    assert written(desk) == "for Walter"
    desk.tab.get_by_role("button", name="New conversation").click()
    desk.tab.get_by_text("A conversation that stays").wait_for()
    assert written(desk) == "for nobody yet"


def test_a_key_that_is_refused_takes_all_with_it_that_was_written_under_it(chromium: Browser, tmp_path: Path) -> None:
    """Whoever has the next key may be somebody else."""
    flags = [text for name, key in KEYS.items() for text in ("--api-key", f"{name}={key}")]
    with ServerProcess(None, tmp_path, *flags) as server:
        desks = desk_at(chromium, server)
        desk = next(desks)
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
        assert written(desk) == ""
        assert desk.asked == []
        assert "Ann" not in desk.tab.evaluate(KEPT)
        assert KEYS["bob"] in desk.tab.evaluate(KEPT)
        assert desk.tab.locator(".row").count() == 0
        assert list(desks) == []


def test_a_turn_that_is_stopped_before_its_first_word_gives_its_words_back(desk: Desk) -> None:
    desk.open()
    desk.expected = ["404 (Not Found)", "499", "ERR_FAILED"]
    held: list[Route] = []
    desk.tab.route("**/chat/completions", lambda route: held.append(route))  # the server never hears of it
    desk.tab.locator("#composer").fill("Tell me a joke.")
    desk.tab.locator("#composer").press("Control+Enter")
    desk.tab.get_by_label("Waiting for the first word").wait_for()
    while not held:
        desk.tab.wait_for_timeout(20)
    desk.tab.get_by_role("button", name="Stop", exact=True).click()
    desk.tab.get_by_text("A conversation that stays").wait_for()
    assert written(desk) == "Tell me a joke."
    assert desk.asked == []
