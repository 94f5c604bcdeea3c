"""Rate limits: buckets that fill up steadily, a 429 that says when, and headers that tell what is left."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from http_context import Site, events, site

from server.errors import ApiError
from server.middleware.key_file import KeyFile, new_key, write_keys
from server.middleware.rate_limit import Bucket, RateLimit


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_up_and_can_be_overdrawn() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(90)
    assert bucket.left() == -30
    assert bucket.seconds_until(1) == 31
    clock.now = 31
    assert bucket.seconds_until(1) == 0
    clock.now = 1000
    assert bucket.left() == 60


def test_requests_and_tokens_are_counted_apart() -> None:
    clock = Clock()
    limit = RateLimit(2, 100, clock)
    limit.admit()
    limit.charge(250)
    with pytest.raises(ApiError, match="100 tokens per minute") as caught:
        limit.admit()
    assert caught.value.status_code == 429
    assert caught.value.body.error.code == "rate_limit_exceeded"
    assert caught.value.headers is not None
    assert caught.value.headers["retry-after"] == "91"
    clock.now = 91
    limit.admit()
    limit.admit()
    with pytest.raises(ApiError, match="2 requests per minute"):
        limit.admit()
    assert limit.headers()["x-ratelimit-remaining-requests"] == "0"


def test_without_limits_nothing_is_refused_or_told() -> None:
    limit = RateLimit(None, None)
    limit.admit()
    limit.charge(10**9)
    assert not limit
    assert limit.headers() == {}


@asynccontextmanager
async def limited(folder: Path, requests: int | None, tokens: int | None) -> AsyncIterator[tuple[Site, dict[str, str]]]:
    """A site and the headers of a limited key."""
    key, entry = new_key("ann", requests, tokens)
    write_keys(folder / "keys.json", [entry])
    async with site(key_file=KeyFile(folder / "keys.json")) as made:
        yield made, {"authorization": f"Bearer {key}"}


async def test_a_turn_beyond_the_requests_is_refused_on_every_endpoint(tmp_path: Path) -> None:
    async with limited(tmp_path, 2, None) as (made, key):
        answer = await made.chat(headers=key)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        assert "x-ratelimit-limit-tokens" not in answer.headers
        streamed = await made.chat(headers=key, stream=True)
        assert events(streamed.text)[-1] == "[DONE]"
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
            ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            refused = await made.http.post(path, json=body, headers=key)
            assert refused.status_code == 429, path
            assert 1 <= int(refused.headers["retry-after"]) <= 31
        assert (await made.http.get("/v1/models", headers=key)).status_code == 200  # no turn


async def test_only_computed_tokens_are_charged(tmp_path: Path) -> None:
    async with limited(tmp_path, None, 1000) as (made, key):
        usage = (await made.chat(headers=key)).json()["usage"]
        again = await made.chat(headers=key)
        spent = usage["prompt_tokens"] + usage["completion_tokens"]
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        second = again.json()["usage"]
        spent += (
            second["prompt_tokens"] - second["prompt_tokens_details"]["cached_tokens"] + second["completion_tokens"]
        )
        left = int((await made.http.get("/v1/models", headers=key)).headers["x-ratelimit-remaining-tokens"])
        assert 1000 - spent <= left <= 1000 - spent + 40  # seconds that have passed fill the bucket


async def test_a_spent_token_limit_refuses_the_next_turn(tmp_path: Path) -> None:
    async with limited(tmp_path, None, 5) as (made, key):
        assert (await made.chat(headers=key)).status_code == 200
        refused = await made.chat(headers=key)
        assert refused.status_code == 429
        assert json.loads(refused.text)["error"]["code"] == "rate_limit_exceeded"
