"""Responses over a WebSocket: what goes on from what, in which order, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from http_context import Site, demo_tokens, until
from real_port import Port, on_a_port, port
from template_styles import NO_TOOLS, tokens_with
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

import server.api.responses.socket as sockets
from server.api.responses.socket_memory import MOST
from server.config.prompt_rules import PROMPT_RULES

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
NEEDS_USER = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query.') }}{% endif %}" + NO_TOOLS
)
ANSWER = "Hello there, friend."


def opened(at: Port, **options: Any) -> connect:
    """A connection that is about to be opened."""
    return connect(f"ws://127.0.0.1:{at.number}/v1/responses", max_size=None, **options)


async def send(socket: ClientConnection, **event: Any) -> None:
    await socket.send(json.dumps({"type": "response.create", "store": False, **event}))


async def until_end(socket: ClientConnection) -> list[Any]:
    """The events of one response, or the error in its place."""
    events = [json.loads(await socket.recv())]
    while events[-1]["type"] not in ENDS:
        events.append(json.loads(await socket.recv()))
    return events


async def create(socket: ClientConnection, **event: Any) -> Any:
    """The response that a request gets."""
    await send(socket, **event)
    last = (await until_end(socket))[-1]
    assert last["type"] in ("response.completed", "response.incomplete"), last
    return last["response"]


async def refused(socket: ClientConnection, status: int, code: str, **event: Any) -> Any:
    """What is wrong with a request."""
    await send(socket, **event)
    (error,) = await until_end(socket)
    assert (error["type"], error["status"], error["error"]["code"]) == ("error", status, code)
    return error


def prompts(site: Site) -> list[list[int]]:
    """The token ids that the engine was asked to continue."""
    return [[*memoryview(submit.prompt).cast("i")] for submit in site.engine.submitted]


# --- what goes on from what ---------------------------------------------------------------------------------


@on_a_port()
async def test_the_events_are_those_of_a_stream(at: Port) -> None:
    streamed = await at.site.http.post("/v1/responses", json={"input": "Hello", "stream": True, "store": False})
    over_http = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    async with opened(at) as socket:
        await send(socket, input="Hello")
        events = await until_end(socket)
    assert [event["type"] for event in events] == [event["type"] for event in over_http]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ANSWER
    assert "stream_id" not in events[0]


@on_a_port()
async def test_a_conversation_is_compacted_and_goes_on_behind_its_summary(at: Port) -> None:
    rule = [{"type": "compaction", "compact_threshold": 200}]
    async with opened(at) as socket:
        one = await create(socket, input="First " + "Tell me a story. " * 20)
        more = {"input": "Second " + "Tell me a story. " * 20, "context_management": rule}
        two = await create(socket, previous_response_id=one["id"], **more)
        assert [item["type"] for item in two["output"]] == ["compaction", "message"]
        await create(socket, input="Third", previous_response_id=two["id"])
        asked = await create(socket, input=[{"type": "compaction_trigger"}], previous_response_id=two["id"])
        assert [item["type"] for item in asked["output"]] == ["compaction"]
        await create(socket, input="Third", previous_response_id=asked["id"])
        await create(socket, input="Other", previous_response_id=one["id"])
    first, summary, second, third, _, behind, back = prompts(at.site)
    assert summary[: len(first)] == back[: len(first)] == first
    assert third[: len(second)] == second
    text = demo_tokens().decode(behind)
    assert ("Second" in text, ANSWER in text, "Third" in text) == (False, True, True)


@on_a_port()
async def test_a_response_that_is_not_stored_is_continued_token_by_token(at: Port) -> None:
    replied = [id for letter in "Hello" for id in demo_tokens().encode(letter, special=False)]
    assert replied != demo_tokens().encode("Hello", special=False)  # nobody who tokenises it anew has these
    at.site.engine.ids = replied
    async with opened(at) as socket:
        one = await create(socket, input="Hello")
        two = await create(socket, input="Go on", previous_response_id=one["id"])
        three = await create(socket, input="And on", previous_response_id=two["id"])
    first, second, third = prompts(at.site)
    assert second[: len(first) + len(replied)] == [*first, *replied]
    assert third[: len(second) + len(replied)] == [*second, *replied]
    assert three["previous_response_id"] == two["id"]
    assert (await at.site.http.get(f"/v1/responses/{one['id']}")).status_code == 404


@on_a_port()
async def test_another_connection_does_not_know_what_is_not_stored(at: Port) -> None:
    async with opened(at) as socket:
        one = await create(socket, input="Hello")
        stored = await create(socket, input="Hello", store=True)
    async with opened(at) as socket:
        await refused(socket, 400, "previous_response_not_found", input="x", previous_response_id=one["id"])
        assert (await create(socket, input="x", previous_response_id=stored["id"]))["status"] == "completed"


@on_a_port()
async def test_what_is_stored_after_what_is_not_has_all_of_it(at: Port) -> None:
    async with opened(at) as socket:
        one = await create(socket, input="Hello")
        two = await create(socket, input="Go on", previous_response_id=one["id"], store=True)
    answer = await at.site.http.post("/v1/responses", json={"input": "And on", "previous_response_id": two["id"]})
    assert answer.status_code == 200
    first, second, third = prompts(at.site)
    assert second[: len(first)] == first
    assert third[: len(second)] == second


@on_a_port()
async def test_a_prompt_is_read_without_a_reply(at: Port) -> None:
    async with opened(at) as socket:
        await send(socket, input="Hello", generate=False, store=True)
        events = await until_end(socket)
        warm = events[-1]["response"]
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        assert (warm["output"], warm["usage"]["output_tokens"], warm["store"]) == ([], 0, False)
        await create(socket, input="Go on", previous_response_id=warm["id"])
    first, second = at.site.prompts()
    assert at.site.engine.submitted[0].stopping.max_tokens == 0
    assert first.endswith("Hello<|im_end|>\n<|im_start|>assistant\n")
    assert "Hello<|im_end|>\n<|im_start|>user\nGo on" in second


@on_a_port(tokens=lambda: tokens_with(NEEDS_USER))
async def test_a_prompt_is_read_where_the_template_wants_a_user(at: Port) -> None:
    system = [{"role": "developer", "content": "Be brief."}]
    async with opened(at) as socket:
        await send(socket, input=system, generate=False)
        warm = (await until_end(socket))[-1]["response"]
        assert (warm["status"], warm["output"]) == ("completed", [])
        await create(socket, input="Hello", previous_response_id=warm["id"])
        await create(socket, input=system)  # a reply to it needs a user's turn
    first, second, third = at.site.prompts()
    assert first.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert (
        second == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert third == "<|im_start|>user\nBe brief.<|im_end|>\n<|im_start|>assistant\n"


ADDED = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]}
WARMED: dict[str, tuple[list[Any], tuple[str, ...]]] = {"tools too": ([ADDED], PROMPT_RULES), "no rules": ([], ())}


@pytest.mark.parametrize("case", WARMED)
async def test_what_is_read_before_the_first_message_is_read_in_parts_too(case: str) -> None:
    tools, rules = WARMED[case]
    async with port(tokens=tokens_with(NEEDS_USER, rules=rules)) as at:
        one, two = ({"role": "developer", "content": text} for text in ("Be brief.", "Be kind."))
        async with opened(at) as socket:
            await send(socket, input=[*tools, one], generate=False)
            first = (await until_end(socket))[-1]["response"]
            await send(socket, input=[two], generate=False, previous_response_id=first["id"])
            second = (await until_end(socket))[-1]["response"]
            await create(socket, input="Hello", previous_response_id=second["id"])
        texts = at.site.prompts()
        fronts = [text.partition("<|im_start|>user\n")[0] for text in texts]
        assert [("Be brief." in front, "Be kind." in front) for front in fronts] == [(True, n > 0) for n in range(3)]
        assert texts[2].endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


@on_a_port()
async def test_a_request_that_is_refused_forgets_what_it_follows_on_its_own_lane_only(at: Port) -> None:
    async with opened(at) as socket:
        one = await create(socket, input="Hello")
        await refused(
            socket, 400, "invalid_value", input="x", previous_response_id=one["id"], top_p=3, stream_id="other"
        )
        await create(socket, input="x", previous_response_id=one["id"], stream_id="third")
        await refused(socket, 400, "invalid_value", input="x", previous_response_id=one["id"], top_p=3)
        await refused(socket, 400, "previous_response_not_found", input="x", previous_response_id=one["id"])


@on_a_port()
async def test_so_many_responses_are_remembered(at: Port) -> None:
    async with opened(at) as socket:
        ids = [(await create(socket, input="Hello", max_output_tokens=1))["id"] for _ in range(MOST + 1)]
        await refused(socket, 400, "previous_response_not_found", input="x", previous_response_id=ids[0])
        await create(socket, input="x", previous_response_id=ids[1])


# --- lanes --------------------------------------------------------------------------------------------------


@on_a_port()
async def test_lanes_run_beside_each_other_and_each_in_order(at: Port) -> None:
    at.site.engine.pause_after = 1
    async with opened(at) as socket:
        await send(socket, input="a", stream_id="one")
        await send(socket, input="b", stream_id="one")
        await send(socket, input="c", stream_id="two")
        seen: set[str] = set()
        while seen != {"one", "two"}:
            seen.add(json.loads(await socket.recv())["stream_id"])
        assert len(at.site.engine.submitted) == 2
        at.site.engine.go.set()
        ends: list[Any] = []
        while len(ends) < 3:
            event = json.loads(await socket.recv())
            ends += [event] if event["type"] == "response.completed" else []
    assert sorted(event["stream_id"] for event in ends) == ["one", "one", "two"]


@on_a_port()
async def test_there_are_so_many_lanes(at: Port) -> None:
    async with opened(at) as socket:
        for number in range(sockets.MOST_LANES):
            await create(socket, input="Hello", stream_id=f"lane-{number}", max_output_tokens=1)
        await refused(socket, 400, "websocket_stream_limit_reached", input="Hello", stream_id="more")
        await create(socket, input="Hello", stream_id="lane-0", max_output_tokens=1)
        await create(socket, input="Hello", max_output_tokens=1)


@on_a_port()
async def test_a_response_is_cancelled_and_can_be_continued(at: Port) -> None:
    at.site.engine.pause_after = 1
    async with opened(at) as socket:
        await send(socket, input="Hello")
        created = json.loads(await socket.recv())["response"]
        while json.loads(await socket.recv())["type"] != "response.output_text.delta":
            pass
        await socket.send(json.dumps({"type": "response.cancel", "response_id": created["id"]}))
        last = (await until_end(socket))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
        at.site.engine.go.set()
        await create(socket, input="Go on", previous_response_id=created["id"])
        await socket.send(json.dumps({"type": "response.cancel", "response_id": created["id"]}))
        assert json.loads(await socket.recv())["error"]["code"] == "response_not_found"


@on_a_port()
async def test_who_leaves_ends_what_runs(at: Port) -> None:
    at.site.engine.pause_after = 1
    async with opened(at) as socket:
        await send(socket, input="Hello")
        await socket.recv()
    await until(lambda: at.site.engine.cancelled)
    assert at.connections == 0 or not at.site.engine.running


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "param", "code"),
    [
        ("{", None, "invalid_json"),
        ("[]", None, "invalid_json"),
        ('{"type": "response.nothing"}', "type", "invalid_value"),
        ("{}", "type", "invalid_value"),
        ('{"type": "response.create", "input": "x", "stream_id": "a b"}', "stream_id", "invalid_stream_id"),
        ('{"type": "response.create", "input": "x", "stream_id": "a\\n"}', "stream_id", "invalid_stream_id"),
        ('{"type": "response.create", "input": "x", "stream_id": 3}', "stream_id", "invalid_stream_id"),
        ('{"type": "response.create", "input": "x", "background": true}', "background", "invalid_value"),
        ('{"type": "response.create", "input": "x", "nonsense": 1}', "nonsense", "unknown_parameter"),
        ('{"type": "response.create", "input": "x", "generate": 1}', "generate", "invalid_value"),
        ('{"type": "response.create"}', "input", "missing_required_parameter"),
        ('{"type": "response.cancel"}', "response_id", "missing_required_parameter"),
    ],
)
@on_a_port()
async def test_what_is_wrong_is_told_and_the_connection_goes_on(
    at: Port, text: str, param: str | None, code: str
) -> None:
    async with opened(at) as socket:
        await socket.send(text)
        error = json.loads(await socket.recv())
        assert (error["type"], error["status"]) == ("error", 400)
        assert (error["error"]["param"], error["error"]["code"]) == (param, code)
        await create(socket, input="Hello")


@on_a_port()
async def test_steering_is_answered_in_its_own_form(at: Port) -> None:
    async with opened(at) as socket:
        await socket.send(json.dumps({"type": "response.steer", "previous_response_id": "resp_1", "input": "Stop"}))
        event = json.loads(await socket.recv())
    assert (event["type"], event["error"]["code"]) == ("response.steer.failed", "steering_not_supported")
    assert event["steer"] == {"previous_response_id": "resp_1", "input": "Stop"}


@on_a_port()
async def test_a_message_of_bytes_is_read_as_one_of_text(at: Port) -> None:
    async with opened(at) as socket:
        await socket.send(b'\xff"')
        assert (await until_end(socket))[-1]["error"]["code"] == "invalid_json"
        await socket.send(b'{"type": "response.create", "input": "Hello"}')
        assert (await until_end(socket))[-1]["type"] == "response.completed"


@on_a_port(api_keys={"ann": "key-a"})
async def test_a_key_is_needed(at: Port) -> None:
    with pytest.raises(InvalidStatus) as error:
        async with opened(at):
            pass
    assert error.value.response.status_code == 401
    assert json.loads(error.value.response.body or b"")["error"]["code"] == "invalid_api_key"
    async with opened(at, additional_headers={"Authorization": "Bearer key-a"}) as socket:
        await create(socket, input="Hello")


@on_a_port(allowed_origins=["https://ours.example"])
async def test_pages_of_other_origins_open_nothing(at: Port) -> None:
    for origin in ("https://evil.example", f"http://127.0.0.1:{at.number + 1}", "null"):
        with pytest.raises(InvalidStatus) as error:
            async with opened(at, origin=origin):
                pass
        assert error.value.response.status_code == 403
    for origin in ("https://ours.example", f"http://127.0.0.1:{at.number}"):
        async with opened(at, origin=origin) as socket:
            await create(socket, input="Hello")


@on_a_port()
async def test_elsewhere_a_wish_for_a_socket_is_a_request_like_any_other(at: Port) -> None:
    with pytest.raises(InvalidStatus) as error:
        async with connect(f"ws://127.0.0.1:{at.number}/v1/models"):
            pass
    assert error.value.response.status_code == 200


# --- how it ends --------------------------------------------------------------------------------------------


@on_a_port()
async def test_an_old_connection_ends_after_what_runs(at: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LIFETIME", 0.3)
    at.site.engine.pause_after = 1
    async with opened(at) as socket:
        await send(socket, input="Hello")
        await asyncio.sleep(0.6)
        at.site.engine.go.set()
        assert (await until_end(socket))[-1]["type"] == "response.completed"
        error = json.loads(await socket.recv())
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed):
            await socket.recv()


@on_a_port()
async def test_the_official_client_opens_it(at: Port) -> None:
    async with (
        openai.AsyncOpenAI(api_key="x", base_url=f"http://127.0.0.1:{at.number}/v1", max_retries=0) as ai,
        ai.responses.connect() as connection,
    ):
        await connection.response.create(model="demo", input="Hello", store=False)
        async for event in connection:
            if event.type == "response.completed":
                assert event.response.output_text == ANSWER
                break
