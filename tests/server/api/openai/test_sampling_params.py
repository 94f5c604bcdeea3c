"""Every sampling and stopping parameter reaches the engine as it was sent; every wrong one is a 400 with its name."""

from typing import Any

import msgspec
import pytest
from fake_engine import FACTS
from http_context import HELLO, Site, served

from scheduler.sampling_params import Generation, Sampling, Stopping

SAMPLING: dict[str, Any] = {
    "temperature": 0.3,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "presence_penalty": -1.5,
    "frequency_penalty": 2,
    "repetition_penalty": 1.2,
    "seed": -7,
}
STOPPING: dict[str, Any] = {"max_tokens": 50, "min_tokens": 5, "stop_token_ids": [7, 1023], "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@served()
async def test_all_parameters_reach_the_engine(site: Site, path: str, stream: bool) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    body = {**prompt, **SAMPLING, **STOPPING, "stop": ["a b", "c"], "logit_bias": {"5": -100, "6": 2.5}}
    response = await site.http.post(path, json={**body, "stream": stream})
    assert response.status_code == 200
    submit = site.engine.submitted[0]
    assert submit.sampling == Sampling(**SAMPLING, logit_bias={5: -100.0, 6: 2.5})
    assert submit.stopping == Stopping(**{**STOPPING, "stop": ("a b", "c"), "stop_token_ids": (7, 1023)})


@served()
async def test_edges_that_mean_off_or_greedy(site: Site) -> None:
    await site.chat(top_k=-1, top_p=0, temperature=0)
    sampling = site.engine.submitted[0].sampling
    assert (sampling.top_k, sampling.temperature) == (0, 0.0)
    assert 0 < sampling.top_p < 1e-6


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 1.01),
        ("top_p", -1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("seed", 2**63 - 1 + 1),
        ("seed", "x"),
        ("stop", ["x"] * 17),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", "x" * 1001),
        ("stop", [1]),
        ("stop", 5),
        ("stop_token_ids", [1024]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "5"),
        ("logit_bias", {"1024": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1e2": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", [1]),
        ("n", 0),
        ("n", 17),
        ("n", True),
        ("logprobs", 30),
        ("max_tokens", -2),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("ignore_eos", "yes"),
        ("stream", 1),
        ("user", 5),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@served()
async def test_wrong_values_are_named(site: Site, path: str, param: str, value: object) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    response = await site.http.post(path, json={**prompt, param: value})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    if value != 2**63:  # which is refused before it is anybody's parameter
        assert error["param"].split("[")[0] == param
        assert error["message"].startswith(param)
    assert not site.engine.submitted


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": True, "stream_options": {"chunk_size": 5}}, "stream_options.chunk_size"),
    ],
)
@served()
async def test_fields_that_do_not_fit_together(site: Site, body: dict[str, Any], param: str) -> None:
    response = await site.chat(**body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(("min_tokens", "limit"), [(3, 16), (16, 16), (40, 40)])
@served()
async def test_min_tokens_lifts_the_default_limit_of_completions(site: Site, min_tokens: int, limit: int) -> None:
    assert (await site.complete(min_tokens=min_tokens)).status_code == 200
    stopping = site.engine.submitted[0].stopping
    assert (stopping.min_tokens, stopping.max_tokens) == (min_tokens, limit)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@served()
async def test_min_tokens_beyond_the_context_is_a_400(site: Site, path: str) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    assert site.engine.facts is not None
    response = await site.http.post(path, json={**prompt, "min_tokens": site.engine.facts.max_context})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert not site.engine.submitted


# -- where a request is silent ----------------------------------------------------------------------------------------

MODELS = Generation("model", temperature=0.6, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.1, stop=("END",))
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SILENT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 50}),
    ("/v1/sessions/s/chat/completions", {"messages": HELLO}),
    ("/v1/sessions/s/regenerate", {}),
]
OWN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def generating(site: Site, generation: Generation) -> None:
    site.engine.facts = msgspec.structs.replace(FACTS, generation=generation)


def drawn(site: Site) -> dict[str, Any]:
    sampling = site.engine.submitted[-1].sampling
    return {name: getattr(sampling, name) for name in NAMES}


@pytest.mark.parametrize(("path", "body"), SILENT)
@served()
async def test_what_the_model_says_holds_where_a_request_is_silent(site: Site, path: str, body: dict[str, Any]) -> None:
    generating(site, MODELS)
    if path.endswith("regenerate"):
        await site.chat(session_id="s")
    own = {**OWN, "stop_sequences" if "messages" in path else "stop": []}
    silent = dict.fromkeys(own)
    for more in ({}, silent):
        assert (await site.http.post(path, json={**body, **more})).status_code == 200
        assert drawn(site) == {name: getattr(MODELS, name) for name in NAMES}
        assert site.engine.submitted[-1].stopping.stop == ("END",)
    assert (await site.http.post(path, json={**body, **own})).status_code == 200
    assert drawn(site) == {**OWN, "min_p": 0.05, "repetition_penalty": 1.1}
    assert site.engine.submitted[-1].stopping.stop == ()


@served()
async def test_greedy_by_default_and_not_where_a_temperature_is_asked_for(site: Site) -> None:
    generating(site, Generation("model", temperature=0.0))
    await site.chat()
    assert site.engine.submitted[-1].sampling.greedy
    await site.chat(temperature=1)
    assert not site.engine.submitted[-1].sampling.greedy


@served()
async def test_who_ignores_the_models_ends_ignores_its_stop_strings_too(site: Site) -> None:
    generating(site, MODELS)
    await site.chat(ignore_eos=True, max_tokens=5)
    await site.chat(ignore_eos=True, max_tokens=5, stop="x")
    assert [submit.stopping.stop for submit in site.engine.submitted] == [(), ("x",)]


@served()
async def test_what_holds_is_told(site: Site) -> None:
    generating(site, MODELS)
    told = (await site.http.get("/v1/models/demo")).json()["warmturn"]["generation"]
    assert told == {**{name: getattr(MODELS, name) for name in NAMES}, "source": "model", "stop": ["END"]}
    response = (await site.http.post("/v1/responses", json={"input": "Hi"})).json()
    assert (response["temperature"], response["top_p"]) == (0.6, 0.8)
    response = (await site.http.post("/v1/responses", json={"input": "Hi", "temperature": 0.1, "top_p": 1})).json()
    assert (response["temperature"], response["top_p"]) == (0.1, 1.0)


@served()
async def test_the_models_own_stop_string_is_the_end_of_a_turn_for_anthropic(site: Site) -> None:
    generating(site, Generation("model", stop=("friend",)))
    body = {"messages": HELLO, "max_tokens": 50}
    own = (await site.http.post("/v1/messages", json=body)).json()
    assert own["content"][0]["text"] == "Hello there, "
    assert (own["stop_reason"], own["stop_sequence"]) == ("end_turn", None)
    named = (await site.http.post("/v1/messages", json={**body, "stop_sequences": ["friend"]})).json()
    assert (named["stop_reason"], named["stop_sequence"]) == ("stop_sequence", "friend")
