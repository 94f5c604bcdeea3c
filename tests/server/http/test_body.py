"""Bodies that are no request: every one is a 4xx in shape, and the server goes on."""

import json

import pytest
from http_context import HELLO, Call, Site, served

from server.errors import ApiError
from server.http.body_size import MAX_BYTES
from server.schemas.json_body import MAX_DEPTH, MAX_PARTS, parse

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
GOOD = json.dumps({"messages": HELLO}).encode()


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"messages": "\xed\xa0\x80"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"seed": 99999999999999999999999}',
        b'{"messages": [[[{"a": -99999999999999999999999}]]]}',
        b"\xef\xbb\xbf" + GOOD,
        GOOD + b"x",
        nested(MAX_DEPTH + 1),
        nested(100_000),
        b"[" * 1_000_000,
    ],
    ids=lambda data: repr(data[:24]),
)
@served()
async def test_what_is_not_a_json_object_is_a_400(site: Site, data: bytes) -> None:
    response = await site.http.post(CHAT, content=data, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert (await site.chat()).status_code == 200


@pytest.mark.parametrize("text", [rb"\ud800", rb"\udc00\ud800"])
@served()
async def test_half_of_a_surrogate_pair_is_told_by_its_parameter(site: Site, text: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % text
    response = await site.http.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "messages[0].content")


@served()
async def test_an_empty_body_is_called_empty(site: Site) -> None:
    response = await site.http.post(CHAT, headers=JSON)
    assert response.json()["error"]["message"].startswith("The body is empty")


def test_depth_is_counted_exactly() -> None:
    parse(nested(MAX_DEPTH))
    parse(b'{"a": [%s]}' % b",".join([b"{}"] * (MAX_PARTS - 3)))
    parse(b'{"a": [%s]}' % b",".join([b"1"] * (2 * MAX_PARTS)))  # token ids
    for many in (
        b'{"a": [%s]}' % b",".join([b"{}"] * (MAX_PARTS - 2)),
        b'{"a": [%s]}' % b",".join([b'{"b": 1}'] * (MAX_PARTS // 2)),
    ):
        with pytest.raises(ApiError, match="more than"):
            parse(many)
    with pytest.raises(ApiError):
        parse(nested(MAX_DEPTH + 1))


def test_integers_of_64_bits_are_the_last_that_pass() -> None:
    assert parse(b'{"a": [9223372036854775807, -9223372036854775808, true]}')
    with pytest.raises(ApiError):
        parse(b'{"a": [9223372036854775808]}')


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"]
)
@served()
async def test_other_content_types_are_a_415(site: Site, content_type: str) -> None:
    response = await site.http.post(CHAT, content=GOOD, headers={"content-type": content_type})
    assert response.status_code == 415
    assert response.json()["error"]["type"] == "invalid_request_error"


@served()
async def test_json_with_charset_is_taken_and_compression_is_not(site: Site) -> None:
    for good in ("application/json; charset=utf-8", "Application/JSON;charset=UTF-8"):
        assert (await site.http.post(CHAT, content=GOOD, headers={"content-type": good})).status_code == 200
    response = await site.http.post(CHAT, content=GOOD, headers={**JSON, "content-encoding": "gzip"})
    assert response.status_code == 415


@served()
async def test_a_body_that_names_a_length_over_the_cap_is_a_413(site: Site) -> None:
    response = await site.http.post(CHAT, content=b" " * (MAX_BYTES + 1), headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


@served()
async def test_a_chunked_body_is_counted_while_it_comes(site: Site) -> None:
    call = Call.post(site.app, CHAT, None, chunks=[b" " * (MAX_BYTES // 4)] * 40)
    await call.finish()
    assert call.status == 413
    assert json.loads(call.body)["error"]["code"] == "request_too_large"


@served()
async def test_a_body_in_pieces_and_a_large_one_are_read_whole(site: Site) -> None:
    call = Call.post(site.app, CHAT, None, chunks=[GOOD[:5], b"", GOOD[5:]])
    await call.finish()
    assert call.status == 200
    padded = GOOD + b" " * (MAX_BYTES - len(GOOD))
    assert (await site.http.post(CHAT, content=padded, headers=JSON)).status_code == 200


@served()
async def test_a_client_that_leaves_while_sending_costs_nothing(site: Site) -> None:
    call = Call.post(site.app, CHAT, None, chunks=[GOOD, b""])
    await call.leave()
    assert site.engine.running == set()
