"""The page at /ui as people use it, in Chromium: it talks, branches, remembers, and does nothing that it should not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser_desk import Desk, desk_at, endless, violations
from server_process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

WALTER = ["My name is Walter.", "Add milk to my shopping list.", "What is my name?"]
EVIL = """<img src=x onerror="window.hacked=1"> <script>window.hacked=2</script> <b onclick="window.hacked=3">bold</b>

[link](javascript:window.hacked=4) [data](data:text/html,<script>window.hacked=5</script>)
![picture](http://192.0.2.1/track.png) <a href="https://example.org">home</a>

<iframe src="http://192.0.2.1/"></iframe><svg onload="window.hacked=6"></svg>
<style>body { display: none }</style>

```html
<script>window.hacked=7</script>
```
"""


def walter(desk: Desk) -> None:
    """A conversation of three turns."""
    for text in WALTER:
        desk.say(text)


def test_a_second_turn_reuses_the_first_and_shows_it(desk: Desk) -> None:
    desk.open()
    assert desk.say(WALTER[0]) == "Nice to meet you, Walter!"
    assert desk.say(WALTER[2]) == "Your name is Walter."
    first, second = desk.rest(f"sessions/{desk.session}/turns")["data"]
    reused = second["cache"]["reused"]
    assert sum(reused.values()) == second["cached_tokens"] >= first["prompt_tokens"] + first["completion_tokens"] - 1
    assert f"{second['cached_tokens']} of {second['prompt_tokens']} tokens reused" in desk.receipts.nth(1).inner_text()
    rows = desk.tab.get_by_role("complementary").locator(".turn").all_inner_texts()
    assert [WALTER[0] in rows[0], WALTER[2] in rows[1]] == [True, True]
    desk.receipts.nth(1).click()
    told = desk.tab.get_by_role("region", name="Turn 2").inner_text()
    assert f"New in this turn\n{second['cache']['new']}" in told
    assert f"Written as the reply\n{second['completion_tokens']}" in told
    assert "device" in desk.tab.get_by_role("table").inner_text()


def test_an_edited_message_begins_a_branch_and_the_old_one_stays(desk: Desk) -> None:
    desk.open()
    walter(desk)
    old = desk.session
    desk.tab.locator(".message.user").nth(0).hover()
    desk.tab.get_by_role("button", name="Edit, as a branch").nth(0).click()
    desk.tab.get_by_role("textbox", name="Edit your message").fill("My name is Emma.")
    desk.tab.keyboard.press("Enter")
    assert desk.reply(0) == "Nice to meet you, Emma!"
    assert desk.say(WALTER[2]) == "Your name is Emma."
    new = desk.session
    assert desk.rest(f"sessions/{new}")["parent"] == {"session_id": old, "turn": 0}
    assert desk.tab.locator(".variants span").inner_text() == "2 of 2"
    assert len(desk.tab.locator(".turn").all()) == 5

    desk.tab.get_by_role("button", name="Previous branch").click()
    desk.tab.get_by_text("1 of 2").wait_for()
    assert (desk.session, desk.asked) == (old, WALTER)
    assert desk.replies[-1] == "Your name is Walter."


def test_a_reply_again_is_a_branch_that_shares_what_came_before(desk: Desk) -> None:
    desk.open()
    walter(desk)
    old = desk.session
    desk.tab.get_by_role("button", name="Answer again, as a branch").last.click()
    desk.tab.wait_for_url(lambda url: old not in url)
    assert desk.reply(2) == "Your name is Walter."
    tree = desk.rest(f"sessions/{desk.session}/tree")
    ids = [[turn["id"] for turn in branch["turns"]] for branch in tree["data"]]
    assert ids[0][:2] == ids[1][:2]
    last = tree["data"][1]["turns"][2]["cache"]
    assert (last["recomputed"], last["miss"]) == (0, None)
    assert "2 branches" in desk.tab.locator(".row.active").inner_text()


def test_a_reload_keeps_everything(desk: Desk) -> None:
    desk.open()
    walter(desk)
    desk.tab.locator("#composer").fill("not sent yet")
    desk.tab.reload()
    desk.receipts.nth(2).wait_for()
    assert (desk.asked, desk.replies[2]) == (WALTER, "Your name is Walter.")
    assert desk.tab.locator("#composer").input_value() == "not sent yet"
    assert WALTER[0] in desk.tab.locator(".row.active").inner_text()
    assert desk.tab.title() == f"{WALTER[0]} · warmturn"


@pytest.mark.slow
def test_a_restart_of_the_server_keeps_everything(chromium: Browser, tmp_path: Path) -> None:
    first = ServerProcess(None, tmp_path)
    with first:
        desks = desk_at(chromium, first)
        desk = next(desks)
        desk.open()
        walter(desk)
    desk.expected = ["ERR_CONNECTION_REFUSED", "503 (Service Unavailable)"]
    desk.tab.locator("#composer").fill("Where do I live?")
    desk.tab.locator("#composer").press("Enter")
    desk.tab.get_by_role("alert").get_by_text("The server does not answer.").wait_for()
    desk.tab.get_by_text("What was finished is kept").wait_for()
    with ServerProcess(None, tmp_path, port=first.port):
        desk.tab.locator(".banner").wait_for(state="detached")
        desk.tab.get_by_role("button", name="Try again").click()
        assert desk.reply(3) == "You have not told me where you live yet."
        assert desk.say("What is my name?") == "Your name is Walter."
        cache = desk.rest(f"sessions/{desk.session}/turns")["data"][3]["cache"]
        assert cache["reused"]["disk"] > 0
        assert "loaded" in desk.receipts.nth(3).inner_text()
        assert list(desks) == []


def test_what_a_model_says_does_nothing(desk: Desk) -> None:
    body = {"id": "evil", "messages": [{"role": "user", "content": EVIL}, {"role": "assistant", "content": EVIL}]}
    assert desk.server.post("/v1/sessions", {**body, "metadata": {"title": EVIL[:500]}}).status_code == 201
    desk.open("#/evil")
    desk.tab.locator(".message.assistant .code").wait_for()
    reply = desk.tab.locator(".message.assistant .markdown")
    shown = reply.inner_text()
    assert '<img src=x onerror="window.hacked=1">' in shown
    assert "<script>window.hacked=7</script>" in shown
    for link in reply.locator("a").all():
        link.evaluate("node => node.removeAttribute('target')")
    links = reply.locator("a").evaluate_all("all => all.map(a => [a.textContent, a.getAttribute('href')])")
    assert dict(links) == {"link": None, "data": None, "picture": "http://192.0.2.1/track.png"}
    reply.locator("a").nth(0).click()
    assert reply.locator("img, script, iframe, svg, style, [onclick], [onerror]").count() == 0
    assert desk.tab.locator(".bubble").locator("img, script, iframe, svg, style, [onclick], [onerror]").count() == 0
    assert desk.tab.evaluate("typeof window.hacked") == "undefined"
    # And where somebody slips something past all of that, the browser itself refuses.
    desk.expected = ["TrustedHTML"]
    refused = "() => { try { document.body.innerHTML = '<p>'; return false } catch { return true } }"
    assert desk.tab.evaluate(refused)


@pytest.mark.usefixtures("slow_engine")
@pytest.mark.parametrize("first", [True, False])
def test_what_was_said_until_it_was_stopped_is_kept(desk: Desk, first: bool) -> None:
    desk.open()
    if not first:
        desk.say(WALTER[0])
    desk.tab.route("**/chat/completions", endless)
    desk.tab.locator("#composer").fill("Tell me a joke.")
    desk.tab.keyboard.press("Enter")
    desk.tab.locator(".message.assistant[aria-busy=true] .markdown").wait_for()
    desk.tab.keyboard.press("Escape")
    number = 0 if first else 1
    desk.reply(number)
    desk.tab.locator(".message.assistant", has_text="stopped").locator(".receipt").wait_for()
    desk.tab.unroute("**/chat/completions")
    name = desk.session
    messages = desk.rest(f"sessions/{name}/messages")["data"]
    assert [(m["role"], m["turn"]) for m in messages[-2:]] == [("user", number + 1), ("assistant", number + 1)]
    assert messages[-2]["content"] == "Tell me a joke."
    assert len(messages) == 2 * (number + 1)
    turn = desk.rest(f"sessions/{name}/turns")["data"][-1]
    assert turn["finish_reason"] == "cancelled"
    cost = desk.receipts.nth(number).inner_text()
    assert desk.tab.locator(".turn-row:not(.root)").count() == number + 1
    desk.say("My name is Emma.")
    assert desk.receipts.nth(number).inner_text() == cost  # not that of the turn behind it
    after = desk.rest(f"sessions/{name}/turns")["data"][-1]
    assert after["number"] == number + 2
    assert after["cached_tokens"] == turn["prompt_tokens"] + turn["completion_tokens"] - 1


def test_a_refusal_is_told_and_the_same_turn_tried_again(desk: Desk) -> None:
    desk.expected = ["429 (Too Many Requests)"]
    keys: list[str | None] = []

    def refuse(route: Route) -> None:
        keys.append(route.request.header_value("idempotency-key"))
        if len(keys) > 1:
            route.continue_()
            return
        error = {"message": "no", "type": "rate_limit_error", "param": None, "code": "queue_full"}
        headers = {"retry-after": "7", "content-type": "application/json"}
        route.fulfill(status=429, headers=headers, body=json.dumps({"error": error}))

    desk.open()
    desk.tab.route("**/chat/completions", refuse)
    desk.tab.locator("#composer").fill(WALTER[0])
    desk.tab.keyboard.press("Enter")
    told = desk.tab.get_by_role("alert")
    told.get_by_text("The server is busy: too many requests are waiting.").wait_for()
    assert told.inner_text() == "The server is busy: too many requests are waiting."  # not read again every second
    desk.tab.get_by_text("The server asks to come back in").wait_for()
    desk.tab.get_by_role("button", name="Try again").click()
    assert desk.reply(0) == "Nice to meet you, Walter!"
    assert keys[0]
    assert keys == [keys[0]] * 2
    assert desk.rest(f"sessions/{desk.session}")["turns"] == 1


def test_rewind_and_fork_by_click(desk: Desk) -> None:
    desk.open()
    walter(desk)
    old = desk.session
    desk.tab.locator(".turn").nth(1).click()
    desk.tab.get_by_role("button", name="Fork here").click()
    desk.tab.wait_for_url(lambda url: old not in url)
    desk.told("A new branch begins after turn 2.")
    assert desk.asked == WALTER[:2]
    assert desk.say("My pet is called Rex.")
    assert desk.tab.locator(".turn").count() == 4

    desk.tab.locator(".turn").nth(0).click()
    desk.tab.get_by_role("button", name="Rewind").click()
    desk.tab.get_by_role("dialog").get_by_role("button", name="Rewind", exact=True).click()
    desk.told("Back at the end of turn 1.")
    assert desk.asked == WALTER[:1]
    assert desk.rest(f"sessions/{old}")["turns"] == 3


def test_the_list_renames_pins_searches_and_deletes_with_a_way_back(desk: Desk) -> None:
    desk.open()
    walter(desk)
    name = desk.session
    row = desk.tab.locator(".row.active")

    def choose(item: str) -> None:
        row.hover()
        row.get_by_role("button").nth(1).click()
        desk.tab.get_by_role("menuitem", name=item).click()

    choose("Rename")
    desk.tab.get_by_label("Title").fill("Zebra and milk")
    desk.tab.keyboard.press("Enter")
    row.get_by_text("Zebra and milk").wait_for()
    assert desk.rest(f"sessions/{name}")["metadata"]["title"] == "Zebra and milk"
    with desk.tab.expect_response(lambda answer: answer.request.method == "POST"):
        choose("Keep its cache for a week")
    assert desk.rest(f"sessions/{name}")["pinned_until"] is not None
    choose("Pin to the top")
    row.locator(".row-title svg").wait_for()
    search = desk.tab.get_by_role("searchbox")
    search.fill("zebra MILK")
    desk.tab.get_by_role("list", name="Results").locator(".row").wait_for()
    assert desk.tab.locator(".row").count() == 1
    search.fill("nobody said this")
    desk.tab.get_by_text("Nothing found.").wait_for()
    search.fill("")
    choose("Delete")
    desk.tab.get_by_text("A conversation that stays").wait_for()
    desk.tab.get_by_role("button", name="Undo").click()
    desk.receipts.nth(2).wait_for()
    assert desk.asked == WALTER
    choose("Delete")
    with desk.tab.expect_response(lambda answer: answer.request.method == "DELETE") as gone:
        desk.tab.get_by_role("button", name="Dismiss").click()
    assert gone.value.status == 200
    assert desk.server.post(f"/v1/sessions/{name}/fork", {}).status_code == 404


def test_a_conversation_travels_as_a_file(desk: Desk) -> None:
    desk.open()
    walter(desk)
    old = desk.session
    with desk.tab.expect_download() as download:
        desk.tab.get_by_role("button", name="Export").click()
        desk.tab.get_by_role("button", name="With its cache").click()
    desk.expected = ["409 (Conflict)"]  # it is still there under its own name
    desk.tab.locator("input[type=file]").set_input_files(download.value.path())
    desk.told("Imported 3 turns, with the cache.")
    assert desk.session != old
    assert desk.asked == WALTER
    assert desk.say("What is my name?") == "Your name is Walter."


def test_the_keyboard_is_enough(desk: Desk) -> None:
    desk.open()
    keyboard = desk.tab.keyboard
    skip = desk.tab.locator("a, button, input, textarea").first
    assert skip.inner_text() == "Skip to the message"
    skip.press("Enter")
    keyboard.type("My name is Walter.")
    keyboard.press("Shift+Enter")
    keyboard.type("Add milk.")
    keyboard.press("Control+Enter")
    desk.reply(0)
    assert desk.asked == ["My name is Walter.\nAdd milk."]
    assert desk.tab.locator("[aria-live=polite]").inner_text().startswith("Reply: ")
    keyboard.press("ArrowUp")
    box = desk.tab.get_by_role("textbox", name="Edit your message")
    box.and_(desk.tab.locator(":focus")).wait_for()
    keyboard.press("Escape")
    box.wait_for(state="detached")
    assert desk.tab.locator(".turn").count() == 1


def test_the_gauges_show_the_server(desk: Desk) -> None:
    desk.open()
    desk.tab.get_by_role("button", name="The server now").click()
    desk.say(WALTER[0])
    desk.tab.locator(".plot canvas").first.wait_for()
    pages = int(desk.server.metric("warmturn_pages_capacity", tier="device"))
    desk.tab.locator(".room", has_text=f"of {pages:,} pages").wait_for()
    first = desk.tab.locator(".gauge", has_text="First token").locator("b")
    first.filter(has_text="ms").or_(first.filter(has_text=" s")).wait_for()
    desk.tab.locator(".gauge", has_text="Running").locator("b").get_by_text("0", exact=True).wait_for()


def test_a_phone_has_room_for_all_of_it(phone: Desk) -> None:
    phone.open()
    assert phone.overflow() == 0
    phone.say("My name is Walter.")
    long = "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n|" + " a |" * 40 + "\n|" + " - |" * 40
    messages = [{"role": "user", "content": long}, {"role": "assistant", "content": long}]
    assert phone.server.post("/v1/sessions", {"id": "wide", "messages": messages}).status_code == 201
    phone.tab.get_by_role("button", name="Conversations").click()
    assert phone.overflow() == 0
    phone.tab.keyboard.press("Escape")
    for name in ("Turns and branches", "The server now"):
        phone.tab.get_by_role("button", name=name).click()
        phone.tab.get_by_role("complementary", name=name).locator(".turn, .gauge").first.wait_for()
        assert phone.overflow() == 0
        phone.tab.get_by_role("button", name="Close").click()
    phone.open("#/wide")
    phone.tab.locator(".message.assistant .code").wait_for()
    assert phone.overflow() == 0
    box = phone.tab.locator("#composer").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 640


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_everybody_can_use_it(colours: str, request: pytest.FixtureRequest) -> None:
    desk: Desk = request.getfixturevalue("desk" if colours == "light" else "dark")
    desk.open()
    assert violations(desk) == []
    walter(desk)
    desk.tab.get_by_role("button", name="Answer again, as a branch").last.click()
    desk.tab.locator(".variants").wait_for()
    assert violations(desk) == []
    desk.tab.get_by_role("button", name="Export").click()
    assert violations(desk) == []
    desk.tab.keyboard.press("Escape")
    desk.tab.get_by_role("button", name="The server now").click()
    desk.tab.locator(".plot canvas").first.wait_for()
    assert violations(desk) == []


def test_a_phones_list_is_usable_by_everybody(phone: Desk) -> None:
    phone.open()
    phone.say("My name is Walter.")
    phone.tab.get_by_role("button", name="Conversations").click()
    phone.tab.locator(".drawer").wait_for()
    assert violations(phone) == []


def test_colours_are_chosen_and_remembered(desk: Desk) -> None:
    desk.open()
    ground = "getComputedStyle(document.body).backgroundColor"
    before = desk.tab.evaluate(ground)
    for _ in range(2):
        desk.tab.get_by_role("button", name="Colours:").click()
    assert desk.tab.evaluate(ground) != before
    desk.tab.reload()
    desk.tab.locator(".model-name").wait_for()
    assert desk.tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert desk.tab.evaluate(ground) != before
