"""Every function that a program knows says what torch's says; what it does not know is refused and runs as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_kit import LENGTHS, Of, check, learn, ran, rows
from torch import nn

Function = Callable[..., Any]
HEADS, DIM = 4, 6
WIDTH = HEADS * DIM


def vectors(tokens: int) -> tuple[torch.Tensor, ...]:
    """Two of ``[1, T, WIDTH]``; the second positive."""
    return rows(tokens, WIDTH), rows(tokens, WIDTH, seed=1).abs() + 0.1


def heads(tokens: int) -> tuple[torch.Tensor, ...]:
    """Two of ``[1, T, HEADS, DIM]``."""
    return rows(tokens, HEADS, DIM), rows(tokens, HEADS, DIM, seed=1)


def turned(tokens: int) -> tuple[torch.Tensor, ...]:
    """Of heads, and the cosines and sines of ``[1, T, DIM]``."""
    angles = rows(tokens, DIM, seed=2)
    return rows(tokens, HEADS, DIM), angles.cos(), angles.sin()


def half(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def interleaved(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def by_hand(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight)).type_as(x)


def in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z += y
    return z.mul_(3).clamp_(-1, 1)


CONSTANT = {name: torch.randn(size, generator=torch.Generator().manual_seed(3)) for name, size in (
    ("row", (WIDTH,)), ("head", (HEADS, 1)), ("dim", (DIM,)), ("one", (1,)), ("lone", ()))}  # fmt: skip

COMPUTED: dict[str, Function] = {
    "add": lambda x, y: x + y,
    "add times": lambda x, y: torch.add(x, y, alpha=3),
    "add number": lambda x, y: 2 + x + 1,
    "subtract": lambda x, y: x - y,
    "subtract times": lambda x, y: torch.sub(x, y, alpha=0.5),
    "subtract from number": lambda x, y: 2 - x,
    "multiply": lambda x, y: x * y * 3,
    "divide": lambda x, y: x / y,
    "divide by number": lambda x, y: x / 7,
    "number over": lambda x, y: 7 / y,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "negative": lambda x, y: -x,
    "relu": lambda x, y: F.relu(x),
    "relu6": lambda x, y: F.relu6(3 * x),
    "leaky": lambda x, y: torch.maximum(x, 0.1 * x),
    "clamp": lambda x, y: x.clamp(-0.5, 0.7),
    "clamp least": lambda x, y: x.clamp(min=-0.5),
    "clamp most": lambda x, y: x.clamp(max=0.5),
    "clamp_min": lambda x, y: x.clamp_min(0.25),
    "clamp_max": lambda x, y: x.clamp_max(0.25),
    "absolute": lambda x, y: x.abs(),
    "exponential": lambda x, y: (8 * x).exp(),
    "root": lambda x, y: y.sqrt(),
    "reciprocal root": lambda x, y: y.rsqrt(),
    "reciprocal": lambda x, y: y.reciprocal(),
    "square": lambda x, y: x.square(),
    "power 2": lambda x, y: x**2,
    "power 3": lambda x, y: x**3,
    "power 1/2": lambda x, y: y**0.5,
    "power -1/2": lambda x, y: y**-0.5,
    "power -1": lambda x, y: y**-1,
    "tanh": lambda x, y: torch.tanh(x),
    "sigmoid": lambda x, y: torch.sigmoid(8 * x),
    "silu": lambda x, y: F.silu(8 * x),
    "error function": lambda x, y: torch.erf(x),
    "gelu": lambda x, y: F.gelu(3 * x),
    "gelu tanh": lambda x, y: F.gelu(3 * x, approximate="tanh"),
    "softcap": lambda x, y: 5 * torch.tanh(x / 5),
    "sum": lambda x, y: x.sum(-1, keepdim=True) + y,
    "sum, lost axis": lambda x, y: x.sum(-1)[..., None] * y,
    "mean": lambda x, y: x.mean(-1, keepdim=True) * y,
    "most": lambda x, y: x.amax(-1, keepdim=True) + y,
    "softmax": lambda x, y: x.softmax(-1),
    "softmax, wide": lambda x, y: torch.softmax(30 * x, -1, dtype=torch.float32),
    "layer norm": lambda x, y: F.layer_norm(x + 3, (WIDTH,)),
    "rms norm": lambda x, y: F.rms_norm(x, (WIDTH,), eps=1e-5),
    "rms norm, own eps": lambda x, y: F.rms_norm(x, (WIDTH,)),
    "in place": in_place,
    "other types between": lambda x, y: (x.double() * y).float() + x.to(torch.float64).float(),
}  # fmt: skip

ON_HEADS: dict[str, Function] = {
    "over an inner axis": lambda x, y: x * y.sum(2, keepdim=True),
    "mean of an inner axis": lambda x, y: x.mean(2).unsqueeze(2) - y,
    "over two axes": lambda x, y: x - y.sum((2, 3), keepdim=True),
    "most of an inner axis": lambda x, y: x - y.amax(2, keepdim=True),
    "spread over heads": lambda x, y: x * y[:, :, :1],
    "spread over numbers": lambda x, y: x * y[..., 2:3],
    "chunk": lambda x, y: x.chunk(2, -1)[0] * x.chunk(2, -1)[1],
    "split": lambda x, y: torch.cat([p * i for i, p in enumerate(x.split([1, 2, 3], -1), 1)], -1),
    "unbind": lambda x, y: x.unbind(2)[1] * y.unbind(2)[3],
    "steps": lambda x, y: x[..., ::2] * y[..., 1::2] + x[:, :, 1::2].repeat(1, 1, 2, 1)[..., :3],
    "transpose": lambda x, y: (x.transpose(1, 2) * y.transpose(1, 2)).transpose(1, 2).reshape(1, -1, WIDTH),
    "permute": lambda x, y: x.permute(0, 2, 3, 1) * y.permute(0, 2, 3, 1),
    "flatten": lambda x, y: x.flatten(2) * y.reshape(1, -1, WIDTH),
    "stack": lambda x, y: torch.stack((x, 2 * y), -2),
    "flip": lambda x, y: x.flip(-1) * y,
    "roll": lambda x, y: x.roll(1, -1) * y,
    "expand": lambda x, y: x[:, :, :2, None].expand(-1, -1, -1, 2, -1).reshape(1, -1, HEADS, DIM) * y,
    "unfold": lambda x, y: x.unfold(3, 3, 1) * y[..., :4, None],
    "heads turned": lambda x, y: x.transpose(2, 3).reshape(1, -1, HEADS, DIM) * y,
}

TURNED: dict[str, Function] = {
    "half": lambda x, cos, sin: x * cos[:, :, None] + half(x) * sin[:, :, None],
    "interleaved": lambda x, cos, sin: x * cos.unsqueeze(2) + interleaved(x) * sin.unsqueeze(2),
    "partly": lambda x, cos, sin: torch.cat(
        (x[..., :4] * cos[:, :, None, :4] + half(x[..., :4]) * sin[:, :, None, :4], x[..., 4:]), -1
    ),
    "heads first": lambda x, cos, sin: x.transpose(1, 2) * cos[:, None] + half(x.transpose(1, 2)) * sin[:, None],
}

WITH_CONSTANTS: dict[str, Function] = {
    "row": lambda m, x, y: x * m.row + m.row,
    "one": lambda m, x, y: x * m.one - m.lone,
    "head": lambda m, x, y: x.view(1, -1, HEADS, DIM) * m.head,
    "dim": lambda m, x, y: x.view(1, -1, HEADS, DIM) * m.dim,
    "rms norm": lambda m, x, y: F.rms_norm(x, (WIDTH,), m.row, 1e-5),
    "rms norm of heads": lambda m, x, y: F.rms_norm(x.view(1, -1, HEADS, DIM), (DIM,), m.dim, 1e-5),
    "layer norm": lambda m, x, y: F.layer_norm(x + 3, (WIDTH,), m.row, m.row, 1e-5),
    "layer norm, no bias": lambda m, x, y: F.layer_norm(x.view(1, -1, HEADS, DIM), (DIM,), m.dim),
    "norm times one more": lambda m, x, y: by_hand(x, m.row),
    "norm by standard deviation": lambda m, x, y: by_hand(x - x.mean(-1, keepdim=True), m.row),
}


def twice(function: Function) -> Function:
    """A single function of torch would be left to torch."""
    return lambda *args: function(*args) * 2 * 3


@pytest.mark.parametrize("name", COMPUTED)
def test_functions_of_vectors(name: str) -> None:
    check(Of(twice(COMPUTED[name])), vectors)


@pytest.mark.parametrize("name", ON_HEADS)
def test_functions_of_heads(name: str) -> None:
    check(Of(twice(ON_HEADS[name])), heads)


@pytest.mark.parametrize("name", TURNED)
def test_rotary_embeddings(name: str) -> None:
    check(Of(TURNED[name]), turned)


@pytest.mark.parametrize("name", WITH_CONSTANTS)
def test_functions_with_constants(name: str) -> None:
    check(Of(twice(WITH_CONSTANTS[name]), **CONSTANT), vectors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smaller_types(dtype: torch.dtype) -> None:
    module = Of(lambda m, x: F.silu(by_hand(x, m.row.to(x.dtype))) * x + 1, **CONSTANT)
    check(module, lambda tokens: (rows(tokens, WIDTH, dtype=dtype),), tolerance=3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("size", [1, 2, 7, 16, 17, 48, 100, 257])
def test_rows_of_any_width(size: int) -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return (x * x.square().mean(-1, keepdim=True).add(1).rsqrt()).softmax(-1) - x.amax(-1, keepdim=True)

    check(Of(norm), lambda tokens: (rows(tokens, size),))


SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30, -1e30, 60.0, -60.0, 1e-30, 1.0, -1.0])
WITH_SPECIALS: dict[str, Function] = {
    name: COMPUTED[name] for name in COMPUTED
    if name.split()[0] in {"add", "subtract", "multiply", "divide", "maximum", "minimum", "negative", "relu", "clamp",
                           "clamp_min", "clamp_max", "absolute", "exponential", "square", "tanh", "sigmoid", "silu",
                           "error", "gelu", "softmax", "sum", "mean", "power", "root", "reciprocal"}
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_SPECIALS)
def test_infinities_and_nan_come_out_as_from_torch(name: str) -> None:
    function = WITH_SPECIALS[name]
    wide = len(SPECIAL) ** 2

    def make(tokens: int) -> tuple[torch.Tensor, ...]:
        left = SPECIAL.repeat_interleave(len(SPECIAL)).expand(1, tokens, wide).clone()
        right = SPECIAL.repeat(len(SPECIAL)).expand(1, tokens, wide).clone()
        return left, right

    module = Of(twice(function))
    fusion = learn(module, lambda tokens: (rows(tokens, wide), rows(tokens, wide, seed=1).abs() + 0.1))
    assert len(fusion) == 1
    got, alone = ran(module, *make(3))
    want = twice(function)(*(x.double() for x in make(3))).float()  # torch's own float32 is not always right here
    assert alone
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf() * got.sign(), want.isinf() * want.sign())
    finite = want.isfinite()
    torch.testing.assert_close(got[finite], want[finite], rtol=1e-5, atol=1e-5)


def test_a_row_of_infinities_does_not_touch_its_neighbours() -> None:
    module = Of(lambda x: x.softmax(-1) + F.layer_norm(x, (WIDTH,)))
    learn(module, lambda tokens: (rows(tokens, WIDTH),))
    x = rows(5, WIDTH)
    want, _ = ran(module, x)
    x[0, 2] = math.inf
    got, alone = ran(module, x)
    assert alone
    assert torch.equal(got[:, [0, 1, 3, 4]], want[:, [0, 1, 3, 4]])
    assert got[0, 2].isnan().all()


# -- linear maps ----------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 50), nn.Linear(WIDTH, 50, bias=False), nn.Linear(50, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_linear_maps_between_functions() -> None:
    check(Gated(), lambda tokens: (rows(tokens, WIDTH),))


def test_rows_without_an_axis_before_them() -> None:
    check(Gated(), lambda tokens: (rows(tokens, WIDTH)[0],))


def test_rows_that_are_part_of_wider_ones() -> None:
    check(Gated(), lambda tokens: (rows(tokens, WIDTH + 9)[..., 5 : WIDTH + 5],))


def test_a_linear_map_of_parts_of_a_token_is_refused() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> Any:
            return self.map(x.transpose(1, 2) * 2).transpose(1, 2)

    module = Heads()
    want = module(heads(7)[0])
    assert len(learn(module, lambda tokens: heads(tokens)[:1])) == 0
    assert torch.equal(module(heads(7)[0]), want)


# -- what is refused ------------------------------------------------------------------------------------------------


def counted(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return x * 2 + y


def by_value(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y if x.sum() > 0 else x - y


def by_number(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y) * x[0, 0, 0].item()


def to_its_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x[..., :3]
    z += y[..., :3]
    return x * y


def seen_elsewhere(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    part = z[..., :3]
    z += y
    return part * 2


REFUSED: dict[str, Function] = {
    "running sum": lambda x, y: x.cumsum(1) * y + 1,
    "mean of tokens": lambda x, y: x * y - x.mean(1, keepdim=True),
    "sum of everything": lambda x, y: x * y / x.sum(),
    "most of tokens": lambda x, y: x * y - x.amax(1, keepdim=True),
    "softmax over tokens": lambda x, y: (x * y).softmax(1) * 2,
    "softmax over tokens, turned": lambda x, y: (x * y).transpose(1, 2).softmax(-1).transpose(1, 2) * 2,
    "softmax over heads": lambda x, y: (x * y).view(1, -1, HEADS, DIM).softmax(2),
    "tokens in reverse": lambda x, y: x * 2 + y.flip(1),
    "tokens shifted": lambda x, y: x * 2 + F.pad(y[:, :-1], (0, 0, 1, 0)),
    "tokens rolled": lambda x, y: x * 2 + y.roll(1, 1),
    "tokens dropped": lambda x, y: (x * 2 + y)[:, -1:],
    "tokens as numbers": lambda x, y: x.transpose(1, 2).reshape(1, -1, WIDTH) * y * 2,
    "tokens that meet": lambda x, y: x @ y.transpose(1, 2) @ x,
    "layer norm over tokens": lambda x, y: F.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(1, 2) * y,
    "convolution": lambda x, y: F.conv1d(x.transpose(1, 2), torch.ones(WIDTH, 1, 3), padding=1, groups=WIDTH) + 1,
    "numbers of tokens": lambda x, y: x * 2 + y * torch.arange(x.shape[1])[None, :, None],
    "how many tokens": lambda x, y: x * 2 + y / x.shape[1],
    "more for many tokens": lambda x, y: x * 2 + y if x.shape[1] > 20 else x * 3 + y,
    "noise": lambda x, y: x * 2 + torch.randn(WIDTH),
    "a branch": by_value,
    "a number": by_number,
    "to its input": to_its_input,
    "to what is seen elsewhere": seen_elsewhere,
    "to a part": lambda x, y: (x * 2).index_copy_(2, torch.arange(3), y[..., :3]),
    "whole numbers": lambda x, y: (x * 2 + y).int().float(),
    "a type of few numbers": lambda x, y: (x * 2 + y).to(torch.float8_e4m3fn).float(),
    "truth": lambda x, y: torch.where(x > 0, x * 2, y),
    "best": lambda x, y: (x * 2).sort(-1).values,
    "the smallest": lambda x, y: (x * 2).topk(3, -1, largest=False).values,
    "the best along another axis": lambda x, y: (x * 2).topk(1, 1).values,
    "any axis": lambda x, y: (x * 2).max(-1).values,
    "its input": lambda x, y: x,
    "a part of its input": lambda x, y: x[..., :3],
    "its input and more": lambda x, y: (x, x * 2 + y),
    "one function": lambda x, y: x * y,
    "a power of rows": lambda x, y: y**x + 1,
    "rounded": lambda x, y: torch.div(x, y, rounding_mode="floor") * 2,
    "nothing": lambda x, y: None,
    "more than tensors": lambda x, y: (x * 2 + y, 7),
    "nothing of its input": lambda x, y: torch.zeros(1, x.shape[1], WIDTH) + 1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_runs_as_it_is(name: str) -> None:
    module = Of(REFUSED[name])
    assert len(learn(module, vectors)) == 0
    assert "forward" not in vars(module)
    for tokens in LENGTHS if "noise" not in name else ():
        out = module(*vectors(tokens))
        torch.testing.assert_close(out, REFUSED[name](*vectors(tokens)), rtol=0, atol=0, equal_nan=True)


def test_what_a_module_counts_is_not_lost() -> None:
    module: Any = Of(counted, count=torch.zeros(1))
    assert len(learn(module, vectors)) == 0
    before = int(module.count)
    module(*vectors(3))
    assert int(module.count) == before + 1


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, ids: x * 2 + m.table[ids],
        lambda m, x, ids: x * 2 + ids[..., None],
        lambda m, x, ids: x * 2 if ids.max() > 1000 else x * 3,
        lambda m, x, ids: x * 2 + (ids.max() > 1000) * 1.0,
        lambda m, x, ids: x * 2 + torch.einsum("bt,d->btd", ids.float(), m.table[0]).cos(),
        lambda m, x, ids: m.table[ids] * 2 * 3,
    ],
)
def test_data_that_follows_from_positions_is_refused(function: Function) -> None:
    module = Of(function, table=torch.randn(400, WIDTH))
    assert len(learn(module, lambda tokens: (rows(tokens, WIDTH), torch.arange(tokens)[None]))) == 0


def test_a_type_of_few_numbers_is_refused_where_rounding_would_hide_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + x.tanh()).to(torch.float8_e4m3fn).to(x.dtype)

    assert len(learn(Of(function), lambda tokens: (rows(tokens, WIDTH, dtype=torch.bfloat16),))) == 0


def test_dropout_is_refused_while_it_drops() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    assert len(learn(module.train(), lambda tokens: vectors(tokens)[:1])) == 0
    assert len(learn(module.eval(), lambda tokens: vectors(tokens)[:1])) == 1


def test_constants_that_change_between_calls_are_refused() -> None:
    class Flips(nn.Module):
        factor = 1.0

        def forward(self, x: torch.Tensor) -> Any:
            self.factor += 1
            return x * self.factor + x.square()

    assert len(learn(Flips(), lambda tokens: vectors(tokens)[:1])) == 0
