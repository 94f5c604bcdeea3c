"""Which of transformers' models an architecture of GGUF is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scheduler.weights.gguf.experts import chooses_by_sigmoid
from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.hybrid import has_rotary_positions

# What GGUF calls an architecture, and transformers' name of its configuration.
ARCHITECTURES = {
    "afmoe": "afmoe",
    "apertus": "apertus",
    "arcee": "arcee",
    "baichuan": "llama",
    "bailingmoe3": "bailing_hybrid",
    "bert": "bert",
    "bitnet": "bitnet",
    "bloom": "bloom",
    "chatglm": "glm",
    "cohere2": "cohere2",
    "cohere2moe": "cohere2_moe",
    "command-r": "cohere",
    "dbrx": "dbrx",
    "deepseek2": "deepseek_v2",
    "deepseek32": "deepseek_v32",
    "deepseek4": "deepseek_v4",
    "dots1": "dots1",
    "dots3note": "dots3_note_text",
    "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone": "llama",  # the same by other names, as internlm2 is; minicpm is Granite
    "exaone-moe": "exaone_moe",
    "exaone4": "exaone4",
    "falcon": "falcon",
    "falcon-h1": "falcon_h1",
    "gemma": "gemma",
    "gemma-embedding": "gemma3_text",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "glm-dsa": "glm_moe_dsa",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "gpt2": "gpt2",
    "gptneox": "gpt_neox",
    "granite": "granite",
    "granite_swa": "granite_swa",
    "granitehybrid": "granitemoehybrid",
    "granitemoe": "granitemoe",
    "hrm_text": "hrm_text",
    "hunyuan-dense": "hunyuan_v1_dense",
    "hunyuan-moe": "hunyuan_v1_moe",
    "hunyuan_vl": "hunyuan_v1_dense",
    "hy_v3": "hy_v3",
    "hy_v4": "hy_v4",
    "internlm2": "llama",
    "jais2": "jais2",
    "jamba": "jamba",
    "kimi-linear": "kimi_linear",
    "laguna": "laguna",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "llama": "llama",
    "llama4": "llama4_text",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "mellum": "mellum",
    "mimo2": "mimo_v2_flash",
    "minicpm": "granite",
    "minicpm3": "minicpm3",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3_vl_text",
    "mistral": "mistral",
    "mistral3": "mistral",
    "mistral4": "mistral4",
    "modern-bert": "modernbert",
    "mpt": "mpt",
    "nemotron": "nemotron",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "nomic-bert": "nomic_bert",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "orion": "stablelm",
    "paddleocr": "llama",
    "phi2": "phi",
    "phi3": "phi3",
    "phimoe": "phimoe",
    "qwen": "qwen2",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen2vl": "qwen2",  # of models that see, the part that reads and writes text
    "qwen3": "qwen3",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3_moe",
    "qwen4exp": "qwen4_exp_text",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder": "gpt_bigcode",
    "starcoder2": "starcoder2",
    "xverse": "llama",
}


def _says(key: str) -> Callable[[GgufFile, Mapping[str, Any]], bool]:
    return lambda file, keys: bool(keys.get(key))


# Of some architectures files with something more are another of transformers' models. The last of these that is there
# decides.
VARIANTS: tuple[tuple[Callable[[GgufFile, Mapping[str, Any]], bool], dict[str, str]], ...] = (
    (_says("expert_count"), {"granite_swa": "granitemoe_swa", "llama": "mixtral"}),
    (_says("expert_shared_feed_forward_length"), {"granitemoe": "granitemoeshared"}),
    (chooses_by_sigmoid, {"deepseek2": "deepseek_v3"}),
    (_says("attention.sliding_window"), {"olmo2": "olmo3"}),
    (_says("attention.temperature_scale"), {"deepseek2": "mistral4", "mistral3": "ministral3"}),
    (_says("ssm.dt_b_c_rms"), {"mamba": "falcon_mamba"}),
    (lambda file, keys: has_rotary_positions(keys), {"granitehybrid": "bamba"}),
)


def kind_of(file: GgufFile, keys: Mapping[str, Any]) -> str:
    """Transformers' name of the configuration for the model in ``file``, whose architecture says ``keys``. Raises
    ``GgufError`` for an architecture that is not known.
    """
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise GgufError(
            f"its architecture is not one of {known}; for another one that transformers has, put the model's own "
            "config.json beside the file"
        )
    kinds = [others[architecture] for there, others in VARIANTS if architecture in others and there(file, keys)]
    return kinds[-1] if kinds else ARCHITECTURES[architecture]
