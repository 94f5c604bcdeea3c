"""Models of other kinds, served as any: an encoder-decoder and a recurrent one, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from server_process import ServerProcess
from tiny_models import greedy, make_tokenizer, model_of, save_model
from transformers import AutoModelForSeq2SeqLM, T5Config

pytestmark = pytest.mark.wide


def test_an_encoder_decoder_completes_and_chats(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ends: dict[str, Any] = {"eos_token_id": 258, "pad_token_id": 256, "decoder_start_token_id": 256}
    config = T5Config(vocab_size=259, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, **ends)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    folder = tmp_path / "t5"
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    messages = [{"role": "user", "content": "three"}]
    prompts: dict[str, tuple[dict[str, Any], list[int]]] = {
        "/v1/completions": ({"prompt": "one two"}, tokenizer("one two")["input_ids"]),
        "/v1/chat/completions": (
            {"messages": messages},
            tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"],
        ),
    }
    options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with ServerProcess(folder, tmp_path, "--dtype", "float32") as server:
        for path, (body, source) in prompts.items():
            answer = server.answer(path, {**body, **options})
            usage, choice = answer["usage"], answer["choices"][0]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(source), 6)
            said = choice["message"]["content"] if "message" in choice else choice["text"]
            ids = [256]
            with torch.no_grad():
                for _ in range(6):
                    inputs: dict[str, Any] = {
                        "input_ids": torch.tensor([source]),
                        "decoder_input_ids": torch.tensor([ids]),
                    }
                    ids.append(int(model(**inputs, use_cache=False).logits[0, -1].argmax()))
            assert said == tokenizer.decode(ids[1:], skip_special_tokens=True)


@pytest.mark.slow
def test_a_recurrent_model_resumes_its_session_after_an_eviction(tmp_path: Path) -> None:
    model, tokenizer = model_of("qwen3_next"), make_tokenizer()
    folder = save_model("qwen3_next", tmp_path)
    options = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with ServerProcess(folder, tmp_path, "--dtype", "float32", "--kv-memory", "128K", "--disk-space", "0") as server:
        log: list[int] = []
        for turn in range(3):
            new = list(range(20 * turn, 20 * turn + 15))
            answer = server.answer("/v1/completions", {"prompt": new, "session_id": "s", **options})
            log += new
            wanted = greedy(model, log, 5)
            assert answer["choices"][0]["text"] == tokenizer.decode(wanted, skip_special_tokens=True)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (0 if turn != 1 else 19)
            log += wanted
            if turn == 1:  # push the session out: no other fits beside one that is as long as can be
                longest = httpx.get(f"{server.url}/v1/models/m").json()["warmturn"]["max_context"]
                server.answer("/v1/completions", {"prompt": [7] * (longest - 5), **options})
        assert server.metric("warmturn_evictions_total") > 0
