"""Prefix stability: measured on templates of every habit, and shown with the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from http_context import MODEL, Site, demo_tokens, served
from transformers import AutoTokenizer

from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.template import UNMEASURED, Divergence, Stability, stability

ASSISTANT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
) + ASSISTANT  # fmt: skip
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETS_REASONING = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') }}")
OPENS_REASONING = FORGETS_REASONING.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
KEEPS_WHAT_IT_OPENED = CHATML.replace(
    "{{ m.content }}",
    "{% if '</think>' in m.content %}<think>{{ m.content.split('<think>')[-1] }}{% else %}{{ m.content }}{% endif %}",
).replace("assistant\n{% endif", "assistant\n<think>{% endif")
COUNTS_FROM_THE_END = CHATML.replace("<|im_end|>", " {{ loop.revindex }}<|im_end|>")
COUNTS_AT_THE_TOP = "There are {{ messages | length }} messages.\n" + CHATML
TRIMS_AND_SPACES = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}<|im_end|>"
    "{% else %}[{{ m.content | trim }}]{% endif %}{% endfor %}"
)
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('No.') }}{% endif %}" + CHATML
REFUSES_ALL = "{{ raise_exception('No.') }}"


def tokens_with(template: str | None) -> ChatTokenizer:
    """The demo tokenizer under another template."""
    tokenizer = AutoTokenizer.from_pretrained(demo_tokens()._tokenizer.name_or_path)
    tokenizer.chat_template = template
    return ChatTokenizer(tokenizer)


@pytest.mark.parametrize("template", [CHATML, KEEPS_WHAT_IT_OPENED, TRIMS_AND_SPACES, REFUSES_SYSTEM])
def test_templates_that_only_append_are_stable(template: str) -> None:
    assert stability(tokens_with(template)) == Stability(True)


def test_the_demo_models_own_template_is_stable() -> None:
    assert stability(demo_tokens()) == Stability(True)


@pytest.mark.parametrize("template", [None, REFUSES_ALL])
def test_without_a_usable_template_nothing_is_said(template: str | None) -> None:
    assert stability(tokens_with(template)) == UNMEASURED


@pytest.mark.parametrize("template", [FORGETS_REASONING, OPENS_REASONING])
def test_a_template_that_drops_the_reasoning_of_old_turns_diverges_at_the_second_turn(template: str) -> None:
    found = stability(tokens_with(template))
    assert found.prefix_stable is False
    assert found.diverges is not None
    assert found.diverges.at == "turn 2"
    assert found.diverges.got.startswith("About")
    assert found.diverges.expected.lstrip("\n").startswith(("<think>", "The user"))


def test_a_template_that_numbers_messages_from_the_end_diverges_behind_the_first() -> None:
    found = stability(tokens_with(COUNTS_FROM_THE_END)).diverges
    assert found is not None
    assert (found.at, found.got[0], found.expected[0]) == ("turn 2", "3", "1")


def test_what_changes_in_front_of_the_users_words_is_told_as_the_systems() -> None:
    found = stability(tokens_with(COUNTS_AT_THE_TOP)).diverges
    assert found is not None
    assert (found.at, found.got[0], found.expected[0]) == ("system", "3", "1")
    only_with_a_system = REFUSES_SYSTEM.replace("raise_exception('No.')", "messages | length")
    numbered = stability(tokens_with(only_with_a_system)).diverges
    assert numbered is not None
    assert (numbered.at, numbered.got[0], numbered.expected[0]) == ("system", "4", "2")


def test_where_the_reply_melts_into_what_is_around_it_it_is_not_stable() -> None:
    found = stability(tokens_with(PLAIN)).diverges
    assert found is not None
    assert (found.at, found.got[:6], found.expected) == ("turn 2", " About", " ")
    found = stability(tokens_with(PLAIN.replace(": ", ":\n"))).diverges  # and neither is a reply's end without a mark
    assert found is not None
    assert (found.at, found.got[:6], found.expected) == ("turn 2", ".\nuser", ".")


@served()
async def test_the_model_tells_what_was_measured(site: Site) -> None:
    answer = (await site.http.get(f"/v1/models/{MODEL}")).json()
    assert answer["warmturn"]["chat_template"] == {"prefix_stable": None, "diverges": None}
    measured = Stability(False, Divergence("turn 2", "About", "<think>"))
    site.context = replace(site.context, template=measured)
    answer = (await site.http.get(f"/v1/models/{MODEL}")).json()
    assert answer["warmturn"]["chat_template"] == {
        "prefix_stable": False,
        "diverges": {"at": "turn 2", "got": "About", "expected": "<think>"},
    }
