"""Writes a model of llama-135m's shape with seeded random weights, for benchmarks: ``python -m tools.random_model
FOLDER``.

30 layers, 9 heads, 3 of them for keys and values, vocabulary 49,152, context 8,192, bfloat16: what a step costs depends
on these alone. It talks nonsense, in the demo model's tokens.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

TOKENS = 1024  # of the demo model's tokenizer
DEMO = Path(__file__).parent.parent / "server" / "demo"


def make(folder: Path) -> Path:
    """Write weights, tokenizer and template to ``folder``, 270 MB, and return it."""
    config = LlamaConfig(
        vocab_size=49152,
        num_hidden_layers=30,
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(1234)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():  # greedy replies stay among the tokens that are text: the others' logits are 0
        model.get_input_embeddings().weight[TOKENS:] = 0
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / name, folder / name)
    return folder


if __name__ == "__main__":
    make(Path(sys.argv[1]))
