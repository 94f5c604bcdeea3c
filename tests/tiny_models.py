"""Tiny random models of several architectures and a byte tokenizer, made on the spot: no test needs weights or
the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MiniMaxConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3NextConfig,
    RwkvConfig,
    T5Config,
)

WINDOW = 8  # shorter than every context of the tests
CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SHAPE: dict[str, Any] = {  # of a decoder, but for its vocabulary
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
_SHAPE: dict[str, Any] = {**SHAPE, "vocab_size": 259}
_MIXED: dict[str, Any] = {
    **_SHAPE,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "head_dim": 8,  # what RoPE turns
}


def _configs() -> dict[str, Any]:
    shape = _SHAPE
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256}
    return {
        "llama": LlamaConfig(**shape),
        "qwen3": Qwen3Config(**shape),
        "gemma2": Gemma2Config(**shape, sliding_window=WINDOW, query_pre_attn_scalar=16),
        "gemma3": Gemma3TextConfig(**_MIXED, sliding_window=WINDOW, query_pre_attn_scalar=16),
        "gpt_oss": GptOssConfig(
            **_MIXED,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        "gemma4": Gemma4TextConfig(
            **shape,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            global_head_dim=32,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
        ),
        "gemma4_shared": Gemma4TextConfig(
            **{**shape, "num_hidden_layers": 6},
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 3,
            global_head_dim=32,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=259,
            num_kv_shared_layers=2,
        ),
        "lfm2": Lfm2Config(
            **{**shape, "num_hidden_layers": 4},
            layer_types=["conv", "full_attention", "conv", "conv"],
            block_auto_adjust_ff_dim=False,
            conv_bias=True,
        ),
        "mistral": MistralConfig(**shape, sliding_window=WINDOW),
        "deepseek_v3": DeepseekV3Config(**{**shape, **_LATENT}),
        "llama4": Llama4TextConfig(
            **shape,
            attention_chunk_size=WINDOW,
            num_local_experts=2,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=96,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
        ),
        "qwen3_next": Qwen3NextConfig(
            **{**shape, "num_hidden_layers": 3},
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
        "longrope": Phi3Config(
            **shape,
            original_max_position_embeddings=THRESHOLD,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0, 3.0, 3.0, 2.0, 2.0, 2.0, 1.5, 1.0],
                "original_max_position_embeddings": THRESHOLD,
            },
        ),
        "mamba2": Mamba2Config(
            vocab_size=259,
            hidden_size=64,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=16,
            state_size=16,
            n_groups=2,
            chunk_size=WINDOW,  # each call is padded to whole chunks, and 256 tokens are never met here
            **ends,
        ),
        "jamba": JambaConfig(
            **{**shape, "num_hidden_layers": 3},
            num_experts=2,
            num_experts_per_tok=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_dt_rank=4,
        ),
        "minimax": MiniMaxConfig(
            **{**shape, "num_hidden_layers": 3},
            num_local_experts=2,
            num_experts_per_tok=1,
            block_size=WINDOW,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        "falcon": FalconConfig(vocab_size=259, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **ends),
        "bloom": BloomConfig(vocab_size=259, hidden_size=64, n_layer=2, n_head=4, **ends),
        "rwkv": RwkvConfig(vocab_size=259, hidden_size=64, num_hidden_layers=2, context_length=CONTEXT, **ends),
        "t5": T5Config(
            vocab_size=259, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=256, **ends
        ),
        "bart": BartConfig(
            vocab_size=259,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            max_position_embeddings=64,
            forced_eos_token_id=None,
            decoder_start_token_id=256,
            **{**ends, "bos_token_id": 257},
        ),
    }


ARCHITECTURES = ("llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "llama4")  # paged, packed
RECURRENT = ("qwen3_next", "mamba2", "jamba")  # packed, with states beside the pages
OTHERS = ("falcon", "bloom", "rwkv")  # masked, alone, alone
TWO_PARTS = ("t5", "bart")  # encoder and decoder
CHAINED = ("gemma4", "gemma4_shared", "lfm2")  # packed, with layers that differ from their neighbours
MODES = dict.fromkeys((*ARCHITECTURES, *RECURRENT, *CHAINED, "longrope", "mistral", "minimax"), "packed") | {
    **dict.fromkeys(TWO_PARTS, "encoder-decoder"),
    "jamba": "packed, token by token",
    "falcon": "masked",
    "bloom": "alone",
    "rwkv": "alone",
}  # what the probe must choose: a slower mode would be right as well, and hide what broke a faster one
THRESHOLD = 24  # of "longrope": longer timelines are turned with other frequencies


def make_model(name: str, seed: int = 0, **settings: Any) -> Any:
    """A float32 model with random weights of unit gain, so that an error in a cache is visible in the logits.
    ``settings``: of its config.
    """
    torch.manual_seed(seed)
    config = _configs()[name]
    for setting, value in settings.items():
        setattr(config, setting, value)
    # transformers 5.17 forgets these bounds elsewhere than in the model's own code.
    own = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32, **own).eval()
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if "embed" in label:
                weight.normal_(0, 1)
            elif weight.ndim >= 2:
                gain = 2 if "q_" in label or "k_" in label else 1  # sharp attention: far tokens matter
                weight.normal_(0, gain / math.sqrt(weight.shape[-1]))
            elif "sink" in label or "bias" in label:
                weight.normal_(0, 0.5)
    return model


@torch.no_grad()
def of_unit_gain(model: Any) -> Any:
    """The model, with other random weights."""
    for weight in model.parameters():
        if weight.ndim >= 2:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    return model


@cache
def model_of(name: str) -> Any:
    """The same model for every test of a run; nobody may change it."""
    return make_model(name)


def byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte: printable ones themselves, the rest from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_tokenizer(
    special: Sequence[str], vocab: dict[str, int] | None = None, merges: Sequence[tuple[str, str]] = ()
) -> Tokenizer:
    """A byte-level tokenizer; without a vocabulary, bytes are tokens 0..255. Special tokens come behind them. Every
    text round-trips.
    """
    vocab = vocab or {char: byte for byte, char in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special])
    return tokenizer


def make_tokenizer(*marks: str, **options: Any) -> PreTrainedTokenizerFast:
    """A byte tokenizer; 256 to 258 are end of text, start and end of a message, ``marks`` come behind them."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks]),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        **options,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def token_of(entry: dict[str, Any]) -> int:
    """The token of an entry of an answer's log-probabilities: a byte is its own id; the others are spelled out."""
    data: list[int] = entry["bytes"]
    return data[0] if len(data) == 1 else int(make_tokenizer().convert_tokens_to_ids(bytes(data).decode()))


def save_model(name: str, folder: Path) -> Path:
    """A folder that ``warmturn serve`` can load."""
    path = folder / name
    model_of(name).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int, draft: list[int] | None = None) -> list[int]:
    """The oracle: ``count`` greedy tokens, each from a from-scratch forward of the whole timeline, no cache.

    ``draft``: what they are expected to be. One forward of the prompt and the draft then tells, as the model is causal,
    how many of its first tokens are right; the rest is computed one by one.
    """
    ids = list(prompt)
    if draft and not _depends_on_length(model):
        drafted = [*prompt, *draft[:count]]
        rows = model(input_ids=torch.tensor([drafted], device=model.device), use_cache=False).logits[0]
        for token, want in zip(draft, rows[len(prompt) - 1 : -1].argmax(-1).tolist(), strict=False):
            ids.append(want)
            if token != want:
                break
    while len(ids) < len(prompt) + count:
        ids.append(
            int(model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1].argmax())
        )
    return ids[len(prompt) :]


def _depends_on_length(model: Any) -> bool:
    """Whether tokens are turned by other angles once more of them follow: then a prefix is not computed as it was."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return rope.get("rope_type") in ("longrope", "dynamic")


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """The oracle: logits ``[len(ids), V]`` of a from-scratch forward."""
    out: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return out
