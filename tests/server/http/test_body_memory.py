"""Large bodies wait until they fit beside those that are being read; small ones never wait."""

import asyncio
import json

import pytest
from http_context import HELLO, Call, Site, served

from server.errors import ApiError
from server.http.body_memory import SMALL, TOGETHER, BodyMemory
from server.http.body_size import MAX_BYTES
from server.schemas.json_body import LARGE_BYTES, MAX_MARKS, parse

CHAT = "/v1/chat/completions"
GOOD = json.dumps({"messages": HELLO}).encode()
LARGE = GOOD + b" " * (2 * SMALL)


async def bodies_take_turns() -> None:
    memory, done = BodyMemory(10 * SMALL), list[str]()
    release = {name: asyncio.Event() for name in ("a", "b", "c", "small")}

    async def read(name: str, size: int) -> None:
        async with memory.hold(size):
            done.append(name)
            await release[name].wait()

    tasks = [asyncio.create_task(read(*one)) for one in (("a", 8 * SMALL), ("b", 9 * SMALL), ("c", 2 * SMALL))]
    tasks.append(asyncio.create_task(read("small", SMALL)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert done == ["a", "small"]  # c would fit, but came after b
    release["a"].set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert done == ["a", "small", "b"]
    tasks[1].cancel()  # its client left
    for _ in range(5):
        await asyncio.sleep(0)
    assert done == ["a", "small", "b", "c"]
    for event in release.values():
        event.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with memory.hold(10 * SMALL):
        pass


def test_bodies_take_turns_and_small_ones_do_not_wait() -> None:
    asyncio.run(bodies_take_turns())


def test_the_largest_body_fits() -> None:
    assert MAX_BYTES <= TOGETHER


@pytest.mark.parametrize("chunked", [False, True])
@served()
async def test_a_large_body_waits_for_room(site: Site, chunked: bool) -> None:
    site.app.state.bodies = BodyMemory(MAX_BYTES)
    head = {} if chunked else {"content-length": str(len(LARGE))}
    async with site.app.state.bodies.hold(MAX_BYTES):
        call = Call.post(site.app, CHAT, None, headers=head, chunks=[LARGE])
        await asyncio.sleep(0.05)
        assert call.status == 0
        assert (await site.chat()).status_code == 200
    await call.finish()
    assert call.status == 200
    async with site.app.state.bodies.hold(MAX_BYTES):
        pass


def test_a_large_body_of_many_values_is_refused_before_it_is_parsed() -> None:
    text = b'{"a": "%s"}' % (b"x" * (LARGE_BYTES + 1))
    assert len(parse(text)["a"]) > LARGE_BYTES
    many = b'{"a": [%s0]}' % (b"0," * MAX_MARKS) + b" " * LARGE_BYTES
    with pytest.raises(ApiError, match="commas and brackets"):
        parse(many)
