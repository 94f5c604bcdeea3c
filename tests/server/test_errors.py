"""Errors: OpenAI's shape, the right status, a name for the parameter, and no word of what the client sent."""

import json
import re
from typing import Any

import pytest
from fake_engine import died
from http_context import HELLO, Site, events, served

from scheduler.protocol import FinishReason
from server.engine.engine import TurnRefused
from server.http.error_responses import FORMS
from server.log.database import LogFull
from server.log.session_log import SessionLog
from server.log.timeline import SessionExists, SessionMoved, UnknownSession

SECRET = "s3cr3t"
UNSUPPORTED: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy"},
}


def in_shape(error: dict[str, Any]) -> bool:
    return set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)


@pytest.mark.parametrize("param", UNSUPPORTED)
@served()
async def test_what_comes_later_is_refused_by_name(site: Site, param: str) -> None:
    response = await site.chat(**{param: UNSUPPORTED[param]})
    error = response.json()["error"]
    assert response.status_code == 400
    assert in_shape(error)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert "not supported by this server yet" in error["message"]


@served()
async def test_harmless_is_compared_by_type_too(site: Site) -> None:
    nearly: list[dict[str, Any]] = [{"store": 0}, {"metadata": []}, {"tools": {}}, {"tools": ""}]
    for body in nearly:
        assert (await site.chat(**body)).status_code == 400


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([HELLO[0], {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "boss", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x", "tool_call_id": None}], "messages[0].tool_call_id"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "user", "content": "x", "name": "an n"}], "messages[0].name"),
        ([{"role": "user", "content": "x", "colour": "red"}], "messages[0].colour"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].image_url"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ],
)
@served()
async def test_wrong_messages_are_located(site: Site, messages: Any, param: str) -> None:
    response = await site.chat(messages=messages)
    assert response.status_code == 400
    assert in_shape(response.json()["error"])
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        {SECRET: 1},
        {"model": SECRET},
        {"temperature": SECRET},
        {"messages": [{"role": SECRET, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": SECRET, "text": "x"}]}]},
        {"messages": [{"role": "user", "content": {"a": SECRET}}]},
        {"logit_bias": {SECRET: 1}},
        {"response_format": {"type": SECRET}},
        {"tool_choice": SECRET},
        {"session_id": SECRET + "/"},
        {"stream": True, "stream_options": {"include_usage": SECRET}},
        {"stop": [SECRET * 1000]},
    ],
)
@served()
async def test_input_is_not_repeated(site: Site, body: dict[str, Any]) -> None:
    response = await site.chat(**body)
    assert response.status_code in (400, 404)
    error = response.json()["error"]
    assert SECRET not in error["message"] or SECRET in body  # an unknown name is a name, and named if it is harmless
    assert SECRET not in str(error["code"])


@served()
async def test_unknown_names_are_only_repeated_if_they_are_names(site: Site) -> None:
    assert (await site.chat(foo=1)).json()["error"]["param"] == "foo"
    for name in ("<script>", "a b", "x" * 100, ""):
        unknown: dict[str, Any] = {name: 1}
        assert (await site.chat(**unknown)).json()["error"]["param"] is None


@served()
async def test_many_faults_cost_one_finding(site: Site) -> None:
    response = await site.chat(messages=[5] * 200_000)
    assert response.status_code == 400
    assert len(response.content) < 500
    unknown: dict[str, Any] = {f"f{i}": 1 for i in range(20_000)}
    assert (await site.chat(**unknown)).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/docs", 404),
        ("GET", "/redoc", 404),
        ("POST", "/v1/moderations", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/other", 404),
        ("PUT", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/sessions//chat/completions", 404),
    ],
)
@served()
async def test_wrong_addresses_are_answered_in_shape(site: Site, method: str, path: str, status: int) -> None:
    response = await site.http.request(method, path)
    assert response.status_code == status
    assert in_shape(response.json()["error"])
    if status == 405:
        assert response.headers["allow"]


@served()
async def test_a_field_whose_name_is_not_repeated_is_still_called_a_field(site: Site) -> None:
    error = (await site.http.post("/v1/chat/completions", json={"messages": HELLO, "<b>": 1})).json()["error"]
    assert (error["param"], error["code"]) == (None, "unknown_parameter")
    assert error["message"] == "A field of the body is not a parameter of this endpoint."
    error = (await site.http.get("/v1/sessions", params={"metadata[a": "1"})).json()["error"]
    assert (error["param"], error["code"]) == (None, "unknown_parameter")
    assert error["message"] == "A parameter of the URL is not a parameter of this endpoint."


@served()
async def test_empty_lists_and_other_parts_have_words_of_their_own(site: Site) -> None:
    none = await site.http.post("/v1/chat/completions", json={"messages": []})
    assert none.json()["error"]["message"] == "messages must have 1 or more entries."
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    told = await site.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": image}]})
    assert told.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (TurnRefused("queue_full", "The queue is full.", 3), 429),
        (TurnRefused("session_busy", "Busy."), 409),
        (TurnRefused("context_length_exceeded", "Too long."), 400),
        (TurnRefused("invalid_prompt", "Not this."), 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@served()
async def test_the_engines_refusals_have_their_status_streaming_or_not(
    site: Site, refusal: TurnRefused, status: int, stream: bool, n: int
) -> None:
    site.engine.refusal = refusal
    response = await site.chat(stream=stream, n=n)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["code"], error["message"]) == (refusal.code, refusal.message)
    assert response.headers.get("retry-after") == {429: "3", 409: "1"}.get(status)
    assert error["type"] == ("rate_limit_error" if status == 429 else "invalid_request_error")


@served()
async def test_one_refused_choice_cancels_the_others(site: Site) -> None:
    site.engine.refusal, site.engine.refuse_from = TurnRefused("queue_full", "The queue is full.", 3), 2
    site.engine.admit.clear()
    response = await site.chat(n=3)
    assert response.status_code == 429
    assert site.engine.running == set()


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_without_an_engine_there_is_a_503_with_retry_after(site: Site, stream: bool) -> None:
    site.engine.facts = None
    response = await site.chat(stream=stream)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "server_error"


@served()
async def test_an_engine_that_dies_under_a_turn_is_a_503(site: Site) -> None:
    site.engine.ends_badly = died()
    response = await site.chat()
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "engine_died"


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [(FinishReason.ERROR, 500, "server_error"), (FinishReason.CANCELLED, 404, "invalid_request_error")],
)
@served()
async def test_a_turn_that_fails_or_is_ended_tells_no_secrets(
    site: Site, reason: FinishReason, status: int, kind: str
) -> None:
    site.engine.ends_badly = reason
    response = await site.chat()
    assert response.status_code == status
    assert "retry-after" not in response.headers  # the same would happen again, or must not
    assert response.json()["error"]["type"] == kind
    assert "secret" not in response.text


@pytest.mark.parametrize(
    ("query", "said"),
    [("metadata=x", "metadata must be given as metadata[key]=value."), ("limit=x", "limit should be a valid integer")],
)
@served()
async def test_a_wrong_parameter_of_the_url_is_told_in_its_own_words(site: Site, query: str, said: str) -> None:
    error = (await site.http.get(f"/v1/sessions?{query}")).json()["error"]
    assert error["message"].startswith(said)
    body = (await site.http.post("/v1/sessions", json={"metadata": []})).json()
    assert body["error"]["message"] == "metadata should be an object."


@served()
async def test_every_route_refuses_unknown_parameters_of_the_url_by_their_name(site: Site) -> None:
    await site.http.post("/v1/sessions", json={"id": "s"})
    routes = [(method.upper(), path) for path, verbs in site.app.openapi()["paths"].items() for method in verbs]
    assert len(routes) >= 20
    for method, path in routes:
        ids = {
            "session_id": "s",
            "response_id": "resp_s_1",
            "conversation_id": "conv_s",
            "item_id": "msg_s_1",
            "completion_id": "chatcmpl-s",
            "file_id": "file-s",
            "batch_id": "batch_s",
        }
        url = path.format(**ids, index=0, turn=1, model="demo", digest="0" * 32)
        body: Any = None if method in ("GET", "DELETE") else {}
        for name, param in (("colour", "colour"), ("a%0Ab", None), ("", None)):
            response = await site.http.request(method, f"{url}?{name}={SECRET}", json=body)
            error = response.json()["error"]
            assert response.status_code == 400, path
            if path.startswith("/api/"):  # Ollama's shape, which is the sentence alone
                assert param is None or param in error
                assert SECRET not in response.text
                continue
            if path.startswith("/v1/messages"):  # Anthropic's shape, in which the sentence alone names it
                assert error["type"] == "invalid_request_error"
                assert param is None or param in error["message"]
            else:
                assert (error["param"], error["code"]) == (param, "unknown_parameter"), path
            assert SECRET not in response.text
    assert await site.log.get("default", "s") is not None


@served()
async def test_an_exception_of_ours_is_a_bare_500(site: Site) -> None:
    def broken(request: object) -> None:
        raise ZeroDivisionError("/root/secret")

    site.engine.submit = broken  # type: ignore[method-assign,assignment]
    response = await site.chat()
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "The server failed on this request.",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("body", "param"),
    [({"max_tokens": 2048}, "messages"), ({"messages": [{"role": "user", "content": "x " * 2100}]}, "messages")],
)
@served()
async def test_what_does_not_fit_the_context_is_a_400(site: Site, body: dict[str, Any], param: str) -> None:
    response = await site.chat(**body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)


@pytest.mark.parametrize("content_length", ["abc", "-1", "9" * 30])
@served()
async def test_odd_lengths_do_no_harm(site: Site, content_length: str) -> None:
    request = site.http.build_request("POST", "/v1/chat/completions", json={"messages": HELLO})
    request.headers["content-length"] = content_length
    assert (await site.http.send(request)).status_code in (200, 413)


LOG_ERRORS: list[tuple[Exception, int, str, int | None]] = [  # status, code, retry-after
    (LogFull("the disk is full at /secret"), 507, "insufficient_storage", 10),
    (SessionMoved(), 409, "session_busy", 1),
    (SessionExists(), 409, "session_exists", None),
    (UnknownSession(), 404, "session_not_found", None),
]


@pytest.mark.parametrize(("error", "status", "code", "retry_after"), LOG_ERRORS)
@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_what_the_log_refuses(
    site: Site,
    error: Exception,
    status: int,
    code: str,
    retry_after: int | None,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refusing(*args: Any, **kwargs: Any) -> None:
        raise error

    site.log.commit = refusing  # type: ignore[method-assign,assignment]
    response = await site.chat(session_id="s", stream=stream)
    told = events(response.text)[-1]["error"] if stream else response.json()["error"]
    assert in_shape(told)
    assert (told["code"], told["type"]) == (code, "server_error" if status >= 500 else "invalid_request_error")
    assert "secret" not in response.text
    if not stream:
        assert response.status_code == status
        assert response.headers.get("retry-after") == (None if retry_after is None else str(retry_after))
    assert not [record for record in caplog.records if record.name == "warmturn.http"]  # it is no surprise


@pytest.mark.parametrize("named", [True, False])
@served()
async def test_no_turn_is_computed_that_the_log_could_not_keep(site: Site, named: bool) -> None:
    async def full() -> None:
        raise LogFull("full")

    site.log.writable = full  # type: ignore[method-assign]
    response = await site.chat(session_id="s" if named else None)
    assert (response.status_code, len(site.engine.submitted)) == ((507, 0) if named else (200, 1))
    site.log.writable = SessionLog.writable.__get__(site.log)  # type: ignore[method-assign]
    assert (await site.chat(session_id="s")).status_code == 200  # and nothing is claimed still


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/sessions/s/chat/completions"])
@served()
async def test_a_server_that_stops_takes_no_turn_and_says_so(site: Site, path: str) -> None:
    site.engine.draining = True
    site.engine.healthy = False
    with site.log.claim("default", "s"):  # not even a busy session's
        refused = [await site.chat(path), await site.complete()]
    for response in refused:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(response.headers["retry-after"]) >= 1
    health = await site.http.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "stopping"})
    assert (await site.http.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "characters"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", 128),
        ({"messages": [{**HELLO[0], "name": "a b"}]}, "messages[0].name", 64),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
            64,
        ),
    ],
)
@served()
async def test_a_form_is_told_in_words(site: Site, body: dict[str, Any], param: str, characters: int) -> None:
    error = (await site.chat(**body)).json()["error"]
    assert error["param"] == param
    assert f"must be 1 to {characters} " in error["message"]
    assert "pattern" not in error["message"]
    assert "^" not in error["message"]


@served()
async def test_a_length_is_told_in_our_words(site: Site) -> None:
    error = (await site.chat(bad_words=[""])).json()["error"]
    assert error["message"] == "bad_words[0] should have at least 1 character."


@served()
async def test_the_form_of_a_prefix_is_told_in_words(site: Site) -> None:
    error = (await site.http.get("/v1/sessions", params={"prefix": "a b"})).json()["error"]
    assert "at most 128 letters" in error["message"]


@served()
async def test_every_form_has_its_words(site: Site) -> None:
    patterns = set(re.findall(r'"pattern": (".*?(?<!\\\\)")[,}]', json.dumps(site.app.openapi())))
    assert {json.loads(pattern) for pattern in patterns} <= set(FORMS)
