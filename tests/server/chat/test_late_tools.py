"""Tools that a message adds: they are defined where they come, and what is before them stays."""

from __future__ import annotations

from typing import Any

import pytest
from template_styles import STYLES, tokens_with

from server.chat.call_rules import CallRules
from server.chat.late_tools import callable_tools, example_call
from server.chat.rendering import Rendering
from server.chat.reply_parser import CallStart
from server.log.logged_message import LoggedMessage


def tool(name: str, description: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


ASKS = LoggedMessage("user", "How is Rome?")
SAYS = LoggedMessage("assistant", "I do not know.")
ADDS = LoggedMessage("user", "Look again.", added_tools=[tool("weather")])


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize("front", [[], [tool("time")]])
def test_what_comes_before_stays_as_it_is(style: str, front: list[dict[str, Any]]) -> None:
    tokens = tokens_with(STYLES[style])
    rendering = Rendering(front)
    plain = LoggedMessage("user", "Look again.")
    with_tools = tokens.render([ASKS, SAYS, ADDS], generation_prompt=True, rendering=rendering)
    without = tokens.render([ASKS, SAYS, plain], generation_prompt=True, rendering=rendering)
    before, _, _ = without.partition("Look again.")
    assert with_tools.startswith(before + "Look again.")
    assert with_tools.count('{"name": "weather"') == 1
    assert "weather" not in without


@pytest.mark.parametrize("style", sorted(STYLES))
def test_how_calls_are_written_is_told_once(style: str) -> None:
    tokens = tokens_with(STYLES[style])
    form = tokens.dialect.form
    assert form is not None
    later = LoggedMessage("user", "And now?", added_tools=[tool("clock")])
    text = tokens.render([ASKS, SAYS, ADDS, SAYS, later], generation_prompt=True)
    assert text.count(example_call(form)) == 1
    text = tokens.render([ASKS, SAYS, ADDS], generation_prompt=True, rendering=Rendering([tool("time")]))
    assert example_call(form) not in text


@pytest.mark.parametrize("style", sorted(STYLES))
def test_an_example_is_a_call_in_the_models_form(style: str) -> None:
    dialect = tokens_with(STYLES[style]).dialect
    assert dialect.form is not None
    written = example_call(dialect.form).replace("<name>", "weather").replace("<arguments as a JSON object>", "{}")
    parser = dialect.make_parser("", CallRules([tool("weather")]), reasons=False)
    parts = [*parser.feed(written), *parser.finish()]
    assert [part.name for part in parts if isinstance(part, CallStart)] == ["weather"]


def test_the_last_definition_of_a_name_holds() -> None:
    added = LoggedMessage("developer", "", added_tools=[tool("b", "new"), tool("c")])
    found = callable_tools([tool("a"), tool("b", "old")], [ASKS, added])
    assert found == [tool("a"), tool("b", "new"), tool("c")]


@pytest.mark.parametrize("style", sorted(STYLES))
def test_calls_of_the_longest_names_are_read(style: str) -> None:
    dialect = tokens_with(STYLES[style]).dialect
    assert dialect.form is not None
    name = "n" * 128
    written = example_call(dialect.form).replace("<name>", name).replace("<arguments as a JSON object>", "{}")
    parser = dialect.make_parser("", CallRules([tool(name)]), reasons=False)
    parts = [part for letter in written for part in parser.feed(letter)] + parser.finish()
    assert [part.name for part in parts if isinstance(part, CallStart)] == [name]


@pytest.mark.parametrize("style", ["hermes", "strict", "llama", "mistral", "pairs", "no tools"])
def test_definitions_look_as_at_the_front(style: str) -> None:
    tokens = tokens_with(STYLES[style])
    typed = style not in ("pairs", "no tools")  # these write only the name, or the function
    assert tokens.dialect.typed_tools == typed
    text = tokens.render([ASKS, SAYS, ADDS], generation_prompt=True)
    assert ('{"type": "function", "function": {"name": "weather"' in text) == typed
