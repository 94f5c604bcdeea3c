"""A dozen architectures of every family through the whole scenario; ``run.py`` does it with all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import scenario
from architectures.build import ENTRIES, build
from architectures.oracle import Oracle
from architectures.scenario import STRICT, Status, check
from architectures.shapes import special_tokens

from scheduler.model import loader

# The mode in which each one is expected to run; None: it may also be refused.
SAMPLE = {
    ("llama", "causal"): "packed",
    ("gemma3_text", "causal"): "packed",
    ("qwen3_next", "causal"): "packed",
    ("mamba2", "causal"): "packed",
    ("jamba", "causal"): "packed, token by token",
    ("zamba", "causal"): "packed, token by token",  # layers share a module
    ("bamba", "causal"): "packed",
    ("lfm2", "causal"): "packed",
    ("deepseek_v32", "causal"): "masked",
    ("falcon", "causal"): "masked",
    ("bloom", "causal"): "alone",
    ("rwkv", "causal"): "alone",
    ("t5", "s2s"): "encoder-decoder",
}
NARROW = ("llama", "bloom")  # other tests run the other modes
HERE = [
    pytest.param(*entry, marks=() if entry[0] in NARROW else pytest.mark.wide) for entry in SAMPLE if entry in ENTRIES
]


@pytest.mark.parametrize(("name", "kind"), HERE)
def test_right_or_refused(name: str, kind: str) -> None:
    report = check(build(name, kind))
    mode = SAMPLE[name, kind]
    if mode is None and report.status is Status.REFUSED:
        assert report.reason
        return
    assert report.status is Status.RIGHT, report.reason
    assert mode is None or report.mode == mode
    lasting = mode != "encoder-decoder"  # nothing outlives its request there, so nothing can be evicted
    assert not [c.detail for c in report.checks if c.detail and lasting]  # every check did what it is there for
    resumed = next((c for c in report.checks if c.name == "resume"), None)
    assert resumed is None or resumed.reused == 1.0


@pytest.mark.parametrize(("name", "kind"), HERE)
def test_one_wrong_token_of_history_shows(name: str, kind: str) -> None:
    """Else the checks could not see a stale or foreign token in a cache."""
    model = build(name, kind)
    oracle = Oracle(model)
    prompt = list(range(30, 60))
    assert not special_tokens(model.config) & set(prompt)
    answer = [70, 71, 72, 73]  # sparse attention may pass over a token now and then
    right = oracle.logits(prompt, answer)
    for at in (0, 15, 28):
        wrong = oracle.logits([*prompt[:at], 99, *prompt[at + 1 :]], answer)
        assert (wrong - right).abs().max() > 10 * STRICT * right.abs().max(), at


def test_a_product_that_is_slightly_off_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare_badly(model: Any, tokenizer: Any) -> Any:
        loaded = loader.prepare(model, tokenizer)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1.01)
        return loaded

    monkeypatch.setattr(scenario, "prepare", prepare_badly)
    report = check(build("llama", "causal"))
    assert report.status is Status.WRONG
    assert {c.status for c in report.checks} <= {Status.WRONG, Status.SKIPPED}
    assert "logits differ" in report.reason


def test_an_exception_in_a_step_is_a_failure_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare_badly(model: Any, tokenizer: Any) -> Any:
        loaded = loader.prepare(model, tokenizer)
        model.forward = broken
        return loaded

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the model broke")

    monkeypatch.setattr(scenario, "prepare", prepare_badly)
    report = check(build("llama", "causal"))
    assert report.status is Status.FAILED
    assert "the model broke" in report.reason


def test_every_name_of_transformers_is_an_entry() -> None:
    names = {name for name, kind in ENTRIES if kind == "causal"}
    assert {"llama", "gpt2", "mixtral"} <= names
    assert len(ENTRIES) == len(set(ENTRIES)) > 150
