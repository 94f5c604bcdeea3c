"""What KV at a byte a number changes (``--kv-dtype``), asked of servers over HTTP: prints a table.
``python -m tools.kv_drift [SHAPE ...]``.

Each shape is served with exact, int8 and fp8 KV, and all are given the same tokens. Compared are 500 log-probabilities
of given tokens after 1,024, 4,096 and 8,192 others, and which token was the likeliest at each of these places.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
)

from tools.random_model import DEMO, TOKENS
from tools.running import Server, serving
from tools.tables import table

CONTEXTS, FORCED = (1024, 4096, 8192), 500
_MEMORY = "2G"
_DEMO = "demo, trained, English text"
_HEAD = "model | codec | bytes a token | tokens before | largest difference | root mean square | same token"


class Place(NamedTuple):
    """What a server tells of one place: the log-probability of the given token, and the likeliest token."""

    given: float
    likeliest: int


class Answer(NamedTuple):
    """What a server tells: the bytes that a token takes, and all places but that of the first token."""

    token_bytes: int
    places: list[Place]


def shapes() -> dict[str, Any]:
    """Configurations by name; heads, windows and sinks are as in the models that they are named after, layers fewer and
    smaller.
    """
    small: dict[str, Any] = {
        "vocab_size": TOKENS, "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1024,
        "max_position_embeddings": 16384, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    narrow: dict[str, Any] = {**small, "num_attention_heads": 8, "num_key_value_heads": 2}
    return {
        "gemma3 (1 key head of 256, 5 of 6 layers see 1,024)": Gemma3TextConfig(
            **small, num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=1024,
        ),
        "mistral (2 of 128, all layers see 4,096)": MistralConfig(**narrow, head_dim=128, sliding_window=4096),
        "gpt_oss (2 of 64, sinks, every other layer sees 128)": GptOssConfig(
            **narrow, head_dim=64, sliding_window=128, num_local_experts=4, num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
        ),
        "llama (2 of 64)": LlamaConfig(**narrow, head_dim=64),
    }  # fmt: skip


def write(config: Any, folder: Path) -> Path:
    """A float32 model with random weights that keep sizes, and whose attention is sharp: far tokens matter."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if "embed" in label:
                weight.normal_(0, 1 / getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0))
            elif weight.ndim >= 2:
                weight.normal_(0, (2 if "q_proj" in label or "k_proj" in label else 1) / math.sqrt(weight.shape[-1]))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(DEMO)).save_pretrained(folder)
    return folder


async def ask(server: Server, tokens: list[int]) -> Answer:
    body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    answer = await server.client.post(f"{server.url}/v1/completions", json=body, timeout=3600)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    places = [
        Place(told[str(token)]["logprob"], next(int(other) for other, one in told.items() if one["rank"] == 1))
        for token, told in zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)
    ]
    return Answer(await server.token_bytes(), places)


def measure(model: Path, tokens: list[int]) -> dict[str, Answer]:
    """What is told with each ``--kv-dtype``."""
    found = {}
    for codec in ("auto", "int8", "fp8"):
        with tempfile.TemporaryDirectory() as data, serving(
            str(model), Path(data), "--dtype", "float32", "--kv-memory", _MEMORY, "--kv-dtype", codec
        ) as server:  # fmt: skip
            found[codec] = asyncio.run(ask(server, tokens))
    return found


def rows(name: str, found: dict[str, Answer]) -> Iterator[tuple[object, ...]]:
    """The rows of one model, for the contexts that it was asked for."""
    exact = found.pop("auto")
    for codec, rounded in found.items():
        for context in CONTEXTS:
            part = slice(context - 1, context - 1 + FORCED)  # the first place is that of the second token
            pairs = [*zip(exact.places[part], rounded.places[part], strict=True)]
            if len(pairs) < FORCED:
                break
            differences = [after.given - before.given for before, after in pairs]
            mean = math.sqrt(sum(one * one for one in differences) / FORCED)
            same = sum(before.likeliest == after.likeliest for before, after in pairs) / FORCED
            sizes = f"{exact.token_bytes:,} to {rounded.token_bytes:,}"
            yield name, codec, sizes, f"{context:,}", f"{max(map(abs, differences)):.4f}", f"{mean:.4f}", f"{same:.1%}"


def models(folder: Path) -> Iterator[tuple[str, Path, list[int]]]:
    """Names, folders and tokens."""
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    yield _DEMO, DEMO, AutoTokenizer.from_pretrained(str(DEMO))(text).input_ids[: CONTEXTS[0] + FORCED]
    drawn = random.Random(1)
    tokens = [drawn.randrange(10, TOKENS) for _ in range(CONTEXTS[-1] + FORCED)]
    for number, (name, config) in enumerate(shapes().items()):
        yield name, write(config, folder / str(number)), tokens


def main(asked: list[str]) -> None:
    """Print the table, of shapes whose names begin so, all by default."""
    print(table(_HEAD, []), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, model, tokens in models(Path(folder)):
            if not asked or name.startswith(tuple(asked)):
                for row in rows(name, measure(model, tokens)):
                    print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
