"""Layer kinds: how far back a query looks, read from configs."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import ARCHITECTURES, WINDOW, model_of
from transformers import LlamaConfig, MistralConfig

from cache.pages.layers import AttentionLayer, Reach, read_layers


@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("reach", [Reach.SLIDING, Reach.CHUNKED])
def test_first_key_is_the_lowest_position_that_is_seen(reach: Reach, window: int) -> None:
    layer = AttentionLayer(reach, window, stores=True)
    for query in range(30):
        if reach is Reach.SLIDING:
            seen = [key for key in range(query + 1) if query - window < key]
        else:
            seen = [key for key in range(query + 1) if key // window == query // window]
        assert layer.first_key(query) == seen[0]


def test_full_attention_looks_at_everything() -> None:
    assert AttentionLayer(Reach.FULL, None, stores=True).first_key(1000) == 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_of_known_architectures(name: str) -> None:
    layers = read_layers(model_of(name).config)
    assert all(layer.stores for layer in layers)
    reaches = [layer.reach.value for layer in layers]
    assert reaches == {
        "gemma2": ["sliding", "full"],
        "gemma3": ["sliding", "full", "sliding"],
        "gpt_oss": ["sliding", "full", "sliding"],
        "llama4": ["chunked", "full"],
    }.get(name, ["full"] * 2)
    assert all(layer.window == (None if layer.reach is Reach.FULL else WINDOW) for layer in layers)


def test_a_window_without_layer_types_is_read() -> None:
    layers = read_layers(MistralConfig(num_hidden_layers=2, sliding_window=77))
    assert layers == [AttentionLayer(Reach.SLIDING, 77, stores=True)] * 2


def test_layers_without_attention_store_nothing() -> None:
    config: Any = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "mlp"]
    assert [layer.stores for layer in read_layers(config)] == [True, False]
