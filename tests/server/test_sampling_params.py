"""Every sampling and stopping parameter reaches the engine as it was sent; every wrong one is a 400 with its name."""

from typing import Any

import pytest
from http_face import Site, served

from scheduler.messages import Sampling, Stopping

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
    assert submit.stopping == Stopping(50, 5, ("a b", "c"), (7, 1023), True)


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
        ("max_tokens", -1),
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
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
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
