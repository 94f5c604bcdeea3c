"""Pictures of a request are asked for once; their bytes are sent only where the engine does not know them."""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, expansion_of
from http_context import demo_tokens

from scheduler.protocol import Expanded, ExpandedMedium, MediaItem
from server.errors import ApiError
from server.turns.expanding import expand_media, expander_of

CAT, DOG = b"a cat", b"a dog"


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Engine(FakeEngine):
    """Notes what it is asked."""

    def __init__(self) -> None:
        super().__init__(demo_tokens())
        self.asked: list[list[tuple[str, bytes]]] = []

    async def expand(self, tenant: str, media: Any) -> Expanded:
        self.asked.append([(item.digest, item.data) for item in media])
        return await super().expand(tenant, media)


def a_log(**stored: bytes) -> Any:
    async def get(tenant: str, digest: str) -> bytes | None:
        return next((data for data in stored.values() if digest_of(data) == digest), None)

    return SimpleNamespace(media=SimpleNamespace(get=get))


class Asking(SimpleNamespace):
    """A request, of which there may be weak references."""


def a_request(*held: bytes) -> Any:
    return Asking(state=SimpleNamespace(tenant="a", media={digest_of(data): data for data in held}))


async def test_bytes_come_from_the_request_and_the_log_and_are_sent_once() -> None:
    engine, digests = Engine(), [digest_of(CAT), digest_of(DOG)]
    found = await expand_media(a_request(DOG), engine, a_log(cat=CAT), dict.fromkeys(digests, "image"))
    assert {digest: one.ids.tobytes() for digest, one in found.items()} == {
        digest: expansion_of(digest).ids for digest in digests
    }
    await expand_media(a_request(), engine, a_log(), dict.fromkeys(digests, "image"))
    unknown = [(digest, b"") for digest in digests]
    assert engine.asked == [unknown, [(digests[0], CAT), (digests[1], DOG)], unknown]
    assert engine.pictures == {"a": set(digests)}


async def test_a_picture_that_is_gone_or_unusable_is_a_400() -> None:
    class Choosy(Engine):
        async def expand(self, tenant: str, media: Any) -> Expanded:
            return Expanded("", tuple(ExpandedMedium(item.digest, "", b"", "It is too small.") for item in media))

    with pytest.raises(ApiError) as refused:
        await expand_media(a_request(), Engine(), a_log(), {digest_of(CAT): "image"})
    assert (refused.value.status_code, refused.value.body.error.code) == (400, "invalid_media")
    with pytest.raises(ApiError, match="too small"):
        await expand_media(a_request(), Choosy(), a_log(), {digest_of(CAT): "image"})


async def test_a_thread_waits_for_the_event_loop() -> None:
    request = a_request(CAT)
    expand = expander_of(request, Engine(), a_log())
    found = await asyncio.to_thread(expand, {digest_of(CAT): "image"})
    assert found[digest_of(CAT)].text == expansion_of(digest_of(CAT)).text


async def test_no_bytes_are_asked_for_where_all_is_known() -> None:
    engine = Engine()
    await engine.expand("a", [MediaItem(digest_of(CAT), CAT)])
    await expand_media(a_request(), engine, a_log(), {digest_of(CAT): "image"})
    assert len(engine.asked) == 2
