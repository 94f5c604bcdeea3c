"""Adapters of every kind against peft itself, where it is installed: its own files, and its own forward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import Kit
from tiny_models import make_model

peft = pytest.importorskip("peft")
NAME = "gpt_oss"  # it has biases
CALL = [70, 81, 66]
PROMPT = [65 + i % 23 for i in range(11)]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank-stabilised": {"use_rslora": True, "rank_pattern": {"v_proj": 2}},
    "DoRA": {"use_dora": True},
    "biases of maps with a LoRA": {"bias": "lora_only"},
    "biases of halves": {"lora_bias": True},
    "modules": {"modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    "everything": {"use_dora": True, "bias": "lora_only", "modules_to_save": ["lm_head"]},
    "activated": {"alora_invocation_tokens": CALL},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_it_says_what_peft_says(kind: str, tmp_path: Path) -> None:
    """Log-probabilities of a prompt and the greedy reply."""
    torch.manual_seed(1)
    options = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **KINDS[kind]
    )
    model = peft.get_peft_model(copy.deepcopy(make_model(NAME)), options).eval()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weight += torch.randn_like(weight) * (0.3 if "lora_" in name else weight.abs().mean().clamp(min=0.1))
    model.save_pretrained(tmp_path / "x")
    prompt = [*PROMPT, *CALL, 75, 76]
    kit = Kit(NAME)
    with kit._installed():
        kit.adapters.load("x", tmp_path / "x")
        turn = kit.send(prompt, 4, adapter="x", prompt_logprobs=0, logprobs=0)
        while not kit.engine.idle:
            kit._step()
        kit.adapters.remove()
    outcome = kit.outcomes[turn]
    ids = torch.tensor([[*prompt, *outcome.tokens]])
    extra = {"alora_offsets": [ids.shape[1] - len(PROMPT)]} if kind == "activated" else {}
    rows = model(input_ids=ids, use_cache=False, **extra).logits[0].log_softmax(-1)
    told = [one.logprob for delta in outcome.deltas for one in delta.prompt_logprobs][1:]
    told += [one.logprob for delta in outcome.deltas for one in delta.logprobs]
    want = rows[range(ids.shape[1] - 1), ids[0, 1:]]
    assert told == pytest.approx(want.tolist(), rel=1e-4, abs=1e-4)
    assert rows[len(prompt) - 1 : -1].argmax(-1).tolist() == outcome.tokens
