"""Loading a model that turns speech into text, and measuring that it writes what its own forward says."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoFeatureExtractor, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from cache.error_line import first_line
from scheduler.engine_config import EngineConfig
from scheduler.model import load_errors
from scheduler.model.checkpoint import read_tokenizer
from scheduler.model.loader import LoadFailed, device_of
from scheduler.model.measurement import TOLERANCE, relative_error
from scheduler.model.tokenizer import take_apart
from scheduler.model.weights import digest, stored_bytes
from scheduler.model_facts import ModelFacts
from scheduler.protocol import Loading, TokenizerRead
from scheduler.speech.recogniser import Recogniser, Told

log = logging.getLogger("warmturn.engine")

_SECONDS = (1.0, 0.6)  # of made-up sounds
_STEPS = 12  # tokens that are written for them
_SOUNDS = ("input_features", "input_values")  # arguments of a forward that reads sounds


def transcribes(config: EngineConfig) -> bool:
    """Whether the model of a configuration has an encoder of sounds and a decoder of text, and is not loaded for text.
    Whatever is wrong with its files is told by whoever loads it.
    """
    if Path(config.model).suffix == ".gguf":
        return False
    try:
        settings = AutoConfig.from_pretrained(config.model)
        speech, text = AutoModelForSpeechSeq2Seq._model_mapping, AutoModelForSeq2SeqLM._model_mapping
        return bool(settings.is_encoder_decoder) and type(settings) in speech and type(settings) not in text
    except Exception:  # whatever a reader of foreign files raises
        return False


def load_recogniser(config: EngineConfig, tell: Any) -> tuple[Recogniser, ModelFacts]:
    """Load and measure ``config.model``; ``tell`` gets ``Loading`` messages and the tokenizer. Raises LoadFailed."""
    device = device_of(config.device)
    try:
        for flag, given in (
            ("--tensor-parallel", config.tensor_parallel > 1),
            ("--weights", config.weights != "auto"),
            ("--activations", config.activations != "auto"),
            ("--draft-model", config.draft_model is not None),
            ("--adapter", bool(config.adapters)),
        ):
            if given:
                raise ValueError(f"{flag} is not for models that turn speech into text")
        check_processor(config)
        tokenizer = read_tokenizer(config)
        tell(TokenizerRead(take_apart(tokenizer)))
        extractor = AutoFeatureExtractor.from_pretrained(config.model)
        tell(Loading("loading the weights"))
        dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        model, info = AutoModelForSpeechSeq2Seq.from_pretrained(config.model, dtype=dtype, output_loading_info=True)
        if lacking := sorted(info["missing_keys"]):
            raise ValueError(f"{len(lacking)} weights are missing, {lacking[0]} first")
        name = digest(model)
        recogniser = Recogniser(model.to(device).eval(), extractor, tokenizer)
    except Exception as error:  # a broken file raises whatever its reader likes
        raise LoadFailed(f"cannot load {config.model!r}: {load_errors.reason(error, config.model)}") from error
    tell(Loading("measuring how it hears"))
    transformers.logging.set_verbosity_error()  # of its generate, which finds fault with generation configs of its own
    try:
        report = measure(recogniser)
    except Exception as error:  # whatever a model raises is its verdict
        raise LoadFailed(f"cannot serve {config.model!r}: {first_line(error, 200)}") from error
    log.info("speech to text; measured: %s", report)
    return recogniser, facts_of(recogniser, name, report)


def check_processor(config: EngineConfig) -> None:
    """Raises ValueError for a model whose processor has to write what the decoder begins with: without that its own
    forward would be as wrong as what it generates.
    """
    processor = PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(config.model)), None)
    if processor is None:
        return
    if (
        hasattr(processor, "apply_transcription_request")
        or "language" in inspect.signature(processor.__call__).parameters
    ):
        raise ValueError("its processor writes what the decoder begins with, which is not supported")


def measure(recogniser: Recogniser) -> str:
    """Compare what the model writes for made-up sounds with one forward over the same tokens without a cache, and what
    it writes for several with what it does for each. Sets how many windows it hears together. Raises ValueError where
    it is wrong, and what the model raises.
    """
    model, rate = recogniser.model, recogniser.extractor.sampling_rate
    accepts = inspect.signature(model.forward).parameters
    if "decoder_input_ids" not in accepts or not any(name in accepts for name in _SOUNDS):
        raise ValueError("its forward does not read sounds, or does not write text")
    rng = np.random.default_rng(0)
    sounds = [rng.normal(0, 0.1, round(seconds * rate)).astype(np.float32) for seconds in _SECONDS]
    errors, alone = [], []
    for sound in sounds:
        inputs = recogniser.features([sound])
        told = recogniser.write(inputs, {}, logits=True, most=_STEPS)
        assert told.logits is not None
        errors.append(relative_error(told.logits[0].float(), plain_logits(recogniser, inputs, told)))
        alone.append(told)
    tolerance = TOLERANCE.get(model.dtype, 6e-2)
    if max(errors) > tolerance:
        raise ValueError(f"what it generates is not what its own forward says: error {max(errors):.1e}")
    try:
        together = batch_error(recogniser, sounds, alone)
    except Exception as error:  # whatever a model raises: it is asked for one window at a time
        log.info("windows are heard one at a time: %s", first_line(error, 160))
        together = float("inf")
    if together > tolerance:
        recogniser.together = 1
    return f"error {max(errors):.1e}; {together:.1e} in a batch of {len(sounds)}"


def batch_error(recogniser: Recogniser, sounds: Sequence[Any], alone: Sequence[Told]) -> float:
    """How far the logits of sounds in one batch are from those of each by itself, as long as the tokens are the
    same.
    """
    both = recogniser.write(recogniser.features(sounds), {}, logits=True, most=_STEPS)
    worst = 0.0
    for row, told in enumerate(alone):
        assert both.logits is not None
        assert told.logits is not None
        ids, own = both.sequences[row, both.begin :], told.sequences[0, told.begin :]
        size = min(len(ids), len(own))
        steps = min(size, int((ids[:size] == own[:size]).int().cumprod(0).sum()) + 1)
        worst = max(worst, relative_error(both.logits[row, :steps].float(), told.logits[0, :steps].float()))
    return worst


@torch.inference_mode()
def plain_logits(recogniser: Recogniser, inputs: dict[str, Any], told: Told) -> torch.Tensor:
    """Logits ``[steps, V]`` for what was written of one window: one forward without a cache."""
    ids = told.sequences[:, :-1]
    logits: torch.Tensor = recogniser.model(**inputs, decoder_input_ids=ids, use_cache=False).logits[0].float()
    return logits[told.begin - 1 :]


def facts_of(recogniser: Recogniser, name: str, report: str) -> ModelFacts:
    """What the server is told of it. ``name``: the digest of its weights."""
    model = recogniser.model
    ends = model.generation_config.eos_token_id
    return ModelFacts(
        architecture=type(model).__name__,
        parameters=model.num_parameters(),
        weight_bytes=stored_bytes(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_context=recogniser.limit,
        eos_token_ids=tuple(ends if isinstance(ends, list) else [] if ends is None else [ends]),
        mode="speech to text",
        probe=report,
        layer_kinds={},
        kv_bytes_per_token=0,
        page_size=1,
        pages=0,
        fingerprint=name,
        encoder_decoder=True,
        speech=recogniser.facts,
        task="transcribe",
    )
