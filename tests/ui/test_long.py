"""A long conversation: what is far away is rendered when one comes near it."""

from __future__ import annotations

from browser_desk import Desk

TURNS = 150
SHOWN = "document.querySelectorAll('.message').length"
TO_TOP = """async () => {
  const box = document.querySelector(".scroll");
  for (let step = 0; step < 200 && !document.querySelector('[data-message="0"]'); step += 1) {
    box.scrollTop = 0;
    await new Promise((next) => setTimeout(next, 10));
  }
}"""
PLACE = "document.querySelector('[data-message=\"250\"]').getBoundingClientRect().top"


def test_only_what_is_near_is_rendered_and_nothing_moves_when_more_comes(desk: Desk) -> None:
    said = [("user", "q"), ("assistant", "a")] * TURNS
    messages = [{"role": role, "content": f"{text} {at}"} for at, (role, text) in enumerate(said)]
    messages[20]["content"] = "the nightingale sang"
    assert desk.server.post("/v1/sessions", {"id": "long", "messages": messages}).status_code == 201
    desk.open("#/long")
    desk.tab.get_by_text("a 299", exact=True).wait_for()
    assert desk.tab.evaluate(SHOWN) <= 80
    desk.tab.locator("[data-message='261']").wait_for()
    desk.tab.evaluate("document.querySelector('[data-message=\"262\"]').scrollIntoView()")
    desk.tab.locator("[data-message='250']").wait_for(state="attached")
    before = desk.tab.evaluate(PLACE)
    desk.tab.wait_for_timeout(200)
    assert abs(desk.tab.evaluate(PLACE) - before) < 2
    desk.tab.evaluate(TO_TOP)
    desk.tab.locator("[data-message='0']").wait_for()
    assert desk.tab.evaluate(SHOWN) == 2 * TURNS
    desk.open()
    desk.tab.get_by_role("searchbox").fill("nightingale")
    desk.tab.get_by_role("list", name="Results").locator(".row-main").click()
    found = desk.tab.locator(".found")
    found.wait_for()
    assert found.get_attribute("data-message") == "20"
