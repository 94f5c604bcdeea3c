"""Blocks of GGUF's TQ1_0: 256 values of three each, five of them to a byte."""

from __future__ import annotations

import torch

from scheduler.weights.packed_source import PackedRows

ELEMENTS, NBYTES = 256, 54
_PARTS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))  # the first byte, how many, and how many values each has
_SCALE = 52  # the byte at which a block's scale begins


def unpack_ternary(blocks: torch.Tensor) -> PackedRows:
    """The rows of uint8 ``blocks [rows, blocks, 54]``: codes 0 to 2, one to a byte. The first values of all bytes of a
    part come before their second ones. A value is how many thirds of 256 the byte is, multiplied by 3 for each one
    before it.
    """
    codes = torch.cat([_digits(blocks[..., at : at + count], each) for at, count, each in _PARTS], -1)
    scales = blocks[..., _SCALE:].contiguous().view(torch.float16).float().squeeze(-1)
    return PackedRows(codes.flatten(1), scales)


def _digits(data: torch.Tensor, count: int) -> torch.Tensor:
    """uint8 ``[rows, blocks, count * bytes]``."""
    powers = torch.tensor([3**place for place in range(count)], dtype=torch.uint8)
    turned = data[:, :, None] * powers[:, None]  # modulo 256
    return (turned.int() * 3 >> 8).to(torch.uint8).flatten(2)
