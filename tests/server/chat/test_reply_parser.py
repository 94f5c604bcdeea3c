"""Replies read in parts: whatever deltas a text comes in, the same parts come of it, and nothing of it is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from call_forms import ARRAY, BARE, NAMED, XML

from server.chat.call_form import CallForm, ParameterForm
from server.chat.dialect import IN_WORDS
from server.chat.dialect_parser import DialectParser, ReasoningMarks
from server.chat.json_scan import JsonScan
from server.chat.reply_parser import (
    ArgumentsPiece,
    CallStart,
    ContentPiece,
    Part,
    PlainParser,
    ReasoningPiece,
    ReplyParser,
)
from server.chat.typed import parse_typed

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": ["boolean", "null"]},
        "where": {"anyOf": [{"type": "object"}, {"type": "array"}]},
    },
}
TOOLS = {"weather": SCHEMA, "now": {}}
THINK = ReasoningMarks("<think>", "</think>")
PAIRS = CallForm(
    "",
    "<tool_call>",
    "\n",
    "</tool_call>",
    "\n",
    parameter=ParameterForm("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome \\"}{\\u00e9", "days": 2}}\n</tool_call>'
ROME = {"city": 'Rome "}{é', "days": 2}


def joined(parts: Iterable[Part]) -> list[tuple[object, ...]]:
    """Parts without ids, where pieces of one thing are one."""
    told: list[list[object]] = []
    for part in parts:
        if isinstance(part, CallStart):
            told.append([CallStart, part.index, part.name])
            continue
        key = [type(part)] if not isinstance(part, ArgumentsPiece) else [ArgumentsPiece, part.index]
        if told and told[-1][:-1] == key:
            told[-1][-1] = str(told[-1][-1]) + part.text
        else:
            told.append([*key, part.text])
    return [tuple(entry) for entry in told]


def read(reading: ReplyParser, pieces: Iterable[str]) -> list[tuple[object, ...]]:
    parts = [part for piece in pieces for part in reading.feed(piece)]
    return joined([*parts, *reading.finish()])


def cuts(text: str, seed: int = 0) -> Iterable[list[str]]:
    """The text as a whole, by single characters, cut in two everywhere, and in random pieces."""
    yield [text]
    yield list(text)
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    draw = random.Random(seed)
    for _ in range(20):
        places = sorted(draw.sample(range(len(text) + 1), min(len(text), 6)))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def one_reading(make: Callable[[], ReplyParser], text: str) -> list[tuple[object, ...]]:
    """What a text is read as, however it is cut."""
    expected = read(make(), [text])
    for pieces in cuts(text):
        assert read(make(), pieces) == expected, pieces
    return expected


def called(told: list[tuple[object, ...]]) -> list[tuple[str, object]]:
    """Names and arguments of the calls among parts."""
    arguments = {entry[1]: entry[2] for entry in told if entry[0] is ArgumentsPiece}
    return [(str(entry[2]), json.loads(str(arguments[entry[1]]))) for entry in told if entry[0] is CallStart]


TWO = [("weather", ROME), ("now", {})]
NOW = '{"name": "now", "arguments": {}}'


def named(name: str, arguments: str) -> str:
    """A call of the form NAMED."""
    return f"<call>function<sep>{name}\n```json\n{arguments}\n```</call>"


WRITTEN = [
    (IN_WORDS, HERMES_CALL + '\n<tool_call>\n{"name":"now","arguments":{}}</tool_call>'),
    (IN_WORDS, f'{HERMES_CALL}<tool_call>{{ "arguments" : {{}} , "name" : "now" }}</tool_call>\n'),
    (IN_WORDS, f'{HERMES_CALL}\n<tool_call>{{"name": "now", "arguments": "{{}}"}}'),
    (IN_WORDS, f'{HERMES_CALL}<tool_call>{{"name": "now"}}</tool_call>'),
    (ARRAY, f'[TOOL_CALLS] [{HERMES_CALL[12:-13]}, {NOW[:-1]}, "id": "abc"}}]'),
    (ARRAY, f'[TOOL_CALLS][{{"arguments": {json.dumps(ROME)}, "name": "weather"}},{NOW}]'),
    (NAMED, f"<calls>{named('weather', json.dumps(ROME))}\n{named('now', '{}')}</calls>"),
    (
        XML,
        '<tool_call>\n<function=weather>\n<parameter=city>\nRome "}{é\n</parameter>\n'
        "<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    (
        PAIRS,
        '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome "}{é</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    ),
]


@pytest.mark.parametrize(("form", "text"), WRITTEN)
def test_calls_are_read_however_their_text_is_cut(form: CallForm, text: str) -> None:
    told = one_reading(lambda: DialectParser(form, None, TOOLS), text)
    assert called(told) == TWO
    assert {entry[0] for entry in told} == {CallStart, ArgumentsPiece}


@pytest.mark.parametrize(("form", "text"), WRITTEN)
@pytest.mark.parametrize("before", ["", "Let me see.", "a < b, {x} and [y]"])
def test_content_and_reasoning_around_calls_are_told_apart(form: CallForm, text: str, before: str) -> None:
    whole = f"<think>\nHm, <tool_call>?\n\n</think>\n\n{before}\n\n{text}\n\nDone."
    told = one_reading(lambda: DialectParser(form, THINK, TOOLS), whole)
    assert told[0] == (ReasoningPiece, "Hm, <tool_call>?")
    assert [entry for entry in told if entry[0] is ContentPiece] == ([(ContentPiece, before)] if before else []) + [
        (ContentPiece, "Done.")
    ]
    assert called(told) == TWO


def test_an_object_alone_is_a_call_at_the_beginning_of_a_reply_only() -> None:
    text = '{"name": "weather", "parameters": {"city": "Rome"}}'
    assert called(one_reading(lambda: DialectParser(BARE, THINK, TOOLS), f"\n{text}")) == [
        ("weather", {"city": "Rome"})
    ]
    behind = f"Well: {text}"
    assert one_reading(lambda: DialectParser(BARE, None, TOOLS), behind) == [(ContentPiece, behind)]
    twice = replace(BARE, separator="; ", several=True)
    assert len(called(one_reading(lambda: DialectParser(twice, None, TOOLS), f"{text}; {text}"))) == 2


NO_CALLS = [
    "<tool_call>",
    "<tool_call>\n",
    "say <tool_call> and </tool_call> to call",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": 3}</tool_call> and more',
    '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>',
    '<tool_call>{"name": "weather", "parameters": {"city": ',
    "<tool_call>{broken}</tool_call>",
    "<tool_call>[]</tool_call>",
    '<tool_call>{"first": "<tool_call>"} <tool',
    "<tool_cal",
    "  \n ",
    "",
]


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_looks_like_a_call_and_is_none_is_content_to_the_letter(text: str) -> None:
    told = one_reading(lambda: DialectParser(IN_WORDS, None, {"weather": SCHEMA}), text)
    if "parameters" in text:  # another key is no call, but it is not known to be wrong before the end
        assert told == [(ContentPiece, text)]
    assert "".join(str(entry[-1]) for entry in told) == text
    assert {entry[0] for entry in told} <= {ContentPiece}


@pytest.mark.parametrize(
    "text", ['{"name": "nobody", "parameters": {}} yes', "{", '["a", "b"]', '{"a": {"name": 1}}', " {"]
)
def test_an_object_that_is_no_call_is_content(text: str) -> None:
    assert one_reading(lambda: DialectParser(BARE, None, TOOLS), text) == [(ContentPiece, text)]


def test_a_call_between_text_that_only_looks_like_one_is_read() -> None:
    text = f'<tool_call> is a mark. <tool_call>{{"name": "x"}}</tool_call>{HERMES_CALL} <tool_call>'
    told = one_reading(lambda: DialectParser(IN_WORDS, None, TOOLS), text)
    assert called(told) == [("weather", ROME)]
    assert told[0] == (ContentPiece, '<tool_call> is a mark. <tool_call>{"name": "x"}</tool_call>')
    assert told[-1] == (ContentPiece, "<tool_call>")


@pytest.mark.parametrize("length", [1, 2, 9, 20, 30])
def test_a_call_that_is_cut_off_has_the_arguments_that_came(length: int) -> None:
    begins = HERMES_CALL.index('{"city"')
    told = one_reading(lambda: DialectParser(IN_WORDS, None, TOOLS), HERMES_CALL[: begins + length])
    assert told == [(CallStart, 0, "weather"), (ArgumentsPiece, 0, HERMES_CALL[begins : begins + length])]


def test_parameters_that_are_cut_off_leave_json_that_is_not_closed() -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n<parameter=city>\nRo"
    told = one_reading(lambda: DialectParser(XML, None, TOOLS), text)
    assert told[1] == (ArgumentsPiece, 0, '{"days":2,"city":"Ro')


def test_arguments_are_told_as_they_come() -> None:
    reader = DialectParser(IN_WORDS, None, TOOLS)
    told = []
    for character in HERMES_CALL:
        told.append([part for part in reader.feed(character) if isinstance(part, ArgumentsPiece)])
    pieces = [part.text for parts in told for part in parts]
    assert {piece for piece in pieces if len(piece) > 1} == {r"\"", r"\u00e9"}  # an escape comes when it is whole
    assert json.loads("".join(pieces)) == ROME


def test_a_prompt_that_opened_the_reasoning_is_answered_with_it() -> None:
    text = "\nSo, 2 < 3 and </ is no mark.\n</think>\n\nYes."
    told = one_reading(lambda: DialectParser(None, THINK, {}, opened=True), text)
    assert told == [(ReasoningPiece, "So, 2 < 3 and </ is no mark."), (ContentPiece, "Yes.")]


def test_reasoning_that_never_ends_is_reasoning() -> None:
    assert one_reading(lambda: DialectParser(None, THINK, {}), "<think>On and on </thin") == [
        (ReasoningPiece, "On and on </thin")
    ]


def test_marks_of_reasoning_within_the_answer_are_content() -> None:
    text = "The tag <think> is closed by </think>."
    assert one_reading(lambda: DialectParser(IN_WORDS, THINK, TOOLS), text) == [(ContentPiece, text)]


def test_without_tools_nothing_is_a_call() -> None:
    assert one_reading(lambda: DialectParser(IN_WORDS, None, {}), HERMES_CALL) == [(ContentPiece, HERMES_CALL)]
    assert one_reading(PlainParser, HERMES_CALL) == [(ContentPiece, HERMES_CALL)]


def test_random_text_of_marks_is_read_alike_however_it_is_cut() -> None:
    draw = random.Random(7)
    words = '<tool_call> </tool_call> { } " \\ {"name":" weather ","arguments": [ ] , <think> </think> x'.split(" ")
    words += ["\n", " ", "<function=", ">\n", "<parameter=", "city", "\n</parameter>\n", "</function>"]
    words += ["<arg_key>", "</arg_key>\n<arg_value>"]
    for _ in range(400):
        text = "".join(draw.choices(words, k=draw.randrange(1, 14)))
        for form in (IN_WORDS, BARE, ARRAY, XML, PAIRS):
            expected = read(DialectParser(form, THINK, TOOLS), [text])
            assert read(DialectParser(form, THINK, TOOLS), list(text)) == expected, (form, text)
            places = sorted(draw.sample(range(len(text) + 1), min(len(text), 3)))
            pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
            assert read(DialectParser(form, THINK, TOOLS), pieces) == expected, (form, pieces)


def test_a_long_reply_that_never_closes_is_read_in_time_that_grows_with_its_length() -> None:
    """The steps are counted, not timed: what is held back is looked at once."""
    text = "<tool_call>{" * 20_000
    reader = DialectParser(IN_WORDS, None, TOOLS)
    for begin in range(0, len(text), 1000):
        reader.feed(text[begin : begin + 1000])
    assert joined(reader.finish()) == [(ContentPiece, text)]


@pytest.mark.parametrize("text", ['{"a": [1, {"b": "]}"}]}', '["\\\\", "\\""]', "{}"])
def test_a_scan_finds_the_end_of_json_in_any_pieces(text: str) -> None:
    for size in (1, 2, 3, len(text)):
        scan = JsonScan()
        ends = [scan.close((text + " }")[: at + size]) for at in range(0, len(text) + 2, size)]
        assert next(end for end in ends if end is not None) == len(text)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3", {}, "3"),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["null", "string"]}, None),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("[1]", {"anyOf": [{"type": "array"}]}, [1]),
        ("many", {"type": "integer"}, "many"),
        ("true", {"type": "integer"}, "true"),
    ],
)
def test_values_are_what_their_schema_wants(text: str, schema: object, value: object) -> None:
    assert parse_typed(text, schema) == value
    assert type(parse_typed(text, schema)) is type(value)
