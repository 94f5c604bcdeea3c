"""Pictures from the outside: a real server's replies are those of a from-scratch forward with all pixels, in sessions
and in stateless chats, over a restart; each picture is encoded once.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("PIL")

from seeing_kit import loaded_of, oracle_logits
from server_process import ServerProcess
from vision_models import picture, save_seeing_model, tokenizer_of

from cache.media_ids import MEDIA
from scheduler.media.eyes import Eyes

pytestmark = pytest.mark.wide

CAT, DOG = picture(64, 48, 1), picture(48, 90, 2)


def shown(text: str, *pictures: bytes) -> dict[str, Any]:
    """A user's message: pictures, then text."""
    urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in pictures]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}


def ask(server: ServerProcess, name: str, messages: list[dict[str, Any]], path: str = "/v1/chat/completions") -> Any:
    body = {"messages": messages, "temperature": 0, "max_tokens": 6, "return_token_ids": True, "ignore_eos": True}
    body["logit_bias"] = {str(placeholder_of(name)): -100}  # the model's own forward takes no more of them than rows
    return server.answer(path, body)


def eyes_of(name: str) -> Eyes:
    eyes = loaded_of(name).eyes
    assert eyes is not None
    return eyes


def placeholder_of(name: str) -> int:
    return eyes_of(name).sight.placeholder


def check(name: str, answer: dict[str, Any], *pictures: bytes) -> None:
    """Each token is the likeliest one, says a forward without a cache, with all pictures."""
    ids, said = list(answer["prompt_token_ids"]), answer["choices"][0]["token_ids"]
    rows = sum(token >= MEDIA for token in ids)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["prompt_tokens_details"].get("image_tokens", 0) == rows
    assert len(said) == 6
    for token in said:
        logits = oracle_logits(name, ids, pictures)[0]
        logits[placeholder_of(name)] = -torch.inf
        assert int(logits.argmax()) == token
        ids.append(token)


def own_ids(name: str, messages: list[dict[str, Any]], *pictures: bytes) -> list[int]:
    """What the processor itself makes of a conversation and its pictures."""
    from scheduler.media.senses import decode_picture

    plain = [
        {**one, "content": [{"type": "image"} if part["type"] == "image_url" else part for part in one["content"]]}
        if isinstance(one["content"], list)
        else one
        for one in messages
    ]
    text = tokenizer_of(name).apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    made = eyes_of(name).processor._processor(images=[decode_picture(one) for one in pictures], text=[text])
    ids: list[int] = made["input_ids"][0]
    return ids


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5_vl",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "llava", "idefics3")),
    ],
)
def test_chats_with_pictures_say_what_the_model_says(name: str, tmp_path: Path) -> None:
    model = save_seeing_model(name, tmp_path)
    eyes = eyes_of(name)
    path = "/v1/sessions/s/chat/completions"
    with ServerProcess(model, tmp_path) as server:
        assert httpx.get(f"{server.url}/v1/models/m").json()["warmturn"]["media"] == ["image"]
        first = ask(server, name, [shown("What is this?", CAT)], path)
        check(name, first, CAT)
        own = own_ids(name, [shown("What is this?", CAT)], CAT)
        assert [eyes.sight.placeholder if one >= MEDIA else one for one in first["prompt_token_ids"]] == own
        assert first["cache"]["pictures"] == {"encoded": 1, "reused": 0}
        second = ask(server, name, [shown("And now?")], path)
        check(name, second, CAT)
        assert second["cache"]["pictures"] == {"encoded": 0, "reused": 1}
        beside = ask(server, name, [shown("How far is the moon?")])
        check(name, beside)
        assert "image_tokens" not in beside["usage"]["prompt_tokens_details"]
        assert server.metric("warmturn_pictures_encoded_total") == 1
    with ServerProcess(model, tmp_path) as server:
        third = ask(server, name, [shown("Another one", DOG)], path)
        check(name, third, CAT, DOG)
        assert third["cache"]["pictures"] == {"encoded": 1, "reused": 1}
        assert server.metric("warmturn_pictures_encoded_total") == 1
        fourth = ask(server, name, [shown("Which?")], path)
        check(name, fourth, CAT, DOG)
        whole = [shown("Compare", CAT, DOG), {"role": "assistant", "content": "Well"}, shown("Go on")]
        stateless = ask(server, name, whole)
        check(name, stateless, CAT, DOG)
        again = ask(server, name, whole)
        assert again["choices"][0]["token_ids"] == stateless["choices"][0]["token_ids"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
        refused = server.post("/v1/chat/completions", {"messages": [shown(eyes.processor.mark, CAT)]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
        assert server.metric("warmturn_encoder_seconds_total") > 0
