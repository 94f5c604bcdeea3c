"""Whole models run as programs: they say what they said, in any company, and their layers really are programs."""

from __future__ import annotations

import pytest
import torch
from architectures.build import build
from program_kit import compiled, ran
from stage_kit import LONG, PAGE, STEPS, Stage
from tiny_models import ARCHITECTURES, logits, make_model
from wide import widely

from cache.pages.layers import read_layers
from scheduler.accel.cpu import experts, linear
from scheduler.accel.cpu.linear import pack
from scheduler.forward.rope import LongRope
from scheduler.model.probe import probe

# Architectures by what their layers are made of, and the modules that must run as programs, at least so many of each.
WHOLE: dict[str, dict[str, int]] = {
    "llama": {"LlamaDecoderLayer": 4, "LlamaRMSNorm": 1},
    "qwen3": {"Qwen3DecoderLayer": 4},
    "gemma2": {"Gemma2DecoderLayer": 4},
    "gemma3_text": {"Gemma3DecoderLayer": 4},
    "gemma3n_text": {"Gemma3nTextAttention": 6},
    "gemma4_text": {"Gemma4TextDecoderLayer": 3},
    "gpt2": {"GPT2Block": 4},
    "gpt_neox": {"GPTNeoXLayer": 4},
    "phi": {"PhiDecoderLayer": 4},
    "phi3": {"Phi3DecoderLayer": 4},
    "glm": {"GlmDecoderLayer": 4},
    "glm4": {"Glm4DecoderLayer": 4},
    "olmo2": {"Olmo2DecoderLayer": 4},
    "cohere": {"CohereDecoderLayer": 4},
    "stablelm": {"StableLmDecoderLayer": 4},
    "starcoder2": {"Starcoder2DecoderLayer": 4},
    "opt": {"OPTDecoderLayer": 4},
    "granite": {"GraniteDecoderLayer": 4},
    "nemotron": {"NemotronDecoderLayer": 4},
    "smollm3": {"SmolLM3DecoderLayer": 4},
    "ministral": {"MinistralDecoderLayer": 4},
    "mixtral": {"MixtralDecoderLayer": 4},
    "gpt_oss": {"GptOssDecoderLayer": 4},
    "qwen2_moe": {"Qwen2MoeDecoderLayer": 4},
    "qwen3_moe": {"Qwen3MoeDecoderLayer": 4},
    "qwen3_5_text": {"Qwen3_5DecoderLayer": 4},
    "qwen3_next": {"Qwen3NextDecoderLayer": 4},
    "glm4_moe": {"Glm4MoeDecoderLayer": 4},
    "deepseek_v3": {"DeepseekV3DecoderLayer": 4},
    "lfm2": {"Lfm2DecoderLayer": 4},
    "lfm2_moe": {"Lfm2MoeDecoderLayer": 4},
}


NARROW = "llama gemma4_text gpt_oss qwen3_5_text"
# Those whose layers are not called one after the other, or are no programs themselves.
CHAINS: dict[str, list[int]] = {name: [] for name in ("gemma3n_text", "gemma4_text")}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing experts pays, however small."""
    monkeypatch.setattr(experts, "_MOST", dict.fromkeys(experts._MOST, float("inf")))


@torch.no_grad()
@pytest.mark.parametrize("name", widely(WHOLE, NARROW))
def test_models_say_what_they_said_and_their_layers_are_programs(name: str) -> None:
    compiled()
    model = build(name, "causal")
    want = [logits(model, ids) for ids in LONG]
    stage = Stage(model)
    assert all(stage.fused[part] >= count for part, count in WHOLE[name].items()), stage.fused
    assert stage.chains == CHAINS.get(name, [4])
    got = stage.run(LONG, STEPS)
    for one, other in zip(got, want, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())
    stage.mode.unfuse()
    assert not stage.fused
    for one, other in zip(stage.run(LONG, STEPS), want, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", widely([*ARCHITECTURES, "qwen3_next", "mamba2"], "gemma3"))
def test_models_of_sharp_attention_too(name: str) -> None:
    compiled()
    model = make_model(name)
    want = [logits(model, ids) for ids in LONG]
    stage = Stage(model)
    assert stage.fused
    for one, other in zip(stage.run(LONG, STEPS), want, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())


@torch.no_grad()
def test_what_a_session_is_told_does_not_depend_on_its_company() -> None:
    compiled()
    stage = Stage(make_model("llama"))
    together = stage.run(LONG, STEPS)
    for number, ids in enumerate(LONG):
        mine = [[(0, count) for i, count in step if i == number] for step in STEPS]
        alone = stage.run([ids], [step for step in mine if step])[0]
        assert float((alone - together[number]).abs().max()) <= 1e-5 * float(alone.abs().max())


@torch.no_grad()
def test_more_rows_than_a_weight_is_read_for_go_the_old_way(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    model = make_model("llama")
    want = [logits(model, ids) for ids in LONG]
    monkeypatch.setattr(linear, "SMALLEST", 1)
    monkeypatch.setattr(linear, "_ways", lambda dtype: iter(()))
    monkeypatch.setattr(
        "scheduler.accel.cpu.packing._ratio", lambda plain, reading, x, evicting: 0.5 if x.shape[1] <= 4 else 2.0
    )
    stage = Stage(model)
    assert stage.fused["LlamaDecoderLayer"] == 2
    layer = model.model.layers[0]
    x = torch.randn(1, 5, 64)
    assert ran(layer.mlp, x)[1] is False  # its own module: within the layer
    for one, other in zip(stage.run(LONG, STEPS), want, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())


@torch.no_grad()
def test_two_threads_say_the_same_to_the_bit() -> None:
    compiled()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        stage = Stage(make_model("llama"))
        alone = stage.run(LONG[2:], [[(0, 9)], [(0, 1)], [(0, 2)]])
        torch.set_num_threads(2)
        for _ in range(3):
            again = stage.run(LONG[2:], [[(0, 9)], [(0, 1)], [(0, 2)]])
            assert all(float((a - b).abs().max()) <= 1e-6 for a, b in zip(alone, again, strict=True))
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_a_mode_that_is_taken_out_leaves_the_model_as_it_was() -> None:
    compiled()
    model = make_model("llama")
    want = logits(model, LONG[0])
    packing = pack(model)
    layers = read_layers(model.config)
    verdict = probe(model, layers, PAGE, LongRope(model), packing=packing)
    verdict.mode.remove()
    packing.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(logits(model, LONG[0]), want)
    verdict.mode.install()
    assert any("forward" in vars(module) for module in model.modules())
    verdict.mode.remove()
    assert not any("forward" in vars(module) for module in model.modules())
