"""Shapes in which encoders take sounds, by the names of their arguments; the first that an encoder takes is used."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

_LENGTHS = (100, 160, 200, 400, 1500, 3000)  # of frames

Inputs = dict[str, Any]


def sounds(model: Any, takes: Any, size: int, generator: torch.Generator) -> Iterator[Inputs]:
    """Candidates for a sound of a size (0, 1, 2). ``takes``: the encoder's arguments."""
    names = {*takes, *inspect.signature(model.forward).parameters}
    config = getattr(model.config, "thinker_config", model.config)
    ear = next(
        (
            getattr(config, name)
            for name in ("audio_config", "encoder_config", "audio_encoder_config")
            if getattr(config, name, None) is not None
        ),
        config,
    )
    configs = [ear, config, *(getattr(ear, name, None) for name in getattr(ear, "sub_configs", None) or {})]
    bands = _first(
        configs, "num_mel_bins", "n_mel_bins", "input_feat_size", "input_dim", "input_size", "feature_size", default=80
    )
    stacked = _first(configs, "num_stacked_frames", default=1)
    longest = _first(configs, "max_source_positions", default=100)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.5

    own = 100 + 60 * size  # of a length of its own, where lengths may differ
    if "audio_input_ids" in names:  # numbers of bins
        bins = _first(configs, "mel_vocab_size", default=16)
        numbers = torch.randint(0, bins, (1, 8 + 4 * size, bands), generator=generator)
        yield {"audio_input_ids": numbers, "audio_input_ids_mask": torch.ones(numbers.shape[:2], dtype=torch.bool)}
        return
    if "audio_input_features" in names:
        yield {"audio_input_features": noise(1, own, bands), "audio_embed_sizes": torch.tensor([-(-own // 8)])}
        return
    for frames in dict.fromkeys((2 * longest, own, *_LENGTHS)):
        widths = (bands, bands * stacked, 128, 640, 160)
        for shape in ((1, bands, frames), *((1, frames, width) for width in widths)):
            yield from _masked({*takes}, frames, noise(*shape))
    if "chunk_sample_lengths" in names:
        for frames in (100, 400, 3000):
            yield {"input_features": noise(1, bands, frames), "chunk_sample_lengths": torch.tensor([160 * frames])}
    if "input_values_mask" in names:
        samples = 1920 * (5 + size)
        yield {"input_values": noise(1, samples), "input_values_mask": torch.ones(1, samples, dtype=torch.long)}
        yield {"input_values": noise(1, 1, samples), "input_values_mask": torch.ones(1, samples, dtype=torch.long)}
    if "input_values" in names:
        for samples in (3200, 24000, 6400):
            mask = {"padding_mask": torch.ones(1, samples, dtype=torch.bool)}
            yield {"input_values": noise(1, samples), **mask}
            yield {"input_values": noise(1, 1, samples), **mask}


def _masked(names: set[str], frames: int, features: torch.Tensor) -> Iterator[Inputs]:
    """With each mask that the encoder takes, and without."""
    for name in ("input_features_mask", "feature_attention_mask", "padding_mask"):
        if name in names:
            mask = torch.ones(1, frames, dtype=torch.long)
            if name == "input_features_mask" and "padding_mask" in names:
                yield {"input_features": features, name: mask, "padding_mask": mask}
            yield {"input_features": features, name: mask.bool()}
            yield {"input_features": features, name: mask}
    yield {"input_features": features}


def _first(configs: list[Any], *names: str, default: int) -> int:
    for config in configs:
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return default
