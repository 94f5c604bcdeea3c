"""Sessions that fit a memory for models with windowed layers: with undivided pages, with divided ones, and the floor.

    python -m tools.kv_capacity --memory 64

The layouts are those of the server, for the shapes of published models in bfloat16; no weights are read.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import Gemma3TextConfig, Gemma4TextConfig, GptOssConfig, MistralConfig

from cache.memory.frames import Frames
from cache.memory.memory_tier import PageShape, divide
from cache.pages.layers import read_layers, windows_of

PAGE = 16
LENGTHS = (1024, 8192, 32768)


def shapes() -> dict[str, Any]:
    """Published shapes."""
    every_sixth = ["full_attention" if at % 6 == 5 else "sliding_attention" for at in range(62)]
    return {
        "gemma3 27B": Gemma3TextConfig(
            num_hidden_layers=62, num_key_value_heads=16, head_dim=128, sliding_window=1024, layer_types=every_sixth
        ),
        "gemma4 31B": Gemma4TextConfig(
            num_hidden_layers=60,
            num_key_value_heads=16,
            num_global_key_value_heads=4,
            head_dim=256,
            global_head_dim=512,
            sliding_window=1024,
            layer_types=every_sixth[:60],
            attention_k_eq_v=True,
        ),
        "gpt_oss 20B": GptOssConfig(num_hidden_layers=24, num_key_value_heads=8, head_dim=64, sliding_window=128),
        "mistral 7B": MistralConfig(num_hidden_layers=32, num_key_value_heads=8, head_dim=128, sliding_window=4096),
    }


def stored_shapes(config: Any) -> dict[int, PageShape]:
    found = {}
    for at, layer in enumerate(read_layers(config)):
        own = config.per_layer_config[at]
        heads, dim = own.num_key_value_heads, own.head_dim
        if layer.window is None and getattr(config, "num_global_key_value_heads", None):
            heads = config.num_global_key_value_heads
        found[at] = PageShape(heads, dim, heads, dim, torch.bfloat16)
    return found


def row(name: str, config: Any, memory: int) -> str:
    layers, kept = read_layers(config), stored_shapes(config)
    windows = windows_of(layers, {at: at for at in kept})
    assert windows is not None
    parts = divide(kept, windows.layers, PAGE)
    token = sum(shape.nbytes for shape in kept.values())
    near = sum(kept[at].nbytes for at in windows.layers)
    cells = []
    for length in LENGTHS:
        first = windows.first_key(length)
        floor = (token - near) * length + near * (length - first)
        pages = -(-length // PAGE)
        frames = Frames(memory // parts.nbytes, parts.each, parts.stride)
        each = frames.count_needed(pages, pages - windows.first_kept(length) // PAGE)
        before = memory // (PAGE * token) // pages
        cells.append(f"{before} / {frames.count // each} / {memory // floor}")
    return f"| {name} | {token:,} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="sessions that fit: undivided pages / divided pages / floor")
    parser.add_argument("--memory", type=int, default=64, help="GiB of KV memory")
    memory = parser.parse_args().memory << 30
    print("| shape | bytes a token | sessions of 1,024 | of 8,192 | of 32,768 |\n|---|---|---|---|---|")
    for name, config in shapes().items():
        print(row(name, config, memory))


if __name__ == "__main__":
    main()
