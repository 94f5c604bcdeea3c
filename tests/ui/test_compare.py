"""Comparing: two branches side by side, one message answered with other settings, and what else could have come."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from browser_desk import Desk, violations

if TYPE_CHECKING:
    from playwright.sync_api import Locator

DIFFERENCES = """async ([left, right]) => (await import("./difference.js")).differencesOf(left, right)"""

MIDDLES = """row => [...row.querySelectorAll("code, button")].map((node) => {
  const { top, bottom } = node.getBoundingClientRect();
  return (top + bottom) / 2;
})"""


def marked(column: Locator) -> list[str]:
    return column.locator("mark").all_inner_texts()


def test_the_words_that_differ_are_found_whatever_stands_around_them(desk: Desk) -> None:
    desk.open()

    def found(left: str, right: str) -> Any:
        parts = desk.tab.evaluate(DIFFERENCES, [left, right])
        assert ["".join(part["text"] for part in side) for side in parts] == [left, right]
        return [[part["text"] for part in side if not part["same"]] for side in parts]

    assert found("The cat sat down.", "The dog sat.") == [["cat", " down"], ["dog"]]
    assert found("same", "same") == [[], []]
    assert found("", "new words") == [[], ["new words"]]
    assert found("a b a", "a") == [[" b a"], []]
    long = "word " * 4000
    assert found(f"{long}one {long}", f"{long}two {long}") == [["one"], ["two"]]


def test_a_message_is_answered_again_with_other_settings_beside_the_first_reply(desk: Desk) -> None:
    desk.open()
    desk.say("My name is Walter.")
    first = desk.session
    desk.tab.get_by_role("button", name="Compare with another reply").click()
    feet = desk.tab.locator("dialog .dialog-foot")
    assert feet.locator("button").all_inner_texts() == ["Close", "Answer again"]
    assert feet.count() == 1
    assert desk.tab.get_by_label("Temperature").get_attribute("placeholder") == "0"  # the model's own
    desk.tab.get_by_label("Temperature").fill("0.01")
    desk.tab.get_by_label("Seed").fill("7")
    with desk.tab.expect_request("**/chat/completions") as asked:
        desk.tab.get_by_role("button", name="Answer again", exact=True).click()
    sent = json.loads(asked.value.post_data or "")
    assert (sent["temperature"], sent["seed"], sent["messages"][0]["content"]) == (0.01, 7, "My name is Walter.")
    desk.tab.get_by_text("Both are the same.").wait_for()
    assert violations(desk) == []
    assert desk.session == first
    desk.tab.get_by_role("button", name="Go on with that one").click()
    desk.tab.wait_for_url(lambda url: first not in url)
    desk.receipts.nth(0).wait_for()
    assert json.loads(desk.rest(f"sessions/{desk.session}")["metadata"]["settings"])["seed"] == "7"


def test_two_branches_stand_side_by_side(dark: Desk) -> None:
    desk = dark
    desk.open()
    desk.say("My name is Walter.")
    old = desk.session
    desk.tab.keyboard.press("ArrowUp")
    desk.tab.get_by_role("textbox", name="Edit your message").fill("My name is Emma.")
    desk.tab.keyboard.press("Enter")
    desk.tab.wait_for_url(lambda url: old not in url)
    desk.reply(0)
    rows = desk.tab.locator(".compare-body .compare-row")
    panel, here = (desk.tab.get_by_label(name) for name in ("Turns and branches", "Branches here"))
    for place in (here, panel):  # below the reply, and where a turn of the other branch was chosen
        if place is panel:
            desk.tab.keyboard.press("Escape")
            desk.tab.locator(".turn").filter(has_text="Walter").click()
        place.get_by_role("button", name="Compare", exact=True).click()
        rows.nth(1).wait_for()
        assert [marked(side) for side in rows.nth(0).locator(".compared").all()] == [["Emma"], ["Walter"]]
        assert [marked(side) for side in rows.nth(1).locator(".compared").all()] == [["Emma"], ["Walter"]]
    assert violations(desk) == []
    desk.expected = ["404 (Not Found)"]  # this server makes no links
    with desk.tab.expect_request(f"**/{old}/shares"):
        desk.tab.get_by_role("button", name="Share that one").click()
    desk.tab.get_by_text("Links are off on this server.").wait_for()
    desk.tab.keyboard.press("Escape")
    desk.tab.get_by_role("button", name="Previous branch").click()
    desk.tab.wait_for_url(lambda url: old in url)
    row = desk.tab.locator(".row.active")
    row.hover()
    row.get_by_role("button").nth(1).click()
    with desk.tab.expect_request(f"**/{old}/shares"):  # what is seen, not what was used last
        desk.tab.get_by_role("menuitem", name="Share").click()


def test_what_else_could_have_come_is_what_the_model_had_computed_and_a_branch_goes_on_there(desk: Desk) -> None:
    desk.open()
    desk.say("My name is Walter.")
    first = desk.session
    wish = {"messages": [{"role": "user", "content": "My name is Walter."}], "logprobs": True, "top_logprobs": 5}
    told = desk.server.post("/v1/chat/completions", {**wish, "temperature": 0}).json()["choices"][0]["logprobs"][
        "content"
    ]
    tokens = desk.rest(f"sessions/{first}/turns/1/tokens")["data"]
    assert "".join(token["text"] for token in tokens[:-1]) == "Nice to meet you, Walter!"
    for at in (0, 3, len(tokens) - 2):
        asked = {"turn": 1, "token": at, "count": 5}
        found = desk.server.post(f"/v1/sessions/{first}/alternatives", asked).json()
        assert found["before"] == "".join(token["text"] for token in tokens[:at])
        assert [one["chosen"] for one in found["data"]] == [True, False, False, False, False]
        expected = [one["logprob"] for one in told[at]["top_logprobs"]]
        assert all(
            math.isclose(one["logprob"], other, abs_tol=0.2) for one, other in zip(found["data"], expected, strict=True)
        )
    assert desk.server.post(f"/v1/sessions/{first}/alternatives", {"turn": 1, "token": 99}).status_code == 400
    assert desk.server.post(f"/v1/sessions/{first}/alternatives", {"turn": 2, "token": 0}).status_code == 404
    desk.tab.get_by_role("button", name="What it could have said").click()
    desk.tab.locator(".token").nth(2).click()
    row = desk.tab.locator(".choices tr").nth(2)
    row.wait_for()
    assert violations(desk) == []
    token, button = row.evaluate(MIDDLES)
    assert abs(token - button) < 3
    other = found_text(row)
    row.get_by_role("button", name="Branch here").click()
    desk.tab.wait_for_url(lambda url: first not in url)
    reply = desk.reply(0)
    assert reply.startswith(f"Nice to{other}")
    assert desk.rest(f"sessions/{first}/messages")["data"][1]["content"] == "Nice to meet you, Walter!"
    assert len(desk.rest(f"sessions/{desk.session}/messages")["data"]) == 2


def found_text(row: Locator) -> str:
    """The token of a row of alternatives."""
    return row.locator("code").inner_text().replace("␣", " ")
