"""Depthwise convolutions in 16 bits: float32 sums that are rounded once; all others are torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from scheduler.forward import depthwise
from scheduler.forward.depthwise import convolve, hasten


@pytest.fixture
def conv() -> Iterator[torch.nn.Conv1d]:
    """A convolution of 24 channels with 4 taps; torch's own function is put back afterwards."""
    plain = F.conv1d
    yield torch.nn.Conv1d(24, 24, 4, groups=24, padding=3).bfloat16()
    F.conv1d = plain


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("padding", "biased", "tokens"), [(0, False, 4), (0, True, 9), (3, True, 1), (3, False, 40)])
def test_sums_are_rounded_once(dtype: torch.dtype, padding: int, biased: bool, tokens: int) -> None:
    x, weight = torch.randn(2, 24, tokens).to(dtype), torch.randn(24, 1, 4).to(dtype)
    bias = torch.randn(24).to(dtype) if biased else None
    got = convolve(x, weight, bias, 1, padding, 1, 24)
    wide = None if bias is None else bias.double()
    want = F.conv1d(x.double(), weight.double(), wide, padding=padding, groups=24).to(dtype)
    assert got.dtype is dtype
    assert got.shape == want.shape
    assert torch.allclose(got.float(), want.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(convolve(x[1:], weight, bias, padding=(padding,), groups=24), got[1:])


@pytest.mark.parametrize("how", ["float32", "stride", "dilation", "same", "one group", "short", "watched"])
def test_other_convolutions_are_torchs(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "_taps", None)
    x, weight = torch.randn(1, 8, 9).bfloat16(), torch.randn(8, 1, 3).bfloat16()
    options: dict[str, Any] = {"groups": 8}
    more: dict[str, Any] = {"stride": {"stride": 2}, "dilation": {"dilation": (2,)}, "same": {"padding": "same"}}
    if how == "float32":
        x, weight = x.float(), weight.float()
    if how == "one group":
        weight, options = torch.randn(8, 8, 3).bfloat16(), {}
    if how == "short":
        with pytest.raises(RuntimeError, match="Kernel size"):
            convolve(x[..., :2], weight, **options)
        return
    options |= more.get(how, {})
    if how == "watched":
        with Seen() as seen:
            convolve(x, weight, **options)
        assert seen.names == ["convolution"]
        return
    assert torch.equal(convolve(x, weight, **options), F.conv1d(x, weight, **options))


@pytest.mark.parametrize("faster", [False, True])
def test_what_is_faster_is_used(faster: bool, conv: torch.nn.Conv1d, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "_is_faster", lambda kind: faster)
    assert not hasten(torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3).bfloat16(), conv.float()))
    assert hasten(torch.nn.Sequential(conv.bfloat16())) is faster
    x = torch.randn(1, 24, 7).bfloat16()
    assert torch.equal(conv(x), convolve(x, conv.weight, conv.bias, padding=3, groups=24)) or not faster


def test_it_is_timed() -> None:
    assert depthwise._is_faster(torch.bfloat16) in (True, False)
