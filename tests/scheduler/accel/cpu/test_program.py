"""Programs: any elements in any order, any number of rows and threads, one memory for all of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from program_kit import Of, compiled, learn, ran, rows
from torch import nn

from scheduler.accel.cpu.basic_block import BasicBlock, External, Ids, Opcode, Ref, Slots
from scheduler.accel.cpu.program import Program, _live_operations

WIDTH = 40


class Gated(nn.Module):
    """A norm, products beside each other and one after another, and what is added at the end."""

    def __init__(self, inner: int = 70) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = F.layer_norm(x, (WIDTH,))
        return x + self.down(F.silu(self.gate(y)) * self.up(y)).tanh()


@torch.no_grad()
def test_products_can_be_left_out() -> None:
    """They are zeros then: what is left of the last one is its bias."""
    module, x = Gated(), rows(5, WIDTH)
    want = module(x)
    learn(module, lambda tokens: (rows(tokens, WIDTH),))
    with compiled().without_products():
        without, alone = ran(module, x)
    assert alone
    torch.testing.assert_close(without, x + module.down.bias.tanh())
    torch.testing.assert_close(ran(module, x)[0], want, rtol=1e-5, atol=1e-5)


# -- elements in any order -------------------------------------------------------------------------------------------


def shaped(rng: random.Random, size: int) -> Ids:
    """Some of ``size`` elements, as tensors have them that were cut, turned, repeated and put together again."""
    first = rng.randrange(size)
    ids = np.arange(first, rng.randint(first + 1, size))
    for _ in range(rng.randrange(4)):
        kind = rng.randrange(6)
        if kind == 0:
            ids = ids[rng.randrange(len(ids)) :]
        elif kind == 1 and len(ids) % 4 == 0:
            ids = ids.reshape(4, -1).T.flatten()
        elif kind == 2 and len(ids) < 500:
            ids = np.tile(ids, rng.randint(1, 5))
        elif kind == 3 and len(ids) < 500:
            ids = np.repeat(ids, rng.choice([2, 16, 20]))
        elif kind == 4:
            ids = np.concatenate([ids[len(ids) // 2 :], ids[: len(ids) // 2]])
        elif kind == 5:
            ids = ids[:: rng.randint(1, 3)]
    return ids


def run(block: BasicBlock, out: Ref, size: int, given: dict[int, torch.Tensor]) -> torch.Tensor:
    """What the block computes for ``out``, ``[rows, size]``; ``given``: its inputs by number."""
    block.write(External("output", 0, (size,), dtype=torch.float32), out, size)
    program = Program(block, compiled())
    program.place_inputs([given[number] for number in sorted(given)])
    outputs = program.place_outputs(given[0].shape[0])
    program.run(given[0].shape[0])
    return outputs[0]


@pytest.mark.parametrize("seed", range(100))
def test_any_two_operands_meet_as_they_should(seed: int) -> None:
    rng = random.Random(seed)
    block = BasicBlock(Slots())
    sizes = [rng.choice([1, 4, 16, 20, 48, 64, 100]) for _ in range(3)]
    inputs = {number: rows(5, size, seed=number)[0] for number, size in enumerate(sizes)}
    read = [block.read(External("input", n, (size,), dtype=torch.float32), size) for n, size in enumerate(sizes)]
    values = torch.cat([inputs[number] for number in range(3)], 1)
    assert [slot.start for slot in read] == [0, sizes[0], sizes[0] + sizes[1]]
    left, right = (shaped(rng, sum(sizes)) for _ in range(2))
    n = min(len(left), len(right))
    left, right = left[:n], right[:n]
    out = block.compute(Opcode.SUB, n, *block.pair(left, right))
    got = run(block, Ref(out), n, inputs)
    assert torch.equal(got, values[:, torch.from_numpy(left)] - values[:, torch.from_numpy(right)])


@pytest.mark.parametrize("count", [1, 3, 16, 17, 32, 50])
@pytest.mark.parametrize("code", [Opcode.REDUCE_SUM, Opcode.REDUCE_MAX])
def test_groups_of_any_size(code: Opcode, count: int) -> None:
    block = BasicBlock(Slots())
    row = block.read(External("input", 0, (5 * count,), dtype=torch.float32), 5 * count)
    x = rows(7, 5 * count)[0]
    got = run(block, Ref(block.compute(code, 5, Ref(row), extra=count)), 5, {0: x})
    groups = x.view(7, 5, count)
    torch.testing.assert_close(
        got, groups.sum(-1) if code is Opcode.REDUCE_SUM else groups.amax(-1), rtol=1e-5, atol=1e-5
    )


def test_what_nothing_depends_on_is_not_computed() -> None:
    block = BasicBlock(Slots())
    row = block.read(External("input", 0, (WIDTH,), dtype=torch.float32), WIDTH)
    kept = block.compute(Opcode.TANH, WIDTH, Ref(row))
    block.compute(Opcode.EXP, WIDTH, Ref(block.compute(Opcode.ABS, WIDTH, Ref(row))))
    block.write(External("output", 0, (WIDTH,), dtype=torch.float32), Ref(kept), WIDTH)
    assert [op.code for op in _live_operations(block.operations)] == [Opcode.LOAD, Opcode.TANH, Opcode.STORE]


# -- rows, threads, memory -------------------------------------------------------------------------------------------


@torch.no_grad()
def outputs(module: nn.Module, counts: list[int]) -> list[torch.Tensor]:
    """As a program, for the first so many of 1,000 rows."""
    x = rows(1000, WIDTH)
    got = [ran(module, x[:, :count]) for count in counts]
    assert all(alone for _, alone in got)
    return [out for out, _ in got]


def test_a_row_does_not_depend_on_how_many_there_are() -> None:
    module = Gated()
    learn(module, lambda tokens: (rows(tokens, WIDTH),))
    *some, whole = outputs(module, [1, 2, 7, 16, 17, 31, 32, 33, 255, 256, 257, 700, 1000])
    assert all(torch.equal(part, whole[:, : part.shape[1]]) for part in some)


@pytest.mark.usefixtures("two_threads")
def test_threads_change_no_bit() -> None:
    module = Gated(300)
    learn(module, lambda tokens: (rows(tokens, WIDTH),))
    counts = [1, 2, 3, 33, 257, 1000]
    torch.set_num_threads(1)
    want = outputs(module, counts)
    torch.set_num_threads(2)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(outputs(module, counts), want, strict=True))


def test_a_program_stays_right_when_a_larger_one_is_made() -> None:
    first = Gated()
    learn(first, lambda tokens: (rows(tokens, WIDTH),))
    want = outputs(first, [50])[0]
    memory = compiled().memory
    for inner in (5_000, 20_000, 80_000):
        second = Gated(inner)
        learn(second, lambda tokens: (rows(tokens, WIDTH),))
        if compiled().memory != memory:
            break
    else:
        pytest.skip("there was room for all of them")
    outputs(second, [50])
    assert torch.equal(outputs(first, [50])[0], want)


def test_programs_take_turns_with_one_memory() -> None:
    modules = [Gated(), Gated(33), Of(lambda x: x.softmax(-1) * x)]
    wants = []
    for module in modules:
        learn(module, lambda tokens: (rows(tokens, WIDTH),))
        wants.append(outputs(module, [20])[0])
    for _ in range(2):
        for module, want in zip(modules, wants, strict=True):
            assert torch.equal(outputs(module, [20])[0], want)
