"""``Absorbed``: a layer whose keys and values are linear functions of one latent per token, and that attends to these.

Of a token such a layer stores one row ``[latent | shared]``: ``shared`` is the part of the keys that all heads have in
common, where the position is. ``q . (A latent)`` is ``(A' q) . latent``, so a query that was multiplied by ``A'``
attends to the rows as they lie: all heads read the same row, once. Values are ``B latent``, so the sum of latents is
multiplied by ``B`` after attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cache.attention.backend import once
from cache.pages.packed import PackedStep


class NotLinear(ValueError):
    """Keys and values are no such functions of what is stored."""


@dataclass(frozen=True, eq=False)
class Absorbed:
    """``keys [H, L, N]`` and ``values [H, Dv, L]`` make the heads' own part of the keys, and the values, of a latent.
    The part that is shared has ``shared`` numbers, which begin at ``at`` in a key: 0 or N.
    """

    keys: torch.Tensor
    values: torch.Tensor
    shared: int
    at: int

    @property
    def latent(self) -> int:
        """Numbers of a latent."""
        return self.keys.shape[1]

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.latent + self.shared

    @property
    def own(self) -> slice:
        """Where a key has the part of its own head."""
        return slice(0, self.at) if self.at else slice(self.shared, None)

    @property
    def common(self) -> slice:
        """Where a key has the part that is shared."""
        return slice(self.at, self.at + self.shared)

    @property
    def most(self) -> int:
        """Tokens of a span up to which it takes fewer operations to attend to latents than to make keys and values of
        them: a latent has more numbers, but those of a long history need not be made for few queries.
        """
        own, width = self.keys.shape[2], self.values.shape[1]
        more = 2 * self.latent - own - width
        return self.latent * (own + width) // more if more > 0 else 1 << 30

    def few(self, step: PackedStep) -> frozenset[int]:
        """The numbers of the spans of at most so many tokens; found once in a step for all layers that are alike."""
        most, spans = self.most, step.spans
        return once(
            step, (Absorbed, most), lambda: frozenset(number for number, span in enumerate(spans) if span.size <= most)
        )

    def serves(self, step: PackedStep) -> bool:
        """Whether the layer attends to latents in a step. Else its own code makes keys and values of all that is
        stored: with adapters, which change what it makes, and for long spans only, for which that is faster.
        """
        return step.adapted is None and bool(self.few(step))

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """``query [H, T, D]`` as it attends to rows, ``[H, T, L + shared]``."""
        rows = query.new_empty(*query.shape[:2], self.width)
        rows[..., : self.latent] = torch.bmm(query[..., self.own], self.keys.transpose(1, 2))
        rows[..., self.latent :] = query[..., self.common]
        return rows

    def outputs(self, latents: torch.Tensor) -> torch.Tensor:
        """What attention to values would have given, ``[T, H, Dv]``, from sums of latents, ``[T, H, L]``."""
        return torch.bmm(latents.transpose(0, 1), self.values.transpose(1, 2)).transpose(0, 1)

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[n, H, D]`` and values ``[n, H, Dv]`` of ``rows [n, L + shared]``."""
        latents, (heads, _, own) = rows[:, : self.latent].contiguous(), self.keys.shape
        keys = rows.new_empty(heads, len(rows), own + self.shared)
        for part, weight in zip(keys[..., self.own], self.keys, strict=True):
            part.copy_(latents @ weight)  # torch would copy the latents for each head of a product of all
        keys[..., self.common] = rows[:, self.latent :]
        values = F.linear(latents, self.values.flatten(0, 1)).view(len(rows), heads, -1)
        return keys.transpose(0, 1), values


def basis(latent: int, shared: int, extra: int, like: torch.Tensor) -> torch.Tensor:
    """Rows ``[latent + shared + extra, latent + shared]`` with the dtype and device of ``like`` that tell a linear
    function: the unit vectors, zeros, and random rows.
    """
    width = latent + shared
    random = torch.randn(extra - 1, width, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([torch.eye(width), torch.zeros(1, width), random])
    return rows.to(like.device, like.dtype)


def measure(rows: torch.Tensor, latent: int, keys: torch.Tensor, values: torch.Tensor, tolerance: float) -> Absorbed:
    """The layer that makes ``keys [H, n, D]`` and ``values [H, n, Dv]`` of ``rows [n, width]``, which are a ``basis``.
    Raises NotLinear. ``tolerance``: relative error of a product.
    """
    width, (heads, _, dim) = rows.shape[1], keys.shape
    shared = width - latent
    own = dim - shared
    if own <= 0 or heads < 2:
        raise NotLinear("no part of the keys is a head's own")
    unit = torch.eye(shared, device=keys.device, dtype=keys.dtype).expand(heads, -1, -1)
    for at in (own, 0):
        found = Absorbed(keys[:, :latent], values[:, :latent].transpose(1, 2).contiguous(), shared, at)
        copied = keys[:, latent:width, found.common]
        if torch.equal(copied, unit) and not keys[:, :latent, found.common].any():
            break
    else:
        raise NotLinear("no part of the keys is what is stored beside the latent")
    found = Absorbed(found.keys[..., found.own].contiguous(), found.values, shared, at)
    made = [part.transpose(0, 1) for part in found.expand(rows)]
    for got, want in zip(made, (keys, values), strict=True):
        if not (got - want).float().norm() <= tolerance * want.float().norm():
            raise NotLinear("keys or values are not a linear function of what is stored")
    return found
