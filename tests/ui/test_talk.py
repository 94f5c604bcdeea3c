"""The page among others: other tabs, other clients, other tenants, a server that goes, a tab nobody looks at, fingers
and keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from browser_desk import Desk, desk_at, endless
from server_process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

WALTER = "My name is Walter."
MILK = "Add milk to my shopping list."
STREAMS = ".message.assistant[aria-busy=true] .markdown"
LOOKED = "() => { dispatchEvent(new Event('focus')); return %s }"  # as often as it takes
HIDDEN = """() => {
  const timer = window.setTimeout;
  Object.defineProperty(document, "hidden", { get: () => window.isHidden });
  window.setTimeout = (work, ...rest) => (window.isHidden && !rest.length ? 0 : timer(work, ...rest));
}"""  # timers for now never come, which is a second's throttling without the waiting
HELD = """() => {
  const get = window.fetch;
  window.fetch = async (place, how) => {
    const answer = await get(place, how);
    if (String(place).endsWith("/cancel")) window.goOn();
    if (!String(place).includes("/chat/completions")) return answer;
    const stopped = new Promise((yes) => (window.goOn = yes));
    let rest = 5;
    const transform = (part, out) => { out.enqueue(part); rest -= 1; return rest > 0 ? undefined : stopped; };
    return new Response(answer.body.pipeThrough(new TransformStream({ transform })), answer);
  };
}"""  # of a reply, only the first words come until it is stopped


def ask(desk: Desk, text: str) -> None:
    """Send it, and wait for nothing."""
    desk.tab.locator("#composer").fill(text)
    desk.tab.keyboard.press("Control+Enter")


def written(desk: Desk) -> str:
    """What stands where one writes."""
    return desk.tab.locator("#composer").input_value()


def focused(place: Locator) -> Locator:
    """It, if it has the focus."""
    return place.and_(place.page.locator(":focus"))


@pytest.mark.usefixtures("slow_engine")
def test_a_tab_that_is_behind_sends_nothing_unread(desk: Desk) -> None:
    desk.open()
    desk.say(WALTER)
    desk.tab.get_by_role("button", name="Turns and branches").click()  # looks every few seconds
    other = Desk(desk.tab.context.new_page(), desk.server)
    other.open(f"#/{desk.session}")
    other.receipts.nth(0).wait_for()
    desk.say(MILK)

    ask(other, "What is my name?")
    other.told("This conversation went on elsewhere.")
    assert (other.asked, written(other)) == ([WALTER, MILK], "What is my name?")
    other.tab.route("**/chat/completions", endless)
    other.tab.locator("#composer").press("Enter")
    other.tab.locator(STREAMS).wait_for()
    other.tab.keyboard.press("Escape")
    other.tab.locator(".reply-foot").get_by_text("stopped", exact=True).wait_for()
    kept = desk.rest(f"sessions/{desk.session}/messages")["data"]
    assert [(said["role"], said["turn"]) for said in kept[4:]] == [("user", 3), ("assistant", 3)]
    assert other.replies[-1].strip() != ""


def test_what_others_do_is_seen_when_one_comes_back(desk: Desk) -> None:
    desk.open()
    desk.say(WALTER)
    name = desk.session
    desk.tab.get_by_role("button", name="Turns and branches").click()
    assert desk.server.post("/v1/sessions", {"id": "elsewhere"}).status_code == 201
    turn = {"messages": [{"role": "user", "content": MILK}], "temperature": 0}
    assert desk.server.post(f"/v1/sessions/{name}/chat/completions", turn).status_code == 200
    desk.tab.wait_for_function(LOOKED % "document.querySelectorAll('.receipt').length === 2")
    assert desk.asked == [WALTER, MILK]
    assert desk.tab.locator(".row", has_text="elsewhere").count() == 1

    httpx.delete(f"{desk.server.url}/v1/sessions/elsewhere")
    desk.tab.wait_for_function(LOOKED % "!document.body.textContent.includes('elsewhere')")
    assert desk.asked == [WALTER, MILK]


def test_what_was_deleted_elsewhere_is_not_begun_again(desk: Desk) -> None:
    desk.expected = ["404 (Not Found)"]
    desk.open()
    desk.say(WALTER)
    name = desk.session
    desk.tab.get_by_role("button", name="Turns and branches").click()
    httpx.delete(f"{desk.server.url}/v1/sessions/{name}")
    ask(desk, "What is my name?")
    desk.tab.get_by_role("alert").get_by_text("This conversation is no longer there.").wait_for()
    assert httpx.get(f"{desk.server.url}/v1/sessions/{name}").status_code == 404
    assert desk.asked[0] == WALTER  # to be copied
    desk.tab.get_by_role("button", name="Ask in a new conversation").click()
    desk.tab.get_by_text("A conversation that stays").wait_for()
    assert written(desk) == "What is my name?"

    desk.tab.locator("#composer").fill("")
    desk.say(WALTER)
    httpx.delete(f"{desk.server.url}/v1/sessions/{desk.session}")
    desk.tab.wait_for_function(LOOKED % "document.querySelector('.trouble') !== null")
    desk.tab.locator("#composer").fill("Hello?")
    assert desk.tab.get_by_role("button", name="Send", exact=True).is_disabled()


@pytest.mark.slow
def test_requests_that_fail_do_not_multiply(desk: Desk) -> None:
    """Each look at the server that finds it well is followed by one try."""
    desk.expected = ["ERR_FAILED"]
    asked: list[str] = []
    desk.tab.on("request", lambda request: asked.append(request.url.rsplit("/", 1)[1].split("?")[0]))
    desk.tab.route("**/v1/**", lambda route: route.abort())
    desk.tab.goto(f"{desk.server.url}/ui/")
    for _ in range(3):
        with desk.tab.expect_request("**/health"):
            pass
    calls = [name for name in asked if name in ("health", "models", "sessions")]
    assert calls[:7] == ["health", "models", "sessions"] * 2 + ["health"]
    desk.tab.unroute("**/v1/**")
    assert desk.say(WALTER) == "Nice to meet you, Walter!"


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle_of_a_reply(chromium: Browser, tmp_path: Path) -> None:
    first = ServerProcess(None, tmp_path)
    with first:
        desks = desk_at(chromium, first)
        desk = next(desks)
        desk.open()
        desk.say(WALTER)
        desk.tab.route("**/chat/completions", endless)
        with first.slowed():
            ask(desk, "What is my name?")
            desk.tab.locator(STREAMS).wait_for()
            desk.tab.locator("#composer").fill("typed meanwhile")
            first.process.kill()
        desk.expected = ["ERR_", "503 (Service Unavailable)"]
        desk.tab.get_by_role("alert").wait_for()
        desk.tab.locator(".banner.quiet").wait_for()  # the box tells it
        desk.tab.unroute("**/chat/completions")
    with ServerProcess(None, tmp_path, port=first.port):
        desk.tab.locator(".banner").wait_for(state="detached")
        desk.tab.get_by_role("button", name="Edit the message").click()
        assert written(desk) == "What is my name?\n\ntyped meanwhile"
        assert desk.say("What is my name?") == "Your name is Walter."
        assert [turn["number"] for turn in desk.rest(f"sessions/{desk.session}/turns")["data"]] == [1, 2]
        assert list(desks) == []


def test_a_tab_that_nobody_sees_reads_on(desk: Desk) -> None:
    desk.open()
    desk.tab.evaluate(HIDDEN)
    desk.tab.evaluate("window.isHidden = true")
    assert desk.say(WALTER) == "Nice to meet you, Walter!"


def test_a_phone_with_long_titles(phone: Desk) -> None:
    body = {"id": "long", "metadata": {"title": "Wide words of a title that has sixty characters, or somewhat"}}
    assert phone.server.post("/v1/sessions", body).status_code == 201
    phone.open()
    phone.tab.get_by_role("button", name="Conversations").click()
    phone.tab.locator(".row", has_text="Wide words").wait_for()
    assert phone.overflow() == 0
    close = phone.tab.get_by_role("button", name="Close the list").bounding_box()
    assert close is not None
    assert close["x"] + close["width"] <= 320
    assert round(min(close["width"], close["height"])) >= 44
    phone.tab.keyboard.press("Escape")

    phone.tab.locator("#composer").fill("one")
    phone.tab.keyboard.press("Enter")  # a touch keyboard has no other way to begin a line
    phone.tab.keyboard.type("two")
    assert written(phone) == "one\ntwo"
    phone.say(WALTER)
    phone.tab.get_by_role("button", name="Turns and branches").click()
    phone.tab.get_by_role("button", name="Fork here").click()
    phone.told("A new branch begins")
    phone.tab.locator(".drawer").wait_for(state="detached")


def test_keys_go_through_list_menu_and_dialog(desk: Desk) -> None:
    desk.open()
    for title in ("First", "Second"):
        assert desk.server.post("/v1/sessions", {"metadata": {"title": title}}).status_code == 201
    desk.tab.reload()
    keyboard = desk.tab.keyboard
    row = desk.tab.locator(".row", has_text="Second")
    row.locator(".row-main").focus()
    keyboard.press("Tab")
    more = row.get_by_role("button", name="More for Second")
    focused(more).wait_for()
    keyboard.press("Enter")
    keyboard.press("Enter")  # rename
    field = focused(desk.tab.get_by_label("Title"))
    field.wait_for()
    keyboard.press("Escape")
    focused(more).wait_for()
    for key in ("Enter", "ArrowUp", "Enter"):  # delete
        keyboard.press(key)
    row.wait_for(state="detached")
    focused(desk.tab.locator(".row", has_text="First").locator(".row-main")).wait_for()
    assert "Undo" in desk.tab.locator("[aria-live=polite]").inner_text()
    desk.tab.get_by_role("button", name="Undo").focus()
    keyboard.press("Enter")
    row.wait_for()
    assert "#/" not in desk.tab.url  # it was not open, and is not


@pytest.mark.usefixtures("slow_engine")
def test_escape_stops_only_where_one_talks_and_a_first_turn_can_be_found_again(desk: Desk) -> None:
    desk.open()
    desk.tab.evaluate(HELD)
    desk.tab.route("**/chat/completions", endless)
    ask(desk, "Tell me a joke.")
    reply = desk.tab.locator(STREAMS)
    reply.wait_for()
    desk.tab.get_by_role("searchbox").press("Escape")
    desk.tab.get_by_role("button", name="New conversation").click()
    desk.tab.get_by_text("A conversation that stays").wait_for()
    row = desk.tab.locator(".row", has_text="Tell me a joke.")
    row.get_by_text("Answering…").wait_for()
    row.click()
    reply.wait_for()
    focused(desk.tab.locator("#composer")).wait_for()
    desk.tab.keyboard.press("Escape")
    reply.wait_for(state="detached")
    row.get_by_text("just now").wait_for()
    assert desk.asked == ["Tell me a joke."]
    assert len(desk.replies) == 1
