"""Shrink the default config of any architecture to a tiny one that still uses every kind of layer it has.

Rules go by the name of a setting, never by the name of a model; what they cannot know is in ``overrides``.
Windows, chunks and top-k end up smaller than the contexts of the scenario, so that they are at work in it. With
``room`` they stay as they are, and contexts are as long as that at least: widths and depths alone are small.
"""

from __future__ import annotations

import re
from typing import Any

VOCAB = 259  # what tiny_models.make_tokenizer knows
WINDOW = 8
LAYERS = 4
POSITIONS = 512

# (size, names of settings): the first rule that matches a name caps its integer.
_RULES: tuple[tuple[int, str], ...] = (
    # vocabularies
    (64, r"(t2u|char|unit_hifi_gan|pronunciation|shape|audio)_vocab_size|codebook_size|encoder_hash_byte_group_vocab"),
    (VOCAB, r".*vocab_size(_per_layer_input)?"),
    (50, r"ngram_vocab_size_base"),
    (8, r"make_ngram_vocab_size_divisible_by"),
    (2, r"split_ngram_parts|heads_per_ngram"),
    # small widths, before the general one
    (8, r"hidden_size_per_layer_input|laurel_rank|hc_lowrank|gated_norm_rank|adapter_rank|d_rel|block_multiple_of"),
    (
        16,
        r"router_hidden_size|ple_embed_dim|prompt_mid_dim|pronunciation_embed_dim|shape_embed_dim|downsample_hidden_size",
    ),
    (16, r"vector_quantization_hidden_dimension|codebook_dim|unit_embed_dim|t2u_variance_predictor_\w+_dim"),
    (16, r"feature_projection_input_dim|input_feat_size|num_mel_bins|nemo_conv_channels|input_dim|num_centroids"),
    (32, r"base_channels|upsample_initial_channel"),
    (8, r"lang_embed_dim|spkr_embed_dim"),
    (4, r"num_filters|num_quantizers|vocoder_num_\w+|num_meta_tokens|prompt_length|centroid_intermediate_top_k"),
    (2, r"num_codebooks|n_layers_per_attn_res_block"),
    (0, r"num_nextn_predict_layers"),
    # widths
    (96, r".*intermediate_size(_mlp)?|.*ffn_dim|d_ff|dim_ff|dff|n_inner|.*ffn_hidden_size|feed_forward_size|d_inner"),
    (96, r"mlp_dim|expert_dim|shared_expert_dim"),
    (64, r".*hidden_size(_global)?|d_model|n_embd|dim|emb_dim|dim_model|embedding_(size|dim)|hidden_dim|lru_width"),
    (
        64,
        r"word_embed_proj_dim|(in|out)put_embedding_size|adapter_(in|out)_dim|adapter_input_size|projector_output_dim",
    ),
    (64, r"conv_output_size|(ext_pw|depthwise_separable)_out_channel|upsample_groups"),
    # depth
    (
        2,
        r".*(en|de)coder_layers|num_blocks|depth|num_lstm_layers|num_mem_blocks|conf_num_hidden_layers|num_global_layers",
    ),
    (LAYERS, r"num_hidden_layers|n_layers?|num_layers"),
    # heads
    (2, r"num_(global_)?key_value_heads|num_kv_heads|swa_num_key_value_heads|kv_n_heads"),
    (4, r".*attention_heads|n_heads?|num_heads|num_query_groups|linear_num_heads"),
    (8, r"qk_rope_head_dim"),
    (24, r"qk_head_dim|q_lora_rank"),
    (16, r"kv_lora_rank|o_lora_rank|(qk_nope|v|index)_head_dim"),
    (16, r"(swa_|swa_v_|global_|attention_|linear_)?head_dim|d_kv|kv_channels|d_head|dim_head|attention_head_size"),
    (2, r"o_groups"),
    # sparse attention: a few blocks of few tokens; fewer than 16 index heads give exact ties
    (16, r"index_n_heads"),
    (6, r"index_topk"),
    (4, r"index_block_size"),
    (2, r"index_topk_blocks"),
    # experts
    (2, r"num_experts_per_tok(en)?|moe_top_?k|moe_k"),
    (
        1,
        r"n_shared_experts|moe_num_shared_experts|n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers",
    ),
    (4, r"num_(local_)?experts|n_routed_experts|moe_num_experts|zero_expert_num"),
    # windows
    (WINDOW, r"sliding_window(_size)?|attention_chunk_size|attention_window(_size)?|window_size"),
    (2 * WINDOW, r"local_attention"),
    # recurrent states
    (2, r"linear_num_key_heads|(mamba_)?n_groups|mamba_ngroups|n_mamba_heads"),
    (4, r"linear_num_value_heads"),
    (16, r"linear_(key|value)_head_dim|(mamba_)?d_state|mamba_d_head|mamba_head_?dim|(ssm_)?state_size"),
    (8, r"mamba_n(um)?_heads|(mamba_)?chunk_size|mamba_dt_rank|time_step_rank"),
    (128, r"mamba_d_ssm"),
    # positions
    (64, r"rel_extent|floor_scale"),
    (POSITIONS, r".*max_position_embeddings|max_(en|de)coder_position_embeddings|n_positions|n_ctx|max_seq_len"),
    (POSITIONS, r"max_(target|source)_positions|context_length|model_max_length|mem_len"),
    # pictures
    (28, r"image_size"),
    (14, r"patch_size"),
)
# What positions, or numbers of keys, are compared with.
_THRESHOLD = re.compile(
    r"attention_chunk_size|floor_scale|log_scaling_n_floor|sliding_window(_size)?|attention_window(_size)?|window_size"
    r"|local_attention(_window_len)?|local_radius|global_block_size|index_(topk|topk_blocks|block_size)|keep_window_size"
    r"|indexer_(budget|compress_ratio)|compress_rates|original_max_position_embeddings|rel_extent|block_size"
    r"|relative_(attention_)?max_distance|(mamba_)?chunk_size|position_bias_max_distance|mem_len|l(ocal|sh)_attn_chunk_length"
)
# What a context cannot be longer than.
_LONGEST = re.compile(
    r".*max_position_embeddings|max_(en|de)coder_position_embeddings|n_positions|n_ctx|max_seq_len"
    r"|max_(target|source)_positions|context_length|model_max_length"
)
# Thresholds that only count together: so many blocks, of so many tokens each.
_TOGETHER = (("index_topk_blocks", "index_block_size"), ("indexer_budget", "indexer_compress_ratio"))
BEYOND = 500  # tokens that timelines grow past a threshold
_LARGEST, _SMALLEST = 20_000, 16  # thresholds
_COMPILED = tuple((size, re.compile(pattern)) for size, pattern in _RULES)
_TOKEN_ID = re.compile(r".*(token_id|token_index|tok_id)")
_FORCED_TOKEN = re.compile(r"forced_\w+_token_id")
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_MOST_LAYERS = 6


def shrunk(config: Any, room: int = 0, depth: int = LAYERS) -> dict[str, Any]:
    """The settings to build ``type(config)`` from for a tiny model of the same kinds of layers; sub-configs are
    dictionaries. ``room``: with the thresholds that ``config`` has, and contexts of so many
    tokens. ``depth``: layers, or more where there are more kinds of them.
    """
    return _shrunk(config, iter(range(VOCAB - 4, 0, -1)), room, depth)


def is_real(name: str) -> bool:
    """Whether a setting of that name stays as it is where thresholds are real."""
    return bool(_THRESHOLD.fullmatch(name) or _LONGEST.fullmatch(name))


def thresholds(config: Any) -> list[int]:
    """Up to 20,000, what timelines can grow past, of all that positions are compared with in the text part."""
    found: dict[str, set[int]] = {}
    pending = [("", config.get_text_config(decoder=not config.is_encoder_decoder).to_dict())]
    while pending:
        above, settings = pending.pop()
        for key, value in settings.items():
            name = above if _THRESHOLD.fullmatch(above) else str(key)
            items = value if isinstance(value, list | tuple) else [value]
            pending += [(name, item) for item in items if isinstance(item, dict)]
            if _THRESHOLD.fullmatch(name):
                numbers = {int(n) for n in items if isinstance(n, int | float) and not isinstance(n, bool)}
                found.setdefault(name, set()).update(numbers)
    every = set().union(*found.values())
    for one, other in _TOGETHER:
        every |= {a * b for a in found.get(one, ()) for b in found.get(other, ())}
    every |= {a * b for a in found.get("index_topk", ()) for b in found.get("compress_rates", ())}
    return sorted(n for n in every if _SMALLEST < n <= _LARGEST)


def special_tokens(config: Any) -> set[int]:
    """Every token id that the config or a sub-config gives a meaning to: models treat some of them differently."""
    found: set[int] = set()
    pending = [config.to_dict()]
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif _TOKEN_ID.fullmatch(str(name)):
                values = value if isinstance(value, list | tuple) else [value]
                found.update(v for v in values if isinstance(v, int) and v >= 0)
    return found


def _shrunk(config: Any, free_ids: Any, room: int, depth: int) -> dict[str, Any]:
    nested = {name for name in (config.sub_configs or {}) if hasattr(getattr(config, name, None), "to_dict")}
    out: dict[str, Any] = {}
    settings = {name: value for name, value in config.to_dict().items() if name not in nested}
    for name, value in settings.items():
        small = _kept(name, value, room) if room and is_real(name) else _capped(name, value, free_ids)
        if small != value:
            out[name] = small
    out.update({name: min(out[name], depth) for name in _DEPTHS if name in out})
    out.update(_thinned(settings, depth))
    for name in nested:
        inner = getattr(config, name)
        out[name] = {**_shrunk(inner, free_ids, room, depth), "model_type": inner.model_type}
    return out


def _kept(name: str, value: Any, room: int) -> Any:
    """One setting where thresholds are real."""
    grows = isinstance(value, int) and not _THRESHOLD.fullmatch(name)
    return max(value, room) if grows else value


def _capped(name: str, value: Any, free_ids: Any) -> Any:
    """One setting made small: token ids into the vocabulary, dropout off, sizes under their rule."""
    if _FORCED_TOKEN.fullmatch(name):
        return None
    if _TOKEN_ID.fullmatch(name):
        if isinstance(value, list):
            return [_capped(name, v, free_ids) for v in value]
        return next(free_ids) if isinstance(value, int) and value >= VOCAB - 3 else value
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if isinstance(value, int) and not isinstance(value, bool):
        return next((min(value, size) for size, pattern in _COMPILED if pattern.fullmatch(name)), value)
    return value


def _thinned(settings: dict[str, Any], few: int) -> dict[str, Any]:
    """The lists that have one entry per layer, cut to the same few layers: two of every distinct combination
    where they may be more than ``few``, and six in all at most.
    """
    depth = next((settings[name] for name in _DEPTHS if isinstance(settings.get(name), int)), None)
    if depth is None and isinstance(settings.get("layers_block_type"), list):
        depth = len(settings["layers_block_type"])
    per_layer = {
        name: value
        for name, value in settings.items()
        if isinstance(value, list | tuple) and depth and len(value) == depth > 1 and not _indices(value)
    }
    if not per_layer:
        return {}
    layers = _chosen([repr(combination) for combination in zip(*per_layer.values(), strict=True)], few)
    out: dict[str, Any] = {name: [value[i] for i in layers] for name, value in per_layer.items()}
    out.update({name: len(layers) for name in _DEPTHS if isinstance(settings.get(name), int)})
    return out


def _indices(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list names layers rather than having an entry for each."""
    return all(isinstance(v, int) for v in values) and list(values) == sorted(set(values))


def _chosen(combinations: list[str], few: int) -> list[int]:
    """Indices of the layers to keep: first one of each combination, then a second, then any, in order."""
    nth = [combinations[:i].count(c) for i, c in enumerate(combinations)]
    by_need = sorted(range(len(combinations)), key=lambda i: (nth[i], i))
    singles = nth.count(0)
    wanted = max(singles, few if few < LAYERS else min(_MOST_LAYERS, max(LAYERS, 2 * singles)))
    return sorted(by_need[:wanted])
