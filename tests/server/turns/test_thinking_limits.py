"""Requests that limit reasoning: which budget a turn gets, and what the client is told."""

from __future__ import annotations

from typing import Any

import pytest
from http_context import HELLO, Site, demo_tokens, events, served, site
from template_styles import HERMES, NO_TOOLS, STYLES, THINKS, template, tokens_with

from scheduler.sampling_params import ThinkingBudget
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.thinking_budget import MESSAGE, ThinkingDefaults

REASONING = "one two three four five six seven eight nine ten"
FIELDS = ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens", "reasoning_budget")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
PATTERNS = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"thinking": {"open_pattern": "<t+>", "close": "</t>"}, "content": {}},
}


def thinking() -> ChatTokenizer:
    """Whose template always opens the reasoning: it has no switch."""
    return tokens_with(THINKS.replace("enable_thinking is defined and enable_thinking is false", "false"))


def patterns() -> ChatTokenizer:
    """Whose reasoning has no fixed marks."""
    return tokens_with(NO_TOOLS, PATTERNS)


def first(tokens: int) -> str:
    """The first tokens of ``REASONING``."""
    return demo_tokens().decode(demo_tokens().encode(REASONING, special=False)[:tokens]).strip()


def budget(site: Site) -> ThinkingBudget | None:
    """That of the last turn."""
    return site.engine.submitted[-1].thinking


def limit(site: Site) -> int | None:
    """How many tokens the last turn may reason for."""
    made = budget(site)
    return None if made is None else made.tokens


def test_the_template_has_no_switch() -> None:
    assert not thinking().variables & {"enable_thinking", "thinking"}
    assert thinking().dialect.opens_reasoning("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("field", [*FIELDS, "reasoning_budget_tokens"])
@served(tokens=thinking)
async def test_each_field_limits_the_reasoning(site: Site, field: str) -> None:
    site.engine.reply = f"{REASONING}\n</think>\n\nYes."
    asked: dict[str, Any] = {field: 3}
    body = (await site.chat(**asked)).json()
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == f"{first(3)}\n\n{MESSAGE}"
    assert message["content"] == "Yes."
    assert body["cache"]["thinking_budget_spent"] is True
    made = budget(site)
    assert made is not None
    assert (made.tokens, made.opened) == (3, True)
    thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 3 < thought <= 3 + len(made.message) + len(made.end)


@pytest.mark.parametrize("field", FIELDS)
@served(tokens=thinking)
async def test_each_field_limits_the_reasoning_of_a_response(site: Site, field: str) -> None:
    site.engine.reply = f"{REASONING}\n</think>\n\nYes."
    body = (await site.http.post("/v1/responses", json={"input": "Hello", field: 3})).json()
    assert limit(site) == 3
    assert body["cache"]["thinking_budget_spent"] is True
    assert body["output"][-1]["content"][0]["text"] == "Yes."


@served(tokens=thinking)
async def test_a_budget_that_suffices_changes_nothing(site: Site) -> None:
    site.engine.reply = f"{REASONING}\n</think>\n\nYes."
    told = []
    bodies: list[dict[str, Any]] = [{"thinking_token_budget": 500}, {}]
    for body in bodies:
        answer = (await site.chat(**body)).json()
        assert "thinking_budget_spent" not in answer["cache"]
        told.append(answer["choices"])
    assert told[0] == told[1]


@served(tokens=thinking)
async def test_a_stream_tells_it_at_its_end(site: Site) -> None:
    site.engine.reply = f"{REASONING}\n</think>\n\nYes."
    response = await site.chat(reasoning_budget=2, stream=True)
    chunks = [chunk for chunk in events(response.text) if chunk != "[DONE]"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == f"{first(2)}\n\n{MESSAGE}"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    (cache,) = [chunk["cache"] for chunk in chunks if chunk.get("cache")]
    assert cache["thinking_budget_spent"] is True


@served(tokens=thinking)
async def test_every_choice_has_the_budget(site: Site) -> None:
    site.engine.reply = f"{REASONING}\n</think>\n\nYes."
    body = (await site.chat(thinking_budget=2, n=3)).json()
    told = {(choice["message"]["reasoning_content"], choice["message"]["content"]) for choice in body["choices"]}
    assert told == {(f"{first(2)}\n\n{MESSAGE}", "Yes.")}
    assert [made.thinking is not None for made in site.engine.submitted] == [True] * 3


@served(tokens=thinking)
async def test_minus_one_is_no_limit(site: Site) -> None:
    await site.chat(reasoning_budget=-1)
    assert budget(site) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"reasoning_budget": -2}, "reasoning_budget"),
        ({"thinking_budget": 1.5}, "thinking_budget"),
        ({"thinking_token_budget": 2**31}, "thinking_token_budget"),
        ({"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_budget"),
    ],
)
@served(tokens=thinking)
async def test_what_is_no_budget_is_refused_by_name(site: Site, body: dict[str, Any], param: str) -> None:
    response = await site.chat(**body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@served(tokens=thinking, thinking=ThinkingDefaults(4, "Enough."))
async def test_the_default_is_for_requests_that_say_nothing(site: Site) -> None:
    site.engine.reply = f"{REASONING}\n</think>\n\nYes."
    message = (await site.chat()).json()["choices"][0]["message"]
    assert message["reasoning_content"] == f"{first(4)}\n\nEnough."
    await site.chat(thinking_budget=7)
    assert limit(site) == 7
    await site.chat(thinking_budget=-1)
    assert budget(site) is None


@pytest.mark.parametrize("opens", [False, True])
async def test_text_and_what_a_format_shapes_from_its_first_word_are_not_reasoning(opens: bool) -> None:
    async with site(tokens=thinking() if opens else tokens_with(HERMES), thinking=ThinkingDefaults(4)) as made:
        await made.complete()
        assert budget(made) is None
        await made.chat(response_format={"type": "json_object"})
        assert limit(made) == (4 if opens else None)


@served(tokens=thinking, thinking=ThinkingDefaults(4))
async def test_the_rest_of_a_message_is_not_limited(site: Site) -> None:
    await site.chat(messages=[*HELLO, {"role": "assistant", "content": "Yes"}], continue_final_message=True)
    assert budget(site) is None


@pytest.mark.parametrize("effort", ["none", "low"])
@served(tokens=thinking)
async def test_effort_none_is_no_reasoning_where_the_template_has_no_switch(site: Site, effort: str) -> None:
    site.engine.reply = f"{REASONING}\n</think>\n\nYes."
    message = (await site.chat(reasoning_effort=effort, thinking_budget=2)).json()["choices"][0]["message"]
    assert limit(site) == (0 if effort == "none" else 2)
    assert message["content"] == "Yes."
    assert message.get("reasoning_content") == (None if effort == "none" else f"{first(2)}\n\n{MESSAGE}")
    await site.http.post("/v1/responses", json={"input": "Hello", "reasoning": {"effort": effort}, "store": False})
    assert limit(site) == (0 if effort == "none" else None)


@served(tokens=lambda: tokens_with(HERMES))
async def test_effort_none_is_the_template_s_matter_where_it_has_a_switch(site: Site) -> None:
    await site.chat(reasoning_effort="none")
    assert budget(site) is None


@served(tokens=thinking)
async def test_anthropics_budget_is_kept(site: Site) -> None:
    body = {"model": "", "max_tokens": 2000, "messages": HELLO}
    site.engine.reply = f"{REASONING}\n</think>\n\nYes."
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert (await site.http.post("/v1/messages", json={**body, "thinking": enabled})).status_code == 200
    assert limit(site) == 1024
    answer = await site.http.post("/v1/messages", json={**body, "thinking": {"type": "disabled"}})
    assert limit(site) == 0
    assert [block["type"] for block in answer.json()["content"]] == ["text"]


@served(tokens=thinking)
async def test_with_tools_that_must_be_called_the_grammar_and_the_budget_go_together(site: Site) -> None:
    await site.chat(tools=[TOOL], tool_choice="required", thinking_budget=3)
    made = site.engine.submitted[-1]
    assert made.grammar is not None
    assert limit(site) == 3


@served(tokens=patterns, thinking=ThinkingDefaults(4))
async def test_marks_that_are_patterns_are_a_400_where_the_request_asks(site: Site) -> None:
    response = await site.chat(thinking_budget=3)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "thinking_budget"
    for body in ({}, {"reasoning_effort": "none"}, {"thinking_budget": -1}):
        assert (await site.chat(**body)).status_code == 200
        assert budget(site) is None


@served(tokens=lambda: tokens_with(STYLES["mistral"]))
async def test_a_model_that_does_not_reason_keeps_every_budget(site: Site) -> None:
    assert (await site.chat(thinking_budget=3)).status_code == 200
    assert budget(site) is None


@served(tokens=lambda: tokens_with(template("channels")))
async def test_channels_end_in_the_answer(site: Site) -> None:
    site.engine.reply = f"<|channel|>analysis<|message|>{REASONING}<|end|>Yes."
    made = (await site.chat(thinking_budget=3)).json()["choices"][0]["message"]
    assert made["reasoning_content"] == f"{first(3)}\n\n{MESSAGE}"
    assert made["content"] == "Yes."
