"""A body that is not read says where it is wrong."""

from __future__ import annotations

import pytest

from server.errors import ApiError
from server.schemas.json_body import parse

HALVES = [
    (rb'{"user": "\ud83d"}', "user"),
    (rb'{"messages": [{"content": "hi"}, {"content": "cut: \ud83d end"}]}', "messages[1].content"),
    (rb'{"stop": ["a", "\udc00\ud800"]}', "stop[1]"),
    (rb'{"metadata": {"\ud800": 1}}', "metadata"),
    (rb'{"metadata": {"a name": "\ud800"}}', None),
    (rb'{"\ud800": 1}', None),
]
MALFORMED = [
    (b'{"messages": [', "The body is not valid JSON, it ends too early."),
    (b'{"messages": }', "The body is not valid JSON: see byte 13."),
    (rb'{"user": "\ud83d" x}', "The body is not valid JSON, it ends too early."),
    (b"{}{}", "The body is not valid JSON: see byte 3."),
    (b"", "The body is empty: it must be a JSON object, at least {}."),
]


@pytest.mark.parametrize(("body", "param"), HALVES)
def test_half_of_a_surrogate_pair_is_named(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        parse(body)
    told = refused.value.body.error
    assert told.message == f"{param or 'The body'} has half of a surrogate pair, which is not valid text."
    assert (refused.value.status_code, told.param, told.code) == (400, param, "invalid_value")


def test_a_whole_pair_and_an_escaped_backslash_are_text() -> None:
    assert parse(rb'{"user": "\ud83d\ude00 \\ud83d"}') == {"user": "\U0001f600 \\ud83d"}


@pytest.mark.parametrize(("body", "message"), MALFORMED)
def test_where_it_is_no_json(body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(body)
    assert refused.value.detail == message
    assert refused.value.body.error.code == "invalid_json"


def test_halves_do_not_get_around_the_limits() -> None:
    for body in (b'{"a":' + b"[" * 100 + rb'"\ud83d"' + b"]" * 100 + b"}", rb'{"a": [99999999999999999999, "\ud83d"]}'):
        with pytest.raises(ApiError) as refused:
            parse(body)
        assert refused.value.body.error.code == "invalid_json"
        assert "surrogate" not in refused.value.detail
