"""A model's own layers for multi-token prediction: which ones are loaded, and what is said of the others."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import make_model, make_tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

from scheduler.engine_assembly import build_engine
from scheduler.engine_config import EngineConfig
from scheduler.model.draft_heads import load_heads, mtp_layers, obstacle
from scheduler.model.loader import prepare
from scheduler.protocol import Submit, pack_ids
from scheduler.sampling_params import Sampling, Stopping

LOADED = {"bailing_hybrid", "deepseek_v3", "glm4_moe", "inkling_mm_model", "inkling_text", "mellum", "step3p7"}


def test_how_many() -> None:
    assert mtp_layers(transformers.DeepseekV3Config(num_nextn_predict_layers=2)) == 2
    assert mtp_layers(transformers.DeepseekV3Config(num_nextn_predict_layers=0)) == 0
    assert mtp_layers(transformers.LlamaConfig()) == 0


@cache
def _names_them(module: str) -> bool:
    """Whether the source of a model's configuration has the name of their number."""
    files = (Path(transformers.__file__).parent / "models" / module).glob("configuration_*.py")
    return any("num_mtp_layers" in file.read_text(encoding="utf-8") for file in files)


def test_those_that_transformers_loads() -> None:
    """The list in the documentation. Here a new version of transformers shows that it has become longer."""
    named = [name for name in CONFIG_MAPPING if _names_them(model_type_to_module_name(name))]  # others are not imported
    known = {name for name in named if "num_mtp_layers" in getattr(CONFIG_MAPPING[name], "__annotations__", {})}
    assert known <= LOADED | {"inkling_text", "step3p7_text"}, known
    assert {"deepseek_v3", "glm4_moe", "mellum", "bailing_hybrid"} <= known


def test_loaded_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_model("deepseek_v3")
    made.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    last = {key: tensor.clone() for key, tensor in weights.items() if key.startswith("model.layers.1.")}
    own = {key.replace(".1.", ".2.", 1): tensor for key, tensor in last.items()}
    own |= {f"model.layers.2.{name}.weight": torch.rand(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["model.layers.2.eh_proj.weight"] = torch.rand(64, 128)
    save_file({**weights, **own}, file, {"format": "pt"})
    monkeypatch.setattr(type(made), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    monkeypatch.setattr(type(made.model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    loaded = prepare(model, make_tokenizer())
    heads, why = load_heads(loaded)
    assert (why, len(heads.layers)) == ("", 1)
    assert torch.equal(heads.layers[0].eh_proj.weight, own["model.layers.2.eh_proj.weight"].bfloat16())
    ours, theirs = heads.layers[0].mtp_block.self_attn.q_a_proj.weight, last["model.layers.1.self_attn.q_a_proj.weight"]
    assert torch.equal(ours, theirs.bfloat16())
    assert heads.embed_tokens is loaded.model.get_input_embeddings()

    engine, facts = build_engine(EngineConfig("", "", kv_memory=1 << 22, speculate="auto"), loaded)
    assert (facts.mtp_layers, facts.mtp_idle) == (1, "")
    stopping = Stopping(max_tokens=5, ignore_eos=True)
    assert engine.submit(Submit("t", "a", pack_ids([5, 6, 7]), None, Sampling(temperature=0.0), stopping)) is None
    with torch.inference_mode():
        while not engine.idle:
            engine.step()
    assert engine.stats().drafted["heads"] > 0

    save_file(weights, file, {"format": "pt"})  # a checkpoint without them
    assert load_heads(loaded) == (None, "they cannot be loaded from this checkpoint")


def test_why_not() -> None:
    loaded = prepare(make_model("llama", num_nextn_predict_layers=1), make_tokenizer())
    assert mtp_layers(loaded.model.config) == 1
    assert load_heads(loaded) == (None, "transformers has no code for them")
    loaded.model.config.num_mtp_layers = 1
    assert obstacle(loaded) == ""
    loaded.model.config.quantization_config = {"quant_method": "fp8"}
    assert obstacle(loaded) == "the checkpoint is quantised"
