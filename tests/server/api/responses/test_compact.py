"""A conversation is summarised by the served model, on its own cache, and goes on from the summary."""

from __future__ import annotations

from typing import Any

import pytest
from http_context import Site, demo_tokens, served

from server.api.responses.sealed_reasoning import seal, unseal
from server.chat.compaction import ASKED, TASK

SUMMARY = "Hello there, friend."
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "First"},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "Second"},
    CALL,
    {"type": "function_call_output", "call_id": "c1", "output": "Seen."},
    {"role": "assistant", "content": "Two."},
]


async def compact(site: Site, headers: Any = None, **body: Any) -> Any:
    answer = await site.http.post("/v1/responses/compact", json={"model": "demo", **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def respond(site: Site, **body: Any) -> Any:
    answer = await site.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@served()
async def test_the_model_summarises_what_it_has_read(site: Site) -> None:
    made = await compact(site, input=TALK, instructions="Be kind.")
    assert (made["object"], [item["type"] for item in made["output"]]) == (
        "response.compaction",
        ["message", "message", "compaction"],
    )
    assert [item["content"][0]["text"] for item in made["output"][:2]] == ["First", "Second"]
    assert unseal(made["output"][2]["encrypted_content"]) == SUMMARY
    assert made["usage"]["output_tokens"] == 7
    (prompt,) = site.prompts()
    assert prompt.startswith("<|im_start|>system\nBe kind.")
    assert "Two." in prompt
    assert prompt.endswith(f"<|im_start|>user\n{TASK}<|im_end|>\n<|im_start|>assistant\n")


@served()
async def test_a_conversation_goes_on_from_its_summary(site: Site) -> None:
    made = await compact(site, input=TALK)
    await respond(site, input=[*made["output"], {"role": "user", "content": "Third"}], store=False)
    assert site.prompts()[-1] == (
        f"<|im_start|>user\nFirst\n\nSecond\n\n{ASKED}<|im_end|>\n"
        f"<|im_start|>assistant\n{SUMMARY}<|im_end|>\n"
        "<|im_start|>user\nThird<|im_end|>\n<|im_start|>assistant\n"
    )


@served()
async def test_what_came_before_a_summary_is_not_read_again(site: Site) -> None:
    item = {"type": "compaction", "encrypted_content": seal("So far.")}
    await respond(site, input=[*TALK, item, {"role": "user", "content": "Third"}], instructions="Be kind.")
    prompt = site.prompts()[-1]
    assert "One." not in prompt
    assert "Seen." not in prompt
    assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nFirst\n\nSecond")
    assert "So far." in prompt


@served()
async def test_a_stored_response_is_summarised_token_by_token_and_stays(site: Site) -> None:
    site.engine.ids = [id for letter in "Hello" for id in demo_tokens().encode(letter, special=False)]
    one = await respond(site, input="First")
    made = await compact(site, previous_response_id=one["id"])
    first, second = ([*memoryview(s.prompt).cast("i")] for s in site.engine.submitted)
    assert second[: len(first) + len(site.engine.ids)] == [*first, *site.engine.ids]
    assert [item["type"] for item in made["output"]] == ["message", "compaction"]
    await respond(site, input="Go on", previous_response_id=one["id"])
    assert (await site.http.get("/v1/sessions")).json()["data"][0]["turns"] == 2  # the summary is no turn


@served()
async def test_the_summary_of_a_line_begins_with_its_tokens(site: Site) -> None:
    site.engine.ids = [id for letter in "Hello" for id in demo_tokens().encode(letter, special=False)]
    headers = {"thread-id": "t1"}
    asked = {"input": "First", "store": False, "tools": TOOLS}
    answer = await site.http.post("/v1/responses", json=asked, headers=headers)
    said = answer.json()["output"][0]["content"][0]["text"]
    talk = [{"role": "user", "content": "First"}, {"role": "assistant", "content": said}]
    await compact(site, headers, input=talk, tools=TOOLS)
    first, second = ([*memoryview(s.prompt).cast("i")] for s in site.engine.submitted)
    assert second[: len(first) + len(site.engine.ids)] == [*first, *site.engine.ids]
    assert site.engine.submitted[1].session is None


@served()
async def test_of_what_is_too_long_the_oldest_part_is_summarised_first(site: Site) -> None:
    words = "word " * 100
    talk = [{"role": role, "content": f"{number} {words}"} for number in range(6) for role in ("user", "assistant")]
    made = await compact(site, input=talk, instructions="Be kind.")
    assert len(made["output"]) == 7
    first, *between, second = site.prompts()
    assert ("0 word" in first, "5 word" in first) == (True, False)
    assert ("0 word" in second, "5 word" in second) == (False, True)
    assert second.startswith(f"<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n{ASKED}<|im_end|>\n")
    assert f"<|im_start|>assistant\n{SUMMARY}<|im_end|>" in second
    assert all(f"{number} word" in "".join([first, *between, second]) for number in range(6))
    assert all(len(submit.prompt) // 4 + 256 <= 2048 for submit in site.engine.submitted)
    assert made["usage"]["input_tokens"] == sum(len(submit.prompt) // 4 for submit in site.engine.submitted)
    huge = {"input": [{"role": "user", "content": "word " * 3000}, {"role": "assistant", "content": "One."}]}
    answer = await site.http.post("/v1/responses/compact", json=huge)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@served()
async def test_a_model_that_writes_no_summary_is_told(site: Site) -> None:
    site.engine.reply = ""
    answer = await site.http.post("/v1/responses/compact", json={"input": TALK})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "compaction_failed")


@served()
async def test_a_summary_that_another_server_has_encrypted_is_left_out(site: Site) -> None:
    item = {"type": "compaction", "encrypted_content": "gAAAA"}
    made = await respond(site, input=[*TALK, item, {"role": "user", "content": "Third"}])
    assert "One." in site.prompts()[-1]
    assert made["cache"]["adapted"] == [{"rule": "item_left_out", "param": "compaction", "count": 1}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
        ({}, "input"),
        ({"input": "x", "previous_response_id": "resp_no"}, "previous_response_id"),
        ({"input": "x", "nonsense": 1}, "nonsense"),
    ],
)
@served()
async def test_what_cannot_be_is_refused_by_name(site: Site, body: dict[str, Any], param: str) -> None:
    answer = await site.http.post("/v1/responses/compact", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert site.engine.submitted == []
