"""Reading a checkpoint: configuration, tokenizer and weights, from a folder, the hub or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
)
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import is_accelerate_available

from cache.error_line import first_line
from scheduler.accel.gpu.quantised_modules import move_packed
from scheduler.engine_config import EngineConfig
from scheduler.model import gguf, load_errors
from scheduler.model.packed_checkpoint import PackedCheckpoint, library_keeps_packed
from scheduler.model.weights import AllOperators, digest
from scheduler.parallel import division
from scheduler.weights.gguf.path import find_file
from scheduler.weights.gguf.tokenizer import read_gguf_tokenizer
from scheduler.weights.packed_format import NotOurs
from scheduler.weights.tekken_tokenizer import read_usual

_TOKENIZERS = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken*")  # files that may hold one
_WORDS = "How far is the moon?"  # every tokenizer makes something of it


def read_config(config: EngineConfig) -> Any:
    """The model's own configuration, or that of its part that says text."""
    if (path := _gguf(config)) is not None:
        return gguf.read_config(path)
    where, options = _source(config.model)
    return _speaking_part(AutoConfig.from_pretrained(where, **options))


def read_tokenizer(config: EngineConfig) -> Any:
    """The tokenizer. Raises whatever its reader does, ``ValueError`` where there is none: for some models transformers
    then makes an empty one."""
    if (path := find_file(config.model)) is not None:
        return read_gguf_tokenizer(path)
    where, options = _source(config.model)
    try:
        tokenizer = read_usual(where, **options)
        if tokenizer.encode(_WORDS, add_special_tokens=False):
            return tokenizer
    except Exception as error:
        folder = Path(where)
        if options or not folder.is_dir() or isinstance(error, ImportError):
            raise
        if any(file for name in _TOKENIZERS for file in folder.glob(name)):
            raise ValueError(f"the tokenizer in {folder} cannot be read ({first_line(error)})") from error
    raise ValueError("there is no tokenizer (such as tokenizer.json) beside the weights")


def read_model(config: EngineConfig, settings: Any, device: torch.device) -> tuple[Any, str]:
    """The model on ``device``, or this rank's part of it, and its digest; ``settings`` from ``read_config``. Raises
    whatever its reader does, ``ValueError`` where weights are missing. All ranks must ask for it together.
    """
    if (path := _gguf(config)) is not None:
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        return gguf.read_model(path, settings, _class_of(settings), dtype, _attention(settings), device)
    where, options = _source(config.model)
    options["dtype"] = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    options |= _attention(settings)
    ours = config.tensor_parallel == 1 and (device.type == "cpu" or not library_keeps_packed(settings))
    packed = PackedCheckpoint.of(settings) if ours else None
    if packed is not None:
        with suppress(NotOurs), packed:  # else the library that made it may know what to do
            model = packed.finish(_load_pretrained(where, settings, options))
            return (model if device.type == "cpu" else move_packed(model, device)).eval(), packed.digest
    options |= _quantised_options(settings, device)
    if config.tensor_parallel > 1:
        options |= division.options(config.tensor_parallel)
    model = _load_pretrained(where, settings, options)
    weights = digest(model)  # while they are here: what is on a GPU would have to come back
    return model.to(device).eval(), weights


def _load_pretrained(where: str, settings: Any, options: Mapping[str, Any]) -> Any:
    """The model as transformers loads it. Raises ``ValueError`` where weights are missing."""
    with AllOperators():
        model, info = _class_of(settings).from_pretrained(where, config=settings, output_loading_info=True, **options)
    if lacking := sorted(info["missing_keys"]):
        raise ValueError(f"{len(lacking)} weights are missing, {lacking[0]} first")
    return model


def _gguf(config: EngineConfig) -> Path | None:
    """The GGUF file of the model where our own reader takes it. Raises what that raises."""
    path = find_file(config.model)
    return path if path is not None and config.tensor_parallel == 1 and gguf.reads(path) else None


def _source(model: str) -> tuple[str, dict[str, Any]]:
    """Where transformers finds the model, and how: a GGUF file is named beside its folder."""
    path = Path(model)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (model, {})


def _class_of(settings: Any) -> Any:
    """The class that loads this config for text: with an encoder, causal, or one that takes other inputs as well.
    Raises ``ValueError`` where there is none.
    """
    known = [AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForImageTextToText]
    known.insert(0 if settings.is_encoder_decoder else 1, AutoModelForSeq2SeqLM)
    found = next((auto for auto in known if type(settings) in auto._model_mapping), None)
    if found is None:
        raise load_errors.speechless(settings)
    return found


def _speaking_part(settings: Any) -> Any:
    """The configuration of the part that says text, of a whole that is several models and has no forward of its own:
    transformers loads such a part by itself from the same files. Else ``settings``.
    """
    kinds = AutoModelForMultimodalLM._model_mapping
    if type(settings) not in kinds or kinds[type(settings)].forward is not torch.nn.Module.forward:
        return settings
    parts = [getattr(settings, name, None) for name in settings.sub_configs]
    part = next((one for one in parts if type(one) in kinds), None)
    if part is not None and hasattr(settings, "quantization_config"):
        part.quantization_config = settings.quantization_config
    return part or settings


def _attention(settings: Any) -> dict[str, Any]:
    """Options for a model that bounds the scores of its attention: only its own code does that everywhere.

    torch's function cannot, and transformers 5.17 calls it nevertheless.
    """
    capped = getattr(settings.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if capped else {}


def _quantised_options(settings: Any, device: torch.device) -> dict[str, Any]:
    """Options for a checkpoint that says it is quantised. Raises ``ValueError`` where transformers does not know how:
    it would take the stored integers for weights.
    """
    parts = (settings, settings.get_text_config(decoder=True))
    said = next((c.quantization_config for c in parts if hasattr(c, "quantization_config")), None)
    if said is None:
        return {}
    if not AutoHfQuantizer.supports_quant_method(said):
        raise ValueError("transformers does not support its quantisation")
    # Some formats are packed for the device that they are loaded on, and do not move well.
    return {"device_map": {"": device}} if is_accelerate_available() else {}
