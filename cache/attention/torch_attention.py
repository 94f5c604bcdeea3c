"""Attention by torch's own operators, session by session: for the spans that no backend takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ROUND = 16


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one session: ``query [H, n, D]``, ``keys [m, Hk, D]``, ``values [m, Hk, Dv]``; returns
    ``[H, n, Dv]``.

    ``seen`` is bool ``[n, m]`` or None for all. ``softcap`` bounds scores as Gemma 2 does (s * tanh(x / s));
    ``sinks`` ``[H]`` are logits that take part in the softmax and have no value (GPT-OSS).
    """
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    if softcap is None and sinks is None:
        grouped = k.shape[0] != query.shape[0]
        rows, width = query.shape[1], v.shape[2]
        v = F.pad(v, (0, max(0, k.shape[2] - width)))  # torch has a fast way for heads of one width
        if seen is not None and query.device.type == "cpu" and query.dtype is not torch.float32:
            query, k, v, seen = _pad_to_round(query, k, v, seen)
        mask = None if seen is None else seen[None, None]
        out = F.scaled_dot_product_attention(query[None], k[None], v[None], mask, scale=scale, enable_gqa=grouped)
        return out[0, :, :rows, :width]
    groups = query.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = (query @ k.transpose(1, 2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.float().reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
        weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return weights.to(v.dtype) @ v


def _pad_to_round(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same inputs with queries and keys padded to multiples of ``_ROUND``.

    The half-precision CPU kernel keeps generated code for every pair of lengths, forever, and a server sees all
    lengths.
    """
    rows, columns = -query.shape[1] % _ROUND, -keys.shape[1] % _ROUND
    seen = F.pad(seen, (0, columns, 0, rows))
    seen[seen.shape[0] - rows :, 0] = True  # a query that sees nothing gives NaN
    wide = (0, 0, 0, columns)
    return F.pad(query, (0, 0, 0, rows)), F.pad(keys, wide), F.pad(values, wide), seen
