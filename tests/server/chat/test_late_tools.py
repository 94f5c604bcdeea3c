"""Tools that a message adds: they are defined where they come, and what is before them stays."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from template_styles import STYLES, tokens_with

from server.chat.call_rules import CallRules
from server.chat.late_tools import callable_tools, example_call, placed_tools
from server.chat.rendering import Rendering, rendering_in_force
from server.chat.reply_parser import CallStart
from server.log.logged_message import LoggedMessage


def tool(name: str, description: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


ASKS = LoggedMessage("user", "How is Rome?")
SAYS = LoggedMessage("assistant", "I do not know.")
ADDS = LoggedMessage("user", "Look again.", added_tools=(tool("weather"),))


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
    later = LoggedMessage("user", "And now?", added_tools=(tool("clock"),))
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


FRONT = [tool("time"), tool("place")]
NOTED = structs.replace(ASKS, tools=FRONT)
NEXT = LoggedMessage("user", "Look again.")


def came(*tools: dict[str, Any]) -> list[LoggedMessage]:
    """A conversation that began with ``FRONT`` and went on with ``tools``."""
    return [NOTED, SAYS, structs.replace(NEXT, tools=[*tools])]


@pytest.mark.parametrize("style", sorted(STYLES))
def test_tools_that_a_request_has_more_than_the_one_before_are_defined_where_they_come(style: str) -> None:
    tokens = tokens_with(STYLES[style])
    before = tokens.render([NOTED, SAYS], generation_prompt=False, rendering=Rendering(FRONT))
    now = [*FRONT, tool("weather")]
    text = tokens.render(came(*now), generation_prompt=True, rendering=Rendering(now))
    assert (text.index("Look again.") < text.index('"weather"')) == tokens.dialect.tools_lead
    assert text.count('"weather"') == 1
    if tokens.dialect.tools_lead:
        assert text.startswith(before.rstrip())


def test_where_a_template_writes_tools_is_measured() -> None:
    assert {style for style in STYLES if not tokens_with(STYLES[style]).dialect.tools_lead} == {"mistral"}


MORE = [*FRONT, tool("weather")]
PLACED = {
    "a new one": (came(*MORE), {2: ["weather"]}),
    "not the reply's": ([NOTED, structs.replace(SAYS, tools=MORE), NEXT], {2: ["weather"]}),
    "the first ones": ([ASKS, SAYS, structs.replace(NEXT, tools=MORE)], {}),
    "one fewer": (came(tool("time"), tool("weather")), {}),
    "another order": (came(tool("place"), tool("time"), tool("weather")), {}),
    "another definition": (came(tool("time", "new"), *MORE[1:]), {}),
    "then one fewer": ([*came(*MORE), SAYS, structs.replace(NEXT, tools=[*FRONT[1:], tool("weather")])], {}),
    "then another": ([*came(*MORE), SAYS, structs.replace(NEXT, tools=[*MORE, tool("x")])], {2: ["weather"], 4: ["x"]}),
}


@pytest.mark.parametrize("case", PLACED)
def test_which_tools_are_defined_where_they_came(case: str) -> None:
    messages, expected = PLACED[case]
    found = placed_tools(messages, rendering_in_force(messages).tools)
    assert {at: [tool["function"]["name"] for tool in tools] for at, tools in found.items()} == expected


def test_a_tool_that_a_message_has_added_is_not_defined_again_once_it_is_sent() -> None:
    tokens = tokens_with(STYLES["hermes"])
    added = [NOTED, SAYS, ADDS, SAYS]
    before = tokens.render(added, generation_prompt=False, rendering=Rendering(FRONT))
    now = [*FRONT, tool("weather")]
    text = tokens.render([*added, structs.replace(NEXT, tools=now)], generation_prompt=True, rendering=Rendering(now))
    assert text.startswith(before)
    assert text.count('"weather"') == 1


def test_with_the_rule_switched_off_all_tools_are_at_the_front() -> None:
    tokens = tokens_with(STYLES["hermes"], rules=())
    now = [*FRONT, tool("weather")]
    text = tokens.render(came(*now), generation_prompt=True, rendering=Rendering(now))
    assert text.index('"weather"') < text.index("How is Rome?")


def test_the_last_definition_of_a_name_holds() -> None:
    added = LoggedMessage("developer", "", added_tools=(tool("b", "new"), tool("c")))
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
