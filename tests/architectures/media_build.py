"""A tiny random model of any entry of transformers that takes pictures or sounds beside text."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from architectures.build import _plain_greedy, _unit_gain
from architectures.media_overrides import BASE, OVERRIDES, TOKENS
from architectures.overrides import BASE as TEXT_BASE
from architectures.overrides import OVERRIDES as TEXT_OVERRIDES
from architectures.overrides import overlay
from architectures.shapes import shrunk
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from scheduler.media.senses import PICTURES, SOUNDS

# Every name of the installed transformers; 112 with 5.23.
MEDIA_ENTRIES: tuple[str, ...] = tuple(sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES))

# Why transformers makes no model of an entry here, where what it raises does not tell.
_TIMM = "its encoder is one of timm, which needs torchvision"
UNBUILT = {"fast_vlm": _TIMM, "gemma3n": _TIMM, "perception_lm": _TIMM}

CONTEXT = 1024
_UNSAID = frozenset({"transformers_version", "_name_or_path", "dtype", "model_type"})


def class_of(name: str) -> Any:
    """The class of transformers for an entry."""
    return getattr(transformers, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[name])


def takes_media(name: str) -> bool:
    """Whether the forward of an entry has an argument for pictures or sounds, as the product knows them."""
    accepts = inspect.signature(class_of(name).forward).parameters
    return any(argument in accepts for sense in (PICTURES, SOUNDS) for argument in sense.inputs)


def build(name: str, seed: int = 0) -> Any:
    """A float32 model in eval mode with weights of unit gain. Raises what transformers raises if it cannot make it."""
    cls = class_of(name)
    config = make_config(name, cls)
    torch.manual_seed(seed)
    model = cls(config).float().eval()
    _unit_gain(model, seed)
    _plain_greedy(model)
    return model


def make_config(name: str, cls: Any) -> Any:
    """The default config made small."""
    kind = CONFIG_MAPPING.get(name, cls.config_class)
    base = overlay(TEXT_BASE.get(name, {}), BASE.get(name, {}))
    default = kind(**base)
    settings = overlay(base, shrunk(default))
    _told_by_the_whole(default, settings)
    over = TEXT_OVERRIDES.get((name, "s2s"), TEXT_OVERRIDES.get(name, {}))
    config = kind(**overlay(overlay(settings, over), OVERRIDES.get(name, {})))
    for token, value in TOKENS.get(name, {}).items():
        setattr(config, token, value)
    _fit_axes(config)
    text = config.get_text_config(decoder=True)
    if isinstance(getattr(text, "max_position_embeddings", None), int):
        text.max_position_embeddings = CONTEXT  # of chats with three sounds
    return config


def _told_by_the_whole(config: Any, settings: dict[str, Any]) -> None:
    """Add to nested ``settings`` what the whole config says of a part other than the part's own default."""
    for name in config.sub_configs or {}:
        part, small = getattr(config, name, None), settings.get(name)
        if part is None or isinstance(part, dict) or not isinstance(small, dict):
            continue
        own = type(part)()
        kinds = (int,) if part is config.get_text_config(decoder=True) else (int, float, str)
        for key, value in part.to_dict().items():
            if (
                isinstance(value, kinds)
                and key not in small
                and key not in _UNSAID
                and getattr(own, key, None) != value
            ):
                small[key] = value
        _told_by_the_whole(part, small)


def _fit_axes(config: Any) -> None:
    """Rotary sections of three axes fill half a head."""
    for name in ("rope_parameters", "rope_scaling"):
        told = getattr(config, name, None)
        for one in [told, *told.values()] if isinstance(told, dict) else []:
            if isinstance(one, dict) and isinstance(one.get("mrope_section"), list | tuple):
                size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
                half = int(size * (one.get("partial_rotary_factor") or 1)) // 2
                if sum(one["mrope_section"]) != half:
                    one["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    for name in config.sub_configs or {}:
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            _fit_axes(part)
