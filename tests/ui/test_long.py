"""A long conversation: what is far away is there as text, and drawn when one comes near it."""

from __future__ import annotations

from browser_desk import Desk

TURNS = 150
DRAWN = "document.querySelectorAll('.message:not(.far)').length"
FAR = "document.querySelectorAll('.message.far').length"
TO_TOP = """async () => {
  const box = document.querySelector(".scroll");
  for (let step = 0; step < 1000 && box.scrollTop > 0; step += 1) {
    box.scrollTop -= 1500;
    await new Promise((next) => requestAnimationFrame(next));
  }
}"""
PLACE = "document.querySelector('[data-message=\"250\"]').getBoundingClientRect().top"
AT_END = """(() => {
  const { scrollHeight, scrollTop, clientHeight } = document.querySelector(".scroll");
  return scrollHeight - scrollTop - clientHeight;
})()"""
SEEN = """(() => {
  const [box, found] = [".scroll", ".found"].map((name) => document.querySelector(name).getBoundingClientRect());
  return found.top >= box.top && found.bottom <= box.bottom;
})()"""
CALM = """() => {
  const [all, now] = [document.querySelectorAll(".stretch"), document.querySelectorAll(".message:not(.far)").length];
  window.looks = window.drawn === now ? window.looks + 1 : 0;
  window.drawn = now;
  return all.length > 0 && window.looks > 9;
}"""


def test_what_is_far_is_text_and_nothing_moves_when_it_is_drawn(desk: Desk) -> None:
    said = [("user", "q"), ("assistant", "a *word*")] * TURNS
    messages = [{"role": role, "content": f"{text} {at}"} for at, (role, text) in enumerate(said)]
    messages[20]["content"] = "the nightingale sang"
    assert desk.server.post("/v1/sessions", {"id": "long", "messages": messages}).status_code == 201
    desk.open("#/long")
    desk.tab.get_by_text("a word 299", exact=True).wait_for()
    assert abs(desk.tab.evaluate(AT_END)) < 2
    assert desk.tab.evaluate(FAR) > 200
    assert desk.tab.evaluate("document.querySelector('[data-message=\"21\"]').textContent") == "a *word* 21"
    assert desk.tab.evaluate("find('nightingale', false, false, true)")  # as the browser's own search
    desk.tab.evaluate("getSelection().empty()")

    desk.tab.evaluate("document.querySelector('[data-message=\"262\"]').scrollIntoView()")
    desk.tab.wait_for_function(CALM, polling=100)
    before = desk.tab.evaluate(PLACE)
    desk.tab.wait_for_timeout(200)
    assert abs(desk.tab.evaluate(PLACE) - before) < 2
    desk.tab.evaluate(TO_TOP)
    desk.tab.locator("[data-message='1'] em").wait_for()  # drawn
    desk.tab.wait_for_function(f"() => {FAR} > 200")  # what was passed is let go
    desk.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    desk.tab.wait_for_function(f"() => {FAR} === 0")  # paper has all of them


def test_a_message_that_is_far_is_found(desk: Desk) -> None:
    said = [("user", "q"), ("assistant", "a")] * TURNS
    messages = [{"role": role, "content": f"{text} {at}"} for at, (role, text) in enumerate(said)]
    messages[20]["content"] = "the nightingale sang"
    assert desk.server.post("/v1/sessions", {"id": "longer", "messages": messages}).status_code == 201
    for before in ("", "#/longer"):  # opened by it, and open already
        desk.open(before)
        desk.tab.get_by_role("searchbox").fill("nightingale")
        desk.tab.get_by_role("list", name="Results").locator(".row-main").click()
        found = desk.tab.locator(".found")
        found.wait_for()
        assert found.get_attribute("data-message") == "20"
        assert found.locator(".bubble").is_visible()
        desk.tab.wait_for_timeout(100)
        assert desk.tab.evaluate(SEEN)
