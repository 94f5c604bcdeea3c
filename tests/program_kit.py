"""Modules recorded and run as programs, without a model around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cache.attention.packed_attention import PackedAttention
from scheduler.accel.cpu.fusion import Fusion
from scheduler.accel.cpu.matrix import Matrix
from scheduler.accel.cpu.program_kernel import ProgramKernel, kernel
from scheduler.accel.cpu.recording import Linear

RECORDED = (23, 19)  # tokens of the two calls that are recorded
LENGTHS = (1, 2, 19, 23, 33, 300)  # tokens of calls that follow
_MOVES = frozenset({"empty", "view", "permute", "transpose", "detach", "slice", "select", "unsqueeze", "alias"})

Make = Callable[[int], tuple[Any, ...]]  # the arguments of a call with so many tokens


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any], **constants: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in constants.items():
            self.register_buffer(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs) if self._buffers else self.function(*args, **kwargs)


class _Root(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class CalledFunctions(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """The names of torch's functions that were called within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def compiled() -> ProgramKernel:
    """The kernel; the test is skipped where there is none."""
    found = kernel()
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the functions of the kernel that compute are called from now on, by their names."""
    ours, found = compiled(), Counter[str]()

    def counted(name: str, original: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            found[name] += 1
            return original(*args)

        return call

    for name in ("run", "attend_between", "chain"):
        monkeypatch.setattr(ours, name, counted(name, getattr(ours, name)))
    return found


def linear(module: nn.Module) -> tuple[Matrix, torch.Tensor | None] | None:
    """Every ``nn.Linear``, as it lies."""
    return (Matrix(module.weight.detach(), False), module.bias) if type(module) is nn.Linear else None


@torch.no_grad()
def learn(
    module: nn.Module,
    make: Make,
    keywords: Callable[[int], dict[str, Any]] | None = None,
    linear: Linear = linear,
) -> Fusion:
    """``module`` and what it contains, run as programs where they can be."""
    matrices: dict[nn.Module, Any] = {}

    def once(part: nn.Module) -> Any:
        return matrices.setdefault(part, linear(part))

    def steps(recorded: bool, count: int) -> Iterator[None]:
        for tokens in RECORDED:
            module(*make(tokens), **(keywords(tokens) if keywords else {}))
            yield

    fusion = Fusion(_Root(module), PackedAttention([]), once, compiled())
    fusion.find(steps)
    return fusion


@torch.no_grad()
def ran(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """What ``module`` says, and whether it said so without one of torch's functions that compute."""
    with CalledFunctions() as called:
        out = module(*args, **kwargs)
    return out, called.names <= _MOVES


def rows(tokens: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``[1, tokens, *shape]``, random."""
    generator = torch.Generator().manual_seed(100 * seed + tokens)
    return torch.randn(1, tokens, *shape, generator=generator).to(dtype)


@torch.no_grad()
def check(module: nn.Module, make: Make, tolerance: float = 1e-5) -> None:
    """``module`` becomes one program, and that says what the module said, whatever the number of tokens."""
    wants = {tokens: module(*make(tokens)) for tokens in LENGTHS}
    fusion = learn(module, make)
    assert len(fusion) == 1, "it was refused"
    for tokens, want in wants.items():
        got, alone = ran(module, *make(tokens))
        assert alone, "it did not run as a program"
        for one, other in zip(_flat(got), _flat(want), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            scale = float(other.nan_to_num(0, 0, 0).abs().max())
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    fusion.remove()
    assert "forward" not in vars(module)


def _flat(out: Any) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)
