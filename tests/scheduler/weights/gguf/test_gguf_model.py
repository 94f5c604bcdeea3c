"""Models in GGUF files: the same logits as a float32 model of transformers with the dequantised weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from gguf_kit import BF16, F16, F32, Q4_0, Q8_0, Stored, store, write_file
from gguf_loaded import logits, quiet, read, rewritten, settings
from gguf_metadata import config_of, metadata_of
from gguf_models import written
from gguf_shapes import MODELS
from transformers import AutoModelForCausalLM

from scheduler.weights.gguf.architectures import ARCHITECTURES
from scheduler.weights.gguf.config import read_gguf_config
from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.model import build_model, digested_settings, file_digest, stored_dtype
from scheduler.weights.gguf.source import all_values
from scheduler.weights.quantised_weight import quantised_weight_of


def test_every_architecture_that_is_named_is_tested() -> None:
    elsewhere = {"mistral", "bert", "modern-bert", "nomic-bert"}  # older files of llama, and models that have no head
    assert {label.partition(" ")[0] for label in MODELS} >= set(ARCHITECTURES) - elsewhere


@quiet
@pytest.mark.parametrize("label", MODELS)
def test_an_architecture(label: str, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", label, Q8_0)
    torch.testing.assert_close(logits(read(path)), logits(want), rtol=1e-4, atol=1e-4)


# What no result depends on: of this configuration, or of all.
_ELSEWHERE = {
    "qwen4exp": {"seed", "layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes"},
    "bailingmoe3": {"layer_group_size", "num_nextn_predict_layers", "q_lora_rank", "rope_theta"},
    "gemma3n": {"eos_token_id"},
    "gemma4": {"eos_token_id"},
    "falcon": {"num_kv_heads", "multi_query"},
    "exaone-moe": {"sliding_window_pattern"},
    "exaone4": {"sliding_window_pattern"},
    "lfm2moe": {"block_auto_adjust_ff_dim"},
    "minimax-m2": {"ignore_keys_at_rope_validation"},
    "minimax-m3": {"ignore_keys_at_rope_validation"},
}
_ANYWHERE = {"transformers_version", "architectures", "dtype", "pad_token_id"}


@quiet
@pytest.mark.parametrize("label", MODELS)
def test_a_configuration(label: str, tmp_path: Path) -> None:
    """All of its settings, also those that matter only for long texts."""
    path, _ = written(tmp_path / "x.gguf", label, Q8_0)
    got, want = vars(settings(path)), vars(config_of(label))
    names = {*got, *want} - _ANYWHERE - _ELSEWHERE.get(label.partition(" ")[0], set())
    for name in sorted(names):
        mine, theirs = got.get(name, "nothing"), want.get(name, "nothing")
        assert mine == (pytest.approx(theirs) if isinstance(theirs, float) else theirs), name


@pytest.mark.parametrize(("kind", "dtype"), [(F32, torch.float32), (F16, torch.float16), (BF16, torch.bfloat16)])
def test_plain_weights_stay_as_they_are(kind: int, dtype: torch.dtype, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "llama", kind)
    assert stored_dtype(GgufFile(path)) is dtype
    got = read(path)
    assert next(got.parameters()).dtype is dtype
    for name, weight in want.state_dict().items():
        if weight.dim() == 2:
            assert torch.equal(got.state_dict()[name].float(), weight), name
    torch.testing.assert_close(logits(read(path, torch.float32)), logits(want), rtol=1e-4, atol=1e-4)


@quiet
@pytest.mark.parametrize("label", ["llama", "glm4moe", "deepseek32"])
def test_what_transformers_keeps_in_float32_has_its_type(label: str, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", label, BF16)
    want.save_pretrained(tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    kinds = {name: value.dtype for name, value in whole.state_dict().items()}
    assert {name: value.dtype for name, value in read(path).state_dict().items()} == kinds
    assert set(kinds.values()) == {torch.bfloat16} | ({torch.float32} if label != "llama" else set())


@quiet
def test_streams_and_scores_stay_in_float32(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "deepseek4", Q8_0)
    got = read(path, torch.bfloat16).state_dict()
    kinds = {name: value.dtype for name, value in got.items()}
    assert kinds["model.layers.1.attn_hc.fn"] is kinds["model.hc_head.hc_base"] is torch.float32
    assert kinds["model.layers.1.mlp.gate.e_score_correction_bias"] is torch.float32
    assert kinds["model.layers.1.self_attn.q_a_proj.weight"] is torch.bfloat16


def test_four_bits(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "qwen2", Q4_0)
    torch.testing.assert_close(logits(read(path)), logits(want), rtol=1e-4, atol=1e-4)


@quiet
@pytest.mark.parametrize("label", ["llama biased", "qwen", "qwen2", "phi2", "chatglm", "falcon-h1", "mimo2", "minicpm"])
def test_queries_keys_and_values_in_one_tensor(label: str, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", label, Q8_0)
    file, change = GgufFile(path), dict[str, Stored | None]()
    for layer in range(2):
        for kind in ("weight", "bias"):
            parts = [file.tensors.get(f"blk.{layer}.attn_{leaf}.{kind}") for leaf in "qkv"]
            found = [part for part in parts if part is not None]
            if found:
                data, rows = (
                    torch.cat([part.data.view(part.shape[0], -1) for part in found]),
                    sum(part.shape[0] for part in found),
                )
                shape = (rows, *found[0].shape[1:])
                change |= {part.name: None for part in found}
                change[f"blk.{layer}.attn_qkv.{kind}"] = Stored(
                    data.numpy().copy(), shape, found[0].kind, torch.empty(0)
                )
    joined = rewritten(path, label, change)
    assert torch.equal(logits(read(joined)), logits(read(path)))
    file = GgufFile(joined)
    model = build_model(file, read_gguf_config(file, joined), AutoModelForCausalLM, None, {}, packed=True)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = quantised_weight_of(getattr(model.model.layers[1].self_attn, name).weight)
        assert weight is not None
        assert torch.equal(weight.dense(), getattr(want.model.layers[1].self_attn, name).weight)
    with pytest.raises(GgufError, match="not have the rows of all heads"):
        read(rewritten(joined, label, {"blk.1.attn_qkv.weight": store(torch.ones(64, 64))}))


def test_embeddings_that_are_the_head_are_kept_once(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "qwen2", Q8_0)
    model = read(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings


def test_factors_of_the_rotary_positions_are_those_of_llama_3(tmp_path: Path) -> None:
    """llama.cpp's converter computes them, and says nothing of them in the metadata."""
    path, want = written(tmp_path / "x.gguf", "llama", F32)
    config = copy.deepcopy(want.config)
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    scaled = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    scaled.load_state_dict(want.state_dict())
    factors = want.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq
    got = read(rewritten(path, "llama", {"rope_freqs.weight": store(factors)}))
    torch.testing.assert_close(logits(got), logits(scaled), rtol=1e-4, atol=1e-4)
    assert (logits(got) - logits(want)).abs().max() > 1e-2
    with pytest.raises(GgufError, match="one for each frequency"):
        read(rewritten(path, "llama", {"rope_freqs.weight": store(factors[:3])}))


def test_a_layer_that_predicts_further_tokens_is_left(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "llama", F32)
    further: dict[str, Stored | None] = {"blk.2.attn_norm.weight": store(torch.ones(64))}
    got = read(rewritten(path, "llama", dict(further), **{"llama.nextn_predict_layers": 1}))
    assert torch.equal(logits(got), logits(want))
    with pytest.raises(GgufError, match="no place for 1 tensors"):
        read(rewritten(path, "llama", further))


def test_keys_of_layers_that_read_those_of_another_one_are_left(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "gemma4", Q8_0)
    unused = {f"blk.5.{name}.weight": store(torch.ones(64, 64)) for name in ("attn_k", "attn_v", "attn_k_norm")}
    got = read(rewritten(path, "gemma4", dict(unused)))
    torch.testing.assert_close(logits(got), logits(want), rtol=1e-4, atol=1e-4)
    with pytest.raises(GgufError, match=r"no place for 1 tensors of the file, 'blk\.5\.attn_q_b\.weight'"):
        read(rewritten(path, "gemma4", {"blk.5.attn_q_b.weight": store(torch.ones(64, 64))}))


def test_a_window_that_the_model_cannot_have(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "llama", Q8_0)
    windowed = rewritten(path, "llama", {}, **{"llama.attention.sliding_window": 8})
    with pytest.raises(GgufError, match="it has a sliding window, which"):
        settings(windowed)


def test_a_tensor_too_few_or_too_many(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "llama", F32)
    with pytest.raises(GgufError, match=r"1 weights are missing in the file, model\.layers\.1\.mlp\.up_proj"):
        read(rewritten(path, "llama", {"blk.1.ffn_up.weight": None}))
    with pytest.raises(GgufError, match=r"no place for 1 tensors of the file, 'blk\.1\.ssm_a'"):
        read(rewritten(path, "llama", {"blk.1.ssm_a": store(torch.ones(4))}))
    with pytest.raises(GgufError, match=r"'blk\.1\.ffn_up\.weight' is of shape"):
        read(rewritten(path, "llama", {"blk.1.ffn_up.weight": store(torch.ones(96, 32))}))
    with pytest.raises(GgufError, match="no embeddings"):
        read(rewritten(path, "llama", {"token_embd.weight": None}))


def test_experts_of_another_shape(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "qwen3moe", F32)
    with pytest.raises(GgufError, match="another shape than the model's experts"):
        read(rewritten(path, "qwen3moe", {"blk.1.ffn_up_exps.weight": store(torch.ones(3, 32, 64))}))


def test_an_architecture_that_is_not_known_is_told_which_are(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "llama", F32)
    other = rewritten(path, "llama", {}, **{"general.architecture": "unheard-of"})
    with pytest.raises(GgufError, match=r"not one of afmoe, .*starcoder2.*; .* config\.json beside the file"):
        read(other)
    want.config.save_pretrained(tmp_path)  # with it, whatever the file calls the architecture
    got = read(rewritten(path, "llama", {}, **{"general.architecture": "mistral3"}))
    assert torch.equal(logits(got), logits(want))


def test_linear_attention_is_configured_by_the_metadata_alone(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "qwen3next", F32)

    def config(**metadata: object) -> dict[str, object]:
        other = rewritten(path, "qwen3next", {}, **{f"qwen3next.{key}": value for key, value in metadata.items()})
        found: dict[str, object] = settings(other).to_dict()
        return found

    want = config_of("qwen3next").to_dict()
    got = config()
    assert got.pop("rms_norm_eps") == pytest.approx(want.pop("rms_norm_eps"))
    assert got == want
    recurrent: dict[str, object] = {"attention.recurrent_layers": [True, False, False]}
    further = config(**{"block_count": 3, "nextn_predict_layers": 1, **recurrent})
    assert further["layer_types"] == want["layer_types"]
    assert further["num_hidden_layers"] == 2
    turned = config(**{"rope.dimension_count": 16})["rope_parameters"]
    assert turned == {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}


def test_which_layers_are_linear_need_not_be_said(tmp_path: Path) -> None:
    metadata = metadata_of("qwen3next")
    del metadata["qwen3next.attention.recurrent_layers"]
    for interval, kinds in ((None, [True] * 2), (2, [True, False]), (1, [False] * 2)):
        said = {} if interval is None else {"qwen3next.full_attention_interval": interval}
        other = write_file(tmp_path / "y.gguf", {**metadata, **said}, {"token_embd.weight": store(torch.ones(288, 64))})
        config = settings(other)
        assert [kind == "linear_attention" for kind in config.layer_types] == kinds
    for key, value, told in (
        ("ssm.time_step_rank", 0, "how many heads"),
        ("attention.recurrent_layers", [True], "which of its layers"),
    ):
        changed = {**metadata, f"qwen3next.{key}": value}
        other = write_file(tmp_path / "z.gguf", changed, {"token_embd.weight": store(torch.ones(288, 64))})
        with pytest.raises(GgufError, match=told):
            read(other)


@quiet
def test_linear_attention_in_older_files_and_of_another_shape(tmp_path: Path) -> None:
    """Older files have queries, keys, values and gates in one tensor, by heads."""
    path, want = written(tmp_path / "x.gguf", "qwen3next", F32)
    whole = store(want.model.layers[0].linear_attn.in_proj_qkvz.weight)
    two: dict[str, Stored | None] = {"blk.0.attn_qkv.weight": None, "blk.0.attn_gate.weight": None}
    got = read(rewritten(path, "qwen3next", {**two, "blk.0.ssm_in.weight": whole}))
    torch.testing.assert_close(logits(got), logits(want), rtol=1e-4, atol=1e-4)
    with pytest.raises(GgufError, match="not have whole heads"):
        read(rewritten(path, "qwen3next", {"blk.0.attn_gate.weight": store(torch.ones(32, 64))}))
    with pytest.raises(GgufError, match=r"'blk\.0\.attn_gate\.weight' are not of one width"):
        read(rewritten(path, "qwen3next", {"blk.0.attn_gate.weight": store(torch.ones(64, 32))}))


def test_heads_of_values_that_are_stored_in_turns(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "qwen35", Q4_0)
    want, got = config_of("qwen35").to_dict(), settings(path).to_dict()
    assert got.pop("rms_norm_eps") == pytest.approx(want.pop("rms_norm_eps"))
    assert got == want
    without = metadata_of("qwen35")
    del without["qwen35.rope.dimension_sections"]
    other = write_file(tmp_path / "y.gguf", without, {"token_embd.weight": store(torch.ones(288, 64))})
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    assert settings(other).rope_parameters == rope
    for name, shape in (("attn_qkv.weight", (64, 64)), ("ssm_a", (5,)), ("ssm_out.weight", (64, 64))):
        with pytest.raises(GgufError, match=f"'blk.0.{name}' does not have whole heads"):
            read(rewritten(path, "qwen35", {f"blk.0.{name}": store(torch.ones(shape), Q4_0)}))
    changed = rewritten(path, "qwen35", {}, **{"qwen35.ssm.time_step_rank": 3, "qwen35.ssm.inner_size": 48})
    with pytest.raises(GgufError, match="as many heads of values for each head of keys"):
        read(changed)


_PACKED = [
    "mimo2",
    "mamba2",
    "mamba normed",
    "granitehybrid rotary",
    "olmo",
    "hrm_text",
    "bitnet",
    "hunyuan_vl",
    "jais2",
    "paddleocr",
    "baichuan",
    "orion",
    "qwen",
    "xverse",
    "gptneox",
    "mpt",
    "starcoder",
    "internlm2",
    "minicpm",
    "minicpm3",
    "chatglm",
    "phi2",
    "jamba",
    "exaone-moe",
    "afmoe",
    "apertus",
    "falcon-h1",
    "nemotron_h",
    "nemotron_h_moe",
    "nemotron_h_moe latent",
    "hunyuan-moe",
    "dots1",
    "phimoe",
    "cohere2moe",
    "mellum",
    "hy_v3",
    "laguna",
    "laguna whole",
    "granite_swa",
    "granite_swa experts",
    "granitemoe shared",
    "glm4moe whole",
]


@quiet
@pytest.mark.parametrize("label", _PACKED)
def test_all_matrices_stay_packed(label: str, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", label, Q4_0)
    model = read(path, packed=True)
    plain, parameters = dict(want.named_parameters()), dict(model.named_parameters())
    matrices = [
        name for name, weight in plain.items() if weight.dim() > 1 and not name.endswith(("conv1d.weight", "A_log"))
    ]
    assert matrices
    for name in matrices:
        weight = quantised_weight_of(parameters[name])
        assert weight is not None, name
        assert torch.equal(weight.dense(), plain[name]), name


@pytest.mark.parametrize("label", ["qwen35", "qwen35moe"])
def test_heads_of_values_stay_packed(label: str, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", label, Q4_0)
    file = GgufFile(path)
    model = build_model(file, read_gguf_config(file, path), AutoModelForCausalLM, None, {}, packed=True)
    found = model.model.layers[0].linear_attn
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj"):
        weight = quantised_weight_of(getattr(found, name).weight)
        assert weight is not None
        plain = getattr(want.model.layers[0].linear_attn, name).weight
        assert torch.equal(weight.dense(), plain)
        assert torch.equal(weight.take(torch.tensor([3, 0])), plain[[3, 0]])


@quiet
def test_keys_and_values_of_latents_in_one_tensor_and_of_another_shape(tmp_path: Path) -> None:
    """Older files have them so, and the widths of heads as those of other models."""
    path, want = written(tmp_path / "x.gguf", "deepseek2", Q8_0)
    weights = [layer.self_attn.kv_b_proj.weight for layer in want.model.layers]
    parts = {f"blk.{n}.attn_{name}_b.weight": None for n in range(3) for name in "kv"}
    whole = {f"blk.{n}.attn_kv_b.weight": store(weight) for n, weight in enumerate(weights)}
    metadata = {key: value for key, value in metadata_of("deepseek2").items() if "_mla" not in key}
    file = GgufFile(path)
    tensors = {
        each.name: Stored(each.data.numpy().copy(), each.shape, each.kind, torch.empty(0))
        for each in file.tensors.values()
        if each.name not in parts
    }
    said = {**metadata, "deepseek2.attention.key_length": 48, "deepseek2.attention.value_length": 32}
    got = read(write_file(tmp_path / "y.gguf", said, {**tensors, **whole}))
    torch.testing.assert_close(logits(got), logits(want), rtol=1e-4, atol=1e-4)
    for shape in ((4, 32, 32), (3, 32, 64)):
        with pytest.raises(GgufError, match="one number of heads, or of one width of latents"):
            read(rewritten(path, "deepseek2", {"blk.1.attn_v_b.weight": store(torch.ones(shape))}))


def test_the_models_own_configuration_wins(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "llama", F32)
    said = json.loads(want.config.to_json_string())
    (tmp_path / "config.json").write_text(json.dumps({**said, "rms_norm_eps": 0.5, "quantization_config": {"a": 1}}))
    file = GgufFile(path)
    config = read_gguf_config(file, path)
    assert config.rms_norm_eps == 0.5
    assert not hasattr(config, "quantization_config")


@pytest.mark.parametrize("label", ["chatglm", "exaone", "internlm2", "minicpm"])
def test_a_configuration_of_code_that_comes_with_a_model_is_not_read(label: str, tmp_path: Path) -> None:
    """transformers would ask on standard input whether to run the code."""
    path, _ = written(tmp_path / "x.gguf", label, F32)
    want = settings(path).to_dict()
    own = {"model_type": label, "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert settings(path).to_dict() == want


def test_files_with_other_weights_or_settings_have_other_digests(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "llama", Q8_0)
    file = GgufFile(path)
    config = read_gguf_config(file, path)
    said = digested_settings(config)
    first = file_digest(file, said)
    assert file_digest(GgufFile(path), said) == first
    norm = all_values(file.tensors["blk.0.attn_norm.weight"], torch.float32).clone()
    norm[5] += 1e-3
    assert file_digest(GgufFile(rewritten(path, "llama", {"blk.0.attn_norm.weight": store(norm)})), said) != first
    config.rms_norm_eps *= 2
    assert file_digest(file, digested_settings(config)) != first
