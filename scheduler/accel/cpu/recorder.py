"""``Recorder``: records what a module computes for the rows of a step, as basic blocks of a program.

A row is one token. For every tensor that depends on the module's input the recorder keeps two integer tensors of the
same shape: for each element its number within a row, and its token. Functions that only move data are also applied to
these integer tensors and need no instruction. Functions that compute become instructions. Anything else raises
``Unrecordable``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from scheduler.accel.cpu.basic_block import BasicBlock, External, Ids, Opcode, Slot, Slots
from scheduler.accel.cpu.function_kinds import CHOOSING, KEEPS, MOVES, REDUCES, RESHAPES, SCATTERS, SEVERAL, ZEROS
from scheduler.accel.cpu.token_axes import Rows, dims_apart, joined_axis, numbers_of, without

# A program keeps float32 where the module goes through one of these.
_EXACT = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_CHOSEN = frozenset({torch.int64, torch.bool})  # places of elements, and masks of them: what routers make


class Unrecordable(Exception):
    """The module does something that a program cannot express; the message names it."""


class IdleWatch(Protocol):
    """What knows more of tensors on which nothing may depend."""

    def see(self, name: Any, args: Any) -> None:
        """A function of such tensors was called."""

    def resolve(self, tensor: torch.Tensor) -> bool:
        """Record what such a tensor is, with which rows meet; whether that is known."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Records what is computed within it from ``inputs``; ``tokens`` is a number that no other size equals.

    ``others`` are tensors whose values may differ in the next step: nothing may depend on them. ``functions`` are torch
    functions that compute, each with the function that records it, called with the recorder, the result and the
    arguments.
    """

    def __init__(
        self,
        tokens: int,
        inputs: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        functions: Mapping[Any, Callable[..., None]],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._functions = functions
        self.tokens = tokens
        self.plain_products = 0  # with weights of no linear module, as routers make
        self.computed = 0  # functions, but for those that only move data
        self.axes: list[int] = []  # of the tokens, in each input
        self.slots = Slots()
        self.blocks = [BasicBlock(self.slots)]
        self._paused = False
        self._alive: list[Any] = [inputs, others]  # so that no other tensor gets the identity of one that was seen
        self._rows: dict[int, Rows] = {}
        self._sharing: defaultdict[int, set[int]] = defaultdict(set)  # by the address of their memory
        self._others = {id(tensor) for tensor in others}
        self._idle: set[int] = set()  # tensors on which nothing may depend, as what they hold is not looked at
        self.idle_watch: IdleWatch | None = None
        self._zeros: set[int] = set()  # the memory of zeros that were made meanwhile
        for number, tensor in enumerate(inputs):
            axis = self.token_axis(tensor)
            self.axes.append(axis)
            external = External("input", number, without(tensor.shape, axis), axis, tensor.dtype)
            self.define(tensor, self.block.read(external, tensor.numel() // tokens), axis)
            self._sharing[_memory(tensor)].add(0)  # the caller also has it

    @property
    def block(self) -> BasicBlock:
        """The block that is being recorded."""
        return self.blocks[-1]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it nothing is recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # What others tell of functions that are recorded as a whole.

    def product(self, weight: Any, bias: torch.Tensor | None, x: torch.Tensor, out: torch.Tensor) -> None:
        """Record that ``out [1, T, out]`` is ``x`` times a weight (``matrix.Matrix``), plus a bias.
        Raises Unrecordable.
        """
        axis, ids = self._row(x, x.shape)
        if axis != x.dim() - 2 or len(ids) != weight.inside:
            raise Unrecordable("a product within a token")
        self.computed += 1
        slot = self.block.product(weight, ids, out.shape[-1])
        if bias is not None:
            operands = self.block.pair(slot.ids, self.block.constant(bias.detach().float()).ids)
            slot = self.block.compute(Opcode.ADD, out.shape[-1], *operands)
        self.define(out, slot, axis)

    def record_routed(self, weights: Any, x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
        """Record that ``out [T, K, out]`` is ``x``, ``[T, in]`` or ``[T, K, in]``, times the weights of the experts
        ``index [T, K]`` (``experts_matrix.ExpertsMatrix``). Raises Unrecordable.
        """
        (axis, ids), (own, experts) = self._row(x, x.shape), self._row(index, index.shape)
        if axis or own or len(ids) not in (weights.inside, weights.inside * len(experts)):
            raise Unrecordable("a product within a token")
        self.computed += 1
        self.define(out, self.block.add_routed(weights, ids, experts), 0)

    def record_heads(self, weights: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        """Record that ``out [.., H, .., out]`` is ``x [.., H, .., in]``, which both have a token axis besides, head by
        head times weights of its own (``experts_matrix.ExpertsMatrix``). Raises Unrecordable.
        """
        axis, ids = self._row(x, x.shape)
        numbers = self.number(0.0, weights.count), self.block.constant(torch.arange(weights.count).float()).ids
        heads = self.block.compute(Opcode.ADD, weights.count, *self.block.pair(*numbers))
        self.computed += 1
        self.define(out, self.block.add_routed(weights, ids, heads.ids), axis)

    def let_idle(self, *tensors: torch.Tensor) -> None:
        """Nothing may depend on these tensors, or on what is made of them alone: it need not be recorded."""
        self._alive += tensors
        self._idle.update(map(id, tensors))

    def is_idle(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of these."""
        return id(tensor) in self._idle

    def replace(self, tensor: torch.Tensor, like: torch.Tensor) -> None:
        """Record that ``tensor`` has the elements of ``like``, which was recorded and has its shape."""
        self._alive.append(tensor)
        self._know(tensor, self._rows[id(like)])

    def attend(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Record that ``out [1, T, H, D]`` is the attention of ``inputs``: these end the block, and a new one
        begins.
        """
        for tensor in inputs:
            self.result(tensor)
        self.computed += 1
        self.blocks.append(BasicBlock(self.slots, self.block))
        axis = self.token_axis(out)
        external = External("attention", 0, without(out.shape, axis), axis, out.dtype)
        self.define(out, self.block.read(external, out.numel() // self.tokens), axis)

    def result(self, tensor: torch.Tensor) -> int:
        """Record that ``tensor``, of any shape with a token axis, is a result of the block; returns its token axis.
        Raises Unrecordable.
        """
        if tensor.dtype not in _EXACT:
            raise Unrecordable("a result of places or of a mask")
        axis, ids = self._row(tensor, tensor.shape)
        number = sum(op.code is Opcode.STORE for op in self.block.operations)
        external = External("output", number, without(tensor.shape, axis), axis, tensor.dtype)
        self.block.write(external, self.block.whole(ids), len(ids))
        return axis

    # What torch's functions compute.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._paused and func._can_decompose():  # as inference mode hands it on
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if not self._paused:
            with self.paused():
                try:
                    self._see(func, args, kwargs or {}, tree_leaves(out))
                except (TypeError, ValueError, LookupError, RuntimeError, AttributeError) as error:
                    raise Unrecordable(f"{func} as it is called here") from error
        return out

    def _see(self, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._alive += [tensors, outs]
        name, others = func.overloadpacket, any(id(tensor) in self._others for tensor in tensors)
        if idle := [tensor for tensor in tensors if id(tensor) in self._idle]:
            mixed = others or any(id(tensor) in self._rows for tensor in tensors)
            if not mixed:
                self._idle.update(map(id, outs))
                if self.idle_watch is not None:
                    self.idle_watch.see(name, args)
                return
            if not all(self.idle_watch is not None and self.idle_watch.resolve(tensor) for tensor in idle):
                raise Unrecordable(f"{name} of what is not looked at")
            self._idle.difference_update(map(id, idle))
        if func._schema.is_mutable:
            name = self._elsewhere(name, args[0])
        if name in ZEROS:
            self._zeros.update(_memory(out) for out in outs)
        elif not any(id(tensor) in self._rows for tensor in tensors):
            if others and not all(isinstance(out, torch.Tensor) for out in outs):
                raise Unrecordable(f"{name} of what is in no row")
            self._others.update(id(out) for out in outs if others)
        elif others:
            raise Unrecordable(f"{name} with what is in no row")
        elif not self._are_exact(name, moved := _is_move(name, tensors, outs), outs):
            raise Unrecordable(f"{name} to another type")
        elif moved:
            self._move(name, func, args, kwargs, outs)
        elif name in self._functions:
            self.computed += 1
            self._compute(name, args, kwargs, outs)
            self._others.update(id(out) for out in outs[1:] if id(out) not in self._rows)
        else:
            raise Unrecordable(str(name))

    def _compute(self, name: Any, args: Any, kwargs: Any, outs: list[torch.Tensor]) -> None:
        """Record a function that computes. Where an axis has all tokens and, within a token, another axis, the function
        is recorded with the two apart.
        """
        known = [self._rows[id(one)] for one in args if id(one) in self._rows]
        axis = next((axis for rows in known if (axis := joined_axis(rows, self.tokens)) is not None), None)
        if axis is None or name in SEVERAL:
            self._functions[name](self, outs if name in SEVERAL else outs[0], *args, **kwargs)
            return
        apart = partial(self._apart, axis=axis, size=outs[0].shape[axis])
        if name in REDUCES:
            args = (args[0], dims_apart(args[1], axis), *args[2:])
        out = apart(outs[0])
        self._functions[name](self, out, *tree_map_only(torch.Tensor, apart, args), **kwargs)
        self._know(outs[0], Rows(*(part.reshape(outs[0].shape) for part in self._rows[id(out)])))

    def _apart(self, tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
        """A tensor whose ``axis`` has ``size`` elements, with that axis as the tokens and what is within each."""
        if tensor.dim() <= axis or tensor.shape[axis] != size:
            return tensor
        view = tensor.view(*tensor.shape[:axis], self.tokens, size // self.tokens, *tensor.shape[axis + 1 :])
        self._alive.append(view)
        if id(tensor) in self._rows:
            self._know(view, Rows(*(part.reshape(view.shape) for part in self._rows[id(tensor)])))
        return view

    def _are_exact(self, name: Any, moved: bool, outs: list[Any]) -> bool:
        """Whether the float32 numbers of a row can be the results; places and masks are if they are only moved, or made
        by a function that is recorded.
        """
        known = _EXACT | _CHOSEN if moved or name in CHOOSING else _EXACT
        return all(isinstance(out, torch.Tensor) and out.dtype in known for out in outs)

    def _move(self, name: Any, func: Any, args: Any, kwargs: Any, outs: list[torch.Tensor]) -> None:
        moved = []
        for part in (0, 1):
            if name in KEEPS:
                moved.append([self._part(args[0], part)])
            elif name in RESHAPES:
                moved.append([self._part(args[0], part).reshape(outs[0].shape)])
            else:
                changed = tree_map_only(torch.Tensor, partial(self._part, part=part), (args, kwargs))
                moved.append(tree_leaves(func(*changed[0], **changed[1])))
        for tensor, elements, tokens in zip(outs, *moved, strict=True):
            self._know(tensor, Rows(elements, tokens))

    def _elsewhere(self, name: Any, tensor: Any) -> Any:
        """The variant of an in-place function that is not in place. Raises Unrecordable if other tensors share the
        memory.
        """
        if name in SCATTERS and _memory(tensor) in self._zeros:
            return name
        if id(tensor) in self._rows and self._sharing[_memory(tensor)] == {id(tensor)}:
            return getattr(torch.ops.aten, name.__name__.removesuffix("_"), name)
        raise Unrecordable(f"{name} is in place")

    def _part(self, tensor: torch.Tensor, part: int) -> torch.Tensor:
        if id(tensor) not in self._rows:
            raise Unrecordable("a constant moved with rows")
        return self._rows[id(tensor)][part]

    # What the recorded functions below need.

    def is_row(self, operand: Any) -> bool:
        """Whether an operand depends on the inputs."""
        return id(operand) in self._rows

    def elementwise(self, out: torch.Tensor, code: Opcode, *operands: Any) -> None:
        """Record that ``out`` is one instruction on tensors, constants or numbers, which are broadcast to its shape."""
        axis, ids = self.spread(out.shape, *operands)
        self.define(out, self.emit(code, *ids), axis)

    def emit(self, code: Opcode, *ids: Ids) -> Slot:
        """Add an instruction on elements to the block."""
        refs = self.block.pair(*ids) if len(ids) == 2 else (self.block.whole(ids[0]),)
        return self.block.compute(code, len(ids[0]), *refs)

    def spread(self, shape: torch.Size, *operands: Any) -> tuple[int, list[Ids]]:
        """The token axis of ``shape``, and for each operand, broadcast to it, the elements of one row.
        Raises Unrecordable.
        """
        known = [operand for operand in operands if id(operand) in self._rows]
        axis = self._row(known[0], shape)[0]
        ids = []
        for operand in operands:
            if id(operand) in self._rows:
                own, found = self._row(operand, shape)
                if own != axis:
                    raise Unrecordable("tokens meet")
                ids.append(found)
            else:
                ids.append(self._constant(operand, shape, axis))
        return axis, ids

    def number(self, value: float, n: int) -> Ids:
        """A constant, repeated ``n`` times."""
        return np.full(n, self.block.constant(torch.tensor([value])).start)

    def groups(self, tensor: torch.Tensor, dims: Any) -> tuple[int, Ids, int]:
        """Of a recorded tensor of any shape: the token axis, the elements of a row with ``dims`` last, and the number
        of elements in ``dims``. Raises Unrecordable.
        """
        axis = self._row(tensor, tensor.shape)[0]
        over = sorted({d % tensor.dim() for d in ([dims] if isinstance(dims, int) else dims or [])})
        if axis in over or not over:
            raise Unrecordable("a sum over tokens")
        rest = [d for d in range(tensor.dim()) if d != axis and d not in over]
        order = [d - (d > axis) for d in (*rest, *over)]
        elements = self._rows[id(tensor)].elements.select(axis, 0).permute(order)
        count = 1
        for d in over:
            count *= tensor.shape[d]
        return axis, elements.flatten().numpy(), count

    def reduce(self, code: Opcode, ids: Ids, count: int) -> Slot:
        """Add a reduction of each group of ``count`` elements to one."""
        return self.block.compute(code, len(ids) // count, self.block.whole(ids), extra=count)

    def _constant(self, operand: Any, shape: torch.Size, axis: int) -> Ids:
        value = operand.detach() if isinstance(operand, torch.Tensor) else torch.tensor(float(operand))
        if value.dim() >= len(shape) - axis and value.shape[axis - len(shape)] != 1:
            raise Unrecordable("a constant that tells tokens apart")
        slot = self.block.constant(value.float().flatten())
        ids = torch.arange(slot.start, slot.start + slot.size).view(value.shape).expand(shape)
        return ids.select(axis, 0).flatten().numpy()

    def _row(self, tensor: torch.Tensor, shape: torch.Size) -> tuple[int, Ids]:
        """The token axis of a tensor that is broadcast to ``shape``, and the elements of a row in order. Raises
        Unrecordable.
        """
        if id(tensor) not in self._rows:
            raise Unrecordable("a constant in place of rows")
        elements, tokens = (part.expand(shape) for part in self._rows[id(tensor)])
        for axis in (a for a, size in enumerate(shape) if size == self.tokens):
            row = elements.select(axis, 0)
            same = torch.equal(elements, row.unsqueeze(axis).expand(shape))
            if same and torch.equal(tokens, numbers_of(shape, axis)):
                return axis, row.flatten().numpy()
        raise Unrecordable("tokens meet")

    def token_axis(self, tensor: torch.Tensor) -> int:
        """The axis whose size is the number of tokens, of a tensor of any shape. Raises Unrecordable if there is not
        exactly one.
        """
        axes = [axis for axis, size in enumerate(tensor.shape) if size == self.tokens]
        if len(axes) != 1:
            raise Unrecordable("no telling which axis is the tokens'")
        return axes[0]

    def define(self, tensor: torch.Tensor, slot: Slot, axis: int) -> None:
        """Record that ``tensor``, ``[..., T, ...]`` with T at ``axis``, holds the slot's elements in order, for every
        token.
        """
        elements = torch.arange(slot.start, slot.start + slot.size).view(without(tensor.shape, axis))
        self._alive.append(tensor)
        self._know(tensor, Rows(elements.unsqueeze(axis).expand(tensor.shape), numbers_of(tensor.shape, axis)))

    def _know(self, tensor: torch.Tensor, rows: Rows) -> None:
        self._rows[id(tensor)] = rows
        self._sharing[_memory(tensor)].add(id(tensor))


def _is_move(name: Any, tensors: list[torch.Tensor], outs: list[Any]) -> bool:
    """Whether a function only moves data, to a type in which the same numbers stand for it."""
    kinds = {one.dtype for one in (*tensors, *outs) if isinstance(one, torch.Tensor)}
    return name in MOVES and (len(kinds) == 1 or kinds <= _EXACT)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
