"""Finding a conversation again: by its words, in context, by label and time, pinned to the top."""

from __future__ import annotations

from browser_desk import Desk

MILK = "Add milk to my shopping list."


def create(desk: Desk, id: str, *texts: str, **metadata: str) -> None:
    """A session of another client: its messages in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    body = {"id": id, "messages": messages, "metadata": metadata}
    assert desk.server.post("/v1/sessions", body).status_code == 201


def choose(desk: Desk, row: str, item: str) -> None:
    """An item of the menu of the row with this text."""
    place = desk.tab.locator(".row", has_text=row).first
    place.hover()
    place.get_by_role("button").nth(1).click()
    desk.tab.get_by_role("menuitem", name=item).click()


def test_a_sentence_is_found_in_context_and_shown(desk: Desk) -> None:
    filler = [f"filler {number} " + "and so on " * 60 for number in range(10)]
    create(desk, "api-1", "Where does the nightingale sing at dusk?", "In the walled garden.", *filler)
    create(desk, "api-2", "Something else entirely.")
    desk.open()
    desk.tab.locator(".row", has_text="Where does the nightingale sing").wait_for()  # titled by its first message
    painted = "all => all.filter((node) => getComputedStyle(node).backgroundImage !== 'none').length"
    assert desk.tab.locator(".sidebar *").evaluate_all(painted) == 0  # no row has the pattern of a cost
    search = desk.tab.get_by_role("searchbox")
    search.fill("GARD walled")
    found = desk.tab.get_by_role("list", name="Results").locator(".row")
    found.first.wait_for()
    desk.tab.wait_for_function("document.querySelectorAll('.row').length === 1")
    assert found.locator(".hit mark").first.inner_text() in ("walled", "garden")
    assert "In the walled garden." in found.locator(".hit").first.inner_text()
    found.locator(".row-main").click()
    message = desk.tab.locator(".message.assistant", has_text="In the walled garden.")
    message.wait_for()
    desk.tab.wait_for_function("document.querySelector('.message.found')?.textContent.includes('walled')")
    top = message.evaluate("node => node.getBoundingClientRect().top")
    assert 0 < top < 900
    search.fill("no such words at all")
    desk.tab.get_by_text("Nothing found.").wait_for()
    search.fill("api-2")  # by its id
    desk.tab.locator(".row", has_text="Something else entirely.").wait_for()
    search.fill("")
    desk.tab.locator(".row", has_text="nightingale").wait_for()


def test_labels_are_set_shown_and_filtered_by(desk: Desk) -> None:
    create(desk, "label-1", "Plans for the tower")
    create(desk, "label-2", "Plans for the bridge")
    desk.open()
    desk.tab.locator(".row", has_text="tower").wait_for()
    choose(desk, "tower", "Labels")
    desk.tab.get_by_label("Labels, with commas between them").fill("work, late ")
    desk.tab.get_by_role("button", name="Save").click()
    row = desk.tab.locator(".row", has_text="tower")
    row.locator(".label", has_text="work").wait_for()
    assert desk.rest("sessions/label-1")["metadata"] == {"label:work": "yes", "label:late": "yes"}
    desk.tab.get_by_role("button", name="Filters").click()
    desk.tab.get_by_label("Label", exact=True).select_option("work")
    desk.tab.get_by_role("list", name="Results").wait_for()
    desk.tab.wait_for_function("document.querySelectorAll('.row').length === 1")
    assert row.count() == 1
    desk.tab.get_by_label("Last used").select_option("1")
    desk.tab.get_by_role("searchbox").fill("bridge")
    desk.tab.get_by_text("Nothing found.").wait_for()
    desk.tab.get_by_role("button", name="Filters").click()
    desk.tab.get_by_role("list", name="Results").get_by_text("bridge").first.wait_for()


def test_a_pinned_conversation_is_at_the_top_however_old(desk: Desk) -> None:
    create(desk, "pin-old", "An old plan", pinned="yes")
    for number in range(70):
        create(desk, f"pin-new-{number}", f"Newer thing {number}")
    desk.open()
    pinned = desk.tab.locator("section", has=desk.tab.get_by_role("heading", name="Pinned"))
    pinned.get_by_text("An old plan").wait_for()
    assert desk.tab.get_by_text("Newer thing 0", exact=True).count() == 0
    desk.tab.locator(".conversations").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    desk.tab.get_by_text("Newer thing 0", exact=True).wait_for()  # older ones come as one scrolls
    choose(desk, "An old plan", "Unpin")
    pinned.wait_for(state="detached")
    assert desk.rest("sessions/pin-old")["metadata"] == {}
    choose(desk, "Newer thing 69", "Pin to the top")
    pinned.get_by_text("Newer thing 69").wait_for()
    desk.tab.reload()
    pinned.get_by_text("Newer thing 69").wait_for()


def test_the_search_on_a_phone(phone: Desk) -> None:
    create(phone, "phone-1", "A lighthouse with a very long description of its lamp " * 3)
    phone.open()
    phone.tab.get_by_role("button", name="Conversations").click()
    phone.tab.get_by_role("button", name="Filters").click()
    phone.tab.get_by_role("searchbox").fill("lighthouse")
    phone.tab.get_by_role("list", name="Results").locator(".hit mark").first.wait_for()
    assert phone.overflow() == 0


def test_a_title_made_by_the_page_is_the_one_that_the_server_makes(desk: Desk) -> None:
    desk.open()
    for number, text in enumerate(
        ("## Is **2**3** in `a_b`?", "- [ ] first #1", "#", "#tag **is** nice", "2**3**4 `x`")
    ):
        create(desk, f"title-{number}", text)
        made = desk.tab.evaluate("async (text) => (await import('./titles.js')).titleFor(text)", text)
        assert made == desk.rest(f"sessions/title-{number}")["title"]
        assert "**is**" not in made
