"""Continuations: new messages become ids behind the logged ones, and past turns are never rendered again."""

from collections.abc import Sequence

import pytest
from http_context import demo_tokens
from jinja2 import Environment

from server.chat.dialect import Dialect
from server.chat.rendering import PLAIN as SAME_MANNER
from server.chat.rendering import Rendering
from server.chat.stateful import continued_ids, full_ids, text_after_reply
from server.log.logged_message import LoggedMessage

END = 2  # <|im_end|> of the demo tokenizer
PAST = [LoggedMessage("system", "Be brief."), LoggedMessage("user", "My name is Ann.")]
REPLY = LoggedMessage("assistant", "Hello Ann.")
NEW = [LoggedMessage("user", "What is my name?")]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TRIMMING = CHATML.replace("m.content", "m.content | trim")
FIRST_REPLY_HIDDEN = (
    "{% for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REPLY_TWICE = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}")


class Renderer:
    """The demo tokenizer with a template of the test's own; counts what it renders."""

    def __init__(self, template: str) -> None:
        self.template = Environment().from_string(template)
        self.rendered: list[Sequence[LoggedMessage]] = []

    dialect = Dialect()

    def render(
        self, messages: Sequence[LoggedMessage], *, generation_prompt: bool, rendering: Rendering = SAME_MANNER
    ) -> str:
        self.rendered.append(messages)
        return self.template.render(messages=messages, add_generation_prompt=generation_prompt)

    def encode(self, text: str, *, special: bool) -> list[int]:
        return demo_tokens().encode(text, special=special)


def logged_turn(renderer: Renderer, reply: str, end: Sequence[int] = (END,)) -> list[int]:
    """The ids that a first turn leaves in the log: its prompt, then what was sampled."""
    return [*full_ids(renderer, PAST), *renderer.encode(reply, special=False), *end]


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
@pytest.mark.parametrize("reply", ["Hello Ann.", "Ünïcode 🙂 and <tags>", "a\nb", "{{ messages }}"])
@pytest.mark.parametrize("new", [NEW, [*NEW, LoggedMessage("assistant", "Ann."), LoggedMessage("user", "ok")]])
def test_continuation_equals_a_full_render_where_the_template_is_prefix_stable(
    template: str, reply: str, new: list[LoggedMessage]
) -> None:
    renderer = Renderer(template)
    logged = [*PAST, LoggedMessage("assistant", reply)]
    continued = continued_ids(renderer, logged_turn(renderer, reply), logged, new, {END})
    assert continued == renderer.encode(
        renderer.template.render(messages=[*logged, *new], add_generation_prompt=True), special=False
    )


def test_the_same_with_the_demo_models_own_template() -> None:
    tokens = demo_tokens()
    past = [LoggedMessage("user", "My name is Ann.")]
    log = [*full_ids(tokens, past), *tokens.encode("Hello Ann.", special=False), END]
    continued = continued_ids(tokens, log, [*past, REPLY], NEW, {END})
    assert continued == full_ids(tokens, [*past, REPLY, *NEW])


def test_sampled_ids_are_kept_where_tokenising_their_text_would_change_them() -> None:
    renderer = Renderer(CHATML)
    letters = [token for letter in "Hello Ann." for token in renderer.encode(letter, special=False)]
    assert letters != renderer.encode("Hello Ann.", special=False)
    log = [*full_ids(renderer, PAST), *letters, END]
    continued = continued_ids(renderer, log, [*PAST, REPLY], NEW, {END})
    assert continued[: len(log)] == log


def test_past_turns_are_not_rendered_with_their_reply() -> None:
    renderer = Renderer(CHATML)
    log = logged_turn(renderer, "Hello Ann.")
    renderer.rendered.clear()
    continued_ids(renderer, log, [*PAST, REPLY], NEW, {END})
    assert all(REPLY not in messages for messages in renderer.rendered)


@pytest.mark.parametrize("end", [(), (END,)])
def test_the_end_of_turn_is_there_exactly_once_whether_or_not_it_was_sampled(end: tuple[int, ...]) -> None:
    renderer = Renderer(CHATML)
    log = logged_turn(renderer, "Hello A", end)  # () is a reply that max_tokens or a stop string cut
    tail = continued_ids(renderer, log, [*PAST, LoggedMessage("assistant", "Hello A")], NEW, {END})[len(log) :]
    text = demo_tokens().decode([*end, *tail])
    assert text == "<|im_end|>\n<|im_start|>user\nWhat is my name?<|im_end|>\n<|im_start|>assistant\n"


def test_a_last_token_is_only_stripped_if_it_ends_turns() -> None:
    renderer = Renderer(PLAIN)
    newline = renderer.encode("\n", special=False)
    log = logged_turn(renderer, "Hello", newline)
    continued = continued_ids(renderer, log, [*PAST, REPLY], NEW, {END})
    assert demo_tokens().decode(continued[len(log) :]).startswith("\nuser: What")


@pytest.mark.parametrize("template", [FIRST_REPLY_HIDDEN, REPLY_TWICE])
def test_a_template_without_one_place_for_the_reply_falls_back_to_a_full_render(template: str) -> None:
    renderer = Renderer(template)
    continued = continued_ids(renderer, [5, 6, 7], [*PAST, REPLY], NEW, {END})
    assert continued == full_ids(renderer, [*PAST, REPLY, *NEW])


def test_a_log_that_does_not_end_with_a_reply_is_rendered_whole() -> None:
    renderer = Renderer(CHATML)
    assert text_after_reply(renderer, PAST, NEW) is None
    assert text_after_reply(renderer, [], NEW) is None
    assert continued_ids(renderer, [5], PAST, NEW, {END}) == full_ids(renderer, [*PAST, *NEW])


def test_a_client_cannot_guess_the_sentinel() -> None:
    renderer = Renderer(CHATML)
    log = logged_turn(renderer, "Hello Ann.")
    continued_ids(renderer, log, [*PAST, REPLY], NEW, {END})
    sentinel = renderer.rendered[-1][2].content
    attack = [LoggedMessage("user", f"{sentinel} {sentinel}")]
    tail = continued_ids(renderer, log, [*PAST, REPLY], attack, {END})[len(log) :]
    assert f"{sentinel} {sentinel}" in demo_tokens().decode(tail)
