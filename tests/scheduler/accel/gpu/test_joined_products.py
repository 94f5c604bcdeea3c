"""Products of one input: which are joined in compiled code, what they say then, and which are left as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn import Linear, Module, ModuleList

from scheduler.accel.gpu.compiled import CompiledLayers
from scheduler.accel.gpu.joined_products import adjacent_parameters

pytestmark = pytest.mark.wide

WIDTH = 24


class Products:
    """A backend that runs graphs as they are and notes how many products each has."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.counts.append(sum(node.target is torch._C._nn.linear for node in graph.graph.nodes))
        return graph.forward  # type: ignore[no-any-return]


class Layer(Module):
    """Attention and an MLP, as models have them; ``asks`` only, without keys of its own."""

    def __init__(self, bias: bool = False, keys: int = 8, asks: bool = False) -> None:
        super().__init__()
        self.q, self.k = Linear(WIDTH, 32, bias=bias), Linear(WIDTH, keys, bias=bias)
        self.v, self.o = Linear(WIDTH, 8, bias=bias), Linear(32, WIDTH)
        self.gate, self.up, self.down = Linear(WIDTH, 40), Linear(WIDTH, 40), Linear(40, WIDTH)
        self.asks = asks

    def forward(self, x: torch.Tensor) -> Any:
        q = self.q(x).view(len(x), 4, 8)
        k, v = (q.mean(1), q.amax(1)) if self.asks else (self.k(x), self.v(x))
        x = x + self.o((q * (k[:, :8] * v)[:, None]).flatten(1))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Net(Module):
    def __init__(self, *layers: Module) -> None:
        super().__init__()
        self.layers = ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@torch.inference_mode()
def compiled(net: Module) -> list[int]:
    """The products of each graph of ``net``'s layers, which then say what they said."""
    torch.manual_seed(0)
    inputs = [torch.randn(rows, WIDTH) for rows in (5, 1, 7)]
    wanted = [net(x) for x in inputs]
    backend = Products()
    layers = CompiledLayers(backend)
    layers.find(net, lambda: [net(x) for x in inputs])
    assert len(layers) == len(net.layers), layers.refused  # type: ignore[arg-type]
    with layers.within(torch.no_grad()):
        for x, want in zip(inputs, wanted, strict=True):
            torch.testing.assert_close(net(x), want)
    layers.remove()
    for x, want in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(net(x), want)
    return backend.counts


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_one_input_are_one(bias: bool) -> None:
    net = Net(Layer(bias), Layer(bias), Layer(bias))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert compiled(net) == [4, 4]  # of several rows, and of one
    after = net.state_dict()
    assert [*after] == [*before]
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in net.parameters()}
    assert sum(storages.values()) == sum(one.nbytes for one in net.parameters())  # no memory
    assert ("q.weight", "k.weight") in adjacent_parameters(net.layers[1])


def test_layers_that_leave_some_out_share_the_others_weights() -> None:
    assert compiled(Net(Layer(), Layer(asks=True), Layer())) == [4, 4, 4, 4]


def test_modules_of_other_sizes_run_code_of_their_own() -> None:
    assert compiled(Net(Layer(), Layer(keys=16), Layer())) == [4, 4, 4, 4]


def tied(layer: Layer) -> None:
    layer.k.weight.data = torch.randn(16, WIDTH)[:8]  # a part of another storage


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1, 2)])
def test_weights_that_cannot_be_moved_stay(which: tuple[int, ...]) -> None:
    """One layer is enough: all run the same code."""
    net = Net(Layer(), Layer(), Layer())
    for number in which:
        tied(net.layers[number])  # type: ignore[arg-type]
    assert compiled(net) == ([6, 6] if len(which) == 3 else [7, 7])


def test_what_a_part_of_a_product_does_not_allow_keeps_them_apart() -> None:
    class Viewed(Layer):
        def forward(self, x: torch.Tensor) -> Any:
            rows = self.k(x).view(-1, 2, len(x))  # rows of a part do not lie together
            return x + self.o(self.q(x) * rows.mean()) + self.v(x).mean()

    assert compiled(Net(Viewed(), Viewed()))[0] == 4


def test_layers_that_listen_to_the_same_tensor_in_turns_are_told_apart() -> None:
    class Turns(Layer):
        def forward(self, x: torch.Tensor) -> Any:
            return self.o(self.q(x)) + self.o(self.q(2 * x)) + self.k(x).mean() + self.v(2 * x).mean()

    assert compiled(Net(Turns(), Turns()))[0] == 6
