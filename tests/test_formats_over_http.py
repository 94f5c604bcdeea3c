"""Replies that must look like something, on a real server with the demo model, which knows nothing of JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from server_process import ServerProcess

pytestmark = pytest.mark.wide

HELLO = [{"role": "user", "content": "My name is Walter."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(demo_server: ServerProcess) -> ServerProcess:
    return demo_server


def ask(server: ServerProcess, **body: Any) -> Any:
    return server.answer("/v1/chat/completions", {"messages": HELLO, "max_tokens": 400, **body})


def content(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def check_person(text: str) -> None:
    """Under ``SCHEMA``, by hand."""
    person = json.loads(text)
    assert [*person] == ["name", "age", "tags"]
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 12
    assert person["age"] in range(121)
    assert 1 <= len(person["tags"]) <= 3
    assert {*person["tags"]} <= {"red", "green"}


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_obeyed(server: ServerProcess, seed: int) -> None:
    answer = ask(server, response_format=FORMAT, temperature=1.0, seed=seed)
    assert answer["choices"][0]["finish_reason"] == "stop"
    check_person(content(answer))


def test_every_choice_obeys(server: ServerProcess) -> None:
    answer = ask(server, response_format=FORMAT, temperature=1.0, seed=1, n=3)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len({*texts}) == 3
    for text in texts:
        check_person(text)


def test_a_stream_adds_up_to_the_same_json(server: ServerProcess) -> None:
    body = {"messages": HELLO, "max_tokens": 400, "response_format": FORMAT, "temperature": 0}
    response = server.post("/v1/chat/completions", {**body, "stream": True})
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    check_person(text)
    assert text == content(ask(server, **body))


def test_a_sessions_second_turn_reuses_what_was_constrained(server: ServerProcess) -> None:
    first = ask(server, session_id="formats", response_format=FORMAT, temperature=0)
    check_person(content(first))
    question = [{"role": "user", "content": "What is my name?"}]
    second = ask(server, session_id="formats", messages=question, response_format=FORMAT, temperature=0)
    check_person(content(second))
    before = first["usage"]["total_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= before - 1
    free = ask(server, session_id="formats", messages=question, temperature=0)
    assert free["usage"]["prompt_tokens_details"]["cached_tokens"] >= second["usage"]["total_tokens"] - 1
    assert "name" in content(free)


def test_objects_regexes_grammars_and_choices(server: ServerProcess) -> None:
    sampled = {"temperature": 1.0, "seed": 5}
    assert re.fullmatch(r"[a-c]{2}-\d{4}", content(ask(server, regex=r"[a-c]{2}-[0-9]{4}", **sampled)))
    assert content(ask(server, choice=["left or right", "up"], **sampled)) in ("left or right", "up")
    assert re.fullmatch(r"(ab)+!", content(ask(server, grammar='start: ("ab")~1..9 "!"', **sampled)))
    answer = ask(server, response_format={"type": "json_object"}, temperature=0, max_tokens=60)
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(content(answer)), dict)
    assert content(answer).startswith("{")


def test_completions_obey_too(server: ServerProcess) -> None:
    body = {"prompt": ["Once", "Twice"], "regex": "[x-z]{5}", "max_tokens": 20, "temperature": 1.0}
    response = server.post("/v1/completions", body)
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert len(texts) == 2
    assert all(re.fullmatch("[x-z]{5}", text) for text in texts)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}}, "schema"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start: <|no_such_token|>"}, "grammar"),
        ({"choice": ["a"], "regex": "a"}, "choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(server: ServerProcess, body: dict[str, Any], param: str) -> None:
    response = server.post("/v1/chat/completions", {"messages": HELLO, **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].endswith(param)
    assert "no_such_token" not in response.text


NOTHING = r"[^\x{0}-\x{D7FF}\x{E000}-\x{10FFFF}]"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"regex": r"[^\s\S]"}, "regex"),
        ({"regex": "[a&&b]"}, "regex"),
        ({"regex": NOTHING}, "regex"),
        ({"grammar": r"start: /[^\s\S]/"}, "grammar"),
        ({"grammar": 'start: "a" B\nB: /[a&&b]/'}, "grammar"),
        ({"grammar": f'start: "a" B\nB: /{NOTHING}/'}, "grammar"),
        ({"grammar": 'start: A\nA: B & ~B\nB: "a"'}, "grammar"),
        ({"grammar": 'start: start "a"'}, "grammar"),
        ({"grammar": 'start: "a" b\nb: b "c"'}, None),  # found when the reply gets there
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
            "type": "string", "pattern": r"[^\s\S]"}}}}, "response_format.json_schema.schema"),
    ],
)  # fmt: skip
def test_what_no_text_can_meet_is_refused(server: ServerProcess, body: dict[str, Any], param: str | None) -> None:
    response = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 20, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["code"] == ("invalid_value" if param else "invalid_grammar")


def test_a_class_beside_the_surrogates_is_what_it_says(server: ServerProcess) -> None:
    wanted = {"regex": r"[^\x{0}-\x{40}\x{42}-\x{D7FF}\x{E000}-\x{10FFFF}]{8}", "temperature": 2.0, "seed": 1}
    assert content(ask(server, **wanted)) == "A" * 8
    wanted = {"grammar": rf"start: /{wanted['regex']}/", "temperature": 2.0, "seed": 1}
    assert content(ask(server, **wanted)) == "A" * 8


def test_a_bad_grammar_hurts_no_neighbour(server: ServerProcess) -> None:
    """It is refused, and the next request is answered."""
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(58):
        nested = {"type": "array", "items": nested}
    chain = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2000)}
    for schema in (nested, {"$defs": {**chain, "d2000": {}}, "$ref": "#/$defs/d0"}):
        body = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        response = server.post("/v1/chat/completions", {"messages": HELLO, "response_format": body, "max_tokens": 20})
        assert response.status_code in (200, 400), response.text
    assert content(ask(server, temperature=0)) == "Nice to meet you, Walter!"


def test_vllms_names_hold_a_reply_to_a_form(server: ServerProcess) -> None:
    check_person(content(ask(server, guided_json=SCHEMA)))
    assert re.fullmatch("[ab]{3}", content(ask(server, structured_outputs={"regex": "[ab]{3}"})))
    assert content(ask(server, guided_grammar='root ::= word "!"\nword ::= "yes" | "no"')) in ("yes!", "no!")


def test_bad_words_do_not_come(server: ServerProcess) -> None:
    said = content(ask(server, temperature=0, max_tokens=20))
    word = next(word for word in re.findall("[A-Za-z]{3,}", said))
    other = content(ask(server, temperature=0, max_tokens=20, bad_words=[word]))
    assert word not in other
    assert other[: said.index(word)].strip() == said[: said.index(word)].strip()


def test_special_tokens_in_the_text(server: ServerProcess) -> None:
    """The demo model's end of turn is one: forced twice, and the first one does not end the reply."""
    body = {"prompt": "Once", "max_tokens": 3, "logit_bias": {"2": 100}, "ignore_eos": True}
    hidden, shown = [
        server.post("/v1/completions", {**body, "skip_special_tokens": skip}).json()["choices"][0]["text"]
        for skip in (True, False)
    ]
    assert hidden == ""
    assert shown == "<|im_end|>" * 3


def test_a_prompt_without_cache_is_computed_whole(server: ServerProcess) -> None:
    long = [{"role": "user", "content": "Tell me of the sea and of the ships on it. " * 4}]
    ask(server, messages=long, max_tokens=4)
    assert ask(server, messages=long, max_tokens=4)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    told = ask(server, messages=long, max_tokens=4, cache_prompt=False)
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
