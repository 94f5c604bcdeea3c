"""Loads a model's own layers for multi-token prediction (MTP), where transformers can."""

from __future__ import annotations

import logging
from typing import Any

from cache.error_line import first_line
from scheduler.forward.modes import PagedMode
from scheduler.model.loader import LoadedModel

log = logging.getLogger("warmturn.engine")
_NAMES = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")


def mtp_layers(config: Any) -> int:
    """How many layers for multi-token prediction a model's configuration has."""
    text = config.get_text_config(decoder=True)
    return next((int(n) for name in _NAMES if isinstance(n := getattr(text, name, None), int)), 0)


def obstacle(loaded: LoadedModel) -> str:
    """Why the MTP layers of a model that has some cannot draft, for people; empty: nothing is known against it."""
    config = loaded.model.config
    if not isinstance(getattr(config.get_text_config(decoder=True), "num_mtp_layers", None), int):
        return "transformers has no code for them"
    if getattr(config, "quantization_config", None) is not None:
        return "the checkpoint is quantised"
    if loaded.model.device.type != "cpu":
        return "on a GPU the steps run as graphs, which tell no hidden states"
    if loaded.followers is not None:
        return "the model is divided among ranks"
    if not isinstance(loaded.verdict.mode, PagedMode):
        return "the model runs in a mode that tells no hidden states"
    return ""


def load_heads(loaded: LoadedModel) -> tuple[Any, str]:
    """transformers' ``MtpModel`` of a model; or None, and why it does not draft (empty: the model has none)."""
    if not mtp_layers(loaded.model.config):
        return None, ""
    why = obstacle(loaded)
    if why:
        return None, why
    from transformers.modeling_layers import MtpModel

    try:
        return MtpModel.from_pretrained(loaded.model).eval(), ""
    except Exception as error:  # a checkpoint without them, or whatever a model's own code raises
        log.warning("the model's own layers for multi-token prediction are not used: %s", first_line(error))
        return None, "they cannot be loaded from this checkpoint"
