"""What was written and not sent: it stays where it was written, comes back where a turn came to nothing, and is nobody
else's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from browser_desk import Desk

if TYPE_CHECKING:
    from playwright.sync_api import Route


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
