"""Attention to latents as a part of programs: queries and sums of latents are multiplied with the weights of each head
within the blocks before and after attention.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from cache.attention.absorbed import Absorbed
from cache.attention.packed_attention import PackedAttention
from scheduler.accel.cpu.experts_matrix import ExpertsMatrix
from scheduler.accel.cpu.interceptors import AttentionRequest
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.accel.cpu.recorder import Recorder


class HeadWeights(NamedTuple):
    """The weights of all heads of a layer as programs read them."""

    keys: ExpertsMatrix
    values: ExpertsMatrix


_weights: WeakKeyDictionary[Absorbed, HeadWeights] = WeakKeyDictionary()  # the same in both recordings


def head_weights(absorbed: Absorbed) -> HeadWeights:
    """The weights of a layer, which are made once."""
    if absorbed not in _weights:
        ours, dtype = kernel(), absorbed.keys.dtype
        tiled = ours is not None and ours.tiles and dtype is torch.bfloat16
        made = [ExpertsMatrix.of(part, None, tiled) for part in (absorbed.keys, absorbed.values)]
        _weights[absorbed] = HeadWeights(*made)
    return _weights[absorbed]


def record_absorbed(
    recorder: Recorder,
    attention: PackedAttention,
    request: AttentionRequest,
    query: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Record attention of ``query [1, H, T, D]`` to the rows of an absorbed layer, of which the step adds those that
    are ``stored``, a latent ``[1, 1, T, L]`` and what heads share. Completes ``request``, returns ``[1, T, H, Dv]``.
    """
    absorbed, step = request.absorbed, attention.step
    assert absorbed is not None
    assert step is not None
    own = query[..., absorbed.own]
    with recorder.paused():
        weights = head_weights(absorbed)
        made = torch.bmm(own[0], absorbed.keys.transpose(1, 2))[None]
        recorder.record_heads(weights.keys, own, made)
    asking = torch.cat([made, query[..., absorbed.common]], dim=-1)
    given = [asking, torch.cat(stored, dim=-1), stored[0]]
    with recorder.paused():
        sums = attention.attend_rows(step, request.layer, asking[0], request.scores, step.numbers)[None]
        recorder.attend(given, sums)
        out = absorbed.outputs(sums[0]).contiguous()[None]
        recorder.record_heads(weights.values, sums, out)
    request.given, request.out = given, sums
    return out
