"""Modules as programs: which become some, and when they are called as such."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_kit import Of, learn, ran, rows
from torch import nn

from scheduler.accel.cpu.matrix import Matrix

WIDTH = 24
PAGE = 4


def one(tokens: int) -> tuple[torch.Tensor]:
    return (rows(tokens, WIDTH),)


# -- how a module is called ------------------------------------------------------------------------------------------


class Asking(nn.Module):
    """Much like a layer: some arguments are rows, some are not."""

    def forward(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, ...],
        mask: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
        kind: str = "plain",
        scale: float = 2.5,
        **others: Any,
    ) -> torch.Tensor:
        x = x * turn[0] + turn[1].tanh() * scale
        if mask is not None:
            x = x + mask
        if ids is None or ids.dim() != 2:
            x = -x
        for part in turn[2:]:
            x = x * part
        return x * (3 if kind == "plain" else 5) + len(others)


def turn(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rows(tokens, WIDTH, seed=1), rows(tokens, WIDTH, seed=2)


def named(tokens: int) -> dict[str, Any]:
    return {"turn": turn(tokens), "mask": None, "ids": torch.arange(tokens)[None], "kind": "plain"}


def test_a_call_like_the_recorded_ones_is_a_program() -> None:
    module = Asking()
    want = module(*one(7), **named(7))
    assert len(learn(module, one, named)) == 1
    got, alone = ran(module, *one(7), **named(7))
    assert alone
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    _, alone = ran(module, *one(7), **{**named(7), "ids": torch.arange(50, 57)[None], "kind": "pl" + "ain"})
    assert alone  # equal is enough, and nothing depends on ids


CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "a mask": lambda: (one(7), {**named(7), "mask": rows(7, WIDTH, seed=4)}),
    "another word": lambda: (one(7), {**named(7), "kind": "other"}),
    "a word left out": lambda: (one(7), {k: v for k, v in named(7).items() if k != "kind"}),
    "one more word": lambda: (one(7), {**named(7), "scale": 2.5}),
    "a new keyword": lambda: (one(7), {**named(7), "flash": None}),
    "by place": lambda: ((*one(7), turn(7)), {k: v for k, v in named(7).items() if k != "turn"}),
    "by keyword": lambda: ((), {**named(7), "x": one(7)[0]}),
    "a longer tuple": lambda: (one(7), {**named(7), "turn": (*turn(7), rows(7, WIDTH, seed=3))}),
    "a list of tensors": lambda: (one(7), {**named(7), "turn": torch.stack(turn(7))}),
    "no ids": lambda: (one(7), {**named(7), "ids": None}),
    "ids of another form": lambda: (one(7), {**named(7), "ids": torch.arange(7)}),
    "a batch of two": lambda: (
        (rows(7, WIDTH).repeat(2, 1, 1),), {**named(7), "turn": tuple(p.repeat(2, 1, 1) for p in turn(7))}
    ),
    "one row for all": lambda: (one(7), {**named(7), "turn": turn(1)}),
    "another type": lambda: ((one(7)[0].double(),), {**named(7), "turn": tuple(p.double() for p in turn(7))}),
    "columns": lambda: ((rows(WIDTH, 7).transpose(1, 2),), named(7)),
    "no axis": lambda: ((one(1)[0][0, 0],), named(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_any_other_call_goes_the_old_way(name: str) -> None:
    module = Asking()
    args, kwargs = CALLS[name]()
    want = module(*args, **kwargs)
    assert len(learn(module, one, named)) == 1
    got, alone = ran(module, *args, **kwargs)
    assert not alone
    assert torch.equal(got, want)


def test_an_error_of_the_module_is_still_its_own() -> None:
    module = Asking()
    assert len(learn(module, one, named)) == 1
    with pytest.raises(TypeError):
        module()
    with pytest.raises((RuntimeError, TypeError)):
        module(rows(7, WIDTH + 1), **named(7))


def test_rows_of_any_stride_are_read_where_they_lie() -> None:
    module = Asking()
    assert len(learn(module, one, named)) == 1
    wide = rows(7, 3 * WIDTH)
    want = module(wide[..., 5 : 5 + WIDTH].clone(), **named(7))
    got, alone = ran(module, wide[..., 5 : 5 + WIDTH], **named(7))
    assert alone
    assert torch.equal(got, want)


def test_as_many_numbers_in_another_form_go_the_old_way() -> None:
    module = Of(lambda x: x.softmax(-1) * x)
    assert len(learn(module, lambda tokens: (rows(tokens, 4, 6),))) == 1
    for shape in ((4, 6), (6, 4), (24, 1)):
        x = rows(7, *shape)
        got, alone = ran(module, x)
        assert alone == (shape == (4, 6))
        torch.testing.assert_close(got, x.softmax(-1) * x, rtol=1e-5, atol=1e-5)


def test_one_tensor_in_two_places_is_refused() -> None:
    def make(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = rows(tokens, WIDTH)
        return x, x

    assert len(learn(Of(lambda x, y: x * 2 + y.tanh()), make)) == 0


class Stored:
    keeps_state = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_state_that_is_in_no_cache_is_refused() -> None:
    part: Any = nn.Identity()
    part.forward = Stored()
    module = Of(lambda x: part(x).tanh() * 3)
    module.part = part
    assert len(learn(module, one)) == 0


class Bag(dict[str, Any]):
    """Something that a layer may hand on, or look into."""


def test_what_a_module_only_hands_on_may_be_anything() -> None:
    module = Of(lambda x, bag: x * 2 + x.tanh() if bag is not None else x * 3)
    assert len(learn(module, lambda tokens: (rows(tokens, WIDTH), Bag(tokens=tokens)))) == 1
    assert ran(module, *one(7), Bag())[1]
    assert not ran(module, *one(7), {})[1]
    got, alone = ran(module, *one(7), None)
    assert not alone
    assert torch.equal(got, one(7)[0] * 3)


@pytest.mark.parametrize(
    "look",
    [
        lambda x, bag: x * 2 + bag["factor"],
        lambda x, bag: x * 2 + bag.get("factor") * 3,
        lambda x, bag: x * 2 + len(bag) * 3,
        lambda x, bag: x * 2 + (1 if bag else 2) * x.tanh(),
        lambda x, bag: x * 2 + (1 if "factor" in bag else 2) * x.tanh(),
        lambda x, bag: x * 2 + (1 if isinstance(bag, Bag) else 2) * x.tanh(),
        lambda x, bag: x * 2 + sum(value for value in bag.values()) * x.tanh(),
        lambda x, bag: x * 2 + x.tanh() if bag.setdefault("seen", True) else x,
        lambda x, bag: x * 2 + x.tanh() * (bag | {})["factor"],
    ],
)
def test_a_module_that_looks_into_it_is_refused(look: Callable[..., torch.Tensor]) -> None:
    module = Of(look)
    want = module(*one(7), Bag(factor=3))
    assert len(learn(module, lambda tokens: (rows(tokens, WIDTH), Bag(factor=3)))) == 0
    assert torch.equal(module(*one(7), Bag(factor=3)), want)


def test_inputs_and_earlier_outputs_stay_what_they_are() -> None:
    module = Of(lambda x: (x * 2 + x.tanh(), x.exp() - 1))
    assert len(learn(module, one)) == 1
    x = one(40)[0]
    kept = x.clone()
    first, _ = ran(module, x)
    copies = [out.clone() for out in first]
    ran(module, -x)
    assert torch.equal(x, kept)
    assert all(torch.equal(out, copy) for out, copy in zip(first, copies, strict=True))


def test_what_was_recorded_is_let_go() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def make(tokens: int) -> tuple[torch.Tensor]:
        x = rows(tokens, WIDTH)
        seen.append(weakref.ref(x))
        return (x,)

    def function(x: torch.Tensor) -> torch.Tensor:
        out = x * 2 + x.tanh()
        seen.append(weakref.ref(out))
        return out

    module = Of(function)
    fusion = learn(module, make)
    gc.collect()
    assert len(fusion) == 1
    assert len(seen) == 6  # two steps to record, as programs, and to see what is called in a row
    assert all(tensor() is None for tensor in seen)
    assert ran(module, *one(3))[1]


# -- which modules ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two parts; what is between them no program says."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Of(lambda m, x: F.rms_norm(x, (WIDTH,), m.weight), weight=torch.rand(WIDTH))
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 50), nn.SiLU(), nn.Linear(50, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return self.hidden(self.norm(x)).cumsum(1) + x


def test_parts_of_what_is_refused_are_tried() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleDict({"all": nn.ModuleList([Block(), Block()])})

        def forward(self, x: torch.Tensor) -> Any:
            blocks: Any = self.blocks["all"]
            return blocks[1](blocks[0](x)).cumsum(1)

    module = Stack()
    want = module(*one(9))
    fusion = learn(module, one)
    assert {type(fused.module).__name__ for fused in fusion._fused} == {"Of", "Sequential"}
    assert len(fusion) == 4
    torch.testing.assert_close(module(*one(9)), want, rtol=1e-4, atol=1e-4)
    fusion.remove()
    assert torch.equal(module(*one(9)), want)


class Holder(nn.Module):
    """A layer with a module that others hold too."""

    def __init__(self, shared: nn.Module, fuses: bool) -> None:
        super().__init__()
        self.own, self.shared, self.fuses = Of(lambda x: x * 2 + x.tanh()), shared, fuses

    def forward(self, x: torch.Tensor) -> Any:
        x = self.shared(self.own(x))
        return x if self.fuses else x.cumsum(1)


@pytest.mark.parametrize("fuses", list(itertools.product([False, True], repeat=3)))
def test_a_module_that_several_hold_is_a_program_where_they_are_none(fuses: tuple[bool, ...]) -> None:
    shared = nn.Sequential(nn.Linear(WIDTH, 50), nn.SiLU(), nn.Linear(50, WIDTH))
    module = nn.Sequential(*(Holder(shared, one) for one in fuses))
    module.append(Of(lambda x: x.cumsum(1)))  # the whole is no program
    want = module(*one(9))
    fusion = learn(module, one)
    found = [fused.module for fused in fusion._fused]
    layers: list[Any] = list(module)[:3]
    expected = [layer if layer.fuses else layer.own for layer in layers] + [shared] * (not all(fuses))
    assert len(found) == len(expected)
    assert set(found) == set(expected)
    torch.testing.assert_close(module(*one(9)), want, rtol=1e-4, atol=1e-4)
    fusion.remove()
    assert not any("forward" in vars(part) for part in module.modules())


def test_what_is_never_called_or_only_at_one_length_is_left_alone() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.never, self.once, self.fixed = (Of(lambda x: x * 2 + x.tanh()) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.once(x) if x.shape[1] > 20 else x
            return (self.fixed(x[:, :7]) + x[:, :7]).cumsum(1)

    assert len(learn(Sometimes(), one)) == 0


def test_a_module_that_is_called_twice_must_do_the_same() -> None:
    class Shared(nn.Module):
        def __init__(self, factors: tuple[float, float]) -> None:
            super().__init__()
            self.part = Of(lambda x, factor: x * factor + x.tanh())
            self.factors = factors

        def forward(self, x: torch.Tensor) -> Any:
            for factor in self.factors:
                x = self.part(x, factor)
            return x.cumsum(1)

    assert len(learn(Shared((2.0, 2.0)), one)) == 1
    assert len(learn(Shared((2.0, 3.0)), one)) == 0


def test_a_program_that_says_something_else_is_not_kept() -> None:
    def wrong(part: nn.Module) -> tuple[Matrix, torch.Tensor | None] | None:
        return (Matrix(part.weight.detach() * 1.001, False), part.bias) if isinstance(part, nn.Linear) else None

    module = nn.Sequential(nn.Linear(WIDTH, 50), nn.SiLU(), nn.Linear(50, WIDTH))
    assert len(learn(module, one, linear=wrong)) == 0
    assert len(learn(module, one)) == 1


class Inner(nn.Module):
    """A module within a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Of(lambda x: x * 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) + x.tanh()


def test_what_others_do_to_an_inner_module_is_not_left_out() -> None:
    for invalidate in (
        lambda inner: setattr(inner, "forward", lambda x: x * 3),
        lambda inner: inner.register_forward_hook(lambda module, args, out: out * 2),
        lambda inner: inner.register_forward_pre_hook(lambda module, args: None),
    ):
        module = Inner()
        invalidate(module.inner)
        assert len(learn(module, one)) == 0
    assert len(learn(Inner(), one)) == 1


def test_hooks_of_the_module_itself_still_run() -> None:
    module = Inner()
    seen: list[Any] = []
    module.register_forward_hook(lambda module, args, out: seen.append(out))
    learn(module, one)
    seen.clear()
    got, alone = ran(module, *one(3))
    assert alone
    assert len(seen) == 1
    assert seen[0] is got


def test_what_lies_otherwise_than_in_rows_is_left_to_the_module() -> None:
    module = Of(lambda x: (x * 2 + x.tanh()).view(1, -1, 4, 6).transpose(1, 2).contiguous())
    assert len(learn(module, one)) == 0
