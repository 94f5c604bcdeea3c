"""Settings: what holds without any, what they ask for, and what they say of a file that is none."""

from __future__ import annotations

import json
from pathlib import Path

from browser_desk import Desk


def test_what_holds_without_a_choice_is_told_and_choices_are_sent(desk: Desk) -> None:
    desk.open()
    desk.tab.get_by_role("button", name="Settings").click()
    desk.tab.get_by_text("The model's own defaults: always the likeliest token.").wait_for()
    temperature = desk.tab.get_by_label("Temperature")
    assert temperature.get_attribute("placeholder") == "0"
    temperature.fill("")
    desk.tab.get_by_label("Most tokens of a reply").fill("3")
    desk.tab.get_by_label("Instructions for new conversations").fill("Be brief.")
    desk.tab.get_by_role("button", name="Save").click()
    with desk.tab.expect_request("**/chat/completions") as asked:
        desk.say("My name is Walter.")
    sent = json.loads(asked.value.post_data or "")
    assert "temperature" not in sent
    assert (sent["max_tokens"], sent["messages"][0]) == (3, {"role": "system", "content": "Be brief."})
    desk.tab.get_by_text("cut at the token limit").wait_for()
    desk.tab.get_by_text("Instructions", exact=True).click()
    desk.tab.get_by_text("Be brief.").wait_for()
    with desk.tab.expect_request("**/chat/completions") as asked:
        desk.say("And again.")
    assert [message["role"] for message in json.loads(asked.value.post_data or "")["messages"]] == ["user"]


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
        desk.tab.locator(".row", has_text="of-another-client").locator(".row-about").inner_text()
        == "just now · 4 messages"
    )
