"""Sounds as files, forms with them, and the oracle of speech: a model's own forward over everything, no cache."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from speech_models import RATE, extractor_of, noise, speech_model, speech_tokenizer

from scheduler.speech.recogniser import Recogniser


@cache
def recogniser_of(name: str) -> Recogniser:
    """A tiny model that hears."""
    return Recogniser(speech_model(name), extractor_of(name), speech_tokenizer())


def sound_file(format: str = "WAV", seconds: float = 1.0, rate: int = RATE, channels: int = 1, **options: Any) -> bytes:
    """A sound in a file of this format."""
    soundfile = pytest.importorskip("soundfile")
    target = io.BytesIO()
    samples = np.random.default_rng(3).normal(0, 0.1, (round(seconds * rate), channels)).clip(-0.9, 0.9)
    soundfile.write(target, samples, rate, format=format, **options)
    return target.getvalue()


@torch.no_grad()
def oracle(name: str, samples: Any, begin: Sequence[int], told: Sequence[int]) -> torch.Tensor:
    """Logits ``[len(told), V]`` of a from-scratch forward, with the features of a window and what was written."""
    features = extractor_of(name)([samples], sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    ids = torch.tensor([[*begin, *told]])
    accepted = {n: v for n, v in features.items() if n in ("input_features", "input_values", "attention_mask")}
    logits: torch.Tensor = speech_model(name)(**accepted, decoder_input_ids=ids, use_cache=False).logits[0]
    return logits[len(begin) - 1 : -1]


__all__ = ["RATE", "noise", "oracle", "recogniser_of", "sound_file"]
