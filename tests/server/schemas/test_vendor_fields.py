"""What vLLM's and llama.cpp's clients send beside OpenAI's parameters: honoured, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_context import HELLO, Site, demo_tokens, events, reply_ids, served

from server.chat.bad_words import encode_bad_words
from server.constraints.grammars import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar

END = 2
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GBNF = 'root ::= answer "!"\nanswer ::= "yes" | "no"'


def ids_of(choices: list[Any]) -> list[int]:
    """The token ids of a stream's choices, one after the other."""
    return [id for choice in choices for id in choice.get("token_ids", [])]


async def both(site: Site, **body: Any) -> list[Any]:
    """A chat and a completion with these fields."""
    return [await site.chat(**body), await site.complete(max_tokens=50, **body)]


# --- token ids ------------------------------------------------------------------------------------------------


@served()
async def test_token_ids_of_prompt_and_reply_are_told(site: Site) -> None:
    told = (await site.chat(return_token_ids=True)).json()
    assert told["prompt_token_ids"] == site.prompt_ids()
    assert told["choices"][0]["token_ids"] == [*reply_ids(), END]
    completion = (await site.complete(return_token_ids=True, max_tokens=50)).json()["choices"][0]
    assert completion["prompt_token_ids"] == site.prompt_ids()
    assert completion["token_ids"] == [*reply_ids(), END]


@served()
async def test_streams_tell_the_prompts_ids_first_and_each_chunk_its_own(site: Site) -> None:
    chunks = events((await site.chat(return_token_ids=True, stream=True)).text)[:-1]
    assert chunks[0]["prompt_token_ids"] == site.prompt_ids()
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert ids_of([chunk["choices"][0] for chunk in chunks]) == [*reply_ids(), END]
    body = {"return_token_ids": True, "stream": True, "max_tokens": 50, "echo": True}
    choices = [chunk["choices"][0] for chunk in events((await site.complete(**body)).text)[:-1]]
    assert choices[0]["prompt_token_ids"] == site.prompt_ids()
    assert choices[0]["text"] == "Once"
    assert ids_of(choices) == [*reply_ids(), END]


@served()
async def test_without_the_wish_there_are_none(site: Site) -> None:
    for answer in await both(site):
        assert "token_ids" not in answer.text
        assert "prompt_logprobs" not in answer.text


@served()
async def test_a_replay_tells_none(site: Site) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("chat/", {"messages": HELLO}),
        ("", {"prompt": "Once", "max_tokens": 9}),
    ]
    for number, (path, fields) in enumerate(asked):
        body = {**fields, "session_id": f"s{number}", "return_token_ids": True}
        first, again = [
            await site.http.post(f"/v1/{path}completions", json=body, headers={"Idempotency-Key": "k"}) for _ in "12"
        ]
        assert "token_ids" in first.text
        assert again.headers["idempotent-replayed"] == "true"
        assert "token_ids" not in again.text


@served()
async def test_tokens_as_ids(site: Site) -> None:
    ids = [*reply_ids(), END]
    named = [f"token_id:{id}" for id in ids]
    chat = (await site.chat(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == named
    assert [entry["top_logprobs"][0]["token"] for entry in content] == named
    assert bytes(content[0]["bytes"]).decode() == demo_tokens().decode(ids[:1])
    completion = (await site.complete(logprobs=2, return_tokens_as_token_ids=True, max_tokens=50)).json()
    logprobs = completion["choices"][0]["logprobs"]
    assert logprobs["tokens"] == named
    assert all(name in alternatives for name, alternatives in zip(named, logprobs["top_logprobs"], strict=True))
    streamed = events((await site.chat(logprobs=True, return_tokens_as_token_ids=True, stream=True)).text)[:-1]
    found = [chunk["choices"][0]["logprobs"] for chunk in streamed if chunk["choices"][0]["logprobs"]]
    assert [entry["token"] for logprobs in found for entry in logprobs["content"]] == named


# --- log-probabilities of prompts -----------------------------------------------------------------------------


@served()
async def test_the_prompts_log_probabilities(site: Site) -> None:
    for number, answer in enumerate(await both(site, prompt_logprobs=2)):
        told = answer.json()
        entries = told.get("prompt_logprobs") or told["choices"][0]["prompt_logprobs"]
        ids = site.prompt_ids(number)
        assert len(entries) == len(ids)
        assert entries[0] is None
        for id, entry in zip(ids[1:], entries[1:], strict=True):
            assert len(entry) == 2
            text = demo_tokens().decode([id])
            assert entry[str(id)] == {"logprob": -0.5, "rank": 1, "decoded_token": text}
    own = (await site.chat(prompt_logprobs=0)).json()["prompt_logprobs"]
    assert [len(entry) for entry in own[1:]] == [1] * (len(own) - 1)
    assert {value["rank"] for entry in own[1:] for value in entry.values()} == {None}


@served()
async def test_an_echo_keeps_its_own_number_of_alternatives(site: Site) -> None:
    body = {"echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 1}
    choice = (await site.complete(**body)).json()["choices"][0]
    assert site.engine.submitted[-1].prompt_logprobs == 3
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {3}
    assert {len(entry) for entry in choice["logprobs"]["top_logprobs"][1:]} == {1}
    plain = (await site.complete(logprobs=1, prompt_logprobs=3, max_tokens=1)).json()["choices"][0]
    assert len(plain["logprobs"]["tokens"]) == 1


@served()
async def test_of_several_choices_of_a_chat_one_reads_the_prompt(site: Site) -> None:
    assert (await site.chat(prompt_logprobs=1, n=2)).json()["prompt_logprobs"]
    assert [submit.prompt_logprobs for submit in site.engine.submitted] == [1, None]


@served()
async def test_n_probs_are_log_probabilities(site: Site) -> None:
    content = (await site.chat(n_probs=3)).json()["choices"][0]["logprobs"]["content"]
    assert {len(entry["top_logprobs"]) for entry in content} == {3}
    logprobs = (await site.complete(n_probs=3, max_tokens=50)).json()["choices"][0]["logprobs"]
    assert {len(entry) for entry in logprobs["top_logprobs"]} == {3}
    assert (await site.chat(n_probs=0)).json()["choices"][0]["logprobs"] is None


# --- words, special tokens, cache -----------------------------------------------------------------------------


@served()
async def test_bad_words_become_tokens_with_and_without_a_space(site: Site) -> None:
    encode = demo_tokens().encode
    for answer in await both(site, bad_words=["friend", "  a"]):
        assert answer.status_code == 200, answer.text
        words = site.engine.submitted[-1].sampling.bad_words
        assert tuple(encode("friend", special=False)) in words
        assert words == encode_bad_words(["friend", "a"], demo_tokens(), 1024)
        spaced = tuple(encode(" a", special=False))
        assert (spaced in words) is (len(spaced) == len(encode("a", special=False)))
    await site.chat()
    assert site.engine.submitted[-1].sampling.bad_words == ()


@served()
async def test_special_tokens_are_shown_where_they_are_not_skipped(site: Site) -> None:
    for wanted in (True, False):
        await both(site, skip_special_tokens=wanted)
        assert {submit.special for submit in site.engine.submitted[-2:]} == {not wanted}


@served()
async def test_a_prompt_that_is_not_to_be_cached_reuses_nothing(site: Site) -> None:
    for _ in range(2):
        await both(site, cache_prompt=False)
    salts = [submit.salt for submit in site.engine.submitted]
    assert len({*salts}) == 4
    assert all(salts)
    await both(site, cache_prompt=True)
    assert [submit.salt for submit in site.engine.submitted[-2:]] == ["", ""]
    await site.chat(cache_prompt=False, n=2)
    assert len({submit.salt for submit in site.engine.submitted[-2:]}) == 1
    for kept in ({"session_id": "s"}, {"store": True}):
        refused = await site.chat(cache_prompt=False, **kept)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "cache_prompt"


@served()
async def test_a_slot_that_is_named_changes_nothing(site: Site) -> None:
    assert [answer.status_code for answer in await both(site, id_slot=-1)] == [200, 200]


# --- echo of chats --------------------------------------------------------------------------------------------


@served()
async def test_an_echo_puts_the_beginning_of_the_reply_before_it(site: Site) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Well. "}]
    body: dict[str, Any] = {"messages": begun, "continue_final_message": True, "echo": True}
    told = (await site.chat(**body)).json()
    assert told["choices"][0]["message"]["content"] == "Well. Hello there, friend."
    chunks = events((await site.chat(**body, stream=True)).text)[:-1]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == "Well. Hello there, friend."
    assert (await site.chat(echo=True)).json()["choices"][0]["message"]["content"] == "Hello there, friend."
    kept = await site.chat(**body, session_id="s")
    assert kept.status_code == 200
    messages = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    assert messages[-1]["content"] == "Well. Hello there, friend."


# --- formats --------------------------------------------------------------------------------------------------

FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": SCHEMA}, json_schema_grammar(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, json_schema_grammar(SCHEMA)),
    ({"guided_regex": "[a-c]+"}, regex_grammar("[a-c]+")),
    ({"guided_choice": ["a", "b"]}, choice_grammar(["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, lark_grammar('start: "a"')),
    ({"guided_grammar": GBNF}, lark_grammar(GBNF)),
    ({"grammar": GBNF}, lark_grammar(GBNF)),
    ({"structured_outputs": {"json": SCHEMA}}, json_schema_grammar(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, json_schema_grammar(SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, json_schema_grammar({"type": "object"})),
    ({"structured_outputs": {"json": {}}}, json_schema_grammar({})),
    ({"structured_outputs": {"regex": "[a-c]+", "json": None}}, regex_grammar("[a-c]+")),
    ({"structured_outputs": {"choice": ["a"], "disable_any_whitespace": False}}, choice_grammar(["a"])),
    ({"structured_outputs": {"grammar": GBNF}}, lark_grammar(GBNF)),
]


@pytest.mark.parametrize(("body", "grammar"), FORMATS)
@served()
async def test_vllms_names_of_formats(site: Site, body: dict[str, Any], grammar: str) -> None:
    for answer in await both(site, **body):
        assert answer.status_code == 200, answer.text
        assert site.engine.submitted[-1].grammar == grammar


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
    ({"regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
    ({"structured_outputs": {"xml": "x"}}, "structured_outputs.xml"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_json": "[" * 100}, "guided_json"),
    ({"guided_json": {"type": "nonsense"}}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar"),
    ({"guided_grammar": "root ::= " + "(" * 9000}, "guided_grammar"),
    ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs.grammar"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"bad_words": ["a"], "guided_regex": "a"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["a"] * 101}, "bad_words"),
    ({"bad_words": "a"}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"n_probs": 21}, "n_probs"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"allowed_token_ids": [5]}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
@served()
async def test_what_cannot_be_is_refused_by_name(site: Site, body: dict[str, Any], param: str) -> None:
    for answer in await both(site, **body):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    assert not site.engine.submitted


@served()
async def test_numbers_that_contradict_each_other(site: Site) -> None:
    chat = await site.chat(n_probs=2, logprobs=True, top_logprobs=3)
    completion = await site.complete(n_probs=2, logprobs=3)
    assert [answer.json()["error"]["param"] for answer in (chat, completion)] == ["n_probs", "n_probs"]


@served()
async def test_defaults_that_clients_send_are_taken(site: Site) -> None:
    defaults: dict[str, Any] = {
        "use_beam_search": False,
        "length_penalty": 1.0,
        "include_stop_str_in_output": False,
        "spaces_between_special_tokens": True,
        "priority": 0,
        "truncate_prompt_tokens": None,
        "guided_json": None,
        "structured_outputs": None,
        "prompt_logprobs": None,
        "bad_words": [],
    }
    for answer in await both(site, **defaults):
        assert answer.status_code == 200, answer.text
