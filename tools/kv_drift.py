"""What KV at a byte a number changes (``--kv-dtype``): prints a table for the demo model and random models of several
shapes. ``python -m tools.kv_drift``. Logits of 512 tokens, fed in steps of 128, are compared with those over exact KV.
"""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
)

from cache.memory.codec import Codec
from cache.memory.memory_tier import MemoryTier, PageShape
from cache.pages.layers import read_layers
from cache.pages.pool import PagePool
from cache.store import SessionStore
from scheduler.forward.mode import installed
from scheduler.forward.modes import PackedMode
from scheduler.model.kv_rounding import rounded_shapes
from scheduler.model.measurement import Measurement, make_session, relative_error
from scheduler.model.runner import ModelRunner
from tools.random_model import DEMO

PAGE, LENGTH, STEP = 16, 512, 128
CPU = torch.device("cpu")


def shapes() -> dict[str, Any]:
    """Configurations by name; layers have the sizes of the models that they are named after, and there are fewer."""
    small: dict[str, Any] = {"vocab_size": 4096, "num_hidden_layers": 8, "max_position_embeddings": 2048}
    return {
        "Llama 135M (3 key heads of 64)": LlamaConfig(
            **small, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3
        ),
        "Qwen3 0.6B (8 of 128)": Qwen3Config(
            **small, hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
            head_dim=128,
        ),
        "gemma3 1B (1 of 256, windows)": Gemma3TextConfig(
            **small, hidden_size=1152, intermediate_size=4096, num_attention_heads=4, num_key_value_heads=1,
            head_dim=256, sliding_window=128,
        ),
        "gpt_oss (8 of 64, sinks, windows)": GptOssConfig(
            **small, hidden_size=768, intermediate_size=768, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
            sliding_window=128, num_local_experts=4, num_experts_per_tok=2,
        ),
    }  # fmt: skip


def logits(mode: PackedMode, stored: dict[int, PageShape], tokens: list[int]) -> torch.Tensor:
    """float32 ``[LENGTH, V]``, over pages of these shapes."""
    tier = MemoryTier(-(-LENGTH // PAGE), PAGE, CPU, stored)
    runner = ModelRunner(mode, tier, None)
    store = SessionStore(PagePool(tier, MemoryTier(0, PAGE, CPU)), None, None)
    session = make_session(array("i", tokens), None)
    session.warm = session.running = True
    store.reserve(session, LENGTH)
    parts = [runner.run([(session, STEP)], range(STEP)) for _ in range(0, LENGTH, STEP)]
    return torch.cat(parts).float()


def rows(name: str, model: Any, tokens: list[int]) -> list[str]:
    """The rows of one model."""
    measurement = Measurement(model, read_layers(model.config), PAGE, None)
    mode, found = PackedMode(model, measurement.layers, measurement.trace), []
    with installed(mode):
        exact = measurement.measure(mode).shapes
        mode.learn()
        before = logits(mode, exact, tokens)
        for codec in (Codec.INT8, Codec.FP8):
            stored = rounded_shapes(mode, exact, codec)
            after = logits(mode, stored, tokens)
            same = float((after.argmax(-1) == before.argmax(-1)).float().mean())
            sizes = [sum(shape.nbytes for shape in each.values()) for each in (exact, stored)]
            found.append(
                f"| {name} | {codec} | {sizes[0]:,} | {sizes[1]:,} | {sizes[0] / sizes[1]:.2f} "
                f"| {relative_error(after, before):.2%} | {same:.1%} |"
            )
    return found


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    print("| model | codec | bytes a token, exact | rounded | times | error of logits | same token |")
    print("|---|---|---|---|---|---|---|")
    tokenizer = AutoTokenizer.from_pretrained(str(DEMO))
    text = tokenizer((Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")).input_ids[:LENGTH]
    demo = AutoModelForCausalLM.from_pretrained(str(DEMO), dtype=torch.bfloat16).eval()
    models = [("demo, trained, English text", demo, text)]
    for name, config in shapes().items():
        torch.manual_seed(1)
        drawn = random.Random(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        models.append((name, model, [drawn.randrange(10, 4000) for _ in range(LENGTH)]))
    for name, model, tokens in models:
        for line in rows(name, model, tokens):
            print(line, flush=True)


if __name__ == "__main__":
    main()
