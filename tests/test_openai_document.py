"""Every answer is what OpenAI's document says: a real server, the demo model, a table of requests.

A row is a method, a path, a body, the status, and the document's name for the answer (errors have theirs). ``stream``
in a body makes it a stream: then the name is that of its events. To add a case, add a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from openai_document import PINNED, STREAMS, document, faults, stream_faults
from server_process import ServerProcess

from tools import openai_schema

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
ANSWERS = {
    CHAT: ("CreateChatCompletionRequest", "CreateChatCompletionResponse"),
    COMPLETIONS: ("CreateCompletionRequest", "CreateCompletionResponse"),
}
HI = [{"role": "user", "content": "My name is Ada."}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *HI,
    {"role": "assistant", "content": "Nice to meet you, Ada!", "refusal": None, "annotations": []},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "my name?"}]},
]


@dataclass(frozen=True)
class Case:
    """One request and what its answer is called."""

    method: str
    path: str
    body: Any = None
    status: int = 200
    name: str = ""
    param: str | None = None  # of an error
    headers: tuple[tuple[str, str], ...] = ()
    ours: bool = False  # the request holds fields that are not OpenAI's

    @property
    def streams(self) -> bool:
        return self.status == 200 and isinstance(self.body, dict) and self.body.get("stream") is True

    def __str__(self) -> str:
        said = {k: v for k, v in self.body.items() if k not in ("messages", "prompt")} if self.body else ""
        return f"{self.status} {self.method} {self.path} {said}"[:90]


def chat(ours: bool = False, **body: Any) -> Case:
    return Case("POST", CHAT, {"model": "m", "messages": HI, "max_tokens": 8, **body}, ours=ours)


def completion(ours: bool = False, **body: Any) -> Case:
    return Case("POST", COMPLETIONS, {"model": "m", "prompt": "Once upon", "max_tokens": 8, **body}, ours=ours)


def wrong(path: str, body: Any, status: int, param: str | None = None, method: str = "POST") -> Case:
    return Case(method, path, body, status, "ErrorResponse", param)


NAMED = (("X-Session-ID", "doc-header"), ("X-Session-Create", "true"))
GOOD = [
    chat(),
    chat(messages=TALK),
    chat(messages=[{"role": "developer", "content": "Be brief."}, *HI]),
    chat(n=3),
    chat(temperature=0),
    chat(temperature=2, top_p=0.5, seed=7),
    chat(presence_penalty=1.5, frequency_penalty=-1),
    chat(logit_bias={"5": -100, "6": 3}),
    chat(logprobs=True),
    chat(logprobs=True, top_logprobs=20),
    chat(logprobs=True, top_logprobs=0),
    chat(stop="a"),
    chat(stop=["x", "yz"]),
    chat(max_completion_tokens=8),
    chat(user="somebody", store=False, metadata={}, service_tier="auto"),
    chat(response_format={"type": "text"}, tools=[], tool_choice="none"),
    chat(session_id="doc-chat", ours=True),
    chat(top_k=3, min_p=0.1, repetition_penalty=1.1, ours=True),
    chat(ignore_eos=True, min_tokens=3, stop_token_ids=[9], ours=True),
    chat(stream=True),
    chat(stream=True, n=2),
    chat(stream=True, logprobs=True, top_logprobs=3),
    chat(stream=True, stream_options={"include_usage": True}),
    chat(stream=True, stream_options={"include_usage": False}),
    chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}, ours=True),
    chat(stream=True, session_id="doc-stream", ours=True),
    Case("POST", "/v1/sessions/doc-path/chat/completions", {"messages": HI, "max_tokens": 4}, ours=True),
    Case("POST", CHAT, {"messages": HI, "max_tokens": 4}, headers=NAMED, ours=True),
    completion(),
    completion(prompt=["One", "Two"]),
    completion(prompt=[5, 6, 7]),
    completion(prompt=[[5, 6], [7]]),
    completion(n=2, temperature=1),
    completion(best_of=1),
    completion(echo=True),
    completion(echo=True, logprobs=2, max_tokens=0),
    completion(echo=True, logprobs=0),
    completion(logprobs=5),
    completion(stop=["\n"], suffix=""),
    completion(user="somebody", seed=3, logit_bias={}),
    completion(session_id="doc-completion", ours=True),
    completion(stream=True),
    completion(stream=True, echo=True, logprobs=1),
    completion(stream=True, n=2, stream_options={"include_usage": True}),
    completion(stream=True, prompt=["One", "Two"]),
    Case("GET", MODELS, name="ListModelsResponse"),
    Case("GET", f"{MODELS}/m", name="Model"),
]
BAD = [
    wrong(CHAT, {"model": "m"}, 400, "messages"),
    wrong(CHAT, {"model": "m", "messages": []}, 400, "messages"),
    wrong(CHAT, {"model": "m", "messages": "hi"}, 400, "messages"),
    wrong(CHAT, {"messages": HI, "temperature": 3}, 400, "temperature"),
    wrong(CHAT, {"messages": HI, "n": 1000}, 400, "n"),
    wrong(CHAT, {"messages": HI, "stream": "yes"}, 400, "stream"),
    wrong(CHAT, {"messages": HI, "stream": True, "temperature": -1}, 400, "temperature"),
    wrong(CHAT, {"messages": HI, "top_logprobs": 3}, 400, "top_logprobs"),
    wrong(CHAT, {"messages": HI, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    wrong(CHAT, {"messages": HI, "colour": "red"}, 400, "colour"),
    wrong(CHAT, {"messages": [{"role": "boss", "content": "x"}]}, 400, "messages[0].role"),
    wrong(CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "messages"),
    wrong(CHAT, {"messages": HI, "n": 2, "session_id": "s"}, 400, "n"),
    wrong(CHAT, {"messages": HI, "session_id": "a/b"}, 400, "session_id"),
    wrong(COMPLETIONS, {"model": "m"}, 400, "prompt"),
    wrong(COMPLETIONS, {"prompt": [99999]}, 400, "prompt"),
    wrong(COMPLETIONS, {"prompt": "x", "logprobs": 99}, 400, "logprobs"),
    wrong(COMPLETIONS, {"prompt": "x", "stop": [""]}, 400, "stop"),
    wrong(CHAT, [], 400),
    wrong(f"{MODELS}/nobody", None, 404, "model", "GET"),
    wrong("/v1/embeddings", {"input": "x", "model": "m"}, 400, "model"),
    wrong("/v1/moderations", {"input": "x", "model": "m"}, 404),
    wrong("/v1/images/generations", {"prompt": "x"}, 404),
    wrong(CHAT, None, 405, method="PUT"),
    wrong(MODELS, None, 405, method="DELETE"),
    Case("POST", CHAT, {"messages": HI}, 415, "ErrorResponse", headers=(("content-type", "text/plain"),)),
]


def test_the_table_is_long_enough_and_no_row_is_twice() -> None:
    assert len({repr(case) for case in (*GOOD, *BAD)}) == len(GOOD) + len(BAD) >= 60


def test_the_document_says_where_it_is_from() -> None:
    assert "openai" in document()["source"].lower()


def test_the_pinned_copy_is_what_the_tool_writes() -> None:
    pinned = PINNED.read_text(encoding="utf-8")
    if f"openai {openai.__version__}," not in pinned:
        pytest.skip("made from another version of the package: python -m tools.openai_schema")
    assert openai_schema.write_schema(openai_schema.from_package()) == pinned


@pytest.mark.parametrize("case", [case for case in GOOD if case.body and not case.ours], ids=str)
def test_what_we_ask_is_what_the_document_lets_one_ask(case: Case) -> None:
    assert faults(ANSWERS[case.path][0], case.body) == []


@pytest.mark.parametrize("case", [*GOOD, *BAD], ids=str)
def test_answers_are_as_the_document_says(demo_server: ServerProcess, case: Case) -> None:
    url = f"{demo_server.url}{case.path}"
    response = httpx.request(case.method, url, json=case.body, headers=dict(case.headers), timeout=120)
    assert response.status_code == case.status, response.text
    path = CHAT if case.path.startswith("/v1/sessions/") else case.path
    if case.streams:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert stream_faults(STREAMS[path], response.text) == []
        return
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert faults(case.name or ANSWERS[path][1], answer) == []
    if case.status != 200:
        assert answer["error"]["param"] == case.param


def test_a_fault_would_be_found() -> None:
    """The validator, against answers that are wrong in ways that have been seen elsewhere."""
    error = {"message": "x", "type": "y", "param": None, "code": None}
    assert faults("ErrorResponse", {"error": error}) == []
    assert faults("ErrorResponse", {"error": {**error, "code": 404}}) != []
    assert faults("ErrorResponse", {"error": {k: v for k, v in error.items() if k != "param"}}) != []
    choice = {"index": 0, "message": {"role": "assistant", "content": "x", "refusal": None}, "logprobs": None}
    body = {"id": "a", "created": 1, "model": "m", "object": "chat.completion"}
    name = "CreateChatCompletionResponse"
    assert faults(name, {**body, "choices": [{**choice, "finish_reason": "stop"}]}) == []
    assert faults(name, {**body, "choices": [{**choice, "finish_reason": "eos"}]}) != []
    assert faults(name, {**body, "choices": [choice]}) != []
    chunk = 'data: {"id":"a","created":1,"model":"m","object":"chat.completion.chunk","choices":[]}\n\n'
    name = STREAMS[CHAT]
    assert stream_faults(name, chunk + "data: [DONE]\n\n") == []
    assert stream_faults(name, chunk) != []
    assert stream_faults(name, "data: [DONE]\n\n" + chunk) != []
    assert stream_faults(name, chunk.replace('"created":1,', "") + "data: [DONE]\n\n") != []
