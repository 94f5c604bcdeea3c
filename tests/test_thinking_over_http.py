"""Budgets of reasoning on a real server: every token is that of a from-scratch forward, the forced end included."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import ServerProcess
from template_styles import THINKS
from transformers import AutoModelForCausalLM, AutoTokenizer

import server.config.serve_options as options

pytestmark = pytest.mark.wide

MESSAGE = "That is enough."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model under a template that opens the reasoning."""
    made = tmp_path_factory.mktemp("model") / "thinks"
    shutil.copytree(options.DEMO_FOLDER, made)
    (made / "chat_template.jinja").write_text(THINKS)
    return made


@pytest.fixture(scope="module")
def running(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--dtype", "float32", "--thinking-budget-message", MESSAGE, "--thinking-budget", "9")
    with ServerProcess(folder, tmp_path_factory.mktemp("data"), *flags) as process:
        yield process


def ask(process: ServerProcess, **body: Any) -> Any:
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 60, "return_token_ids": True, **body}
    return process.answer("/v1/chat/completions", body)


@torch.no_grad()
def test_a_cut_reply_goes_on_as_from_scratch(folder: Path, running: ServerProcess) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)
    forced = tokens.encode(f"\n\n{MESSAGE}") + tokens.encode("\n</think>\n\n")
    for body, budget in (({}, 9), ({"thinking_budget": 4}, 4), ({"reasoning_budget": -1}, None)):
        answer = ask(running, ignore_eos=True, **body)
        prompt, said = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        ids = [*prompt]
        for at in range(len(said)):
            given = None if budget is None or not budget <= at < budget + len(forced) else forced[at - budget]
            if given is None:
                given = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            ids.append(given)
        assert said == ids[len(prompt) :]
        cut = budget is not None
        assert answer["cache"].get("thinking_budget_spent") is (True if cut else None)
        message = answer["choices"][0]["message"]
        assert (MESSAGE in (message.get("reasoning_content") or "")) is cut
        assert "think>" not in message["content"]


def test_a_session_goes_on_from_a_cut_reply(running: ServerProcess) -> None:
    first = ask(running, session_id="s", thinking_budget=4)
    second = ask(running, session_id="s", thinking_budget=0, max_tokens=20)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1
    assert not second["choices"][0]["message"].get("reasoning_content")


@pytest.mark.parametrize("seed", range(3))
def test_a_call_and_a_schema_come_behind_the_forced_end(running: ServerProcess, seed: int) -> None:
    body = {
        "temperature": 1,
        "seed": seed,
        "max_tokens": 400,
        "thinking_budget": 5,
        "tools": [TOOL],
        "parallel_tool_calls": False,
    }
    called = ask(running, tool_choice="required", **body)
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["days"] in range(1, 10)
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    formatted = ask(running, response_format=named, **body)["choices"][0]["message"]
    assert formatted["tool_calls"] if not formatted["content"] else json.loads(formatted["content"]).keys() == {"yes"}
    plain = ask(running, response_format=named, **{**body, "tools": []})["choices"][0]["message"]
    assert json.loads(plain["content"]).keys() == {"yes"}
    for message in (called["choices"][0]["message"], formatted, plain):
        assert message["reasoning_content"].endswith(MESSAGE)


SPELLINGS: tuple[dict[str, Any], ...] = (
    {"thinking_budget": 5},
    {"thinking": {"type": "enabled", "budget_tokens": 5}},
    {"reasoning": {"max_tokens": 5}},
    {"thinking_token_budget": 5},
    {"reasoning_budget": 5},
)
SWITCHES: tuple[dict[str, Any], ...] = (
    {"enable_thinking": False},
    {"reasoning_effort": "none"},
    {"reasoning": {"effort": "none"}},
    {"thinking": {"type": "disabled"}},
)


def test_every_spelling_of_a_budget_is_the_same_limit_under_a_schema(running: ServerProcess) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    body = {"temperature": 1, "seed": 7, "max_tokens": 200, "response_format": named}
    with ThreadPoolExecutor(len(SPELLINGS + SWITCHES)) as pool:
        answers = pool.map(lambda fields: ask(running, **body, **fields), SPELLINGS + SWITCHES)
        choices = [answer["choices"][0] for answer in answers]
    limited, silent = choices[: len(SPELLINGS)], choices[len(SPELLINGS) :]
    assert [choice["token_ids"] for choice in limited] == [limited[0]["token_ids"]] * len(limited)
    assert limited[0]["message"]["reasoning_content"].endswith(MESSAGE)
    assert not any(choice["message"].get("reasoning_content") for choice in silent)
    assert all(json.loads(choice["message"]["content"]).keys() == {"yes"} for choice in choices)
