"""Conversations are compacted within a response: beyond a threshold, where they do not fit, or where it is asked."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from compaction_kit import HEAD, LONG, SUMMARY, TALK, turn_of
from http_context import Call, Site, demo_tokens, served, until
from openai_document import stream_faults
from responses_kit import respond, says
from template_styles import THINKS, tokens_with

from server.api.responses.sealed_reasoning import unseal
from server.chat.compaction import ASKED, GO_ON, TASK
from server.log.logged_message import LoggedMessage
from server.schemas.sealed_compaction import SEAL, seal_messages, unseal_messages

TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
RULE = [{"type": "compaction", "compact_threshold": 200}]
TRIGGER = {"type": "compaction_trigger"}


@served()
async def test_beyond_its_threshold_the_older_part_is_summarised(site: Site) -> None:
    made = await respond(site, TALK, context_management=RULE, instructions="Be kind.", store=False)
    assert [item["type"] for item in made["output"]] == ["compaction", "message"]
    asked, replied = site.prompt(0), site.prompt(1)
    assert asked.startswith(turn_of("system", "Be kind."))
    assert ("First" in asked, "Two." in asked, "Third" in asked) == (True, True, False)
    assert asked.endswith(f"{turn_of('user', TASK)}<|im_start|>assistant\n")
    assert replied == f"{turn_of('system', 'Be kind.')}{HEAD}{turn_of('user', 'Third')}<|im_start|>assistant\n"
    told = made["cache"]["compaction"]
    assert (told["reason"], told["messages"], told["summaries"]) == ("threshold", 4, 1)
    assert (told["prompt_tokens"], told["completion_tokens"]) == (len(site.prompt_ids(0)), 7)
    assert made["usage"]["input_tokens"] == len(site.prompt_ids(1))  # a client that counts sees how much is left


@pytest.mark.parametrize("only_newest", [False, True])
@served()
async def test_a_client_that_sends_its_history_goes_on_behind_the_summary(site: Site, only_newest: bool) -> None:
    made = await respond(site, TALK, context_management=RULE, store=False)
    sent = [*([] if only_newest else TALK), *made["output"], {"role": "user", "content": "Fourth"}]
    two = await respond(site, sent, context_management=RULE, store=False)
    assert "compaction" not in two["cache"]
    assert site.prompt_ids()[: len(site.prompt_ids(1))] == site.prompt_ids(1)
    assert two["usage"]["input_tokens_details"]["cached_tokens"] >= len(site.prompt_ids(1)) - 1
    assert site.prompt().endswith(f"{turn_of('assistant', SUMMARY)}{turn_of('user', 'Fourth')}<|im_start|>assistant\n")


@served()
async def test_a_stored_response_goes_on_behind_the_summary_and_before_it(site: Site) -> None:
    one = await respond(site, TALK)
    two = await respond(site, "Fourth " + LONG, previous_response_id=one["id"], context_management=RULE)
    assert [item["type"] for item in two["output"]] == ["compaction", "message"]
    assert (
        site.prompt_ids(1)[: one["usage"]["total_tokens"]]
        == [*site.prompt_ids(0), *site.prompt_ids(1)[len(site.prompt_ids(0)) :]][: one["usage"]["total_tokens"]]
    )
    cached = two["cache"]["compaction"]["cached_tokens"]
    assert cached >= one["usage"]["total_tokens"] - 1  # only the question is computed
    three = await respond(site, "Fifth", previous_response_id=two["id"])
    assert site.prompt_ids()[: len(site.prompt_ids(2))] == site.prompt_ids(2)
    assert "First" not in site.prompt()
    assert three["usage"]["input_tokens_details"]["cached_tokens"] >= two["usage"]["total_tokens"] - 1
    back = await respond(site, "Fifth", previous_response_id=one["id"])
    assert "First" in site.prompt()
    assert back["usage"]["input_tokens_details"]["cached_tokens"] >= one["usage"]["total_tokens"] - 1
    assert (await site.http.get(f"/v1/responses/{two['id']}")).json() == two


@served()
async def test_a_conversation_that_is_compacted_is_kept_as_it_was(site: Site) -> None:
    conversation = (await site.http.post("/v1/conversations", json={})).json()["id"]
    await respond(site, TALK, conversation=conversation)
    before = site.prompt_ids()
    made = await respond(site, "Fourth " + LONG, conversation=conversation, context_management=RULE)
    kept = made["cache"]["compaction"]["kept"]
    items = (await site.http.get(f"/v1/conversations/{conversation}/items?order=asc&limit=50")).json()["data"]
    kinds = [item["type"] for item in items]
    assert kinds == ["message"] * 6 + ["compaction", "message", "message"]
    assert items[6] == made["output"][0]
    answer = await site.http.delete(f"/v1/conversations/{conversation}/items/{items[6]['id']}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "item_not_removable")
    back = await respond(site, "Fourth", conversation=f"conv_{kept}")
    assert site.prompt_ids()[: len(before)] == before
    assert back["usage"]["input_tokens_details"]["cached_tokens"] >= len(before)
    tree = (await site.http.get(f"/v1/sessions/{kept}/tree")).json()
    assert len(tree["data"]) == 2


@served()
async def test_calls_that_are_being_answered_stay(site: Site) -> None:
    says(site, ("look", "{}"))
    one = await respond(site, TALK, tools=TOOLS)
    call = one["output"][0]
    site.engine.ids = None
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Seen."}
    stored = await respond(site, [result], previous_response_id=one["id"], tools=TOOLS, context_management=RULE)
    assert "Third" in site.prompt(1)
    assert "look" not in site.prompt(1).rpartition(TASK)[0].rpartition("Third")[2]
    after = site.prompt()
    assert after.index(ASKED) < after.index(GO_ON) < after.index("Seen.")
    assert "Third" not in after
    made = await respond(site, [*TALK, call, result], tools=TOOLS, context_management=RULE, store=False)
    assert site.prompt() == after
    await respond(site, [*made["output"], {"role": "user", "content": "On"}], tools=TOOLS, store=False)
    assert site.prompt().startswith(after)
    await respond(site, "On", previous_response_id=stored["id"], tools=TOOLS)
    assert site.prompt().startswith(after)


@served()
async def test_below_the_threshold_nothing_changes(site: Site) -> None:
    rule = [{"type": "compaction", "compact_threshold": 2000}]
    made = await respond(site, TALK, context_management=rule)
    assert ([item["type"] for item in made["output"]], len(site.engine.submitted)) == (["message"], 1)
    assert "compaction" not in made["cache"]


@served()
async def test_what_cannot_be_folded_is_answered_while_it_fits(site: Site) -> None:
    made = await respond(site, "First " + LONG * 3, context_management=RULE)
    assert [item["type"] for item in made["output"]] == ["message"]
    two = await respond(site, "On " + LONG * 3, previous_response_id=made["id"], context_management=RULE)
    assert two["output"][0]["type"] == "compaction"  # its summary and its newest message are beyond the threshold
    body = {"input": [*two["output"][:1]], "context_management": RULE, "store": False}
    made = await respond(site, **body)
    assert [item["type"] for item in made["output"]] == ["message"]


@pytest.mark.parametrize("rules", [{"context_management": [{"type": "compaction"}]}, {"truncation": "auto"}])
@served()
async def test_what_does_not_fit_is_compacted_in_parts(site: Site, rules: dict[str, Any]) -> None:
    talk = [
        {"role": role, "content": f"Number {number}. {LONG}"} for number in range(20) for role in ("user", "assistant")
    ]
    newest = {"role": "user", "content": "And now?"}
    made = await respond(site, [*talk, newest], **rules)
    told = made["cache"]["compaction"]
    assert (told["reason"], told["messages"], told["summaries"]) == ("context", 40, len(site.engine.submitted) - 1)
    assert told["summaries"] > 1
    asked = [site.prompt(at) for at in range(told["summaries"])]
    for number in range(20):
        assert sum(f"Number {number}." in one for one in asked) >= 1
    assert site.prompt() == f"{HEAD}{turn_of('user', 'And now?')}<|im_start|>assistant\n"


@served()
async def test_a_stream_tells_of_the_compaction_first(site: Site) -> None:
    body = {"input": TALK, "context_management": RULE, "stream": True, "background": True}
    answer = await site.http.post("/v1/responses", json=body)
    assert not stream_faults("ResponseStreamEvent", answer.text, done=False)
    told = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    added = [event for event in told if event["type"] == "response.output_item.added"]
    assert [(event["output_index"], event["item"]["type"]) for event in added] == [(0, "compaction"), (1, "message")]
    done = [event for event in told if event["type"] == "response.output_item.done"]
    last = told[-1]["response"]
    assert (told[-1]["type"], [event["item"] for event in done]) == ("response.completed", last["output"])
    assert [event["sequence_number"] for event in told] == [*range(len(told))]
    assert added[0]["item"] == last["output"][0]
    again = await site.http.get(f"/v1/responses/{last['id']}?stream=true")
    assert again.text == answer.text


@served()
async def test_the_events_of_a_response_that_was_not_recorded_tell_of_the_compaction(site: Site) -> None:
    key = {"idempotency-key": "k1"}
    body = {"input": TALK, "context_management": RULE}
    one = (await site.http.post("/v1/responses", json=body, headers=key)).json()
    for asked in (body, {**body, "input": [*TALK[:-1], TRIGGER]}):
        key = {"idempotency-key": "k" + str(len(str(asked)))}
        one = (await site.http.post("/v1/responses", json=asked, headers=key)).json()
        replayed = await site.http.post("/v1/responses", json={**asked, "stream": True}, headers=key)
        assert not stream_faults("ResponseStreamEvent", replayed.text, done=False)
        last = json.loads(replayed.text.rstrip().rpartition("data: ")[2])
        assert last["response"] == one


# --- a compaction in place of a reply -------------------------------------------------------------------------


@served()
async def test_a_trigger_is_answered_by_one_compaction(site: Site) -> None:
    made = await respond(site, [*TALK[:-1], TRIGGER], instructions="Be kind.", tools=TOOLS, store=False)
    (item,) = made["output"]
    assert (item["type"], unseal(item["encrypted_content"])) == ("compaction", SUMMARY)
    assert site.prompt().endswith(f"{turn_of('user', TASK)}<|im_start|>assistant\n")
    assert (made["status"], made["usage"]["output_tokens"]) == ("completed", 7)
    assert made["cache"]["compaction"]["reason"] == "request"
    assert "line" not in made["cache"]
    users = [one for one in TALK if one["role"] == "user"]
    await respond(site, [*users, item], store=False)  # in the middle of its work
    assert site.prompt().endswith(f"{turn_of('assistant', SUMMARY)}{turn_of('user', GO_ON)}<|im_start|>assistant\n")
    assert "Third" in site.prompt()


@served()
async def test_a_trigger_in_a_stream(site: Site) -> None:
    body = {"input": [*TALK, TRIGGER], "stream": True, "store": False}
    answer = await site.http.post("/v1/responses", json=body)
    assert not stream_faults("ResponseStreamEvent", answer.text, done=False)
    kinds = [line.removeprefix("event: response.") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert {*kinds[3:-2]} == {"compaction.compacting"}
    assert kinds[-2:] == ["output_item.done", "completed"]


@served()
async def test_a_session_goes_on_from_the_compaction_that_it_was_asked_for(site: Site) -> None:
    one = await respond(site, TALK)
    two = await respond(site, [TRIGGER], previous_response_id=one["id"])
    assert [item["type"] for item in two["output"]] == ["compaction"]
    assert two["usage"]["input_tokens_details"]["cached_tokens"] >= one["usage"]["total_tokens"] - 1
    await respond(site, "Fourth", previous_response_id=two["id"])
    assert site.prompt() == f"{HEAD}{turn_of('user', 'Fourth')}<|im_start|>assistant\n"
    await respond(site, "Fourth", previous_response_id=one["id"])
    assert "First" in site.prompt()
    conversation = (await site.http.post("/v1/conversations", json={})).json()["id"]
    await respond(site, TALK, conversation=conversation)
    made = await respond(site, [TRIGGER], conversation=conversation)
    assert made["cache"]["compaction"]["kept"]
    await respond(site, "Fourth", conversation=conversation)
    assert site.prompt() == f"{HEAD}{turn_of('user', 'Fourth')}<|im_start|>assistant\n"


@served()
async def test_a_model_that_writes_no_summary_ends_nothing(site: Site) -> None:
    one = await respond(site, TALK)
    site.engine.reply = ""
    for body in ({"input": [TRIGGER]}, {"input": "Fourth", "context_management": RULE}):
        answer = await site.http.post("/v1/responses", json={**body, "previous_response_id": one["id"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "compaction_failed")
    site.engine.reply = SUMMARY
    await respond(site, "Fourth", previous_response_id=one["id"])
    assert "First" in site.prompt()


@served(tokens=lambda: tokens_with(THINKS))
async def test_reasoning_is_no_summary_and_takes_half_of_its_room_at_most(site: Site) -> None:
    site.engine.reply = "<think>\nWhat was it?\n</think>\n\nStories."
    made = await respond(site, TALK, context_management=RULE)
    budget = site.engine.submitted[0].thinking
    assert budget is not None
    assert budget.tokens == 2048 // 8 // 2
    assert site.engine.submitted[1].thinking is None
    told = unseal_messages(made["output"][0]["encrypted_content"])
    assert told is not None
    assert told[1] == LoggedMessage("assistant", "Stories.")
    made = await respond(site, [*TALK, TRIGGER])
    assert unseal(made["output"][0]["encrypted_content"]) == "Stories."


@served()
async def test_tools_that_came_later_stay_callable_behind_the_summary(site: Site) -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [{**TOOLS[0], "name": "late"}]}
    talk = [*TALK[:2], added, *TALK[2:]]
    made = await respond(site, talk, tools=TOOLS, context_management=RULE, store=False)
    front, _, rest = site.prompt().partition(ASKED)
    assert ("look" in front, "late" in front, "late" in rest.partition(SUMMARY)[0]) == (True, False, True)
    before = site.prompt()
    says(site, ("late", "{}"))
    two = await respond(site, [*made["output"], {"role": "user", "content": "On"}], tools=TOOLS, store=False)
    assert site.prompt().startswith(before)
    assert two["output"][0]["name"] == "late"


@served()
async def test_a_count_is_that_of_the_whole_conversation(site: Site) -> None:
    long = [{**TALK[0], "content": LONG * 20}, *TALK[1:]]
    counted = await site.http.post("/v1/responses/input_tokens", json={"input": long, "truncation": "auto"})
    assert counted.json()["input_tokens"] > 2048


@served()
async def test_a_client_that_leaves_ends_the_summary(site: Site) -> None:
    site.engine.pause_after = 2
    call = Call.post(site.app, "/v1/responses", {"input": TALK, "context_management": RULE})
    await until(lambda: site.engine.running)
    await call.leave()
    assert site.engine.cancelled == [site.engine.submitted[0].turn]
    assert len(site.engine.submitted) == 1


# --- on a line --------------------------------------------------------------------------------------------------


@served()
async def test_on_a_line_the_summary_begins_with_its_tokens_and_the_next_turn_goes_on(site: Site) -> None:
    letters = [id for letter in "Hello" for id in demo_tokens().encode(letter, special=False)]
    site.engine.ids = letters
    headers = {"thread-id": "t1"}
    rule = [{"type": "compaction", "compact_threshold": 500}]  # behind the tools

    async def ask(input: Any) -> Any:
        body = {"input": input, "store": False, "context_management": rule, "tools": TOOLS}
        answer = await site.http.post("/v1/responses", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    first = {"role": "user", "content": "First " + LONG}
    one = await ask([first])
    two = await ask([first, *one["output"], {"role": "user", "content": "Second " + LONG}])
    begun = [*site.prompt_ids(0), *letters]
    assert site.prompt_ids(1)[: len(begun)] == begun  # as generated, not as text would be
    assert two["output"][0]["type"] == "compaction"
    three = await ask([*two["output"], {"role": "user", "content": "Third"}])
    assert three["cache"]["line"]["outcome"] == "continued"
    assert site.prompt_ids()[: len(site.prompt_ids(2)) + len(letters)] == [*site.prompt_ids(2), *letters]
    back = await ask([first, *one["output"], {"role": "user", "content": "Other"}])
    assert back["cache"]["line"]["turns"] == 1  # the line from before it is still there


# --- bad input --------------------------------------------------------------------------------------------------

BAD_COUNTS: list[Any] = [0, -1, 1.5, "1000", True, [], 2**31, 1e300]
FORGED = [
    "",
    "x",
    "[]",
    "{}",
    '{"messages":[]}',
    '{"messages":[{"role":"user","content":"a"}]}',
    '{"messages":[{"role":"system","content":"a"},{"role":"assistant","content":"b"}]}',
    '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"tool","content":"c"}]}',
    '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":1}]}',
    '{"messages":[{"role":"user","content":"\\ud800"},{"role":"assistant","content":"b"}]}',
    '{"messages":[{"role":"user","content":"a","added_tools":[{}]},{"role":"assistant","content":"b"}]}',
    '{"messages":[{"role":"user","content":"a","removed_tools":[1]},{"role":"assistant","content":"b"}]}',
    '{"messages":' + "[" * 5000 + "]" * 5000 + "}",
]


def sealed(text: str) -> dict[str, Any]:
    return {"type": "compaction", "encrypted_content": SEAL + base64.b64encode(text.encode()).decode()}


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("context_management", {"context_management": {"type": "compaction"}}),
        ("context_management", {"context_management": [{"type": "compaction"}] * 17}),
        ("context_management[0].type", {"context_management": [{}]}),
        ("context_management[0].type", {"context_management": [{"type": None}]}),
        ("context_management[0].type", {"context_management": [{"type": ["compaction"]}]}),
        ("context_management[0].x", {"context_management": [{"type": "compaction", "x": 1}]}),
        ("context_management[0]", {"context_management": ["compaction"]}),
        *(
            ("context_management[0].compact_threshold", {"context_management": [{**RULE[0], "compact_threshold": bad}]})
            for bad in BAD_COUNTS
        ),
        ("input", {"input": [TRIGGER, {"role": "user", "content": "a"}]}),
        ("input", {"input": [TRIGGER, TRIGGER]}),
        ("input", {"input": [TRIGGER]}),
        ("input", {"input": [{"role": "system", "content": "a"}, TRIGGER]}),
        ("input[0].x", {"input": [{**TRIGGER, "x": 1}]}),
        ("truncation", {"truncation": "front"}),
        ("input[0].encrypted_content", {"input": [{"type": "compaction"}]}),
        ("input[0].encrypted_content", {"input": [{"type": "compaction", "encrypted_content": SEAL + "%%"}]}),
        *(("input[0].encrypted_content", {"input": [sealed(text)]}) for text in FORGED),
    ],
)
@served()
async def test_bad_input_is_refused_by_name(site: Site, param: str, body: dict[str, Any]) -> None:
    answer = await site.http.post("/v1/responses", json={"input": "a", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert site.engine.submitted == []


@served()
async def test_a_trigger_is_no_item_of_a_conversation(site: Site) -> None:
    answer = await site.http.post("/v1/conversations", json={"items": [TRIGGER]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "items")
    made = (await site.http.post("/v1/conversations", json={})).json()["id"]
    answer = await site.http.post(f"/v1/conversations/{made}/items", json={"items": [TRIGGER]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "items")


def test_a_seal_keeps_what_is_said_and_nothing_else() -> None:
    told = [LoggedMessage("user", "é", instructions=True, items=(["x", 1],)), LoggedMessage("assistant", "b", begun=1)]
    assert unseal_messages(seal_messages(told)) == [LoggedMessage("user", "é"), LoggedMessage("assistant", "b")]
    assert unseal_messages("wt1:x") is None
