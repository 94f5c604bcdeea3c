"""POST /v1/chat/completions: bodies, chunks, choices and log-probabilities."""

from typing import Any

from fake_engine import FACTS
from http_context import HELLO, Site, demo_tokens, events, reply_ids, served

from scheduler.sampling_params import Sampling, Stopping


@served()
async def test_body_has_the_shape_of_openai(site: Site) -> None:
    response = await site.chat(model="demo")
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "demo")
    assert isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there, friend.", "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert "session_id" not in body


@served()
async def test_prompt_is_the_rendered_template(site: Site) -> None:
    await site.chat()
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert site.prompt_ids(0) == demo_tokens().encode(text, special=False)
    assert site.engine.submitted[0].session is None
    assert site.engine.submitted[0].tenant == "default"


@served()
async def test_defaults_are_those_of_openai(site: Site) -> None:
    await site.chat()
    assert site.engine.submitted[0].sampling == Sampling()
    assert site.engine.submitted[0].stopping == Stopping()
    assert site.engine.submitted[0].logprobs is None


@served()
async def test_usage_counts_tokens_and_what_was_cached(site: Site) -> None:
    first = (await site.chat()).json()["usage"]
    prompt = len(site.prompt_ids(0))
    assert first == {
        "prompt_tokens": prompt,
        "completion_tokens": len(reply_ids()) + 1,
        "total_tokens": prompt + len(reply_ids()) + 1,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    second = (await site.chat()).json()["usage"]
    assert second["prompt_tokens_details"] == {"cached_tokens": prompt - 1}


@served()
async def test_stream_has_role_content_end_and_done(site: Site) -> None:
    response = await site.chat(stream=True)
    chunks = events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert chunks.pop() == "[DONE]"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-1])
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello there, friend."
    assert all("usage" not in c for c in chunks)


@served()
async def test_include_usage_adds_one_chunk_without_choices(site: Site) -> None:
    chunks = events((await site.chat(stream=True, stream_options={"include_usage": True})).text)[:-1]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == (await site.chat()).json()["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert all(c["usage"] is None for c in chunks[:-1])


@served()
async def test_continuous_usage_counts_up(site: Site) -> None:
    chunks = events((await site.chat(stream=True, stream_options={"continuous_usage_stats": True})).text)[:-1]
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(reply_ids()) + 1)


@served()
async def test_max_tokens_cuts_with_length(site: Site) -> None:
    limits: list[dict[str, Any]] = [{"max_tokens": 2}, {"max_completion_tokens": 2}]
    for limit in limits:
        choice = (await site.chat(**limit)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == demo_tokens().decode(reply_ids()[:2])
    assert [s.stopping.max_tokens for s in site.engine.submitted] == [2, 2]


@served()
async def test_stop_strings_end_the_text_before_them(site: Site) -> None:
    for stop in (",", ["xyz", ","]):
        choice = (await site.chat(stop=stop)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello there", "stop")


@served()
async def test_n_choices_are_n_turns_with_seeds_of_their_own(site: Site) -> None:
    body = (await site.chat(n=3, seed=40)).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert [s.sampling.seed for s in site.engine.submitted] == [40, 41, 42]
    assert len({s.turn for s in site.engine.submitted}) == 3
    prompt = len(site.prompt_ids(0))
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (prompt, 3 * (len(reply_ids()) + 1))


@served()
async def test_what_was_cached_counts_once_per_prompt(site: Site) -> None:
    prompt = (await site.chat()).json()["usage"]["prompt_tokens"]
    usage = (await site.chat(n=3)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": prompt - 1}


@served()
async def test_seeds_wrap_within_64_bits(site: Site) -> None:
    await site.chat(n=2, seed=2**63 - 1)
    assert [s.sampling.seed for s in site.engine.submitted] == [2**63 - 1, -(2**63)]


@served()
async def test_streamed_choices_keep_their_index(site: Site) -> None:
    chunks = events((await site.chat(stream=True, n=2)).text)[:-1]
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in own) == "Hello there, friend."
        assert [c["finish_reason"] for c in own][-1] == "stop"


@served()
async def test_logprobs_hold_one_entry_per_generated_token(site: Site) -> None:
    body = (await site.chat(logprobs=True, top_logprobs=2)).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert len(logprobs["content"]) == body["usage"]["completion_tokens"]
    first = logprobs["content"][0]
    assert first["token"] == "Hello"
    assert first["logprob"] == -0.5
    assert bytes(first["bytes"]) == b"Hello"
    assert first["top_logprobs"][0]["token"] == "Hello"
    assert len(first["top_logprobs"]) == 2
    assert site.engine.submitted[0].logprobs == 2


@served()
async def test_logprobs_without_top_ask_for_no_alternatives(site: Site) -> None:
    body = (await site.chat(logprobs=True)).json()
    assert all(entry["top_logprobs"] == [] for entry in body["choices"][0]["logprobs"]["content"])
    assert site.engine.submitted[0].logprobs == 0


@served()
async def test_streamed_logprobs_add_up_to_those_of_the_body(site: Site) -> None:
    whole = (await site.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
    chunks = events((await site.chat(stream=True, logprobs=True, top_logprobs=1)).text)[:-1]
    parts = [c["choices"][0]["logprobs"] for c in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == whole


@served()
async def test_text_parts_are_joined_and_developer_is_system_where_the_template_knows_none(site: Site) -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    await site.chat(messages=messages)
    rendered = site.prompt(0)
    assert rendered.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>")


@served()
async def test_harmless_values_and_nulls_ask_for_nothing(site: Site) -> None:
    harmless: dict[str, Any] = {
        "tools": [],
        "tool_choice": None,
        "functions": None,
        "response_format": {"type": "text"},
        "store": False,
        "metadata": None,
        "service_tier": "auto",
        "parallel_tool_calls": None,
        "modalities": ["text"],
        "reasoning_effort": None,
        "audio": None,
        "temperature": None,
        "n": None,
        "stop": None,
        "seed": None,
        "stream": None,
        "stream_options": None,
        "logit_bias": None,
        "max_tokens": None,
        "session_id": None,
        "model": None,
        "user": "someone",
    }
    assert (await site.chat(**harmless)).status_code == 200
    assert site.engine.submitted[0].sampling == Sampling()


@served()
async def test_a_reply_can_be_sent_back_as_the_sdk_dumps_it(site: Site) -> None:
    reply = (await site.chat()).json()["choices"][0]["message"]
    dumped = {**reply, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    response = await site.chat(messages=[*HELLO, dumped, {"role": "user", "content": "More"}])
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 14


@served()
async def test_models_and_fingerprints_are_named(site: Site) -> None:
    assert (await site.chat()).json()["system_fingerprint"] == "fp_" + FACTS.fingerprint[:16]
    for name in ("demo", "", None):
        assert (await site.chat(model=name)).status_code == 200
    response = await site.chat(model="gpt-9")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"
    assert "but demo" in response.json()["error"]["message"]
    assert "but demo" in (await site.http.get("/v1/models/gpt-9")).json()["error"]["message"]
