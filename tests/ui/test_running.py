"""A reply belongs to the server: a reload, a second tab and a broken connection find it again, and stop keeps it."""

from __future__ import annotations

import pytest
from browser_desk import Desk, endless

WALTER = "My name is Walter."
STREAMS = ".message.assistant[aria-busy=true] .markdown"


def ask(desk: Desk, text: str) -> None:
    """Send it, and wait for the beginning of the reply."""
    desk.tab.locator("#composer").fill(text)
    desk.tab.keyboard.press("Control+Enter")
    desk.tab.locator(STREAMS).wait_for()


def stop(desk: Desk) -> None:
    """Stop the reply, and wait until it is kept."""
    desk.tab.get_by_role("button", name="Stop", exact=True).click()
    desk.tab.locator(".reply-foot").get_by_text("stopped", exact=True).wait_for()


@pytest.mark.usefixtures("slow_engine")
def test_a_reload_goes_on_with_the_reply(desk: Desk) -> None:
    desk.open()
    desk.tab.route("**/chat/completions", endless)
    ask(desk, WALTER)
    before = desk.replies[0][:20]
    desk.tab.reload()
    desk.tab.locator(STREAMS).wait_for()
    assert desk.asked == [WALTER]
    assert desk.replies[0].startswith(before)
    stop(desk)
    assert len(desk.replies) == 1
    (turn,) = desk.rest(f"sessions/{desk.session}/turns")["data"]
    assert (turn["number"], turn["finish_reason"]) == (1, "cancelled")
    old = desk.session

    desk.tab.locator("#composer").press("ArrowUp")
    desk.tab.get_by_role("textbox", name="Edit your message").fill("My name is Emma.")
    desk.tab.keyboard.press("Control+Enter")
    desk.tab.locator(STREAMS).wait_for()
    desk.tab.reload()
    desk.tab.locator(STREAMS).wait_for()
    assert desk.asked == ["My name is Emma."]
    stop(desk)
    assert desk.rest(f"sessions/{desk.session}")["parent"] == {"session_id": old, "turn": 0}


# A weak reference to what shows the running turn, in the tree of components.
SHOWS = """() => {
  const within = (nodes) => nodes?.reduce?.((found, one) => found ?? find(one), null);
  const find = (node) => node && (node.props?.follow && node.__c ? node.__c : within(node.__k));
  window.shows = new WeakRef(find(document.getElementById("app").__k));
}"""


@pytest.mark.usefixtures("slow_engine")
def test_nothing_is_kept_of_a_running_turn_that_is_not_shown(desk: Desk) -> None:
    desk.open()
    desk.tab.route("**/chat/completions", endless)
    ask(desk, WALTER)
    asked = desk.session
    desk.tab.evaluate(SHOWS)
    assert desk.tab.evaluate("shows.deref() !== undefined")
    desk.tab.get_by_role("button", name="New conversation").click()
    desk.tab.locator(".welcome").wait_for()
    desk.tab.context.new_cdp_session(desk.tab).send("HeapProfiler.collectGarbage")
    assert desk.tab.evaluate("shows.deref() === undefined")
    desk.server.post(f"/v1/sessions/{asked}/cancel", {})


@pytest.mark.usefixtures("slow_engine")
def test_a_second_tab_shows_the_reply_while_it_is_written_and_can_stop_it(desk: Desk) -> None:
    desk.open()
    desk.say(WALTER)
    desk.tab.route("**/chat/completions", endless)
    ask(desk, "Tell me a joke.")
    other = Desk(desk.tab.context.new_page(), desk.server)
    other.watch()
    other.open(f"#/{desk.session}")
    other.tab.locator(STREAMS).wait_for()
    other.tab.locator(".bubble").nth(1).wait_for()
    assert other.asked == [WALTER, "Tell me a joke."]
    stop(other)
    desk.tab.locator(".reply-foot").get_by_text("stopped", exact=True).wait_for()
    assert desk.replies == other.replies
    other.is_well()


@pytest.mark.usefixtures("slow_engine")
def test_a_first_turn_is_found_by_its_address_in_a_tab_that_is_opened_meanwhile(desk: Desk) -> None:
    desk.open()
    desk.tab.route("**/chat/completions", endless)
    ask(desk, WALTER)
    other = Desk(desk.tab.context.new_page(), desk.server)
    other.watch()
    other.open(f"#/{desk.session}")
    other.tab.locator(STREAMS).wait_for()
    assert other.asked == [WALTER]
    stop(other)
    assert other.tab.locator(".row.active").get_by_text(WALTER).count() == 1
    other.is_well()


def test_a_closed_tab_loses_no_reply(desk: Desk) -> None:
    desk.open()
    desk.say(WALTER)
    desk.tab.locator("#composer").fill("What is my name?")
    with desk.tab.expect_response("**/chat/completions"):
        desk.tab.keyboard.press("Enter")
    other = Desk(desk.tab.context.new_page(), desk.server)
    session = desk.session
    desk.tab.close()
    other.open(f"#/{session}")
    other.receipts.nth(1).wait_for()
    assert other.replies == ["Nice to meet you, Walter!", "Your name is Walter."]


@pytest.mark.usefixtures("slow_engine")
def test_without_a_network_the_page_says_so_and_goes_on_with_the_reply(desk: Desk) -> None:
    desk.expected = ["ERR_INTERNET_DISCONNECTED", "ERR_FAILED", "ERR_NETWORK_CHANGED"]
    desk.open()
    desk.tab.route("**/chat/completions", endless)
    ask(desk, WALTER)
    desk.tab.context.set_offline(True)
    desk.tab.evaluate("window.stop()")  # offline does not cut what streams already
    desk.tab.locator(".banner", has_text="You are offline.").wait_for()
    desk.tab.context.set_offline(False)
    desk.tab.locator(".banner").wait_for(state="detached")
    desk.tab.locator(STREAMS).wait_for()
    stop(desk)
    assert desk.asked == [WALTER]
    assert len(desk.rest(f"sessions/{desk.session}/turns")["data"]) == 1


def test_a_draft_outlives_its_tab(desk: Desk) -> None:
    desk.open()
    desk.say(WALTER)
    desk.tab.locator("#composer").fill("not sent yet")
    session, context = desk.session, desk.tab.context
    desk.tab.close()
    desk.tab = context.new_page()
    desk.open(f"#/{session}")
    desk.receipts.nth(0).wait_for()
    assert desk.tab.locator("#composer").input_value() == "not sent yet"
