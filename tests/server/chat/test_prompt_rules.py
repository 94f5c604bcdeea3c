"""Billing lines, kept reasoning and the order of tools: each prompt begins as the one before, and the receipt says by
which rules."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FACTS
from http_context import Site, served
from template_styles import STYLES, tokens_with

from scheduler.protocol import unpack_ids
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.prompts import chat_prompt
from server.chat.rendering import Rendering, order_tools
from server.config.prompt_rules import PROMPT_RULES, parse_prompt_rules
from server.log.logged_message import LoggedMessage
from server.schemas.requests import ChatRequest

BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cch={n};"
USER = {"role": "user", "content": "How is Rome?"}
REPLY = {"role": "assistant", "content": "Sunny.", "reasoning_content": "I know that."}
AGAIN = {"role": "user", "content": "And Oslo?"}
STRICT = tokens_with(STYLES["strict"])


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def text_of(tokens: ChatTokenizer, *messages: dict[str, Any], **body: Any) -> str:
    prompt = chat_prompt(ChatRequest.model_validate({"messages": [*messages], **body}), tokens, FACTS, None)
    return tokens.decode(prompt.ids)


# --- the billing line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("rest", ["Be brief.", "Be brief.\nx-anthropic-billing-header: not in front"])
def test_a_billing_line_in_front_of_a_system_text_is_left_out(role: str, rest: str) -> None:
    told = {"role": role, "content": f"{BILLING.format(n=1)}\n{rest}"}
    assert text_of(STRICT, told, USER) == text_of(STRICT, {"role": role, "content": rest}, USER)
    assert text_of(STRICT, {"role": role, "content": BILLING.format(n=2)}, USER) == text_of(STRICT, USER)


def test_only_that_line_of_only_those_messages_is() -> None:
    for message in (
        {"role": "user", "content": BILLING},
        {"role": "system", "content": f" {BILLING}"},
        {"role": "system", "content": BILLING.upper()},
        {"role": "system", "content": f"Be brief.\n{BILLING}"},
    ):
        assert message["content"].strip() in text_of(STRICT, message, USER)
    off = tokens_with(STYLES["strict"], rules=[rule for rule in PROMPT_RULES if rule != "billing_line_folded"])
    assert BILLING in text_of(off, {"role": "system", "content": BILLING}, USER)


def test_a_request_of_nothing_else_is_still_a_prompt() -> None:
    assert BILLING not in text_of(STRICT, {"role": "system", "content": BILLING})


# --- reasoning ----------------------------------------------------------------------------------------------


def test_a_templates_own_switch_keeps_the_reasoning_of_older_turns() -> None:
    assert STRICT.dialect.reasoning_switch == {"preserve_thinking": True}
    assert "I know that." in text_of(STRICT, USER, REPLY, AGAIN)
    assert "I know that." not in text_of(STRICT, USER, REPLY, AGAIN, reasoning_history="drop")
    assert "I know that." not in text_of(STRICT, USER, REPLY, AGAIN, chat_template_kwargs={"preserve_thinking": False})
    off = tokens_with(STYLES["strict"], rules=["system_in_place"])
    assert off.dialect.reasoning_switch == {}
    assert "I know that." not in text_of(off, USER, REPLY, AGAIN)


def test_a_switch_that_is_set_to_false_is_found_too_and_others_are_not_taken_for_one() -> None:
    clears = STYLES["strict"].replace(
        "(preserve_thinking is defined and preserve_thinking is true)",
        "(clear_thinking is defined and clear_thinking is false)",
    )
    assert tokens_with(clears).dialect.reasoning_switch == {"clear_thinking": False}
    other = STYLES["strict"].replace("preserve_thinking", "add_notes") + "{% if add_notes %}<notes>{% endif %}"
    assert tokens_with(other).dialect.reasoning_switch == {}
    assert all(not tokens_with(STYLES[style]).dialect.reasoning_switch for style in ("hermes", "llama", "no tools"))


# --- tools --------------------------------------------------------------------------------------------------


def test_tools_keep_the_order_in_which_they_were_first_there() -> None:
    a, b, c, d = (tool(name) for name in "abcd")
    log = [LoggedMessage("user", "x", tools=[c, a, b]), LoggedMessage("user", "y", tools=[c, b])]
    assert order_tools(log, [a, b, c]) == [c, a, b]
    assert order_tools(log, [d, b, c]) == [c, b, d]
    assert order_tools([], [b, a]) == [b, a]
    changed = tool("a", city={"type": "string"})
    assert order_tools(log, [b, changed, c]) == [c, changed, b]


def test_a_definition_with_its_keys_in_another_order_is_the_logged_one() -> None:
    one = tool("a", city={"type": "string", "default": 1})
    log = [LoggedMessage("user", "x", tools=[one])]
    other = tool("a", city={"default": 1, "type": "string"})
    assert [*order_tools(log, [other])[0]["function"]["parameters"]["properties"]["city"]] == ["type", "default"]
    (kept,) = order_tools(log, [tool("a", city={"type": "string", "default": True})])
    assert kept["function"]["parameters"]["properties"]["city"]["default"] is True


@served(tokens=lambda: STRICT)
async def test_a_session_goes_on_from_its_tokens_when_tools_come_in_another_order(site: Site) -> None:
    one, two = tool("a", x={"type": "string"}), tool("b")
    await site.chat(session_id="s", tools=[one, two])
    swapped = tool("a", x={"type": "string"})
    swapped["function"] = dict(reversed(swapped["function"].items()))
    told = (await site.chat(session_id="s", tools=[two, swapped])).json()["cache"]
    first, second = (list(unpack_ids(submit.prompt)) for submit in site.engine.submitted)
    assert second[: len(first)] == first
    assert (told["miss"], told["adapted"]) == (
        None,
        [{"rule": "tools_in_first_order", "param": "tools", "count": 1}],
    )
    told = (await site.chat(session_id="s", tools=[one, two])).json()["cache"]
    assert "adapted" not in told


# --- the receipt --------------------------------------------------------------------------------------------


@served(tokens=lambda: STRICT)
async def test_the_receipt_names_the_rules(site: Site) -> None:
    front = {"role": "system", "content": f"{BILLING.format(n=1)}\nBe brief."}
    left = {"role": "system", "content": "900 left"}
    history = [front, USER, left, REPLY, AGAIN, left]
    told = (await site.chat(messages=history)).json()["cache"]
    assert told["adapted"] == [
        {"rule": "billing_line_folded", "param": "system", "count": 1},
        {"rule": "system_in_place", "param": "messages", "count": 2},
        {"rule": "reasoning_kept", "param": "messages", "count": 1},
    ]
    front["content"] = f"{BILLING.format(n=2)}\nBe brief."
    told = (await site.chat(messages=history)).json()["cache"]
    assert (told["miss"], told["new"]) == (None, 1)
    assert "adapted" not in (await site.chat(messages=[USER])).json()["cache"]


@served(tokens=lambda: STRICT)
async def test_the_receipt_of_a_session_names_what_is_new(site: Site) -> None:
    left = {"role": "system", "content": "900 left"}
    for count in (1, 2):
        told = (await site.chat(session_id="s", messages=[USER, *[left] * count])).json()["cache"]
        assert told["adapted"] == [{"rule": "system_in_place", "param": "messages", "count": count}]
        assert told["miss"] is None


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        ("all", PROMPT_RULES),
        ("none", ()),
        ("tools_in_place,billing_line_folded", ("billing_line_folded", "tools_in_place")),
        (["reasoning_kept"], ("reasoning_kept",)),
    ],
)
def test_rules_are_chosen_by_name(given: object, rules: tuple[str, ...]) -> None:
    assert parse_prompt_rules(given) == rules


@pytest.mark.parametrize("given", ["", "some", "all,reasoning_kept", "none,all", 5])
def test_other_names_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match="expected all, none"):
        parse_prompt_rules(given)


def test_rendering_of_added_tools_in_front_where_that_rule_is_off() -> None:
    off = tokens_with(STYLES["strict"], rules=())
    added = LoggedMessage("user", "Look.", added_tools=(tool("weather"),))
    text = off.render([added], generation_prompt=True, rendering=Rendering([tool("time")]))
    assert text.index('"weather"') < text.index("Look.")
    assert text.count("weather") == 1
