"""How a model that embeds is run: padding is measured, not assumed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import of_unit_gain
from torch import nn
from transformers import (
    MistralConfig,
    MistralForSequenceClassification,
    MistralModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetForSequenceClassification,
    MPNetModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
)

from scheduler.pooling.modules import PoolingModule
from scheduler.pooling.pooler import Pooler, VectorHead
from scheduler.pooling_messages import PoolInput
from scheduler.protocol import pack_ids

WIDTH = 50


class MeanMixer(nn.Module):
    """Each token is moved by the mean of those that the mask has, or, if it is ``deaf``, of padding too."""

    def __init__(self, deaf: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(WIDTH, 4)
        self.deaf, self.device, self.dtype = deaf, torch.device("cpu"), torch.float32

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, return_dict: bool) -> Any:
        """Hidden states."""
        hidden = self.embedding(input_ids)
        mask = torch.ones_like(attention_mask) if self.deaf else attention_mask
        mean = (hidden * mask[..., None]).sum(dim=1, keepdim=True) / mask.sum(dim=1)[:, None, None]
        return SimpleNamespace(last_hidden_state=hidden + mean)


def pooler(deaf: bool) -> Pooler:
    made = Pooler(MeanMixer(deaf), VectorHead(PoolingModule({"pooling_mode": "mean"})), 0, False)
    made.measure(WIDTH)
    return made


def test_a_model_that_hears_the_mask_may_be_padded() -> None:
    assert pooler(deaf=False).pads


def test_one_that_does_not_runs_inputs_of_one_length_together() -> None:
    made = pooler(deaf=True)
    assert not made.pads
    inputs = [PoolInput(pack_ids([*range(1, count + 1)])) for count in (3, 5, 3)]
    groups = made.groups([3, 5, 3])
    assert sorted(map(sorted, groups)) == [[0, 2], [1]]
    for group in groups:
        for row, place in zip(made.run([inputs[place] for place in group]), group, strict=True):
            assert torch.allclose(row, made.run([inputs[place]])[0])


SIZES = {"vocab_size": WIDTH, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 32, "max_position_embeddings": 80, "pad_token_id": 1}
MODELS: dict[str, Any] = {  # how each is run: a table of positions that begins behind the padding's, windows both ways
    "packed": (RobertaModel, RobertaConfig(**SIZES)),
    "packed, with windows": (
        ModernBertModel,
        ModernBertConfig(local_attention=8, global_attn_every_n_layers=2, **SIZES),
    ),
    "packed, only back": (MistralModel, MistralConfig(sliding_window=6, num_key_value_heads=1, **SIZES)),
    "padded": (MPNetModel, MPNetConfig(**SIZES)),
    # heads that take the first token, a mean, the last token
    "packed, scores": (RobertaForSequenceClassification, RobertaConfig(num_labels=3, **SIZES)),
    "packed, scores of means": (
        ModernBertForSequenceClassification,
        ModernBertConfig(local_attention=8, global_attn_every_n_layers=2, classifier_pooling="mean", **SIZES),
    ),
    "packed, scores of the last": (MistralForSequenceClassification, MistralConfig(num_key_value_heads=1, **SIZES)),
    "padded, scores": (MPNetForSequenceClassification, MPNetConfig(**SIZES)),
}


@pytest.mark.parametrize("name", MODELS)
def test_inputs_that_share_a_forward_give_what_each_gives_alone(name: str) -> None:
    """Also beyond the windows of a model, and equal lengths among others."""
    kind, config = MODELS[name]
    torch.manual_seed(5)
    model = of_unit_gain(kind(config).eval())
    pooling = None if "scores" in name else PoolingModule({"pooling_mode": ["mean", "lasttoken"]})
    made = Pooler(model, VectorHead(pooling), 1, False)
    lengths = [40, 3, 17, 40, 40, 9, 17]
    inputs = [PoolInput(pack_ids([2 + (7 * n + i * i) % 40 for i in range(size)])) for n, size in enumerate(lengths)]
    alone = torch.cat([made.run([one]) for one in inputs])  # before it was measured: nothing is shared
    made.measure(WIDTH)
    assert made.mode == name.partition(",")[0]
    assert sum(map(len, made.groups(lengths))) == len(lengths)
    for group in made.groups(lengths):
        together = made.run([inputs[place] for place in group])
        assert torch.allclose(together, alone[group], rtol=1e-5, atol=1e-5)
    if made.mode == "packed":
        assert len(made.groups(lengths)) == 1
