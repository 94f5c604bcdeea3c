"""Linear layers that read the same input are one product in compiled code: a layer's queries, keys and values, or the
gate and the up projection of an MLP.

Other engines write such layers by hand (``QKVParallelLinear`` of vLLM). Here the model's modules stay as they are:
their weights ``[out, in]`` are moved one behind the other into one storage, of which the parameters are views, and the
graph that is compiled reads them as one weight. This takes no memory, and what is not compiled is not concerned.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Interpreter, Node

_LINEAR: Any = torch._C._nn.linear
Names = tuple[str, ...]


@contextmanager
def noted_groups(roots: Iterable[torch.nn.Module]) -> Iterator[dict[type[torch.nn.Module], set[Names]]]:
    """Within it, forwards are watched. In the dict is afterwards for each class of ``roots`` which linear layers of one
    of them read the same tensor, by their names there and in the order of their calls.
    """
    found: dict[type[torch.nn.Module], set[Names]] = {}
    with ExitStack() as stack:
        for root in roots:
            calls: list[tuple[weakref.ref[torch.Tensor], list[str]]] = []
            for name, module in root.named_modules():
                if type(module) is torch.nn.Linear:
                    stack.callback(module.register_forward_pre_hook(_noting(calls, name)).remove)
            stack.callback(_note_all, found.setdefault(type(root), set()), calls)
        yield found


def _note_all(groups: set[Names], calls: list[tuple[Any, list[str]]]) -> None:
    groups.update(tuple(names) for _, names in calls)


def _noting(calls: list[tuple[weakref.ref[torch.Tensor], list[str]]], name: str) -> Callable[[Any, Any], None]:
    def note(linear: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if not calls or calls[-1][0]() is not args[0]:
            calls.append((weakref.ref(args[0]), []))
        calls[-1][1].append(name)

    return note


def lay_together(roots: Iterable[torch.nn.Module], groups: dict[type[torch.nn.Module], set[Names]]) -> None:
    """Move the weights of each group of linear layers of each root, and their biases, one behind the other into one
    storage. Left as they are: what is no plain parameter with a storage of its own, and what was moved already.
    """
    for root in roots:
        for names in sorted(groups.get(type(root), ()), key=len, reverse=True):
            found = dict(root.named_modules())
            linears: list[Any] = [found[name] for name in names if name in found]
            weights = [linear.weight for linear in linears]
            biases = [linear.bias for linear in linears if linear.bias is not None]
            whole = len(linears) == len(names) > 1 and len(biases) in (0, len(names))
            if whole and _can_move(weights) and _can_move(biases):
                _move(weights)
                _move(biases)


def adjacent_parameters(module: torch.nn.Module) -> frozenset[Names]:
    """The pairs of names of parameters of which the second lies behind the first."""
    plain = [(name, one) for name, one in module.named_parameters() if type(one) is torch.nn.Parameter and one.nbytes]
    named = [(name, one, one.untyped_storage().data_ptr()) for name, one in plain]
    ends = {(storage, one.data_ptr() + one.nbytes): name for name, one, storage in named}
    return frozenset((ends[at], name) for name, one, storage in named if (at := (storage, one.data_ptr())) in ends)


def _can_move(tensors: Sequence[torch.Tensor]) -> bool:
    kinds = {(tensor.dtype, tensor.device, tensor.shape[1:]) for tensor in tensors}
    return len(kinds) <= 1 and all(
        type(tensor) is torch.nn.Parameter
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        for tensor in tensors
    )


def _move(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        return
    with torch.inference_mode(False), torch.no_grad():
        whole, first = torch.cat([tensor.data for tensor in tensors]), 0
        for tensor in tensors:
            tensor.data = whole[first : first + len(tensor)]
            first += len(tensor)


def _are_adjacent(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor begins where another ends, in one storage, and both have rows of one kind."""
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.data_ptr() + one.nbytes == other.data_ptr()
        and (one.dtype, one.shape[1:]) == (other.dtype, other.shape[1:])
    )


class _Product(NamedTuple):
    """A linear layer in a graph, and the inputs of the graph that are its weight and bias, if it has one."""

    node: Node
    weight: Node
    bias: Node | None

    @property
    def parameters(self) -> tuple[Node, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class JoinedProducts:
    """A backend of ``torch.compile`` that joins the products of a graph before ``backend`` compiles it.

    Several modules run the same code: their ``adjacent_parameters`` must be the same.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __call__(self, graph: GraphModule, inputs: list[Any]) -> Any:
        """The compiled graph."""
        from torch._dynamo.backends.registry import lookup_backend

        backend = lookup_backend(self._backend) if isinstance(self._backend, str) else self._backend
        values = dict(zip(_inputs(graph), inputs, strict=True))
        runs = [run for run in _runs(graph, values) if len(run) > 1]
        joined = _with_joined(graph, runs) if runs else None
        return backend(graph if joined is None else joined, inputs)


def _inputs(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _runs(graph: GraphModule, values: dict[Node, Any]) -> list[list[_Product]]:
    """The linear layers of a graph, with those together that read one input and whose parameters lie together."""
    runs: dict[Any, list[list[_Product]]] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target is not _LINEAR or node.kwargs:
            continue
        product = _Product(node, node.args[1], node.args[2] if len(node.args) > 2 else None)
        if not all(isinstance(values.get(one), torch.nn.Parameter) for one in product.parameters):
            continue
        same = runs.setdefault(node.args[0], [[]])
        if same[-1] and not _follows(same[-1][-1], product, values):
            same.append([])
        same[-1].append(product)
    return [run for same in runs.values() for run in same]


def _follows(one: _Product, other: _Product, values: dict[Node, Any]) -> bool:
    pairs = zip(one.parameters, other.parameters, strict=False)
    alike = len(one.parameters) == len(other.parameters)
    return alike and all(_are_adjacent(values[a], values[b]) for a, b in pairs)


def _with_joined(graph: GraphModule, runs: Sequence[Sequence[_Product]]) -> GraphModule | None:
    """A copy of ``graph`` in which each run is one product; None where what follows does not take parts of one."""
    made = GraphModule(graph, copy.deepcopy(graph.graph))
    made.meta.update(graph.meta)
    nodes = {node.name: node for node in made.graph.nodes}
    for run in runs:
        _join(made.graph, [[nodes[node.name] for node in (one.node, *one.parameters)] for one in run])
    made.graph.lint()
    made.recompile()
    examples = [node.meta["example_value"] for node in _inputs(made)]
    try:
        with next(one.fake_mode for one in examples if isinstance(one, FakeTensor)):
            Interpreter(made).run(*examples)
    except (RuntimeError, ValueError):  # a view that parts of a tensor do not have
        return None
    return made


def _join(graph: Graph, run: Sequence[Sequence[Node]]) -> None:
    """Replace linear layers, each given as its node, its weight and its bias, by one."""
    first, *parameters = run[0]
    shapes = [[node.meta["example_value"].shape for node in column] for column in zip(*run, strict=True)][1:]
    sizes = [shape[0] for shape in shapes[0]]
    with graph.inserting_before(first):
        wholes = []
        for parameter, (shape, *_) in zip(parameters, shapes, strict=True):
            rest = tuple(shape[1:])
            strides = (rest[0], 1) if rest else (1,)
            wholes.append(graph.call_function(torch.as_strided, (parameter, (sum(sizes), *rest), strides)))
        product = graph.call_function(_LINEAR, (first.args[0], *wholes))
        parts = graph.call_function(torch.split, (product, sizes, -1))
        results = [graph.call_function(operator.getitem, (parts, at)) for at in range(len(run))]
    for (node, *_), result in zip(run, results, strict=True):
        result.meta.update(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
