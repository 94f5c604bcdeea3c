"""A tiny random model of any architecture that transformers knows."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
import transformers
from architectures.overrides import BASE, OVERRIDES, REAL, overlay
from architectures.shapes import BEYOND, LAYERS, is_real, shrunk, thresholds
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

_CLASSES = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "s2s": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}

# Every (name, kind) of the installed transformers; 226 with 5.23.
ENTRIES: tuple[tuple[str, str], ...] = tuple(
    sorted((name, kind) for kind, names in _CLASSES.items() for name in names if name in CONFIG_MAPPING)
)

_FEW_LAYERS = 2  # where timelines are long
_OWN_STATE = "own state object"
_RECURRENT = {"linear_attention", "conv", "mamba", "dummy"}
_FAMILIES = (
    (("linear", "conv", "hybrid", "recurrent"), "hybrid"),
    (("indexed", "sparse", "compressed"), "sparse attention"),
    (("chunked",), "chunked attention"),
    (("sliding",), "sliding attention"),
)

# What a recurrence needs in its own range: decays, time steps, slopes, rotary tables, routing corrections.
_DYNAMICS = re.compile(
    r"A_log|dt_bias|dt_proj\.bias|\.[AD]$|time_(decay|first|mix)|inv_freq|lambda|decay|slope|e_score|correction"
)


def build(name: str, kind: str, seed: int = 0, *, real: bool = False) -> Any:
    """A float32 model in eval mode with weights of unit gain, so that an error in a cache shows in the logits.

    ``kind``: "causal" or "s2s". ``real``: with the thresholds and contexts of the default config. Raises
    whatever transformers raises where it cannot make the model.
    """
    config = make_config(name, kind, real)
    cls = getattr(transformers, _CLASSES[kind][name])
    torch.manual_seed(seed)
    model = cls(_expected(cls, config)).float().eval()
    _unit_gain(model, seed)
    _plain_greedy(model)
    return model


def make_config(name: str, kind: str, real: bool = False) -> Any:
    cls = CONFIG_MAPPING[name]
    base = BASE.get(name, {})
    default = cls(**base)
    room = max(thresholds(default), default=0) + 2 * BEYOND if real else 0
    depth = _FEW_LAYERS if real and name not in OVERRIDES and (name, kind) not in OVERRIDES else LAYERS
    settings = overlay(base, shrunk(default, room, depth))
    over = OVERRIDES.get((name, kind), OVERRIDES.get(name, {}))
    over = overlay(_without_thresholds(over), REAL.get(name, {})) if real else over
    return cls(**overlay(settings, over))


def has_thresholds(name: str, kind: str) -> bool:
    """Whether the default config of an entry names any; True where it cannot be made, which will be told then."""
    try:
        return bool(thresholds(make_config(name, kind, real=True)))
    except Exception:
        return True


def _without_thresholds(over: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in over.items() if not is_real(name)}
    return {name: _without_thresholds(v) if isinstance(v, dict) else v for name, v in kept.items()}


def _expected(cls: Any, config: Any) -> Any:
    """``config``, or the part of it that the class takes (the text or decoder config of a larger model)."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    parts = (getattr(config, name, None) for name in config.sub_configs or {})
    return next((part for part in parts if isinstance(part, wanted)), config)


@torch.no_grad()
def _unit_gain(model: Any, seed: int) -> None:
    """The usual initialisation (deviation 0.02, zero gates) hides errors: draw every weight anew."""
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for name, weight in model.named_parameters():
        if weight.data_ptr() in done or _DYNAMICS.search(name) or not weight.is_floating_point():
            continue
        done.add(weight.data_ptr())
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim < 2:
            weight.add_(0.1 * noise)
        elif "embed" in name.lower() or "wte" in name or "wpe" in name:
            weight.copy_(0.5 * noise)
        else:
            weight.copy_(noise / max(_fan_in(weight), 1) ** 0.5)


def _fan_in(weight: torch.Tensor) -> int:
    """Inputs of one output; stacked experts ``[E, a, b]`` may lie either way round."""
    if weight.ndim == 3 and weight.shape[1] != 1:
        return max(weight.shape[1], weight.shape[2])
    return weight[0].numel()


def _plain_greedy(model: Any) -> None:
    """No forced or suppressed tokens, no beams: greedy is the largest logit. Encoder-decoders have a start token."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return
    for name in ("forced_eos_token_id", "forced_bos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        setattr(settings, name, None)
    settings.num_beams = 1
    if model.config.is_encoder_decoder:
        start = settings.decoder_start_token_id
        start = getattr(model.config, "decoder_start_token_id", None) if start is None else start
        settings.decoder_start_token_id = model.config.decoder_start_token_id = 1 if start is None else start


def family_of(model: Any) -> str:
    """What kinds of layers a model has, by the words of its own config."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder"
    text = model.config.get_text_config(decoder=True)
    try:
        stored, _ = get_layer_types_and_kwargs(text)
    except (AttributeError, TypeError, ValueError):
        return _OWN_STATE
    declared = {*stored, *(getattr(text, "layer_types", None) or [])}
    if declared <= _RECURRENT:
        return "recurrent"
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return _OWN_STATE
    kinds = " ".join(declared)
    return next((family for words, family in _FAMILIES if any(word in kinds for word in words)), "full attention")
