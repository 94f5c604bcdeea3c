"""``TokenRecord``: the keys or the values of one token in one layer at a byte a number, all heads together."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cache.memory.codec import FORMS, Codec, quantise

_ALIGN = 16  # bytes: what a GPU's thread reads at once
_SCALE = 4  # bytes: float32


class TokenRecord(NamedTuple):
    """The layout of a record: the scales of all heads, float32, then their numbers; each part is filled up to a
    multiple of 16 bytes. Pools of records are ``[slots, page_size, nbytes]`` uint8.
    """

    heads: int
    dim: int
    codec: Codec  # not EXACT

    @property
    def begin(self) -> int:
        """Offset of the numbers."""
        return -(-self.heads * _SCALE // _ALIGN) * _ALIGN

    @property
    def nbytes(self) -> int:
        return self.begin + -(-self.heads * self.dim // _ALIGN) * _ALIGN

    def scales(self, records: torch.Tensor) -> torch.Tensor:
        """The scales in ``records [..., nbytes]``: a view ``[..., heads]`` float32."""
        return records.view(torch.float32)[..., : self.heads]

    def numbers(self, records: torch.Tensor) -> torch.Tensor:
        """The numbers in ``records [..., nbytes]``: a view ``[..., heads, dim]`` uint8, of the bits that they have in
        the codec's dtype.
        """
        numbers = records[..., self.begin : self.begin + self.heads * self.dim]
        return numbers.view(*records.shape[:-1], self.heads, self.dim)

    def pack(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens [n, heads, dim]`` as records ``[n, nbytes]``."""
        numbers, scales = quantise(tokens, self.codec)
        records = torch.zeros(len(tokens), self.nbytes, dtype=torch.uint8, device=tokens.device)
        self.scales(records).copy_(scales[..., 0])
        self.numbers(records).copy_(numbers.view(torch.uint8))
        return records

    def unpack(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tokens ``[n, heads, dim]`` that ``pack`` was given, rounded, from records ``[n, nbytes]``."""
        numbers = self.numbers(records).contiguous().view(FORMS[self.codec][0])
        return (numbers.float() * self.scales(records)[..., None]).to(dtype)
