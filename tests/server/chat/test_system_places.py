"""System messages stay where they are, whatever a chat template does with them; nothing before them changes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from template_styles import NO_SYSTEM, NO_TOOLS, STYLES, tokens_with

from server.chat.chat_tokenizer import TemplateRefused
from server.chat.rendering import Rendering
from server.chat.system_places import ANYWHERE, REMINDER, SystemPlaces
from server.config.prompt_rules import PROMPT_RULES
from server.log.logged_message import LoggedCall, LoggedFunction, LoggedMessage

TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}
CALL = LoggedCall("call_1", "function", LoggedFunction("weather", json.dumps({"city": "Rome"})))
FRONT = LoggedMessage("system", "Be brief.")
USER = LoggedMessage("user", "How is Rome?")
CALLING = LoggedMessage("assistant", "", reasoning_content="I have to look.", tool_calls=(CALL,))
RESULT = LoggedMessage("tool", "Sunny.", tool_call_id="call_1")
REPLY = LoggedMessage("assistant", "It is sunny.", reasoning_content="So it is.")
LEFT = LoggedMessage("system", "900 tokens left")
NUDGE = LoggedMessage("developer", "Mind the list.")
AGAIN = LoggedMessage("user", "And Oslo?")
TALK = [FRONT, USER, LEFT, CALLING, RESULT, LEFT, NUDGE, REPLY, NUDGE, AGAIN, LEFT, NUDGE]
HOIST = (
    "{% for m in messages if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
MEASURED = {
    "hermes": SystemPlaces(several=False, inside=False),
    "thinks": SystemPlaces(several=False, inside=False),
    "mistral": SystemPlaces(leading=False, several=False, inside=False),
    "llama": ANYWHERE,
    "xml": ANYWHERE,
    "no tools": ANYWHERE,
    "no system": SystemPlaces(leading=False, several=False),
    "strict": SystemPlaces(several=False, inside=False, reminder_after_tool=False),
    "alternating": SystemPlaces(
        several=False, inside=False, user_after_user=False, user_after_tool=False, reminder_after_tool=False
    ),
}


@pytest.mark.parametrize("style", MEASURED)
def test_what_a_template_takes_is_measured(style: str) -> None:
    assert tokens_with(STYLES[style]).dialect.places == MEASURED[style]


def test_a_template_that_collects_system_messages_in_front_takes_none_inside() -> None:
    assert not tokens_with(HOIST).dialect.places.inside


@pytest.mark.parametrize("style", STYLES)
def test_every_text_is_there_once_and_in_its_place(style: str) -> None:
    text = tokens_with(STYLES[style]).render(TALK, generation_prompt=True, rendering=Rendering([TOOL]))
    at = -1
    for message in TALK:
        if message.content:
            at = text.find(message.content, at + 1)
            assert at >= 0, message
    assert text.count(LEFT.content) == TALK.count(LEFT)
    assert text.count(NUDGE.content) == TALK.count(NUDGE)


@pytest.mark.parametrize("style", sorted({*STYLES} - {"mistral", "hermes", "thinks"}))  # these write tools or thoughts
@pytest.mark.parametrize("end", [i for i, message in enumerate(TALK) if message.role in ("assistant",)])
def test_each_prompt_begins_with_the_one_before(style: str, end: int) -> None:
    tokens = tokens_with(STYLES[style])
    earlier = tokens.render(TALK[:end], generation_prompt=False, rendering=Rendering([TOOL]))
    later = tokens.render(TALK, generation_prompt=False, rendering=Rendering([TOOL]))
    assert later.startswith(earlier.rstrip())


def test_a_refused_message_is_a_user_turn_of_its_own_or_joins_what_it_has_to() -> None:
    text = tokens_with(STYLES["strict"]).render(TALK, generation_prompt=True)
    left, nudge = REMINDER.format(text=LEFT.content), REMINDER.format(text=NUDGE.content)
    assert f"How is Rome?<|im_end|>\n<|im_start|>user\n{left}<|im_end|>" in text
    assert f"Sunny.\n\n{left}\n\n{nudge}\n</tool_response>" in text  # a user turn would drop the reasoning before it
    text = tokens_with(STYLES["alternating"]).render(TALK, generation_prompt=True)
    assert f"[INST]How is Rome?\n\n{left}[/INST]" in text
    assert f"[TOOL_RESULTS]Sunny.\n\n{left}\n\n{nudge}[/TOOL_RESULTS]" in text
    assert f"[INST]{nudge}\n\nAnd Oslo?\n\n{left}\n\n{nudge}[/INST]" in text


def test_several_in_front_become_one_and_none_becomes_the_users() -> None:
    front = [FRONT, LEFT, USER]
    text = tokens_with(STYLES["strict"]).render(front, generation_prompt=False)
    assert (
        text == "<|im_start|>system\nBe brief.\n\n900 tokens left<|im_end|>\n<|im_start|>user\nHow is Rome?<|im_end|>"
    )
    text = tokens_with(STYLES["no system"]).render(front, generation_prompt=False)
    assert text.startswith("<|im_start|>user\nBe brief.\n\n900 tokens left<|im_end|>\n<|im_start|>user\n")


def test_a_conversation_of_system_messages_only_ends_with_a_user_turn_where_a_template_demands_one() -> None:
    demands = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('No user query found in messages.') }}{% endif %}"
    )
    tokens = tokens_with(demands + NO_TOOLS)
    assert tokens.dialect.places == replace(ANYWHERE, only=False)
    text = tokens.render([FRONT], generation_prompt=False)
    assert text == "<|im_start|>user\nBe brief.<|im_end|>\n"
    text = tokens.render([FRONT, LEFT], generation_prompt=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n900 tokens left<|im_end|>\n"
    text = tokens.render([FRONT, USER], generation_prompt=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow")
    one = tokens_with(demands + NO_SYSTEM).render([FRONT, LEFT], generation_prompt=False)
    assert one == "<|im_start|>user\nBe brief.\n\n900 tokens left<|im_end|>\n"
    others = [rule for rule in PROMPT_RULES if rule != "system_in_place"]
    with pytest.raises(TemplateRefused, match="No user query"):
        tokens_with(demands + NO_TOOLS, rules=others).render([FRONT], generation_prompt=True)


def test_users_in_a_row_become_one_where_roles_must_alternate() -> None:
    tokens = tokens_with(STYLES["alternating"])
    text = tokens.render([USER, AGAIN], generation_prompt=True)
    assert text == "[INST]How is Rome?\n\nAnd Oslo?[/INST]"
    text = tokens.render([USER, CALLING, RESULT, AGAIN], generation_prompt=True)
    assert text.endswith("[TOOL_RESULTS]Sunny.\n\nAnd Oslo?[/TOOL_RESULTS]")


def test_the_rules_can_be_switched_off() -> None:
    others = [rule for rule in PROMPT_RULES if rule != "system_in_place"]
    strict = tokens_with(STYLES["strict"], rules=others)
    with pytest.raises(TemplateRefused, match="must be at the beginning"):
        strict.render([USER, LEFT], generation_prompt=True)
    assert LEFT.content not in tokens_with(STYLES["hermes"], rules=()).render([USER, LEFT], generation_prompt=True)
    with pytest.raises(TemplateRefused, match="must alternate"):
        tokens_with(STYLES["alternating"], rules=["system_in_place"]).render([USER, AGAIN], generation_prompt=True)


def test_a_template_that_takes_all_gets_all_as_it_is() -> None:
    plain, ruled = tokens_with(NO_TOOLS, rules=()), tokens_with(NO_TOOLS)
    assert ruled.dialect.places == ANYWHERE
    assert replace(plain.dialect.places, moves=True, joins=True) == ANYWHERE
    assert ruled.render(TALK, generation_prompt=True) == plain.render(TALK, generation_prompt=True)
