"""Settings of single architectures in GGUF files, and files that do not say them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_kit import F32, Q8_0, store, write_file
from gguf_loaded import logits, quiet, read, rewritten, settings
from gguf_metadata import config_of, metadata_of
from gguf_models import written

from scheduler.weights.gguf_file import GgufFile
from scheduler.weights.gguf_header import GgufError
from scheduler.weights.gguf_source import all_values


def test_queries_that_grow_with_positions_that_are_not_stretched(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "mistral3", Q8_0)
    damaged = rewritten(path, "mistral3", {}, **{"mistral3.rope.scaling.type": "none"})
    with pytest.raises(GgufError, match="how its rotary positions are stretched"):
        settings(damaged)


def test_layers_that_do_not_say_how_sparse_they_are(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "gemma3n", Q8_0)
    for damaged in (
        rewritten(path, "gemma3n", {}, **{"gemma3n.activation_sparsity_scale": [0.5]}),
        rewritten(path, "gemma3n", {"blk.0.laurel_l.weight": None}),
    ):
        with pytest.raises(GgufError, match="how sparse its layers are"):
            settings(damaged)


def test_layers_of_two_widths(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "gemma4", Q8_0)
    uniform = rewritten(path, "gemma4", {"rope_freqs.weight": None}, **{"gemma4.rope.freq_base": 1000.0})
    ropes = settings(uniform).rope_parameters
    assert ropes["full_attention"] == {**want.config.rope_parameters["full_attention"], "rope_theta": 1000.0}
    for key, wrong in (
        ("attention.sliding_window_pattern", [True] * 6),
        ("attention.sliding_window_pattern", [False] * 5),
        ("attention.sliding_window_pattern", 6),
        ("feed_forward_length", [96] * 5),
        ("attention.head_count_kv", ["two"] * 6),
    ):
        damaged = rewritten(path, "gemma4", {}, **{f"gemma4.{key}": wrong})
        with pytest.raises(GgufError, match="the file does not say"):
            settings(damaged)


def test_which_layers_have_a_window(tmp_path: Path) -> None:
    """Of each, or every which has none; further layers, which predict tokens, may be told of too."""
    path, want = written(tmp_path / "x.gguf", "exaone4 windows", Q8_0)
    key, count = "exaone4.attention.sliding_window_pattern", want.config.num_hidden_layers

    def kinds(pattern: Any) -> list[str]:
        file = rewritten(path, "exaone4 windows", {}, **{key: pattern})
        return [kind.partition("_")[0] for kind in settings(file).layer_types]

    turns = [number % 2 == 0 for number in range(count)]
    assert kinds([*turns, True]) == kinds(turns) == kinds(2) == ["sliding" if each else "full" for each in turns]
    with pytest.raises(GgufError, match="of each layer whether it has a sliding window"):
        kinds(turns[1:])


def test_numbers_of_activations_are_weights(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "apertus", Q8_0)
    file = GgufFile(path)
    said = dict(file.metadata)
    tensors = {
        each.name: store(all_values(each, torch.float32)) for each in file.tensors.values() if "xielu" not in each.name
    }
    got = read(path)
    for mine, theirs in zip(got.model.layers, want.model.layers, strict=True):
        assert all(
            torch.equal(x, y)
            for x, y in zip(mine.mlp.act_fn.state_dict().values(), theirs.mlp.act_fn.state_dict().values(), strict=True)
        )
    other = {**said, "xielu.beta": [0.25, 0.75]}
    changed = read(write_file(tmp_path / "y.gguf", other, tensors))
    assert [float(layer.mlp.act_fn.beta) for layer in changed.model.layers] == [0.25, 0.75]
    for wrong, told in (
        ([0.5], "does not have the numbers of the activation"),
        (["a", "b"], "is not a list of numbers"),
    ):
        path = write_file(tmp_path / "z.gguf", {**said, "xielu.beta": wrong}, tensors)
        with pytest.raises(GgufError, match=told):
            read(path)


def test_scores_of_experts_that_the_model_cannot_have(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "dots1", Q8_0)
    by_softmax = rewritten(path, "dots1", {}, **{"dots1.expert_gating_func": 1})
    with pytest.raises(GgufError, match="scores of its experts are no sigmoids"):
        settings(by_softmax)
    path, _ = written(tmp_path / "x.gguf", "afmoe", Q8_0)
    for key, wrong, told in (
        ("expert_gating_func", 1, "no normalised sigmoids"),
        ("expert_weights_norm", False, "no normalised sigmoids"),
        ("attention.sliding_window", 0, "which of its layers have a sliding window"),
    ):
        other = rewritten(path, "afmoe", {}, **{f"afmoe.{key}": wrong})
        with pytest.raises(GgufError, match=told):
            settings(other)
    for label in ("hy_v3", "laguna"):
        path, _ = written(tmp_path / "x.gguf", label, Q8_0)
        for key in ("expert_gating_func", "expert_weights_norm"):
            other = rewritten(path, label, {}, **{f"{label}.{key}": False})
            with pytest.raises(GgufError, match="no normalised sigmoids"):
                settings(other)


def test_groups_of_experts_are_configured_by_the_metadata(tmp_path: Path) -> None:
    """A last layer is for predicting further tokens."""
    path, _ = written(tmp_path / "x.gguf", "glm4moe", F32)
    further: dict[str, object] = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    path = rewritten(path, "glm4moe", {}, **further)
    want, got = config_of("glm4moe").to_dict(), settings(path).to_dict()
    assert got.pop("rms_norm_eps") == pytest.approx(want.pop("rms_norm_eps"))
    assert got == want


def test_attention_to_latents_is_configured_by_the_metadata(tmp_path: Path) -> None:
    for label in ("deepseek2", "deepseek2 softmax"):
        path, _ = written(tmp_path / "x.gguf", label, F32)
        config = settings(path)
        want, got = config_of(label).to_dict(), config.to_dict()
        assert got.pop("rms_norm_eps") == pytest.approx(want.pop("rms_norm_eps"))
        assert got == want
    path, _ = written(tmp_path / "x.gguf", "deepseek2", F32)
    metadata = metadata_of("deepseek2")
    tensors = {"token_embd.weight": store(torch.ones(288, 64)), "blk.1.exp_probs_b.bias": store(torch.ones(8))}

    def config_without(*keys: str, **more: object) -> Any:
        said = {key: value for key, value in metadata.items() if key.removeprefix("deepseek2.") not in keys}
        said |= {f"deepseek2.{key}": value for key, value in more.items()}
        other = write_file(tmp_path / "y.gguf", said, tensors)
        return settings(other)

    assert config_without("expert_gating_func").model_type == "deepseek_v3"
    assert config_without("expert_gating_func", "expert_count", "expert_group_count").model_type == "deepseek_v3"
    with pytest.raises(GgufError, match="in how many groups its experts are"):
        config_without("expert_group_count")
    with pytest.raises(GgufError, match="how wide the parts of its keys and values are"):
        config_without("attention.kv_lora_rank")
    with pytest.raises(GgufError, match="normalised"):
        config_without(expert_gating_func=1)
    assert config_without("expert_weights_norm", expert_gating_func=1, expert_group_count=1).topk_method == "greedy"


def test_scales_that_older_files_of_minicpm_do_not_say(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "minicpm", Q8_0)
    tensors = {each.name: store(all_values(each, torch.float32)) for each in GgufFile(path).tensors.values()}
    said = {key: value for key, value in metadata_of("minicpm").items() if not key.endswith("_scale")}
    older = write_file(tmp_path / "y.gguf", said, tensors)
    config = settings(older)
    assert (config.embedding_multiplier, config.logits_scaling) == (12.0, 0.25)
    assert config.residual_multiplier == pytest.approx(1.4 / 2**0.5)
    routed = rewritten(path, "minicpm", {}, **{"minicpm.expert_count": 4})
    with pytest.raises(GgufError, match="no model of its architecture with experts"):
        settings(routed)


def test_what_is_added_in_norms_by_its_other_name(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "exaone", Q8_0)
    tensors = {each.name: store(all_values(each, torch.float32)) for each in GgufFile(path).tensors.values()}
    said = {key: value for key, value in metadata_of("exaone").items() if "epsilon" not in key}
    other = write_file(tmp_path / "y.gguf", {**said, "exaone.attention.layer_norm_epsilon": 0.5}, tensors)
    assert settings(other).rms_norm_eps == 0.5


def test_layers_that_see_chunks_of_the_text(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "llama4", Q8_0)
    many = settings(rewritten(path, "llama4", {}, **{"llama4.expert_count": 128}))
    assert settings(path).use_qk_norm
    assert not many.use_qk_norm
    assert many.layer_types == want.config.layer_types == [*["chunked_attention"] * 3, "full_attention"]
    whole = settings(rewritten(path, "llama4", {}, **{"llama4.attention.sliding_window": 0}))
    assert (whole.layer_types, whole.no_rope_layers) == (["full_attention"] * 4, [1] * 4)
    assert whole.moe_layers == want.config.moe_layers == [1, 3]


@quiet
def test_rotary_positions_of_long_contexts_that_are_multiplied(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "phimoe", Q8_0)
    assert settings(path).rope_parameters == {"rope_type": "default", "rope_theta": 1_000_000.0}
    factors = {
        f"rope_factors_{name}.weight": store(torch.full((8,), by)) for name, by in (("short", 1.5), ("long", 3.0))
    }
    said = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    got = read(rewritten(path, "phimoe", {**factors}, **{f"phimoe.{key}": value for key, value in said.items()}))
    config = want.config.to_dict() | {"original_max_position_embeddings": 32}
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 1_000_000.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.5] * 8,
        "long_factor": [3.0] * 8,
        "short_mscale": 1.243163121016122,
        "long_mscale": 1.243163121016122,
    }
    longer = type(want)(type(want.config)(**config)).eval()
    longer.load_state_dict(want.state_dict())
    torch.testing.assert_close(logits(got), logits(longer), rtol=1e-4, atol=1e-4)
    assert (logits(got) - logits(want)).abs().max() > 1e-2
    without = rewritten(path, "phimoe", {"output.bias": None})
    assert settings(path).lm_head_bias
    assert not settings(without).lm_head_bias


def test_scores_of_experts_and_windows_that_are_not_said(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "cohere2moe", Q8_0)
    for key, told in (
        ("expert_gating_func", "what the scores of its experts are"),
        ("attention.sliding_window_pattern", "which of its layers have a sliding window"),
    ):
        other = rewritten(path, "cohere2moe", {}, **{f"cohere2moe.{key}": None})
        with pytest.raises(GgufError, match=told):
            settings(other)
    whole = rewritten(path, "cohere2moe", {}, **{"cohere2moe.attention.sliding_window": None})
    assert settings(whole).layer_types == ["full_attention"] * 5


def test_experts_of_all_tokens_that_are_no_whole_number(tmp_path: Path) -> None:
    """A last layer is for predicting further tokens."""
    path, _ = written(tmp_path / "x.gguf", "hy_v3", Q8_0)
    key = "hy_v3.expert_shared_feed_forward_length"
    for wrong in (None, 40):
        other = rewritten(path, "hy_v3", {}, **{key: wrong})
        with pytest.raises(GgufError, match="how many experts all tokens have"):
            settings(other)
    further = settings(rewritten(path, "hy_v3", {}, **{"hy_v3.block_count": 4, "hy_v3.nextn_predict_layers": 1}))
    assert (further.num_hidden_layers, further.mlp_layer_types) == (3, ["dense", "sparse", "sparse"])


def test_layers_with_gated_heads_of_their_own_number(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "laguna", Q8_0)
    turns = [number % 2 == 0 for number in range(5)]
    other = rewritten(path, "laguna", {}, **{"laguna.attention.sliding_window_pattern": turns})
    assert settings(path).layer_types == want.config.layer_types
    assert [kind == "sliding_attention" for kind in settings(other).layer_types] == turns
    even = rewritten(path, "laguna", {}, **{"laguna.attention.head_count": 6})
    assert settings(even).num_attention_heads_per_layer == [6] * 5
    ungated = rewritten(path, "laguna", {"blk.0.attn_gate.weight": None})
    with pytest.raises(GgufError, match="no gates of its attention"):
        settings(ungated)
    short = rewritten(path, "laguna", {}, **{"laguna.attention.head_count": [6] * 4})
    with pytest.raises(GgufError, match="how many heads its layers have"):
        settings(short)


def test_which_layers_have_rotary_positions(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "granite_swa", Q8_0)
    for wrong in (None, [True] * 4, True):
        other = rewritten(path, "granite_swa", {}, **{"granite_swa.attention.rope_pattern": wrong})
        with pytest.raises(GgufError, match="which of its layers have rotary positions"):
            settings(other)


def test_layers_that_choose_what_they_attend_to(tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "hy_v4", Q8_0)
    types, limit = "attention.indexer.types", "swiglu_clamp_exp"
    for key, wrong, told in (
        (types, None, "which of its layers choose"),
        (types, [True] * 3, "which of its layers choose"),
        (types, [False, True, True, True], "which of its layers choose"),
        (limit, [1.0, 2.0, 2.0, 2.0], "differ in how large numbers"),
        (limit, 1.0, "differ in how large numbers"),
    ):
        other = rewritten(path, "hy_v4", {}, **{f"hy_v4.{key}": wrong})
        with pytest.raises(GgufError, match=told):
            settings(other)
    unlimited, large = (
        logits(read(rewritten(path, "hy_v4", {}, **{f"hy_v4.{limit}": given}))) for given in (None, [1000.0] * 4)
    )
    assert torch.equal(unlimited, large)
    assert not torch.equal(unlimited, logits(want))


def test_few_keys_are_chosen(tmp_path: Path) -> None:
    """In float32 there is one order of them."""
    path, want = written(tmp_path / "x.gguf", "hy_v4", Q8_0)
    got = read(rewritten(path, "hy_v4", {}, **{"hy_v4.attention.indexer.top_k": 4}))
    config = type(want.config)(**(want.config.to_dict() | {"index_topk": 4}))
    few = type(want)(config).eval()
    few.load_state_dict(want.state_dict())
    torch.testing.assert_close(logits(got), logits(few), rtol=1e-4, atol=1e-4)
    assert (logits(few) - logits(want)).abs().max() > 1e-2


def test_rotary_positions_of_layers_with_a_window(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "mellum", Q8_0)
    for key in ("rope.freq_base_swa", "attention.key_length"):
        other = rewritten(path, "mellum", {}, **{f"mellum.{key}": None})
        with pytest.raises(GgufError, match="what the rotary positions of layers with a sliding window are"):
            settings(other)
    whole = rewritten(path, "mellum", {}, **{"mellum.attention.sliding_window": None})
    assert settings(whole).layer_types == ["full_attention"] * 5
