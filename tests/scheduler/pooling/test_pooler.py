"""How a model that embeds is run: padding is measured, not assumed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

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
