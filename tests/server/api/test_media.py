"""Pictures in requests of every API: what the template sees, what the log keeps, and what answers tell of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_engine import PICTURE_ROWS, SEEING
from http_context import HELLO, P, Scenario, Site, Test, served, site, within
from media_kit import asks, data_url, digest, encoded, png, said, saved, seeing_tokens, shown, wav
from msgspec import structs
from speech_kit import sound_file
from video_kit import film

from cache.media_frames import join_frames
from cache.media_ids import MEDIA, is_first
from scheduler.model_facts import MediaMarks
from scheduler.protocol import unpack_ids
from server.media.media import Media

pytest.importorskip("PIL")
CAT, DOG = png(3, 2), png(5, 4, shade=200)
LOOK = {"type": "function", "function": {"name": "look"}}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}


HEARD = MediaMarks("<audio>", 0, "scripted", "f" * 32, "audio")
WATCHED = MediaMarks("<video>", 0, "scripted", "f" * 32, "video")
MARKS = {"image": SEEING.media_marks, "audio": HEARD, "video": WATCHED}


def seeing(*kinds: str, **parts: Any) -> Callable[[Scenario[Site, P]], Test[P]]:
    """Make a test of a coroutine function whose first parameter is a Site whose model takes pictures."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Site]:
        taken = kinds or ("image",)
        first, *others = (MARKS[kind] for kind in taken)
        async with site(tokens=seeing_tokens(), **parts) as made:
            made.engine.facts = structs.replace(SEEING, media=taken, media_marks=first, further_marks=(*others,))
            yield made
            await made.app.state.media_reader.close()

    return within(opened)


def prompt(site: Site, number: int = -1) -> str:
    """The text of a submitted prompt, in which the rows of a picture are its mark again."""
    ids = unpack_ids(site.engine.submitted[number].prompt)
    assert site.engine.facts is not None
    assert site.engine.facts.media_marks is not None
    mark = seeing_tokens().encode(site.engine.facts.media_marks.mark, special=False)
    shown = [mark if is_first(token) else [] if token >= MEDIA else [token] for token in ids]
    return seeing_tokens().decode([token for part in shown for token in part])


async def stored(site: Site, *pictures: bytes) -> list[bool]:
    """Which of these the log has."""
    return [await site.log.media.get("default", digest(data)) is not None for data in pictures]


@seeing()
async def test_a_stateless_chat_shows_pictures_where_they_stand(site: Site) -> None:
    parts = [said("One: "), shown(data_url(CAT)), said("Two: "), said("and"), shown(data_url(DOG), detail="high")]
    answer = await site.chat(messages=[asks(*parts)])
    assert answer.status_code == 200, answer.text
    assert "user\nOne: <image>Two: \nand<image><|im_end|>" in prompt(site)
    assert answer.json()["cache"]["adapted"] == [{"rule": "detail_left_out", "param": "detail", "count": 1}]
    assert await stored(site, CAT, DOG) == [False, False]


@seeing()
async def test_a_picture_of_low_detail_is_a_smaller_one(site: Site) -> None:
    large, small = png(1500, 900), png(500, 300)
    path = "/v1/sessions/s/chat/completions"
    for picture, reduced in ((large, 1), (small, 0)):
        answer = await site.chat(path, messages=[asks(shown(data_url(picture), detail="low"))])
        assert answer.status_code == 200, answer.text
        told = [one for one in answer.json()["cache"].get("adapted", []) if one["rule"] == "picture_reduced"]
        assert told == [{"rule": "picture_reduced", "param": "detail", "count": 1}] * reduced
    (first, _, second, _) = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    (less,), (same,) = first["media"], second["media"]
    assert (less["width"], less["height"], less["format"]) == (512, 307, "png")
    assert less["digest"] != digest(large)
    assert same["digest"] == digest(small)
    assert await stored(site, large, small) == [False, True]
    shown_low = {"type": "input_image", "image_url": data_url(large), "detail": "low"}
    answer = await site.http.post("/v1/responses", json={"input": [{"role": "user", "content": [shown_low]}]})
    assert answer.status_code == 200, answer.text
    (item, *_) = (await site.http.get(f"/v1/responses/{answer.json()['id']}/input_items")).json()["data"]
    assert item["content"][0]["image_url"].endswith(less["digest"])


@seeing()
async def test_a_session_keeps_its_pictures_until_it_is_deleted(site: Site) -> None:
    path = "/v1/sessions/s/chat/completions"
    assert (await site.chat(path, messages=[asks(shown(data_url(CAT)), said("What?"))])).status_code == 200
    assert (await site.chat(path)).status_code == 200
    assert prompt(site).startswith("<|im_start|>user\n<image>What?<|im_end|>")
    assert "user\nHello<|im_end|>" in prompt(site)
    (first, *_) = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    told = {"kind": "image", "digest": digest(CAT), "format": "png", "width": 3, "height": 2, "at": 0}
    assert (first["content"], first["media"]) == ("What?", [told])
    got = await site.http.get(f"/v1/media/{digest(CAT)}")
    assert (got.content, got.headers["content-type"]) == (CAT, "image/png")
    assert got.headers["x-content-type-options"] == "nosniff"
    again = await site.chat(messages=[asks(shown(f"/v1/media/{digest(CAT)}"))])
    assert again.status_code == 200
    await site.http.delete("/v1/sessions/s")
    assert await stored(site, CAT) == [False]
    assert (await site.http.get(f"/v1/media/{digest(CAT)}")).status_code == 404
    gone = await site.chat(messages=[asks(shown(f"/v1/media/{digest(CAT)}"))])
    assert gone.json()["error"]["param"] == "messages[0].content[0].image_url.url"


@seeing()
async def test_another_picture_is_no_replay_and_the_same_one_is(site: Site) -> None:
    path, key = "/v1/sessions/s/chat/completions", {"idempotency-key": "k"}
    first = await site.chat(path, headers=key, messages=[asks(shown(data_url(CAT)))])
    again = await site.chat(path, headers=key, messages=[asks(shown(data_url(CAT, "image/webp")))])
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["choices"] == first.json()["choices"]
    other = await site.chat(path, headers=key, messages=[asks(shown(data_url(DOG)))])
    assert other.status_code == 422
    assert await stored(site, CAT, DOG) == [True, False]


@seeing()
async def test_what_a_tool_gives_back_is_seen(site: Site) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": [said("Done."), shown(data_url(CAT))]}
    behind = asks(shown(data_url(DOG)))
    answer = await site.chat(messages=[*HELLO, CALLS, result, behind], tools=[LOOK])
    assert answer.status_code == 200, answer.text
    assert "Done.<image>" in prompt(site)
    assert prompt(site).count("<image>") == 2
    assert "adapted" not in answer.json()["cache"]


@seeing()
async def test_a_line_goes_on_with_the_same_picture_only(site: Site) -> None:
    hint = {"x-session-affinity": "talk"}
    history = [{"role": "system", "content": "Be brief."}, asks(said("See"), shown(data_url(CAT)))]
    first = await site.chat(messages=history, tools=[LOOK], headers=hint)
    history += [first.json()["choices"][0]["message"], asks(said("More?"))]
    second = await site.chat(messages=history, tools=[LOOK], headers=hint)
    assert second.json()["cache"]["line"]["outcome"] == "continued", second.text
    assert await stored(site, CAT) == [True]
    other = [history[0], asks(said("See"), shown(data_url(DOG))), *history[2:]]
    third = await site.chat(messages=other, tools=[LOOK], headers=hint)
    assert third.json()["cache"]["line"]["outcome"] != "continued"


@seeing()
async def test_an_edit_replaces_pictures_and_can_keep_them_by_their_path(site: Site) -> None:
    await site.http.post("/v1/sessions", json={"id": "s", "messages": [asks(said("See"), shown(data_url(CAT)))]})
    url = f"/v1/media/{digest(CAT)}"
    made = await site.http.put("/v1/sessions/s/messages/0", json={"content": [shown(url), said("Other")]})
    assert made.status_code == 200, made.text
    (message,) = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    assert (message["content"], [one["at"] for one in message["media"]]) == ("Other", [0])
    await site.http.put("/v1/sessions/s/messages/0", json={"content": "Text"})
    (message,) = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    assert "media" not in message


@seeing()
async def test_a_fork_and_a_capsule_have_the_pictures(site: Site) -> None:
    await site.chat("/v1/sessions/s/chat/completions", messages=[asks(shown(data_url(CAT)), shown(data_url(DOG)))])
    capsule = (await site.http.get("/v1/sessions/s/export")).content
    assert (await site.http.post("/v1/sessions/s/fork", json={"id": "f"})).status_code == 201
    await site.http.delete("/v1/sessions/s")
    assert await stored(site, CAT, DOG) == [True, True]
    await site.http.delete("/v1/sessions/f")
    assert await stored(site, CAT, DOG) == [False, False]
    kind = {"content-type": "application/zip"}
    made = await site.http.post("/v1/sessions/import", content=capsule, headers=kind)
    assert made.status_code == 201, made.text
    assert await stored(site, CAT, DOG) == [True, True]
    assert (await site.chat("/v1/sessions/s/chat/completions")).status_code == 200
    assert prompt(site).count("<image>") == 2


@seeing()
async def test_a_capsule_whose_pictures_were_changed_is_refused(site: Site) -> None:
    await site.chat("/v1/sessions/s/chat/completions", messages=[asks(shown(data_url(CAT)))])
    capsule = (await site.http.get("/v1/sessions/s/export")).content
    assert CAT in capsule
    kind = {"content-type": "application/zip"}
    for changed in (capsule.replace(CAT, CAT[:-1] + b"x"), capsule.replace(b'\\"width\\":3', b'\\"width\\":4')):
        path = "/v1/sessions/import?id=t"
        answer = await site.http.post(path, content=changed, headers=kind) if changed != capsule else None
        assert answer is None or answer.json()["error"]["code"] == "invalid_capsule"


@seeing()
async def test_responses_take_pictures_and_tell_where_they_are(site: Site) -> None:
    parts = [
        {"type": "input_text", "text": "See: "},
        {"type": "input_image", "image_url": data_url(CAT), "detail": "auto"},
        {"type": "input_file", "filename": "dog.png", "file_data": data_url(DOG)},
    ]
    asked = {"input": [{"role": "user", "content": parts}]}
    first = await site.http.post("/v1/responses", json=asked)
    assert first.status_code == 200, first.text
    assert "See: <image><image><|im_end|>" in prompt(site)
    id = first.json()["id"]
    items = (await site.http.get(f"/v1/responses/{id}/input_items")).json()["data"]
    assert [part["type"] for part in items[0]["content"]] == ["input_text", "input_image", "input_image"]
    assert items[0]["content"][1]["image_url"] == f"/v1/media/{digest(CAT)}"
    assert encoded(CAT) not in first.text
    follow = await site.http.post("/v1/responses", json={"input": "And?", "previous_response_id": id})
    assert follow.status_code == 200
    assert prompt(site).count("<image>") == 2
    assert await stored(site, CAT, DOG) == [True, True]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = [{"type": "input_image", "image_url": data_url(CAT)}]
    result = {"type": "function_call_output", "call_id": "c", "output": output}
    tool = {"type": "function", "name": "look", "parameters": {}}
    third = await site.http.post("/v1/responses", json={"input": [call, result], "store": False, "tools": [tool]})
    assert third.status_code == 200, third.text
    assert "<image>" in prompt(site)


@seeing()
async def test_conversations_hold_pictures(site: Site) -> None:
    part = {"type": "input_image", "image_url": data_url(CAT)}
    items = [{"type": "message", "role": "user", "content": [part]}]
    made = (await site.http.post("/v1/conversations", json={"items": items})).json()
    assert await stored(site, CAT) == [True]
    more = [{"type": "message", "role": "user", "content": [{**part, "image_url": data_url(DOG)}]}]
    added = await site.http.post(f"/v1/conversations/{made['id']}/items", json={"items": more})
    assert added.json()["data"][0]["content"][0]["media"]["width"] == 5
    listed = (await site.http.get(f"/v1/conversations/{made['id']}/items?order=asc")).json()["data"]
    again = {"input": [{"role": "user", "content": listed[0]["content"]}], "conversation": made["id"]}
    for part in again["input"][0]["content"]:
        part.pop("media")
    answer = await site.http.post("/v1/responses", json=again)
    assert answer.status_code == 200, answer.text
    assert prompt(site).count("<image>") == 3
    await site.http.delete(f"/v1/conversations/{made['id']}")
    assert await stored(site, CAT, DOG) == [False, False]


@seeing()
async def test_anthropics_blocks_are_seen_in_messages_and_results(site: Site) -> None:
    def block(data: bytes) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(data)}}

    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [said("Seen: "), block(DOG)]}
    messages = [
        {"role": "user", "content": [said("Look: "), block(CAT), said("well?")]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, block(CAT), said("go on")]},
    ]
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    body = {"model": "demo", "max_tokens": 8, "messages": messages, "tools": tools}
    answer = await site.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert "Look: <image>well?" in prompt(site)
    assert "Seen: <image>" in prompt(site)
    assert "<image>go on" in prompt(site)
    count = await site.http.post("/v1/messages/count_tokens", json={"model": "demo", "messages": messages[:1]})
    assert count.status_code == 200


@seeing()
async def test_ollamas_images_come_before_the_text(site: Site) -> None:
    message = {"role": "user", "content": "See", "images": [encoded(CAT), encoded(DOG)]}
    answer = await site.http.post("/api/chat", json={"messages": [message], "stream": False})
    assert answer.status_code == 200, answer.text
    assert "user\n<image><image>See<|im_end|>" in prompt(site)
    made = await site.http.post("/api/generate", json={"prompt": "See", "images": [encoded(CAT)], "stream": False})
    assert made.status_code == 200, made.text
    assert "<image>See" in prompt(site)
    shown_model = (await site.http.post("/api/show", json={"model": "demo"})).json()
    assert "vision" in shown_model["capabilities"]
    bad = await site.http.post("/api/chat", json={"messages": [{**message, "images": ["x"]}]})
    assert "messages[0].images[0]" in bad.json()["error"]


@seeing("image", "audio")
async def test_sounds_are_taken_by_models_that_hear(site: Site) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": encoded(wav()), "format": "wav"}}
    answer = await site.chat("/v1/sessions/s/chat/completions", messages=[asks(said("Hear: "), sound)])
    assert answer.status_code == 200, answer.text
    assert "Hear: <image>" in prompt(site)  # as this names any row
    assert (await site.http.get(f"/v1/media/{digest(wav())}")).headers["content-type"] == "audio/wav"


@seeing("image", "audio", "video")
async def test_pictures_sounds_and_videos_are_taken_in_one_message(site: Site) -> None:
    pytest.importorskip("soundfile")
    url, frames = data_url(film(), "image/gif"), [data_url(CAT), data_url(DOG)]
    sound = {"type": "audio_url", "audio_url": {"url": data_url(wav(), "audio/wav")}}
    parts = [{"type": "video_url", "video_url": {"url": url}}, sound, shown(data_url(CAT))]
    path = "/v1/sessions/s/chat/completions"
    answer = await site.chat(path, messages=[asks(said("See: "), *parts, {"type": "video", "video": frames})])
    assert answer.status_code == 200, answer.text
    ids = unpack_ids(site.engine.submitted[-1].prompt)
    assert sum(is_first(token) for token in ids) == 4
    details = answer.json()["usage"]["prompt_tokens_details"]
    told = (details["image_tokens"], details["audio_tokens"], details["video_tokens"])
    assert told == (PICTURE_ROWS, PICTURE_ROWS, 2 * PICTURE_ROWS)
    (first, *_) = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    assert [(one["kind"], one["format"]) for one in first["media"]] == [
        ("video", "gif"),
        ("audio", "wav"),
        ("image", "png"),
        ("video", "frames"),
    ]
    capsule = (await site.http.get("/v1/sessions/s/export")).content
    await site.http.delete("/v1/sessions/s")
    made = await site.http.post("/v1/sessions/import", content=capsule, headers={"content-type": "application/zip"})
    assert made.status_code == 201, made.text
    assert await stored(site, CAT, wav(), film(), join_frames([CAT, DOG])) == [True] * 4
    assert (await site.http.get(f"/v1/media/{digest(wav())}")).headers["content-type"] == "audio/wav"


@seeing("audio")
async def test_tokens_of_sounds_are_counted_and_pictures_refused(site: Site) -> None:
    pytest.importorskip("soundfile")
    data = sound_file("MP3", 0.3)
    sound = {"type": "input_audio", "input_audio": {"data": encoded(data), "format": "mp3"}}
    answer = await site.chat("/v1/sessions/s/chat/completions", messages=[asks(said("Hear: "), sound)])
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert details["audio_tokens"] == PICTURE_ROWS
    assert "image_tokens" not in details
    assert (await site.http.get(f"/v1/media/{digest(data)}")).headers["content-type"] == "audio/mp3"
    item = {"role": "user", "content": [{"type": "input_audio", "input_audio": sound["input_audio"]}]}
    made = await site.http.post("/v1/responses", json={"input": [item]})
    assert made.status_code == 200, made.text
    refused = await site.chat(messages=[asks(shown(data_url(CAT)))])
    assert refused.json()["error"]["param"] == "messages[0].content[0].image_url"


@seeing("image")
async def test_a_session_with_pictures_is_refused_by_a_model_that_only_hears(site: Site) -> None:
    path = "/v1/sessions/s/chat/completions"
    assert (await site.chat(path, messages=[asks(shown(data_url(CAT)))])).status_code == 200
    assert site.engine.facts is not None
    site.engine.facts = structs.replace(site.engine.facts, media=("audio",), fingerprint="e" * 32)
    answer = await site.chat(path, messages=[asks(shown(data_url(CAT)))])
    assert answer.status_code == 400


@seeing("image")
async def test_sounds_are_refused_by_models_that_only_see(site: Site) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": encoded(wav()), "format": "wav"}}
    answer = await site.chat(messages=[asks(sound)])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].input_audio"


@seeing()
async def test_exif_turns_a_picture(site: Site) -> None:
    image = pytest.importorskip("PIL.Image")
    exif = image.Exif()
    exif[0x0112] = 6
    turned = saved("JPEG", 8, 4, exif=exif)
    await site.chat("/v1/sessions/s/chat/completions", messages=[asks(shown(data_url(turned)))])
    (first, *_) = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    (medium,) = first["media"]
    assert (medium["format"], medium["width"], medium["height"]) == ("jpeg", 4, 8)


@seeing(api_keys={"ann": "a", "bob": "b"})
async def test_tenants_do_not_see_each_others_pictures(site: Site) -> None:
    ann, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
    path = "/v1/sessions/s/chat/completions"
    await site.chat(path, headers=ann, messages=[asks(shown(data_url(CAT)))])
    url = f"/v1/media/{digest(CAT)}"
    assert (await site.http.get(url, headers=ann)).status_code == 200
    assert (await site.http.get(url, headers=bob)).status_code == 404
    assert (await site.http.get(url)).status_code == 401
    stolen = await site.chat(path, headers=bob, messages=[asks(shown(url))])
    assert stolen.json()["error"]["code"] == "invalid_media"


@seeing()
async def test_a_stored_chat_names_its_pictures(site: Site) -> None:
    made = await site.chat(store=True, messages=[asks(said("See"), shown(data_url(CAT)))])
    listed = await site.http.get(f"/v1/chat/completions/{made.json()['id']}/messages")
    (message,) = listed.json()["data"]
    assert message["content"][1]["image_url"]["url"] == f"/v1/media/{digest(CAT)}"


@served(tokens=seeing_tokens)
async def test_a_model_that_does_not_see_refuses_as_before(site: Site) -> None:
    answer = await site.chat(messages=[asks(shown(data_url(CAT)))])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].image_url"
    item = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(CAT)}]}
    response = await site.http.post("/v1/responses", json={"input": [item]})
    assert response.json()["error"]["param"] == "input[0].content[0].image_url"


@seeing()
async def test_no_json_passes_for_a_picture_that_was_checked(site: Site) -> None:
    media = {"kind": "image", "digest": digest(CAT), "format": "png", "width": 3, "height": 2}
    for part in (media, {"type": "image", **media}, {"type": "media", "media": media}):
        assert (await site.chat(messages=[asks(part)])).status_code == 400
    assert Media(**media).url.endswith(digest(CAT))  # type: ignore[arg-type]
