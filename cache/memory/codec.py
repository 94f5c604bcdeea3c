"""``Codec``: how keys and values are stored, in pages and in files: exact, or int8 or fp8 with one scale per token and
head.
"""

from __future__ import annotations

from enum import StrEnum

import torch


class Codec(StrEnum):
    EXACT = "exact"
    INT8 = "int8"  # off by at most absmax / 254 of its token and head
    FP8 = "fp8"  # off by at most 1/16 of the number itself, or absmax / 458752 where that is more


FORMS = {Codec.INT8: (torch.int8, 127.0), Codec.FP8: (torch.float8_e4m3fn, 448.0)}  # and the largest number of each


def quantise(tensor: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of ``tensor [..., dim]`` in the codec's dtype, and the scales that they are multiplied with,
    ``[..., 1]`` float32.
    """
    form, top = FORMS[codec]
    wide = tensor.float()
    scales = wide.abs().amax(-1, keepdim=True) / top
    wide = (wide / torch.where(scales > 0, scales, 1.0)).clamp(-top, top)
    return (wide.round() if codec is Codec.INT8 else wide).to(form), scales
