"""Messages in rows: what was written before messages had a type of their own is read, and written again, as it is."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from log_kit import user

from server.log.database import SessionDamaged
from server.log.logged_message import LoggedCall, LoggedFunction, LoggedMessage, of_json, to_json
from server.log.portable import PortableLog
from server.log.stored import checksum, columns_of, row_of

# As they were written: control characters, letters outside of ASCII, numbers that only Python's json tells exactly.
WRITTEN = [
    (
        '[{"role":"system","content":"Sei \\"kurz\\".\\n\\t\\u0000\\u001f\\b","tools":[{"type":"function"'
        ',"function":{"name":"look","description":"Größe \x7f\u2028","parameters":{"type":"object","prope'
        'rties":{"n":{"type":"number","minimum":1e-07,"maximum":1180591620717411303424,"default":1.0}},"r'
        'equired":[]}}}],"template":{"effort":"low","n":1,"x":1.0,"on":true}}]'
    ),
    (
        '[{"role":"user","content":"żółć 🙂\\n</b>","name":"ann"},{"role":"assistant","content":"Well","re'
        'asoning_content":"Hm","tool_calls":[{"id":"call_1","type":"function","function":{"name":"look","'
        'arguments":"{\\"n\\": 1}"}},{"id":"call_2","type":"function","function":{"name":"look","argument'
        's":"{"}}]}]'
    ),
    (
        '[{"role":"tool","content":"one","tool_call_id":"call_1"},{"role":"tool","content":"","tool_call_'
        'id":"call_2"},{"role":"user","content":"Go on","tools":[],"template":{}},{"role":"assistant","co'
        'ntent":"So it is","begun":3}]'
    ),
    (
        '[{"role":"system","content":"Be brief","instructions":true},{"role":"user","content":"a","items"'
        ':[["msg_s_0123456789ab",1]]},{"role":"user","content":"b","items":[["msg_s_1123456789ab",1]],"to'
        'ols":[],"template":{"enable_thinking":false},"dropped":true},{"role":"assistant","content":"Well'
        '","reasoning_content":"Hm","tool_calls":[{"id":"call_1","type":"function","function":{"name":"lo'
        'ok","arguments":"{\\"n\\": 1}"}},{"id":"call_2","type":"function","function":{"name":"look","arg'
        'uments":"{"}}],"items":[["rs_s_1",2],["msg_s_2",4],["fc_s_3",0],["fc_s_4",0,"incomplete"]],"begu'
        'n":1},{"role":"tool","content":"1","tool_call_id":"call_1","items":[["fco_s_1",1]]}]'
    ),
]
# Of a response's items: the fields came in another order then.
OTHER_ORDER = (
    '[{"role":"assistant","content":"","items":[["rs_s_1",2],["fc_s_2",0]],"tool_calls":[{"id":"c","type":"function",'
    '"function":{"name":"f","arguments":"{}"}}],"reasoning_content":"Hm"}]'
)
COLUMNS = {
    "session_id": 1,
    "number": 2,
    "keep_tokens": 0,
    "tokens": bytes.fromhex("010000000200000003000000"),
    "keep_messages": 1,
    "messages": WRITTEN[1],
    "fingerprint": "f",
    "finish_reason": "tool_calls",
    "created": 1795401842,
    "kind": "turn",
    "keep_turns": 0,
    "prompt_tokens": 2,
    "cached": 0,
    "receipt": '{"new":1}',
    "checksum": bytes.fromhex("169d8115452a333451aa5e6f47bce949"),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_messages_are_written_as_they_were(text: str) -> None:
    messages = of_json(text)
    assert to_json(messages) == text
    portable = PortableLog(1, 0, "f", [], messages)
    again = msgspec.json.decode(msgspec.json.encode(portable), type=PortableLog)
    assert to_json(again.rest) == text


def test_a_row_is_written_as_it_was() -> None:
    row = row_of("a", "s", COLUMNS)
    assert [message.role for message in row.messages] == ["user", "assistant"]
    assert row.messages[1].tool_calls[1] == LoggedCall("call_2", "function", LoggedFunction("look", "{"))
    assert columns_of("a", "s", 1, 2, row) == COLUMNS


def test_the_order_of_fields_means_nothing() -> None:
    (message,) = of_json(OTHER_ORDER)
    assert (message.reasoning_content, message.items) == ("Hm", (["rs_s_1", 2], ["fc_s_2", 0]))
    assert json.loads(to_json([message])) == json.loads(OTHER_ORDER)
    assert to_json(of_json(to_json([message]))) == to_json([message])


def test_no_tools_are_other_ones_than_those_before() -> None:
    assert to_json([LoggedMessage("user", "", tools=[], template={})]) == (
        '[{"role":"user","content":"","tools":[],"template":{}}]'
    )
    assert to_json([user("")]) == '[{"role":"user","content":""}]'


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"role":"user"}]', '[{"role":"x","content":""}]', "[", '[{"a":1}]'])
def test_a_row_of_anything_else_is_damaged(text: str) -> None:
    columns = {**COLUMNS, "messages": text}
    columns["checksum"] = checksum("a", "s", columns)
    with pytest.raises(SessionDamaged):
        row_of("a", "s", columns)


@pytest.mark.parametrize("field", ['"content":1', '"content":"","role":["assistant"]', '"content":"","x":1'])
def test_a_portable_log_holds_nothing_but_messages(field: str) -> None:
    text = f'{{"format":1,"created":0,"fingerprint":"","turns":[],"rest":[{{"role":"assistant",{field}}}]}}'
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=PortableLog)


def test_messages_are_values() -> None:
    row = row_of("a", "s", COLUMNS)
    assert replace(row, messages=of_json(to_json(row.messages))) == row
    with pytest.raises(AttributeError):
        row.messages[0].content = ""  # type: ignore[misc]
