"""``python layer_kernels.py MODEL ROWS``: the kernels that one layer launches in a decode step on a GPU, as Inductor's
Triton backend schedules them; prints a JSON object.

It schedules for the CPU, as without a GPU no tensors can be there; ``concatenated`` parts of one kernel, as on a GPU.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime import driver  # type: ignore[import-not-found,unused-ignore]
from triton_offline import CPU, Chip

from cache.attention.decode import DecodeStep, Tables
from cache.attention.packed_attention import PackedAttention
from cache.memory.memory_tier import MemoryTier, PageShape
from cache.pages.layers import read_layers
from cache.pages.packed import PackedCache
from scheduler.accel.gpu.compiled import CompiledLayers

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "sliding_window": None,
}
HEAD = 64
_LAUNCH = re.compile(r"triton_\w+\.run\(|extern_kernels\.\w+\(")


class Written(Exception):
    """The code is written, which is all that is wanted."""


def written(name: str, rows: int) -> str:
    """The code of a layer for a decode step of ``rows`` sessions."""
    config = AutoConfig.for_model(name, **SHAPE, head_dim=HEAD)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    layers, heads = read_layers(config), config.num_key_value_heads
    attention = PackedAttention(layers)
    attention.sources = {index: index for index in range(len(layers))}
    model.set_attn_implementation(attention.name)
    shape = PageShape(heads, HEAD, heads, HEAD, torch.bfloat16)
    tier = MemoryTier(rows + 1, 16, CPU, dict.fromkeys(range(len(layers)), shape), scratch=True)
    step = DecodeStep(tier, [Tables(tier, rows, 1)], rows)
    codes: list[str] = []

    def write(lowering: Any) -> Any:
        codes.append(lowering.codegen()[0].value)
        raise Written

    def attend(self: Any, step: Any, index: int, query: torch.Tensor, key: Any, value: Any, *_: Any) -> torch.Tensor:
        return query.new_empty(1, rows, query.shape[1], HEAD)

    def run() -> None:
        cache = PackedCache(layers, step, frozenset(range(len(layers))))
        with attention.running(step):
            model(input_ids=step.token_ids, position_ids=step.positions, past_key_values=cache, use_cache=True)

    with ExitStack() as stack:
        stack.enter_context(inductor.patch(cpu_backend="triton", force_pointwise_cat=True, fx_graph_cache=False))
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", write))
        stack.enter_context(patch.object(PackedAttention, "_over", attend))
        stack.enter_context(torch.inference_mode())
        CompiledLayers("inductor").find(model, run)
    return codes[0]


def main(name: str, rows: int) -> None:
    """Count and tell."""
    driver.set_active(Chip(90))
    code = written(name, rows).rpartition("def call")[2]
    launched = _LAUNCH.findall(code)
    products = sum(one.startswith("extern") for one in launched)
    attention = 2 * code.count("torch.ops.warmturn.attend.default(")
    print(json.dumps({"products": products, "triton": len(launched) - products, "attention": attention}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
