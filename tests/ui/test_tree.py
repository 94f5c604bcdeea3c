"""The tree of turns and the gauges in the page at /ui, in Chromium: what is counted, found by keys, told in words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from browser_desk import Desk

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Route

QUESTIONS = ["My name is Walter.", "I live in Paris.", "Where do I live?"]
TURNS = 6000
METRICS = """warmturn_running 0
warmturn_waiting 0
warmturn_generated_tokens_total 7
warmturn_time_to_first_token_seconds_sum 1
warmturn_time_to_first_token_seconds_count 2
warmturn_pages{tier="device"} 0
warmturn_pages{tier="host"} 0
warmturn_pages_capacity{tier="device"} 100
warmturn_pages_capacity{tier="host"} 0
warmturn_disk_bytes 0
warmturn_disk_bytes_capacity 0
"""


def grow(desk: Desk, name: str, *questions: str, fork: tuple[str, int] | None = None) -> None:
    """A session with these turns, behind what it is forked from."""
    if fork:
        made = desk.server.post(f"/v1/sessions/{fork[0]}/fork", {"id": name, "turn": fork[1]})
        assert made.status_code == 201, made.text
    for text in questions:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0}
        answer = desk.server.post(f"/v1/sessions/{name}/chat/completions", body)
        assert answer.status_code == 200, answer.text


def rows(desk: Desk) -> Locator:
    return desk.tab.locator(".turn-row:not(.root)")


def numbers(desk: Desk) -> list[str]:
    return [text.split("\n")[-1] for text in desk.tab.locator(".turn-title b").all_inner_texts()]


def detail(desk: Desk, number: int) -> Locator:
    return desk.tab.get_by_role("region", name=f"Turn {number}", exact=True)


def some_loaded(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree whose later turns were loaded in part, and computed again in part."""
    for branch in tree["data"]:
        for turn in branch["turns"][1:]:
            cache, held = turn["cache"], turn["cache"]["reused"]["device"]
            cache["reused"] = {"device": held - 3, "host": 0, "disk": 2, "remote": 0}
            cache["recomputed"] += 1
    return tree


def spent(turns: list[dict[str, Any]]) -> dict[str, int]:
    """What the receipts of some turns add up to."""
    reused = [turn["cache"]["reused"] for turn in turns]
    return {
        "Reused": sum(sum(tiers.values()) for tiers in reused),
        "Of it loaded": sum(sum(tiers.values()) - tiers["device"] for tiers in reused),
        "Computed again": sum(turn["cache"]["recomputed"] for turn in turns),
        "New": sum(turn["cache"]["new"] for turn in turns),
    }


def test_what_a_branch_cost_is_what_its_turns_cost(desk: Desk) -> None:
    grow(desk, "cost", *QUESTIONS)
    grow(desk, "cost-side", "I live in Oslo.", fork=("cost", 1))
    tree = some_loaded(desk.rest("sessions/cost/tree"))
    desk.tab.route("**/cost*/tree", lambda route: route.fulfill(json=tree))
    desk.open("#/cost")
    rows(desk).nth(3).wait_for()
    ends = desk.tab.locator(".turn-row", has=desk.tab.locator(".branch-total"))
    for branch, row in zip(tree["data"], (ends.nth(1), ends.nth(0)), strict=True):
        wanted = spent(branch["turns"])
        row.click()
        told = detail(desk, len(branch["turns"])).locator(".totals div").all_inner_texts()
        assert dict(text.split("\n") for text in told) == {words: str(tokens) for words, tokens in wanted.items()}
        reused, loaded, again, new = wanted.values()
        small = row.locator(".branch-total").inner_text()
        assert f"{reused} reused ({loaded} loaded) · {again} computed again · {new} new" in small
    assert ends.count() == 2


def test_keys_go_through_the_tree_and_fork(desk: Desk) -> None:
    grow(desk, "keys", *QUESTIONS)
    grow(desk, "keys-side", *QUESTIONS, "What is my name?", fork=("keys", 1))
    desk.open("#/keys")
    rows(desk).nth(3).wait_for()
    focused = desk.tab.locator(":focus")
    keyboard = desk.tab.keyboard
    assert desk.tab.locator("[role=tree] [tabindex='0']").count() == 1
    desk.tab.get_by_role("treeitem", selected=True).focus()
    keyboard.press("Home")
    detail(desk, 1).wait_for()
    keyboard.press("ArrowRight")
    side = desk.tab.locator("[role=treeitem][aria-level='2']").first
    side.and_(focused).wait_for()
    assert side.inner_text().startswith("Branch off turn 1:")
    assert (side.get_attribute("aria-expanded"), numbers(desk)) == ("false", ["1", "2", "2", "3"])
    keyboard.press("ArrowRight")
    desk.tab.locator(".turn-row[aria-expanded=true]").wait_for()
    assert numbers(desk) == ["1", "2", "3", "4", "5", "2", "3"]
    keyboard.press("ArrowLeft")
    desk.tab.locator(".turn-row[aria-expanded=false]").wait_for()
    keyboard.press("ArrowDown")
    detail(desk, 2).filter(has_text="on this branch").wait_for()
    keyboard.press("Enter")
    detail(desk, 2).and_(focused).wait_for()
    keyboard.press("Escape")
    rows(desk).nth(2).and_(focused).wait_for()
    keyboard.press("Enter")
    for _ in range(20):
        keyboard.press("Tab")
        if focused.inner_text() == "Fork here":
            break
    keyboard.press("Enter")
    desk.told("A new branch begins after turn 2.")
    assert desk.rest(f"sessions/{desk.session}")["parent"] == {"session_id": "keys", "turn": 2}


def many(turns: int) -> dict[str, Any]:
    """A tree of one long branch, and one that leaves it in the middle."""

    def turn(number: int, branch: str) -> dict[str, Any]:
        cache = {"reused": {"device": number, "host": 0, "disk": 0, "remote": 0}, "recomputed": 0, "new": 1}
        said = {"preview": f"Question {number}", "reply_preview": "Yes."}
        lengths = {"prompt_tokens": number + 1, "completion_tokens": 1, "cached_tokens": number}
        more = {"finish_reason": "stop", "cache": {**cache, "load_ms": 0, "prefill_ms": 1, "miss": None}}
        return {"id": f"{branch}{number}", "number": number, "created_at": number, **lengths, **said, **more}

    def branch(name: str, parent: Any, all_turns: list[Any]) -> dict[str, Any]:
        times = {"created_at": 1, "last_used_at": 2, "pinned_until": None}
        counts = {"turns": len(all_turns), "tokens": 9, "messages": 0, "kv": {}, "running": False}
        return {"session": {"id": name, "metadata": {}, "parent": parent, **times, **counts}, "turns": all_turns}

    first = [turn(number, "a") for number in range(1, turns + 1)]
    half = turns // 2
    other = first[:half] + [turn(number, "b") for number in range(half + 1, turns + 1)]
    fork = {"session_id": "many", "turn": half}
    return {"root": "many", "data": [branch("many", None, first), branch("many-side", fork, other)], "has_more": False}


def test_a_tree_of_thousands_of_turns_opens(desk: Desk) -> None:
    tree = json.dumps(many(TURNS))
    desk.tab.route("**/many/tree", lambda route: route.fulfill(body=tree, content_type="application/json"))
    desk.tab.route("**/many/messages", lambda route: route.fulfill(json={"data": []}))
    desk.open("#/many")
    last = rows(desk).filter(has_text=f"Question {TURNS}")
    last.wait_for()
    keyboard = desk.tab.keyboard
    last.click()
    keyboard.press("Home")
    detail(desk, 1).wait_for()
    first = rows(desk).filter(has=desk.tab.get_by_text("Question 1", exact=True))
    first.and_(desk.tab.locator(":focus")).wait_for()
    assert rows(desk).count() < 100
    keyboard.press("End")
    detail(desk, TURNS).wait_for()
    last.and_(desk.tab.locator(":focus")).wait_for()
    assert last.bounding_box() is not None


def test_a_branch_that_is_being_deleted_is_not_shown(desk: Desk) -> None:
    grow(desk, "gone", *QUESTIONS[:2])
    grow(desk, "gone-side", "I live in Oslo.", fork=("gone", 1))
    desk.open("#/gone")
    rows(desk).nth(2).wait_for()
    desk.tab.get_by_text("1 of 2").wait_for()
    rows(desk).filter(has_text="Oslo").click()
    desk.tab.get_by_role("button", name="Delete branch").click()
    desk.told("Branch deleted.")
    desk.tab.get_by_text("1 of 2").wait_for(state="detached")
    assert numbers(desk) == ["1", "2"]
    desk.tab.get_by_role("button", name="Undo").click()
    desk.tab.locator(".variants").wait_for()
    assert numbers(desk) == ["1", "2", "2"]


def test_replies_to_the_same_message_are_told_apart(desk: Desk) -> None:
    grow(desk, "twins", *QUESTIONS)
    grow(desk, "twins-side", QUESTIONS[2], fork=("twins", 2))
    desk.open("#/twins")
    rows(desk).nth(3).wait_for()
    twins = desk.tab.locator(".turn-row", has_text=QUESTIONS[2])
    assert ["You live in Paris." in text for text in twins.all_inner_texts()] == [True, True]
    assert "other reply, just now" in twins.nth(0).inner_text()
    assert "You live" not in rows(desk).nth(0).inner_text()


def test_the_detail_folds_away_and_stays_so(desk: Desk) -> None:
    grow(desk, "folds", *QUESTIONS[:1])
    desk.open("#/folds")
    shown = desk.tab.get_by_role("button", name="Fork here")
    shown.wait_for()
    detail(desk, 1).get_by_role("button", name="Turn 1").click()
    shown.wait_for(state="detached")
    desk.tab.reload()
    detail(desk, 1).wait_for()
    assert shown.count() == 0


def test_gauges_without_figures_say_so_in_words(desk: Desk) -> None:
    def answer(route: Route) -> None:
        route.fulfill(body=METRICS, content_type="text/plain")

    desk.tab.route("**/metrics", answer)
    desk.open()
    desk.tab.get_by_role("button", name="The server now").click()
    desk.tab.get_by_text("Nothing has been answered since you opened this view.").wait_for()
    desk.tab.get_by_text("None was in use.").wait_for()
    assert desk.tab.locator(".plot canvas").count() == 0
    assert desk.tab.locator(".gauge", has_text="First token").inner_text() == "First token\n–"
    for tier in ("Host memory", "Disk"):
        assert desk.tab.locator(".room", has_text=tier).inner_text() == f"{tier}\noff"

    desk.expected = ["500 (Internal Server Error)"]
    desk.tab.unroute("**/metrics")
    desk.tab.route("**/metrics", lambda route: route.fulfill(status=500))
    desk.tab.get_by_text("These are the last figures.").wait_for()
    close = desk.tab.get_by_role("complementary").get_by_role("button", name="Close")
    close.click()
    desk.tab.get_by_role("button", name="The server now").click()
    desk.tab.locator(".room", has_text="of 100 pages").wait_for()


def test_plots_have_keys_and_the_colours_of_the_page(desk: Desk) -> None:
    def answer(route: Route) -> None:
        busy = METRICS.replace("running 0", "running 2").replace("waiting 0", "waiting 1")
        route.fulfill(body=busy.replace('pages{tier="device"} 0', 'pages{tier="device"} 5'), content_type="text/plain")

    desk.tab.route("**/metrics", answer)
    desk.open()
    desk.tab.get_by_role("button", name="The server now").click()
    turns = desk.tab.locator(".plot", has_text="running")
    turns.locator("canvas").wait_for()
    assert turns.locator(".key").all_inner_texts() == ["waiting", "running"]
    desk.tab.get_by_role("img", name="Pages of cache in use, the last five minutes; now device 5").wait_for()
    turns.locator("canvas").evaluate("canvas => canvas.id = 'light'")
    desk.tab.emulate_media(color_scheme="dark")
    turns.locator("canvas:not(#light)").wait_for()
    assert desk.tab.locator("#light").count() == 0


def test_a_conversation_that_was_recognised_says_by_what_and_how_many_side_calls_it_had(desk: Desk) -> None:
    headers = {"x-claude-code-session-id": "of the page", "x-claude-code-agent-id": "agent-7"}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    first = desk.server.post("/v1/chat/completions", {"messages": messages, "tools": [tool]}, **headers)
    title = desk.server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}, **headers)
    assert (first.status_code, title.status_code) == (200, 200)
    desk.open(f"#/{first.json()['cache']['line']['id']}")
    rows(desk).first.wait_for()
    told = desk.tab.locator(".recognised").inner_text()
    assert told == "Kept for a client, by its x-claude-code-session-id · agent agent-7 · 1 side call"
    assert "What is the capital of France?" in desk.tab.locator(".conversations").inner_text()
    grow(desk, "named", QUESTIONS[0])
    desk.open("#/named")
    rows(desk).first.wait_for()
    assert desk.tab.locator(".recognised").count() == 0


def test_drafted_tokens_are_told(desk: Desk) -> None:
    def counted(route: Route) -> None:
        lines = ("draft_tokens", 70), ("accepted_draft_tokens", 62)
        told = "".join(f'warmturn_{name}_total{{source="grammar"}} {value}.0\n' for name, value in lines)
        route.fulfill(body=METRICS + told, content_type="text/plain")

    tree = many(2)
    drafts = {"history": {"drafted": 40, "accepted": 31}, "heads": {"drafted": 9, "accepted": 0}}
    tree["data"][0]["turns"][1]["cache"]["speculation"] = drafts
    desk.tab.route("**/many/tree", lambda route: route.fulfill(json=tree))
    desk.tab.route("**/many/messages", lambda route: route.fulfill(json={"data": []}))
    desk.open("#/many")
    rows(desk).filter(has_text="31 drafted").wait_for()
    detail(desk, 2).get_by_text("31 of 40 right").wait_for()
    told = detail(desk, 2).inner_text()
    assert "Drafted from this conversation" in told
    assert "Drafted by the model's own layers\n0 of 9 right" in told
    assert "drafted" not in rows(desk).nth(0).inner_text()
    desk.tab.route("**/metrics", counted)
    desk.tab.get_by_role("button", name="The server now").click()
    shown = desk.tab.get_by_role("region", name="Drafted tokens that were right")
    shown.get_by_text("62 of 70 right").wait_for()
    assert "Drafted by the grammar" in shown.inner_text()
    desk.tab.unroute("**/metrics")
