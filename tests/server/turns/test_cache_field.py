"""The field ``cache`` on the wire: beside usage in bodies, once at the end of a stream, for chats and completions."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fake_engine import FACTS
from http_context import HELLO, Site, demo_tokens, events, reply_ids, served
from log_kit import as_logged

from cache.tier import Tier
from scheduler.turn_receipt import Miss, Receipt
from server.chat.stateful import full_ids
from server.log.logged_message import LoggedMessage
from server.log.timeline import NewTurn, SessionRecord

MORE = [{"role": "user", "content": "And now?"}]
END = 2
NOTHING = dict.fromkeys(map(str, Tier), 0)


def token(id: int) -> dict[str, Any]:
    return {"id": id, "text": demo_tokens().decode([id])}


async def logged(site: Site) -> SessionRecord:
    record = await site.log.get("default", "s")
    assert record is not None
    return record


async def ask(site: Site, **body: Any) -> Any:
    response = await site.chat(**body)
    assert response.status_code == 200, response.text
    return response.json()["cache"]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@served()
async def test_a_body_says_what_its_prompt_cost(site: Site, endpoint: str) -> None:
    site.engine.receipts = [Receipt(9, 7, loaded={Tier.HOST: 1, Tier.DISK: 3, Tier.REMOTE: 2}, load_seconds=0.004)]
    body = (await getattr(site, endpoint)()).json()
    prefill = body["cache"].pop("prefill_ms")
    assert 0 <= prefill < 60_000
    assert 0 <= body["cache"].pop("decode_ms") < 60_000
    length = len(site.prompt_ids())
    assert body["cache"] == {
        "prompt_tokens": length,
        "reused": {**NOTHING, "device": 1, "host": 1, "disk": 3, "remote": 2},
        "recomputed": 0,
        "new": max(0, length - 7),
        "load_ms": 4.0,
        "miss": None,
    }
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("usage", [False, True])
@served()
async def test_a_stream_says_it_once_where_it_ends_and_beside_usage(site: Site, endpoint: str, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = events((await getattr(site, endpoint)(stream=True, n=2, **options)).text)
    assert chunks.pop() == "[DONE]"
    carrying = [chunk for chunk in chunks if "cache" in chunk]
    ends = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"] is not None]
    assert len(ends) == 2
    assert carrying == [ends[-1], *([chunks[-1]] if usage else [])]
    assert len({str(chunk["cache"]) for chunk in carrying}) == 1
    assert carrying[0]["cache"]["prompt_tokens"] == len(site.prompt_ids())


@served()
async def test_several_prompts_and_choices_are_one_receipt(site: Site) -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    expected = Receipt(3, 0, miss=Miss.DIVERGED, matched=1, expected=12)
    site.engine.receipts = [Receipt(4, 3), Receipt(4, 0), expected, Receipt(3, 2)]
    cache = (await site.complete(prompt=prompts, n=2)).json()["cache"]
    assert cache["reused"] == {**NOTHING, "device": 3}
    assert (cache["prompt_tokens"], cache["new"]) == (7, 4)
    assert cache["miss"] == {"reason": "diverged", "at": 1, "got": token(prompts[1][1]), "expected": token(12)}


@served()
async def test_the_prefill_is_timed_from_the_admission_in_the_engine(site: Site) -> None:
    now = time.monotonic()
    site.engine.receipts = [Receipt(9, 0, admitted=now - 50), Receipt(9, 0, admitted=now + 1000)]
    assert (await ask(site))["prefill_ms"] >= 50_000
    assert (await ask(site))["prefill_ms"] == 0


@served()
async def test_where_no_token_is_asked_for_there_is_no_prefill_to_time(site: Site) -> None:
    cache = (await site.complete(max_tokens=0)).json()["cache"]
    assert cache["prefill_ms"] is None


@served()
async def test_a_stateful_turn_misses_nothing_when_the_cache_has_its_session(site: Site) -> None:
    assert (await ask(site, session_id="s"))["miss"] is None
    cache = await ask(site, session_id="s", messages=MORE)
    assert cache["miss"] is None
    assert cache["recomputed"] == 0
    assert cache["reused"]["device"] == len([*site.prompt_ids(0), *reply_ids(), END])


@served()
async def test_a_stateful_turn_whose_cache_is_gone_was_evicted(site: Site) -> None:
    await ask(site, session_id="s")
    site.engine.receipts = [Receipt(0, 0)]  # an engine that has just started knows of nothing
    cache = await ask(site, session_id="s", messages=MORE)
    assert cache["miss"] == {"reason": "evicted", "at": 0, "got": None, "expected": None}
    known = len(site.prompt_ids(0)) + len(reply_ids())
    assert (cache["recomputed"], cache["new"]) == (known, len(site.prompt_ids()) - known)


@pytest.mark.parametrize("reason", ["damaged", "recompute_cheaper", "no_room", "no_checkpoint"])
@served()
async def test_the_engines_own_reasons_pass(site: Site, reason: str) -> None:
    await ask(site, session_id="s")
    site.engine.receipts = [Receipt(0, 4, miss=Miss(reason))]
    cache = await ask(site, session_id="s", messages=MORE)
    assert cache["miss"] == {"reason": reason, "at": 4, "got": None, "expected": None}


@served()
async def test_a_full_history_under_a_name_that_was_edited(site: Site) -> None:
    named = {"X-Session-ID": "s", "X-Session-Create": "true"}
    await ask(site, headers=named)
    logged = [*site.prompt_ids(), *reply_ids(), END]
    history = [*HELLO, {"role": "assistant", "content": "Hello there, Ann."}, *MORE]
    cache = await ask(site, headers=named, messages=history)
    prompt = site.prompt_ids()
    at = next(i for i, (a, b) in enumerate(zip(prompt, logged, strict=False)) if a != b)
    assert cache["miss"] == {
        "reason": "edited_history",
        "at": at,
        "got": token(prompt[at]),
        "expected": token(logged[at]),
    }
    assert cache["recomputed"] == 0
    assert cache["reused"]["device"] == at


@served()
async def test_a_full_history_under_a_name_that_was_kept(site: Site) -> None:
    named = {"X-Session-ID": "s", "X-Session-Create": "true"}
    await ask(site, headers=named)
    history = [*HELLO, {"role": "assistant", "content": "Hello there, friend."}, *MORE]
    assert (await ask(site, headers=named, messages=history))["miss"] is None


@served()
async def test_words_that_tokenise_otherwise_than_they_were_sampled_are_drift(site: Site) -> None:
    named = {"X-Session-ID": "s", "X-Session-Create": "true"}
    letters = [id for letter in "Hello there." for id in demo_tokens().encode(letter, special=False)]
    site.engine.ids = [*letters, END]
    text = (await site.chat(headers=named)).json()["choices"][0]["message"]["content"]
    at = len(site.prompt_ids())
    history = [*HELLO, {"role": "assistant", "content": text}, *MORE]
    cache = await ask(site, headers=named, messages=history)
    assert site.prompt_ids()[at] != letters[0]
    assert cache["miss"] == {
        "reason": "template_drift",
        "at": at,
        "got": token(site.prompt_ids()[at]),
        "expected": token(letters[0]),
    }


@served()
async def test_a_log_of_another_model_is_a_miss_of_its_own(site: Site) -> None:
    await site.log.commit(
        "default",
        "s",
        NewTurn(
            tokens=[700, 701, 702],
            messages=[*as_logged(HELLO), LoggedMessage("assistant", "Ho")],
            fingerprint="another",
            finish_reason="stop",
        ),
    )
    cache = await ask(site, session_id="s", messages=MORE)
    assert cache["miss"] == {"reason": "fingerprint", "at": 0, "got": None, "expected": None}
    assert (await logged(site)).fingerprint == demo_tokens().fingerprint(FACTS.vocab_size)
    assert (await ask(site, session_id="s", messages=MORE))["miss"] is None


@served()
async def test_an_unnamed_chat_is_told_where_it_left_the_cache(site: Site) -> None:
    site.engine.receipts = [Receipt(0, 2, miss=Miss.DIVERGED, matched=3, expected=7)]
    cache = await ask(site)
    assert cache["miss"] == {"reason": "diverged", "at": 3, "got": token(site.prompt_ids()[3]), "expected": token(7)}


@served()
async def test_a_seeded_message_is_rendered_by_the_next_turn(site: Site) -> None:
    past = [LoggedMessage("system", "Be brief."), LoggedMessage("user", "I am Ann.")]
    await site.log.create("default", "s", messages=past)
    await ask(site, session_id="s", messages=MORE)
    assert site.prompt_ids() == full_ids(demo_tokens(), [*past, *as_logged(MORE)])
    record = await logged(site)
    assert [m.content for m in record.messages] == ["Be brief.", "I am Ann.", "And now?", "Hello there, friend."]


@served()
async def test_an_edited_message_is_rendered_behind_the_tokens_that_stay(site: Site) -> None:
    for messages in (HELLO, MORE):
        await ask(site, session_id="s", messages=messages)
    await site.log.edit("default", "s", 2, "And then?")
    kept = (await logged(site)).tokens
    cache = await ask(site, session_id="s", messages=[{"role": "user", "content": "Tell me."}])
    prompt = site.prompt_ids()
    assert prompt[: len(kept)] == kept
    assert demo_tokens().decode(prompt[len(kept) :]) == (
        "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>user\nTell me.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert cache["miss"] is None  # of what the log holds now, everything was there


@served()
async def test_raw_text_follows_messages_that_no_turn_has_rendered(site: Site) -> None:
    await site.log.create("default", "s", messages=[LoggedMessage("user", "Once")])
    await site.complete(prompt=" upon", session_id="s")
    tokens = demo_tokens()
    assert site.prompt_ids() == [*tokens.encode("Once", special=True), *tokens.encode(" upon", special=False)]


@served()
async def test_and_text_that_was_edited_since(site: Site) -> None:
    tokens = demo_tokens()
    for prompt in ("Once", " upon"):
        await site.complete(prompt=prompt, session_id="s")
    await site.log.edit("default", "s", 2, " under")
    kept = (await logged(site)).tokens
    assert kept
    await site.complete(prompt=" a time", session_id="s")
    edited = [*tokens.encode(" under", special=False), *tokens.encode(" a time", special=False)]
    assert site.prompt_ids() == [*kept, *edited]


@served()
async def test_a_whole_text_under_a_name_is_the_prompt(site: Site) -> None:
    for prompt in ("Once", "Once upon"):
        await site.complete(prompt=prompt, headers={"X-Session-ID": "s", "X-Session-Create": "true"})
        assert site.prompt_ids() == demo_tokens().encode(prompt, special=True)
