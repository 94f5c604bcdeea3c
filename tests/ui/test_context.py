"""How full the context is: a gauge, the tokens of a long draft, how fast replies came, and the ways on."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from browser_desk import Desk

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Route

LONG = "Add " + "milk " * 860


@pytest.fixture
def full(desk: Desk) -> Desk:
    """A conversation of three turns that has almost all of the context."""
    desk.open()
    desk.say("My name is Walter.")
    for _ in range(2):
        desk.say(LONG)
    desk.tab.locator(".ways").wait_for()
    return desk


def ways(desk: Desk) -> Locator:
    return desk.tab.get_by_role("region", name="Ways on")


def test_each_reply_tells_how_fast_it_came_and_when(desk: Desk) -> None:
    desk.open()
    desk.say("My name is Walter.")
    speed = re.search(r"([\d,]+) tokens/s", desk.receipts.nth(0).inner_text())
    assert speed is not None
    cache = desk.rest(f"sessions/{desk.session}/turns")["data"][0]
    told = 1000 * (cache["completion_tokens"] - 1) / cache["cache"]["decode_ms"]
    assert abs(int(speed[1].replace(",", "")) - told) <= 0.5
    assert re.search(r"\d+:\d\d", desk.tab.locator(".reply-foot time").inner_text())
    desk.tab.get_by_text("Writing the reply").wait_for()


def test_a_long_draft_is_counted_before_it_is_sent(desk: Desk) -> None:
    desk.open()
    assert desk.tab.locator(".gauge-context").count() == 0
    desk.say("My name is Walter.")
    assert desk.tab.locator(".gauge-context").get_attribute("title") == "25 of 2,048 tokens of context"
    desk.tab.locator("#composer").fill(LONG)
    count = desk.server.post("/tokenize", {"prompt": LONG}).json()["count"]
    desk.tab.get_by_text(f"About {count} tokens, {round(100 * count / 2048)} % of the context.").wait_for()
    desk.tab.locator("#composer").fill(LONG * 3)
    desk.tab.get_by_text("and there is room for 2,023.").wait_for()
    desk.tab.locator("#composer").fill("short")
    desk.tab.locator(".estimate").wait_for(state="detached")


def test_where_it_is_full_one_can_go_on_from_an_earlier_turn(full: Desk) -> None:
    first = full.session
    full.tab.locator("#composer").fill("What is my name?")
    ways(full).get_by_role("button", name="Go on from turn 2").click()
    full.tab.wait_for_url(lambda url: first not in url)
    full.told("A new branch begins after turn 2.")
    assert full.tab.locator("#composer").input_value() == "What is my name?"
    assert full.rest(f"sessions/{full.session}")["parent"] == {"session_id": first, "turn": 2}


def test_a_turn_that_does_not_fit_can_go_on_from_a_summary(full: Desk) -> None:
    full.expected = ["400 (Bad Request)"]
    asked: list[dict[str, Any]] = []

    def summarise(route: Route) -> None:
        """The demo model can summarise only what is short: the same request for less of the conversation."""
        asked.append(json.loads(route.request.post_data or ""))
        route.continue_(post_data=json.dumps({**asked[0], "messages": asked[0]["messages"][:2]}))

    full.tab.route("**/v1/messages", summarise)
    first = full.session
    full.tab.locator("#composer").fill(LONG)
    full.tab.keyboard.press("Enter")
    full.tab.get_by_role("alert").get_by_text("This conversation is too long for the model.").wait_for()
    assert full.tab.get_by_role("button", name="Try again").count() == 0  # it could only fail again
    ways(full).get_by_role("button", name="Go on from a summary").click()
    full.told("It goes on from a summary.")
    assert full.tab.locator("#composer").input_value() == LONG.strip()
    assert len(asked[0]["messages"]) == 4
    messages = full.rest(f"sessions/{full.session}/messages")["data"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[1]["content"]
    assert messages[2]["content"] == LONG.strip()
    assert full.rest(f"sessions/{first}")["turns"] == 3
