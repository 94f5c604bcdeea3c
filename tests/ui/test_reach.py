"""Everybody reaches everything: other languages, in both directions of reading, by the keyboard, and as an app."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from browser_desk import Desk, desk_at, violations

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route
    from server_process import ServerProcess

HEBREW = "localStorage.setItem('warmturn-language', '\"he\"')"
CUT = """all => all.filter((node) => {
  const box = node.getBoundingClientRect();
  const isHigh = box.height > 1.8 * parseFloat(getComputedStyle(node).fontSize);
  return isHigh || box.right > node.closest("dialog").getBoundingClientRect().right;
}).map((node) => node.textContent)"""
CUT_CHOICES = """all => all.flatMap((select) => [...select.options].map((option) => {
  const draw = document.createElement("canvas").getContext("2d");
  const style = getComputedStyle(select);
  draw.font = `${style.fontSize} ${style.fontFamily}`;
  const room = select.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return draw.measureText(option.text).width > room - 16 ? option.text : null; // 16: the arrow
})).filter(Boolean)"""
TO_EDGES = """([inner, outer]) => {
  const [a, b] = [inner, outer].map((one) => document.querySelector(one).getBoundingClientRect());
  return [a.left - b.left, b.right - a.right];
}"""


def test_the_page_speaks_the_browsers_language_or_the_chosen_one(chromium: Browser, server: ServerProcess) -> None:
    for desk in desk_at(chromium, server, locale="de-CH"):
        desk.open()
        desk.tab.get_by_role("button", name="Neues Gespräch").wait_for()
        desk.tab.locator(".model-name").click()
        desk.tab.get_by_text("2.048 Tokens").or_(desk.tab.get_by_text("2'048 Tokens")).first.wait_for()
        desk.tab.keyboard.press("Escape")
        desk.tab.get_by_label("Sprache").select_option("en")
        desk.tab.get_by_role("button", name="New conversation").wait_for()
        desk.tab.reload()
        desk.tab.get_by_role("button", name="New conversation").wait_for()
        assert desk.tab.evaluate("[document.documentElement.lang, document.documentElement.dir]") == ["en", "ltr"]


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_a_page_from_right_to_left_is_mirrored_and_usable(colours: str, request: pytest.FixtureRequest) -> None:
    desk: Desk = request.getfixturevalue("desk" if colours == "light" else "dark")
    desk.tab.add_init_script(HEBREW)
    desk.open()
    desk.tab.get_by_role("button", name="שיחה חדשה").wait_for()
    desk.tab.locator("#composer").fill("My name is Walter.")
    desk.tab.keyboard.press("Enter")
    desk.receipts.nth(0).wait_for()
    assert desk.tab.evaluate("document.documentElement.dir") == "rtl"
    left, right = desk.tab.evaluate(TO_EDGES, [".sidebar", "html"])
    assert (left > 900, right) == (True, 0)
    assert desk.overflow() == 0
    assert violations(desk) == []
    desk.tab.get_by_role("button", name="הגדרות").click()
    desk.tab.locator("dialog details summary").click()
    assert violations(desk) == []


def test_a_phone_from_right_to_left_has_room_for_it(phone: Desk) -> None:
    phone.tab.add_init_script(HEBREW)
    phone.open()
    phone.tab.locator("#composer").fill("My name is Walter.")
    phone.tab.locator("#composer").press("Control+Enter")
    phone.receipts.nth(0).wait_for()
    assert phone.overflow() == 0
    phone.tab.get_by_role("button", name="שיחות").click()
    phone.tab.locator(".drawer .row").first.wait_for()
    assert phone.overflow() == 0


def test_the_keys_are_listed_and_do_what_the_list_says(desk: Desk) -> None:
    desk.open()
    desk.say("My name is Walter.")
    old = desk.session
    keyboard = desk.tab.keyboard
    keyboard.press("ArrowUp")
    box = desk.tab.get_by_role("textbox", name="Edit your message")
    box.fill("My name is Emma.")
    keyboard.press("Enter")  # sends here too
    desk.tab.wait_for_url(lambda url: old not in url)
    assert desk.reply(0) == "Nice to meet you, Emma!"
    keyboard.press("Control+/")
    sheet = desk.tab.get_by_role("dialog", name="Keys")
    sheet.get_by_text("Send, also an edited message").wait_for()
    assert violations(desk) == []
    keyboard.press("Escape")
    sheet.wait_for(state="detached")
    keyboard.press("Control+k")
    desk.tab.get_by_role("searchbox").and_(desk.tab.locator(":focus")).wait_for()
    panel = desk.tab.get_by_role("complementary", name="Turns and branches")
    keyboard.press("Control+.")
    panel.wait_for(state="detached")
    keyboard.press("Control+.")
    panel.wait_for()
    keyboard.press("Control+Shift+O")
    desk.tab.get_by_text("A conversation that stays").wait_for()
    keyboard.press("Control+,")
    desk.tab.get_by_role("dialog", name="Settings for new conversations").wait_for()


@pytest.mark.parametrize("language", ["en", "de"])
def test_no_key_or_choice_is_cut_off(phone: Desk, language: str) -> None:
    phone.tab.add_init_script(f"localStorage.setItem('warmturn-language', '\"{language}\"')")
    phone.open()
    phone.tab.keyboard.press("Control+/")
    phone.tab.locator("kbd").first.wait_for()
    assert phone.tab.locator("kbd").evaluate_all(CUT) == []
    assert phone.tab.locator("dialog").evaluate("node => node.scrollWidth - node.clientWidth") == 0
    phone.tab.keyboard.press("Escape")
    phone.tab.set_viewport_size({"width": 1360, "height": 900})
    phone.tab.keyboard.press("Control+,")
    phone.tab.locator("dialog summary").click()
    assert phone.tab.locator("dialog select").evaluate_all(CUT_CHOICES) == []


def test_what_is_opened_while_the_page_loads_stays_open(phone: Desk) -> None:
    assert phone.server.post("/v1/sessions", {"id": "slow"}).status_code == 201
    held: list[Route] = []
    phone.tab.route("**/v1/models", lambda route: held.append(route))
    phone.tab.goto(f"{phone.server.url}/ui/#/slow")
    phone.tab.get_by_role("button", name="The server now").click()
    drawer = phone.tab.get_by_role("dialog", name="The server now")
    drawer.wait_for()
    with phone.tab.expect_response("**/sessions/slow/messages"):
        held[0].continue_()
    phone.tab.locator(".waiting").wait_for(state="detached")
    assert drawer.is_visible()


def test_the_page_can_be_installed(desk: Desk) -> None:
    desk.open()
    cdp = desk.tab.context.new_cdp_session(desk.tab)
    told = cdp.send("Page.getAppManifest")
    assert told["errors"] == []
    assert told["url"].endswith("/ui/manifest.webmanifest")
    errors = cdp.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert {error["errorId"] for error in errors} <= {"in-incognito"}  # as tests run
