"""Settings of conversations, the model's card, and a file that is no conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from browser_desk import Desk

if TYPE_CHECKING:
    from playwright.sync_api import Route


CHANGED = {"Instructions": "Rhyme.", "Longest reply, in tokens": "4"}


def sent_with(desk: Desk, text: str) -> dict[str, Any]:
    """The request of one turn."""
    with desk.tab.expect_request("**/chat/completions") as asked:
        desk.say(text)
    body: dict[str, Any] = json.loads(asked.value.post_data or "")
    return body


def test_what_holds_without_a_choice_is_told_and_choices_are_sent(desk: Desk) -> None:
    desk.open()
    desk.tab.get_by_role("button", name="Settings").click()
    desk.tab.get_by_text("The model's own defaults: always the likeliest token.").wait_for()
    temperature = desk.tab.get_by_label("Temperature")
    assert temperature.get_attribute("placeholder") == "0"
    temperature.fill("")
    desk.tab.get_by_label("Longest reply, in tokens").fill("3")
    desk.tab.get_by_label("Instructions").fill("Be brief.")
    desk.tab.get_by_role("button", name="Save").click()
    sent = sent_with(desk, "My name is Walter.")
    assert "temperature" not in sent
    assert (sent["max_tokens"], sent["messages"][0]) == (3, {"role": "system", "content": "Be brief."})
    desk.tab.get_by_text("cut at the token limit").wait_for()
    desk.tab.get_by_text("Instructions", exact=True).click()
    desk.tab.get_by_text("Be brief.").wait_for()
    assert [message["role"] for message in sent_with(desk, "And again.")["messages"]] == ["user"]


def test_a_conversation_has_settings_of_its_own_in_every_browser(desk: Desk) -> None:
    desk.open()
    desk.say("My name is Walter.")
    first = desk.session
    desk.tab.get_by_role("button", name="Settings").click()
    dialog = desk.tab.get_by_role("dialog", name="Settings of this conversation")
    dialog.get_by_text("More", exact=True).click()
    for label, text in ({"top-p": "0.9", "top-k": "7", "min-p": "0.05", "Seed": "3"} | CHANGED).items():
        dialog.get_by_label(label).fill(text)
    dialog.get_by_label("Reasoning effort").select_option("low")
    dialog.get_by_label("Tools").select_option("off")
    dialog.get_by_label("Reply as").select_option("schema")
    dialog.get_by_role("textbox", name="Schema").fill("{")
    dialog.get_by_role("button", name="Save").click()
    dialog.get_by_role("alert").get_by_text("The schema is not a JSON object.").wait_for()
    dialog.get_by_role("textbox", name="Schema").fill('{"type": "integer"}')
    with desk.tab.expect_response(lambda answer: answer.url.endswith(first)):
        dialog.get_by_role("button", name="Save").click()
    desk.tab.evaluate("localStorage.removeItem('warmturn-settings')")
    desk.tab.reload()
    desk.receipts.nth(0).wait_for()
    sent = sent_with(desk, "How old am I?")
    form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": {"type": "integer"}}}
    assert sent["response_format"] == form
    told = {name: sent[name] for name in ("top_p", "top_k", "min_p", "seed", "reasoning_effort", "tool_choice")}
    assert told == {
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.05,
        "seed": 3,
        "reasoning_effort": "low",
        "tool_choice": "none",
    }
    assert [message["content"] for message in sent["messages"]] == ["Rhyme.", "How old am I?"]
    assert desk.replies[1].isdigit()
    desk.tab.get_by_role("button", name="Answer again, as a branch").last.click()
    desk.tab.wait_for_url(lambda url: first not in url)
    desk.reply(1)
    assert desk.rest(f"sessions/{desk.session}")["metadata"]["settings"].startswith("{")
    desk.tab.get_by_role("button", name="New conversation").click()
    assert "top_p" not in sent_with(desk, "My name is Emma.")


def test_settings_can_be_kept_under_a_name(desk: Desk) -> None:
    desk.open()
    desk.tab.get_by_role("button", name="Settings").click()
    dialog = desk.tab.get_by_role("dialog")
    dialog.get_by_label("Temperature").fill("0.3")
    dialog.get_by_role("button", name="Keep as a preset").click()
    dialog.get_by_label("Name of the preset").fill("careful")
    desk.tab.keyboard.press("Enter")
    desk.told("Kept as “careful”.")
    dialog.get_by_role("button", name="Cancel").click()
    desk.tab.reload()
    desk.tab.get_by_role("button", name="Settings").click()
    assert dialog.get_by_label("Temperature").input_value() == "0"
    dialog.get_by_label("Preset").select_option("careful")
    assert dialog.get_by_label("Temperature").input_value() == "0.3"
    dialog.get_by_role("button", name="Remove").click()
    dialog.get_by_text("none yet").wait_for(state="attached")


def test_the_card_tells_what_the_model_is_and_another_one_can_be_chosen(desk: Desk) -> None:
    def two(route: Route) -> None:
        models = route.fetch().json()
        other = {**models["data"][0], "id": "other", "status": {"value": "unloaded", "failed": False}, "warmturn": None}
        route.fulfill(json={**models, "data": [*models["data"], other]})

    desk.tab.route("**/v1/models", two)
    desk.open()
    desk.tab.locator(".model-name").get_by_text("m", exact=True).click()
    facts = desk.tab.locator(".facts").inner_text()
    for words in ("Qwen2ForCausalLM", "2,048 tokens", "1.0 kB a token", "packed, cpu", "apache-2.0", "Speed now"):
        assert words in facts
    desk.tab.get_by_label("Model").select_option("other")
    desk.tab.get_by_text("It is loaded when it is first asked.").wait_for()
    desk.tab.get_by_role("button", name="Use this model").click()
    desk.tab.locator(".model-name").get_by_text("other").wait_for()
    assert sent_with(desk, "My name is Walter.")["model"] == "other"


def test_a_file_that_is_no_conversation_is_refused_in_words(desk: Desk, tmp_path: Path) -> None:
    desk.open()
    desk.expected = ["400 (Bad Request)"]
    (file := tmp_path / "holiday.zip").write_bytes(b"PK\x03\x04 not one of ours")
    desk.tab.locator("input[type=file]").set_input_files(file)
    desk.told("This file is not a conversation that was exported from this program, or it is damaged.")


def test_what_tools_were_called_for_and_gave_back_is_shown(desk: Desk) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ghent"}'}}
    messages = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "It rains."},
        {"role": "assistant", "content": "It rains in Ghent."},
    ]
    made = desk.server.post("/v1/sessions", {"id": "of-another-client", "messages": messages})
    assert made.status_code == 201, made.text
    desk.open("#/of-another-client")
    desk.tab.get_by_text("Called weather").click()
    desk.tab.get_by_text('{"city": "Ghent"}').wait_for()
    desk.tab.get_by_text("Result of a tool").click()
    desk.tab.get_by_text("It rains.", exact=True).wait_for()
    desk.tab.locator(".message.assistant", has_text="It rains in Ghent.").wait_for()
    assert (
        desk.tab.locator(".row", has_text="How is the weather?").locator(".row-about").inner_text()
        == "just now · 4 messages"
    )
