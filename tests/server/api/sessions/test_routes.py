"""Sessions over REST: every verb, what it refuses, two tenants, and verbs that race with turns."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec
import pytest
from http_context import HELLO, Call, Site, demo_tokens, events, served
from log_kit import as_logged

from scheduler.protocol import FinishReason
from server.chat.cutting import cut_reply
from server.engine.engine import EngineDied
from server.log.logged_message import LoggedMessage
from server.log.timeline import NewTurn, SessionRecord, TurnRecord

URL = "/v1/sessions"
END = 2
MORE = [{"role": "user", "content": "And now?"}]
SEED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
KEYS = {"ann": "key-a", "bob": "key-b"}
BOB = {"Authorization": "Bearer key-b"}
ANN = {"Authorization": "Bearer key-a"}


async def make(site: Site, name: str = "s", turns: int = 2, **kwargs: Any) -> dict[str, Any]:
    """A session with turns, as GET shows it."""
    for number in range(turns):
        messages = [{"role": "user", "content": f"Question {number}"}]
        assert (await site.chat(session_id=name, messages=messages, **kwargs)).status_code == 200
    return await show(site, name, **kwargs)


def spell(site: Site, text: str) -> list[int]:
    """Have the engine sample ids that no tokenizer makes of ``text``: a token a character."""
    site.engine.ids = [i for character in text for i in demo_tokens().encode(character, special=False)] + [END]
    assert site.engine.ids != [*demo_tokens().encode(text, special=False), END]
    return site.engine.ids


async def show(site: Site, name: str = "s", **kwargs: Any) -> dict[str, Any]:
    response = await site.http.get(f"{URL}/{name}", **kwargs)
    assert response.status_code == 200, response.text
    shown: dict[str, Any] = response.json()
    return shown


async def contents(site: Site, name: str = "s") -> list[str]:
    response = await site.http.get(f"{URL}/{name}/messages")
    return [message["content"] for message in response.json()["data"]]


async def post(site: Site, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
    return await site.http.post(f"{URL}{path}", json={} if body is None else body, **kwargs)


def refused(response: httpx.Response, status: int, code: str | None, param: str | None = None) -> None:
    """The answer is this error, in OpenAI's shape."""
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), response.text
    assert set(error) == {"message", "type", "param", "code"}


# --- create, look, list -------------------------------------------------------------------------------------


def face_fingerprint(site: Site) -> str:
    """Of the served token ids."""
    assert site.engine.facts is not None
    return demo_tokens().fingerprint(site.engine.facts.vocab_size)


@served()
async def test_a_session_is_made_with_everything(site: Site) -> None:
    before = int(time.time())
    body = {"id": "s", "messages": SEED, "metadata": {"team": "a"}, "ttl_seconds": 60, "pin_seconds": 30}
    response = await post(site, "", body)
    assert response.status_code == 201
    made = response.json()
    assert made == await show(site)
    assert (made["id"], made["object"], made["metadata"], made["ttl_seconds"]) == ("s", "session", {"team": "a"}, 60)
    assert (made["turns"], made["tokens"], made["messages"]) == (0, 0, 2)
    assert (made["parent"], made["running"], made["model_matches"]) == (None, False, True)
    assert before <= made["created_at"] == made["last_used_at"] <= time.time()
    assert before + 60 <= made["expires_at"] <= time.time() + 60
    assert before + 30 <= made["pinned_until"] <= time.time() + 30
    assert site.engine.pinned == {("default", "s"): made["pinned_until"]}


@served()
async def test_without_an_id_each_session_gets_one(site: Site) -> None:
    made = [(await post(site, "")).json()["id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(name.startswith("sess_") for name in made)


@served()
async def test_an_id_is_taken_once(site: Site) -> None:
    await make(site, turns=1)
    refused(await post(site, "", {"id": "s", "messages": SEED}), 409, "session_exists", "id")
    assert await contents(site) == ["Question 0", "Hello there, friend."]


@served()
async def test_a_seeded_session_goes_on_from_its_messages(site: Site) -> None:
    await post(site, "", {"id": "s", "messages": [*SEED, {"role": "assistant", "content": "Me."}]})
    await site.chat(session_id="s", messages=MORE)
    whole = [*SEED, {"role": "assistant", "content": "Me."}, *MORE]
    assert site.prompt_ids() == demo_tokens().encode(
        demo_tokens().render(as_logged(whole), generation_prompt=True), special=False
    )
    assert await contents(site) == ["Be brief.", "Who are you?", "Me.", "And now?", "Hello there, friend."]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"id": "a b"}, "id"),
        ({"id": "import"}, "id"),
        ({"id": "."}, "id"),
        ({"id": ".."}, "id"),
        ({"id": 5}, "id"),
        ({"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"": "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {"k": "\0"}}, "metadata"),
        ({"metadata": {"\0": ""}}, "metadata"),
        ({"ttl_seconds": 0}, "ttl_seconds"),
        ({"ttl_seconds": 1.5}, "ttl_seconds"),
        ({"pin_seconds": 7 * 86_400 + 1}, "pin_seconds"),
        ({"pin_seconds": -1}, "pin_seconds"),
        ({"colour": "red"}, "colour"),
    ],
)
@served()
async def test_what_no_session_can_have_is_named(site: Site, body: dict[str, Any], param: str) -> None:
    response = await post(site, "", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert (await site.http.get(URL)).json()["data"] == []


@served()
async def test_a_session_is_shown_with_its_turns_and_messages(site: Site) -> None:
    shown = await make(site)
    record = await site.log.get("default", "s")
    assert record is not None
    assert (shown["turns"], shown["tokens"], shown["messages"]) == (2, len(record.tokens), 4)
    assert shown["fingerprint"] == record.fingerprint == face_fingerprint(site)
    turns = (await site.http.get(f"{URL}/s/turns")).json()
    assert turns["object"] == "list"
    assert [turn["number"] for turn in turns["data"]] == [1, 2]
    first, second = turns["data"]
    assert (first["cached_tokens"], first["finish_reason"]) == (0, "stop")
    assert second["prompt_tokens"] == len(site.prompt_ids())
    assert second["prompt_tokens"] + second["completion_tokens"] == len(record.tokens)
    assert second["cached_tokens"] == first["prompt_tokens"] + first["completion_tokens"]
    messages = (await site.http.get(f"{URL}/s/messages")).json()["data"]
    assert [(m["index"], m["role"], m["turn"]) for m in messages] == [
        (0, "user", 1),
        (1, "assistant", 1),
        (2, "user", 2),
        (3, "assistant", 2),
    ]


@served()
async def test_unanswered_messages_have_no_turn(site: Site) -> None:
    await make(site, turns=1)
    await site.http.put(f"{URL}/s/messages/0", json={"content": "Other"})
    messages = (await site.http.get(f"{URL}/s/messages")).json()["data"]
    assert messages == [{"object": "session.message", "index": 0, "role": "user", "content": "Other", "turn": None}]


@served()
async def test_the_tiers_are_the_engines_and_null_without_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await make(site, turns=1)
    site.engine.kv["default", "s"] = [b"12345"]
    assert (await show(site))["kv"] == {"device": {"tokens": 5, "bytes": 320}}
    site.engine.call_failure = EngineDied("gone")
    assert (await show(site))["kv"] is None
    site.engine.call_failure = None
    monkeypatch.setattr("server.api.sessions.objects.INSPECT_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(site.engine, "inspect", lambda *_: asyncio.Event().wait())
        assert (await show(site))["kv"] is None
    site.engine.facts = None
    shown = await show(site)
    assert (shown["kv"], shown["running"], shown["model_matches"]) == (None, False, False)


@served()
async def test_a_running_turn_shows(site: Site) -> None:
    await make(site, turns=1)
    call = await paused_turn(site)
    assert (await show(site))["running"] is True
    site.engine.go.set()
    await call.finish()
    assert (await show(site))["running"] is False


@served()
async def test_the_list_is_ordered_filtered_and_paged(site: Site) -> None:
    for name in ("a1", "a2", "b1", "b2"):
        await post(site, "", {"id": name, "metadata": {"team": name[0], "n": name[1]}})
    everything = (await site.http.get(URL)).json()
    assert [s["id"] for s in everything["data"]] == ["b2", "b1", "a2", "a1"]
    assert (everything["first_id"], everything["last_id"], everything["has_more"]) == ("b2", "a1", False)
    assert "kv" not in everything["data"][0]
    assert "running" not in everything["data"][0]

    async def ids(query: str) -> list[str]:
        response = await site.http.get(f"{URL}?{query}")
        assert response.status_code == 200, response.text
        return [s["id"] for s in response.json()["data"]]

    assert await ids("order=asc") == ["a1", "a2", "b1", "b2"]
    assert await ids("limit=1&after=b2") == ["b1"]
    assert (await site.http.get(f"{URL}?limit=3")).json()["has_more"] is True
    assert await ids("prefix=a") == ["a2", "a1"]
    assert await ids("metadata[team]=a") == ["a2", "a1"]
    assert await ids("metadata%5Bteam%5D=b&metadata[n]=1") == ["b1"]
    assert await ids("metadata[team]=x") == []
    assert await ids(f"used_before={int(time.time()) - 60}") == []
    assert await ids(f"used_after={int(time.time()) - 60}&limit=1") == ["b2"]
    empty = (await site.http.get(f"{URL}?prefix=zz")).json()
    assert (empty["data"], empty["first_id"], empty["last_id"]) == ([], None, None)


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("limit=0", 400, "limit"),
        ("limit=101", 400, "limit"),
        ("limit=x", 400, "limit"),
        ("order=up", 400, "order"),
        ("after=a%20b", 400, "after"),
        ("after=nobody", 404, "after"),
        ("used_after=-1", 400, "used_after"),
        ("prefix=%00", 400, "prefix"),
        ("prefix=%25", 400, "prefix"),
        ("metadata[a]=%00", 400, "metadata"),
        ("metadata[a]=1&metadata[a]=2", 400, "metadata"),
        ("metadata[]=x", 400, "metadata"),
        ("metadata=x", 400, "metadata"),
        ("colour=red", 400, "colour"),
    ],
)
@served()
async def test_a_list_refuses_by_name(site: Site, query: str, status: int, param: str) -> None:
    response = await site.http.get(f"{URL}?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


# --- change -------------------------------------------------------------------------------------------------


@served()
async def test_an_update_changes_what_it_names_only(site: Site) -> None:
    await post(site, "", {"id": "s", "metadata": {"a": "1"}, "ttl_seconds": 60})
    shown = (await post(site, "/s", {"metadata": {"b": "2"}})).json()
    assert (shown["metadata"], shown["ttl_seconds"], shown["pinned_until"]) == ({"b": "2"}, 60, None)
    shown = (await post(site, "/s", {"pin_seconds": 100})).json()
    assert time.time() < shown["pinned_until"] <= time.time() + 100
    assert site.engine.pinned["default", "s"] == shown["pinned_until"]
    await site.log.update("default", "s", pinned_until=int(time.time()) - 1)
    assert (await show(site))["pinned_until"] is None
    shown = (await post(site, "/s", {"ttl_seconds": None, "pin_seconds": 0})).json()
    assert (shown["ttl_seconds"], shown["expires_at"], shown["pinned_until"]) == (None, None, None)
    assert site.engine.pinned["default", "s"] == 0
    assert shown["metadata"] == {"b": "2"}
    shown = (await post(site, "/s", {"metadata": {}})).json()
    assert shown["metadata"] == {}


@served()
async def test_a_fork_has_the_same_past_and_its_own_future(site: Site) -> None:
    await make(site)
    response = await post(site, "/s/fork", {"id": "f", "turn": 1})
    assert response.status_code == 201
    forked = response.json()
    assert (forked["id"], forked["turns"], forked["parent"]) == ("f", 1, {"session_id": "s", "turn": 1})
    assert await contents(site, "f") == ["Question 0", "Hello there, friend."]
    first = (await site.log.get("default", "f")).tokens  # type: ignore[union-attr]
    await site.chat(session_id="f", messages=MORE)
    assert site.prompt_ids()[: len(first)] == first
    assert (await show(site))["turns"] == 2
    whole = (await post(site, "/s/fork")).json()
    assert whole["id"].startswith("sess_")
    assert whole["tokens"] == (await show(site))["tokens"]


@served()
async def test_a_fork_needs_a_turn_that_is_there_and_an_id_that_is_free(site: Site) -> None:
    await make(site)
    refused(await post(site, "/s/fork", {"turn": 3}), 400, "invalid_value", "turn")
    refused(await post(site, "/s/fork", {"turn": -1}), 400, "invalid_value", "turn")
    refused(await post(site, "/s/fork", {"id": "s"}), 409, "session_exists", "id")
    assert (await post(site, "/s/fork", {"id": "f", "turn": 0})).json()["tokens"] == 0


@served()
async def test_a_rewind_to_a_turn_drops_what_came_after(site: Site) -> None:
    await make(site, turns=3)
    one = (await site.http.get(f"{URL}/s/turns")).json()["data"][0]
    shown = (await post(site, "/s/rewind", {"turn": 1})).json()
    assert (shown["turns"], shown["messages"]) == (1, 2)
    assert shown["tokens"] == one["prompt_tokens"] + one["completion_tokens"]
    before = (await site.log.get("default", "s")).tokens  # type: ignore[union-attr]
    await site.chat(session_id="s", messages=MORE)
    assert site.prompt_ids()[: len(before)] == before
    assert (await post(site, "/s/rewind", {"turn": 0})).json()["tokens"] == 0
    assert await contents(site) == []


@served()
async def test_a_rewind_to_a_token_cuts_the_reply_there(site: Site) -> None:
    text = "Hello wörld, friend."
    prompt = demo_tokens().encode(demo_tokens().render(as_logged(HELLO), generation_prompt=True), special=False)
    ids = [*prompt, *demo_tokens().encode(text + " STOP", special=False), END]
    assert site.engine.facts is not None
    await site.log.commit(
        "default",
        "s",
        NewTurn(
            tokens=ids,
            messages=[*as_logged(HELLO), LoggedMessage("assistant", text)],
            prompt_tokens=len(prompt),
            fingerprint=face_fingerprint(site),
            finish_reason="stop",
        ),
    )
    for cut in range(len(prompt) + 1, len(ids)):
        await post(site, "/s/fork", {"id": f"f{cut}"})
        answer = (await post(site, f"/f{cut}/rewind", {"tokens": cut})).json()
        assert (answer["turns"], answer["tokens"]) == (1, cut)
        whole = demo_tokens().decode(ids[len(prompt) : cut]).rstrip("\ufffd")
        assert (await contents(site, f"f{cut}"))[-1] == (whole if text.startswith(whole) else text)


class Words:
    """Token ids are words, with a space before each but at the start of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


def test_the_text_of_a_cut_reply_begins_as_the_reply_did() -> None:
    turn = TurnRecord(1, 0, 3, 6, 2, 0, "stop", "f")
    messages = [*as_logged(HELLO), LoggedMessage("assistant", " w4 w5 w6")]
    record = SessionRecord("s", [1, 2, 3, 4, 5, 6], messages, "f", 0, turns=(turn,))
    assert cut_reply(Words(), record, 5) == LoggedMessage("assistant", " w4 w5")  # type: ignore[arg-type]
    assert cut_reply(Words(), record, 3) is None  # type: ignore[arg-type]


@served()
async def test_a_rewind_into_a_prompt_goes_back_to_the_reply_before(site: Site) -> None:
    await make(site)
    first, second = (await site.http.get(f"{URL}/s/turns")).json()["data"]
    shown = (await post(site, "/s/rewind", {"tokens": second["prompt_tokens"]})).json()
    assert (shown["turns"], shown["tokens"]) == (1, first["prompt_tokens"] + first["completion_tokens"])


@pytest.mark.parametrize("body", [{}, {"turn": 1, "tokens": 1}, {"turn": 3}, {"tokens": 100_000}, {"turn": "1"}])
@served()
async def test_a_rewind_needs_one_place_that_is_there(site: Site, body: dict[str, Any]) -> None:
    await make(site)
    response = await post(site, "/s/rewind", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == ("tokens" if body.get("tokens") == 100_000 else "turn")
    assert (await show(site))["turns"] == 2


@served()
async def test_an_edited_question_is_read_by_the_next_turn(site: Site) -> None:
    await make(site, turns=3)
    response = await site.http.put(f"{URL}/s/messages/2", json={"content": "Another question"})
    assert response.status_code == 200
    assert (response.json()["turns"], response.json()["messages"]) == (1, 3)
    before = (await site.log.get("default", "s")).tokens  # type: ignore[union-attr]
    await site.chat(session_id="s", messages=MORE)
    prompt = site.prompt_ids()
    assert prompt[: len(before)] == before
    tail = demo_tokens().decode(prompt[len(before) :])
    assert "Another question" in tail
    assert "And now?" in tail
    assert "Question 1" not in tail


@served()
async def test_an_edited_reply_is_what_the_model_said(site: Site) -> None:
    await make(site)
    await site.http.put(f"{URL}/s/messages/3", json={"content": [{"type": "text", "text": "Edited."}]})
    assert await contents(site) == ["Question 0", "Hello there, friend.", "Question 1", "Edited."]
    await site.chat(session_id="s", messages=MORE)
    assert "Edited.<|im_end|>" in site.prompt()


@pytest.mark.parametrize(("index", "status"), [("4", 404), ("-1", 400), ("x", 400), ("9" * 5000, 400)])
@served()
async def test_a_message_that_is_not_there_cannot_be_edited(site: Site, index: str, status: int) -> None:
    await make(site)
    response = await site.http.put(f"{URL}/s/messages/{index}", json={"content": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (status, "index")


# --- regenerate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_reply_is_made_anew_from_the_same_prompt(site: Site, stream: bool) -> None:
    spell(site, "Hello there, friend.")
    await make(site)
    prompt, name = site.prompt_ids(), site.engine.submitted[-1].session
    site.engine.ids, site.engine.reply = None, "Something else."
    response = await post(site, "/s/regenerate", {"stream": stream, "temperature": 0, "max_tokens": 50})
    assert response.status_code == 200, response.text
    if stream:
        *chunks, done = events(response.text)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert done == "[DONE]"
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert text == "Something else."
    assert site.prompt_ids() == prompt
    submit = site.engine.submitted[-1]
    assert (submit.session, submit.sampling.temperature, submit.stopping.max_tokens) == (name, 0, 50)
    assert await contents(site) == ["Question 0", "Hello there, friend.", "Question 1", "Something else."]
    assert (await show(site))["turns"] == 2
    assert (await show(site))["tokens"] == len(prompt) + len(demo_tokens().encode("Something else.", special=False)) + 1


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_regenerate_that_fails_or_is_left_keeps_the_old_reply(site: Site, stream: bool) -> None:
    before = await make(site)
    site.engine.ends_badly = FinishReason.ERROR
    await post(site, "/s/regenerate", {"stream": stream})
    site.engine.ends_badly = None
    assert await contents(site) == ["Question 0", "Hello there, friend.", "Question 1", "Hello there, friend."]
    call = await paused_turn(site, f"{URL}/s/regenerate", {"stream": stream})
    await call.leave()
    after = await show(site)
    assert {**after, "last_used_at": 0} == {**before, "last_used_at": 0}


@served()
async def test_a_message_without_reply_is_answered(site: Site) -> None:
    await post(site, "", {"id": "s", "messages": SEED})
    response = await post(site, "/s/regenerate")
    assert response.json()["choices"][0]["message"]["content"] == "Hello there, friend."
    assert site.prompt_ids() == demo_tokens().encode(
        demo_tokens().render(as_logged(SEED), generation_prompt=True), special=False
    )
    assert await contents(site) == ["Be brief.", "Who are you?", "Hello there, friend."]
    await site.http.put(f"{URL}/s/messages/1", json={"content": "Who am I?"})
    await post(site, "/s/regenerate")
    assert await contents(site) == ["Be brief.", "Who am I?", "Hello there, friend."]
    assert "Who am I?" in site.prompt()


@served()
async def test_an_edited_question_behind_a_reply_is_answered(site: Site) -> None:
    await make(site)
    await site.http.put(f"{URL}/s/messages/2", json={"content": "Another"})
    before = (await site.log.get("default", "s")).tokens  # type: ignore[union-attr]
    await post(site, "/s/regenerate")
    assert site.prompt_ids()[: len(before)] == before
    assert await contents(site) == ["Question 0", "Hello there, friend.", "Another", "Hello there, friend."]


@served()
async def test_a_cut_or_edited_reply_is_made_anew_as_a_whole(site: Site) -> None:
    await make(site)
    prompt = site.prompt_ids()
    await post(site, "/s/rewind", {"tokens": len(prompt) + 2})
    await post(site, "/s/regenerate")
    assert site.prompt_ids() == prompt
    assert (await contents(site))[-1] == "Hello there, friend."
    await site.http.put(f"{URL}/s/messages/3", json={"content": "Edited."})
    await post(site, "/s/regenerate")
    assert site.prompt_ids() == prompt
    assert (await contents(site))[-1] == "Hello there, friend."


@served()
async def test_what_cannot_be_regenerated(site: Site) -> None:
    await post(site, "", {"id": "empty"})
    await post(site, "", {"id": "system", "messages": SEED[:1]})
    await make(site)
    refused(await post(site, "/empty/regenerate"), 400, "nothing_to_answer")
    refused(await post(site, "/system/regenerate"), 400, "nothing_to_answer")
    refused(await post(site, "/s/regenerate", {"messages": MORE}), 400, "unknown_parameter", "messages")
    refused(await post(site, "/s/regenerate", {"n": 2}), 400, None, "n")
    refused(await post(site, "/s/regenerate", {"session_id": "t"}), 400, "session_id_mismatch", "session_id")


@served()
async def test_a_regenerate_under_a_key_runs_once(site: Site) -> None:
    await make(site)
    site.engine.reply = "Second."
    headers = {"Idempotency-Key": "k"}
    first = await post(site, "/s/regenerate", {"seed": 1}, headers=headers)
    again = await post(site, "/s/regenerate", {"seed": 1}, headers=headers)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["choices"] == first.json()["choices"]
    assert len(site.engine.submitted) == 3


@served()
async def test_another_model_of_the_same_tokens_goes_on_with_the_log(site: Site) -> None:
    await make(site)
    before = await site.log.get("default", "s")
    assert site.engine.facts is not None
    assert before is not None
    site.engine.facts = msgspec.structs.replace(site.engine.facts, fingerprint="e" * 32, dtype="float64")
    assert (await show(site))["model_matches"] is True
    await site.chat(session_id="s")
    after = await site.log.get("default", "s")
    assert after is not None
    assert after.turns[:2] == before.turns  # nothing was rendered anew
    assert site.prompt_ids()[: len(before.tokens)] == before.tokens


@served()
async def test_a_log_of_other_tokens_is_rendered_anew(site: Site) -> None:
    spell(site, "Hello there, friend.")
    shown = await make(site)
    assert site.engine.facts is not None
    site.engine.facts = msgspec.structs.replace(site.engine.facts, vocab_size=site.engine.facts.vocab_size + 1)
    assert (await show(site))["model_matches"] is False
    messages = (await site.log.get("default", "s")).messages[:-1]  # type: ignore[union-attr]
    await post(site, "/s/regenerate")
    whole = demo_tokens().render(messages, generation_prompt=True)
    assert site.prompt_ids() == demo_tokens().encode(whole, special=False)
    assert (await show(site))["model_matches"] is True
    assert (await show(site))["messages"] == shown["messages"]


# --- delete -------------------------------------------------------------------------------------------------


@served()
async def test_a_deleted_session_is_gone_and_its_id_begins_empty(site: Site) -> None:
    await make(site)
    response = await site.http.delete(f"{URL}/s")
    assert response.json() == {"object": "session.deleted", "id": "s", "deleted": True}
    refused(await site.http.get(f"{URL}/s"), 404, "session_not_found")
    refused(await site.http.delete(f"{URL}/s"), 404, "session_not_found")
    assert ("default", "s") in site.engine.forgotten
    assert [*await site.log.tombstones()] == [("default", "s")]
    await site.chat(session_id="s", messages=MORE)
    assert await contents(site) == ["And now?", "Hello there, friend."]


@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
@served()
async def test_deleting_ends_a_turn_of_which_nothing_comes_back(
    site: Site, turns: int, stream: bool, waiting: bool
) -> None:
    if turns:
        await make(site, turns=turns)
    if waiting:
        site.engine.admit.clear()
    call = await paused_turn(site, body={"messages": MORE, "session_id": "s", "stream": stream})
    if not waiting and stream:
        await call.until(lambda: bool(call.body))
    response = await site.http.delete(f"{URL}/s")
    assert response.json()["deleted"] is True
    await call.finish()
    begun = stream and not waiting  # then the status has left, and the last event tells
    assert call.status == (200 if begun else 404)
    told = events(call.body.decode())[-1] if begun else json.loads(call.body)
    assert (told["error"]["code"], told["error"]["type"]) == ("session_deleted", "invalid_request_error")
    assert b"[DONE]" not in call.body
    site.engine.admit.set()
    refused(await site.http.get(f"{URL}/s"), 404, "session_not_found")
    site.engine.go.set()
    await asyncio.sleep(0)
    assert await site.log.get("default", "s") is None
    assert (await site.chat(session_id="s")).status_code == 200


@served()
async def test_a_turn_that_is_about_to_be_submitted_is_ended_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.api.sessions.routes.NUDGE_SECONDS", 0.001)
    await make(site, turns=1)
    held, get = asyncio.Event(), site.log.get

    async def slow_get(*args: Any) -> Any:
        await held.wait()
        return await get(*args)

    monkeypatch.setattr(site.log, "get", slow_get)
    site.engine.pause_after = 1
    call = Call.post(site.app, "/v1/chat/completions", {"messages": MORE, "session_id": "s"})
    await asyncio.sleep(0.01)
    deleting = asyncio.create_task(site.http.delete(f"{URL}/s"))
    await asyncio.sleep(0.01)
    assert ("default", "s") in site.engine.forgotten
    held.set()
    assert (await deleting).json()["deleted"] is True
    await call.finish()
    assert (call.status, json.loads(call.body)["error"]["code"]) == (404, "session_deleted")


@served()
async def test_a_turn_that_cannot_be_ended_is_a_409(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.api.sessions.routes.DELETE_SECONDS", 0.01)
    await make(site, turns=1)
    with site.log.claim("default", "s"):
        refused(await site.http.delete(f"{URL}/s"), 409, "session_busy")
    assert (await show(site))["turns"] == 1


# --- races and strangers ------------------------------------------------------------------------------------

VERBS: list[tuple[str, str, Any]] = [
    ("POST", "/s/fork", {"id": "f"}),
    ("POST", "/s/rewind", {"turn": 0}),
    ("POST", "/s/rewind", {"tokens": 0}),
    ("PUT", "/s/messages/0", {"content": "x"}),
    ("POST", "/s/regenerate", {}),
]
UPDATES: list[tuple[str, str, Any]] = [
    ("POST", "/s", {"metadata": {"team": "b"}}),
    ("POST", "/s", {"ttl_seconds": 60}),
    ("POST", "/s", {"ttl_seconds": None}),
    ("POST", "/s", {"pin_seconds": 60}),
    ("POST", "/s", {"pin_seconds": 0}),
]
LOOKS = [("GET", "/s", None), ("GET", "/s/turns", None), ("GET", "/s/messages", None), ("GET", "/s/export", None)]


async def paused_turn(site: Site, path: str = "/v1/chat/completions", body: Any = None) -> Call:
    """A turn of session s that waits after its first token until ``go`` is set."""
    site.engine.go.clear()
    site.engine.pause_after = 1
    before = len(site.engine.submitted)
    call = Call.post(site.app, path, {"messages": MORE, "session_id": "s"} if body is None else body)
    while len(site.engine.submitted) == before or not site.engine.running:
        await asyncio.sleep(0)
    return call


@pytest.mark.parametrize(("method", "path", "body"), VERBS)
@served()
async def test_a_verb_on_a_running_session_is_a_409(site: Site, method: str, path: str, body: Any) -> None:
    await make(site, turns=1)
    call = await paused_turn(site)
    response = await site.http.request(method, f"{URL}{path}", json=body)
    refused(response, 409, "session_busy")
    assert int(response.headers["retry-after"]) >= 1
    site.engine.go.set()
    await call.finish()
    assert (await show(site))["turns"] == 2
    site.engine.pause_after = None
    assert (await site.http.request(method, f"{URL}{path}", json=body)).status_code in (200, 201)


@pytest.mark.parametrize(("method", "path", "body"), UPDATES)
@served()
async def test_an_update_during_a_turn_lasts_and_the_turn_too(site: Site, method: str, path: str, body: Any) -> None:
    await make(site, turns=1)
    await post(site, "/s", {"metadata": {"team": "a"}, "ttl_seconds": 600, "pin_seconds": 600})
    call = await paused_turn(site)
    response = await site.http.request(method, f"{URL}{path}", json=body)
    assert response.status_code == 200, response.text
    changed = response.json()
    assert (changed["running"], changed["turns"]) == (True, 1)
    site.engine.go.set()
    await call.finish()
    assert call.status == 200
    shown = await show(site)
    assert shown["turns"] == 2
    kept = ("metadata", "ttl_seconds", "pinned_until")
    assert {name: shown[name] for name in kept} == {name: changed[name] for name in kept}
    assert shown["metadata"] == body.get("metadata", {"team": "a"})
    assert shown["ttl_seconds"] == body.get("ttl_seconds", None if "ttl_seconds" in body else 600)
    assert site.engine.pinned["default", "s"] == (shown["pinned_until"] or 0)
    assert (shown["pinned_until"] is None) == (body.get("pin_seconds") == 0)
    if shown["ttl_seconds"] is not None:
        assert shown["expires_at"] == shown["last_used_at"] + shown["ttl_seconds"]


@served()
async def test_updates_at_once_have_one_order_in_log_and_engine(site: Site) -> None:
    await make(site, turns=1)
    await asyncio.gather(*(post(site, "/s", {"pin_seconds": seconds}) for seconds in range(100, 120)))
    assert site.engine.pinned["default", "s"] == (await show(site))["pinned_until"]


@pytest.mark.parametrize(("method", "path", "body"), LOOKS)
@served()
async def test_looking_at_a_running_session_is_allowed(site: Site, method: str, path: str, body: Any) -> None:
    await make(site, turns=1)
    call = await paused_turn(site)
    assert (await site.http.request(method, f"{URL}{path}")).status_code == 200
    site.engine.go.set()
    await call.finish()


@pytest.mark.parametrize(("method", "path", "body"), [*VERBS, *UPDATES, *LOOKS, ("DELETE", "/s", None)])
@served(KEYS)
async def test_a_foreign_id_is_answered_as_an_unknown_one(site: Site, method: str, path: str, body: Any) -> None:
    await make(site, headers=ANN)
    foreign = await site.http.request(method, f"{URL}{path}", json=body, headers=BOB)
    unknown = await site.http.request(method, f"{URL}{path.replace('/s', '/t')}", json=body, headers=BOB)
    refused(foreign, 404, "session_not_found")
    assert foreign.content == unknown.content
    assert (await show(site, headers=ANN))["turns"] == 2
    assert (await site.http.request(method, f"{URL}{path}", json=body, headers=ANN)).status_code in (200, 201)


@served(KEYS)
async def test_the_list_and_new_ids_are_each_tenants_own(site: Site) -> None:
    for headers in (ANN, BOB):
        assert (await post(site, "", {"id": "s"}, headers=headers)).status_code == 201
    await make(site, "only-ann", headers=ANN)
    listed = [s["id"] for s in (await site.http.get(URL, headers=BOB)).json()["data"]]
    assert listed == ["s"]
    refused(await site.http.get(f"{URL}?after=only-ann", headers=BOB), 404, "session_not_found", "after")


@served()
async def test_of_twenty_equal_turns_at_once_one_runs(site: Site) -> None:
    await make(site, turns=1)
    answers = await asyncio.gather(*(site.chat(session_id="s", messages=MORE) for _ in range(20)))
    ran = [answer for answer in answers if answer.status_code == 200]
    assert {answer.status_code for answer in answers} == {200, 409}
    assert (await show(site))["turns"] == 1 + len(ran)
    assert (await show(site))["messages"] == 2 + 2 * len(ran)


@pytest.mark.parametrize("verb", [*VERBS, *UPDATES], ids=lambda verb: f"{verb[1]} {verb[2]}")
@served()
async def test_a_verb_and_a_turn_at_once_have_an_order(site: Site, verb: tuple[str, str, Any]) -> None:
    method, path, body = verb
    await make(site)
    turn, answer = await asyncio.gather(
        site.chat(session_id="s", messages=MORE), site.http.request(method, f"{URL}{path}", json=body)
    )
    assert sorted((turn.status_code, answer.status_code)) in ([200, 200], [200, 201], [200, 409], [201, 409])
    record = await site.log.get("default", "s")
    assert record is not None
    assert (len(record.turns), len(record.messages)) in ((2, 4), (3, 6), (0, 0), (0, 1), (1, 2))


@pytest.mark.parametrize("name", ["a b", "x" * 129, "%00"])
@pytest.mark.parametrize("call", [lambda s, n: s.get(f"{URL}/{n}"), lambda s, n: s.delete(f"{URL}/{n}")])
@served()
async def test_an_id_that_cannot_be_is_a_400(site: Site, name: str, call: Callable[..., Any]) -> None:
    refused(await call(site.http, name), 400, "invalid_session_id", "session_id")
