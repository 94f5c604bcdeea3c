"""``ModuleRecording``: one recorded call of a module, with its arguments, the basic blocks of its program, and its
results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from cache.attention.packed_attention import PackedAttention
from cache.pages.packed import PackedCache
from scheduler.accel.cpu.attention_interceptor import intercept_attention
from scheduler.accel.cpu.basic_block import BasicBlock, Opcode, Operation
from scheduler.accel.cpu.convolution_program import ConvolutionRequest
from scheduler.accel.cpu.expert_routing import ROUTING
from scheduler.accel.cpu.experts import packed_experts
from scheduler.accel.cpu.functions import COMPUTED
from scheduler.accel.cpu.handed_keys import HandedKeys, MappingWatch
from scheduler.accel.cpu.interceptors import AttentionRequest, intercept_experts, intercept_product, refuse_linear
from scheduler.accel.cpu.matrix import PACKED, Matrix
from scheduler.accel.cpu.recorder import Recorder, Unrecordable
from scheduler.accel.cpu.state_recording import has_state, intercept_states, keeps_state

# A linear map as its weight and bias; None where the module is none.
Linear = Callable[[torch.nn.Module], tuple[Matrix, torch.Tensor | None] | None]
Request = AttentionRequest | ConvolutionRequest  # what is computed between two blocks
Kind = tuple[torch.dtype, int]  # of a tensor: its elements, and how many axes it has

# Root mean square of a difference over that of the result: what rounding between functions may do.
_ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_ROUNDED_INPUTS = 1e-4  # the same where packed products round their inputs
_ALIKE = 0.5  # of the tokens whose experts are chosen by what is computed
_FUNCTIONS = COMPUTED | ROUTING
_PLAIN = (type(None), bool, str, int, float)
_KNOWN = (*_PLAIN, torch.Tensor, PackedCache)
_FEWEST = 2  # functions: torch computes one as fast as a program


@dataclass
class ModuleRecording:
    """The result of ``record``. Arguments are numbered as ``spread_arguments`` returns them."""

    tokens: int
    called: list[Any]  # the form of the call
    inputs: list[tuple[int, torch.Tensor]]
    axes: list[int]  # of the tokens, in each input
    same: list[tuple[int, Any]]  # arguments that must be what they were
    ignored: list[tuple[int, Kind]]  # tensors on which nothing depended
    untouched: list[tuple[int, type]]  # what the module did not look into
    cache_at: int | None
    blocks: list[BasicBlock]
    asked: list[Request]
    outputs: list[torch.Tensor | None]
    form: TreeSpec
    handed: list[HandedKeys]  # what it stores in mappings that it got, and takes from them
    _rows: int = -1
    _shapes: list[torch.Size] = field(default_factory=list)  # of the inputs where there are so many rows

    @property
    def axis(self) -> int:
        """The token axis of the first input."""
        return self.axes[0]

    @property
    def limits(self) -> list[int]:
        """Of its products, the numbers of rows up to which they are fast, where there are such."""
        routed = (op.extra[0] for op in self._operations if op.code is Opcode.ROUTED)
        return [weight.limit for weight in chain(self._weights, routed) if weight.limit is not None]

    @property
    def _weights(self) -> Iterator[Matrix]:
        return (op.extra for op in self._operations if op.code is Opcode.MATMUL)

    @property
    def _operations(self) -> Iterator[Operation]:
        return (op for block in self.blocks for op in block.operations)

    @property
    def signature(self) -> Any:
        """A value that is equal for two recordings of the same computation, whatever the number of tokens."""
        inputs = [(number, *_kind(tensor)) for number, tensor in self.inputs]
        asked = [one.signature for one in self.asked]
        operations = [_signature(op) for block in self.blocks for op in (None, *block.operations)]
        kinds = [out is None for out in self.outputs]
        given = self.called, inputs, self.axes, self.same, self.ignored, self.untouched, self.cache_at
        return given, asked, operations, kinds, self.form, self.handed

    def is_like(self, other: ModuleRecording) -> bool:
        """Whether both match the same calls, and have one tensor as their result."""
        seen, others = (
            (one.called, one.same, one.ignored, one.untouched, one.axes, one.cache_at, one.form, one._input_kinds)
            for one in (self, other)
        )
        return seen == others and self.form.is_leaf()

    @property
    def _input_kinds(self) -> list[Any]:
        pairs = zip(self.inputs, self.axes, strict=True)
        return [(number, tensor.dtype, _with(tensor.shape, axis, 0)) for (number, tensor), axis in pairs]

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Any, int] | None:
        """The inputs (of the recorded shapes but for their tokens), the cache and the number of tokens of a call; None
        if it differs in kind from the recorded call.
        """
        called, given = spread_arguments(args, kwargs)
        if called != self.called:
            return None
        for number, value in self.same:
            if given[number] is not value and (type(given[number]) is not type(value) or given[number] != value):
                return None
        for number, kind in self.ignored:
            if not isinstance(given[number], torch.Tensor) or _kind(given[number]) != kind:
                return None
        if any(type(given[number]) is not kind for number, kind in self.untouched):
            return None
        inputs = [given[number] for number, _ in self.inputs]
        if not isinstance(inputs[0], torch.Tensor) or inputs[0].dim() <= self.axis:
            return None
        rows = inputs[0].shape[self.axis]
        if rows != self._rows:
            self._rows, self._shapes = (
                rows,
                [_with(t.shape, a, rows) for (_, t), a in zip(self.inputs, self.axes, strict=True)],
            )
        for tensor, axis, shape, (_, seen) in zip(inputs, self.axes, self._shapes, self.inputs, strict=True):
            if not isinstance(tensor, torch.Tensor) or tensor.shape != shape or tensor.dtype is not seen.dtype:
                return None
            if not _lies_in_rows(tensor, axis):
                return None
        cache = given[self.cache_at] if self.cache_at is not None else None
        return (inputs, cache, rows) if self.cache_at is None or isinstance(cache, PackedCache) else None

    def assemble(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The module's result, from the outputs of its last block: shaped as recorded, of any number of tokens."""
        if len(self.outputs) == 1 and self.form.is_leaf():
            return outputs[0]
        left = iter(outputs)
        return tree_unflatten([None if out is None else next(left) for out in self.outputs], self.form)

    def compare(self, compute: Callable[[list[torch.Tensor], Callable[..., torch.Tensor]], Any]) -> None:
        """Raises ``Unrecordable`` unless the results of ``compute`` agree with the recorded ones."""
        asked, coarsest = iter(self.asked), max(_ROUNDING.get(tensor.dtype, 0.0) for _, tensor in self.inputs)
        if any(weight.kind & PACKED for weight in self._weights):
            coarsest = max(coarsest, _ROUNDED_INPUTS)

        def attend(_: Request, given: list[torch.Tensor]) -> torch.Tensor:
            one = next(asked)
            _equal(given, one.given, coarsest)
            assert one.out is not None
            return one.out

        out = compute([tensor for _, tensor in self.inputs], attend)
        chosen = any(op.code is Opcode.TOPK for op in self._operations)
        _equal(tree_flatten(out)[0], self.outputs, coarsest, self.tokens if chosen else None)

    def release(self) -> None:
        """Free the recorded tensors."""
        self.inputs = [(number, tensor.to("meta")) for number, tensor in self.inputs]
        self.outputs = [None if out is None else out.to("meta") for out in self.outputs]
        self.blocks = []
        for one in self.asked:
            one.given, one.out = [], None


def record(
    attention: PackedAttention,
    linear: Linear,
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, ModuleRecording]:
    """Call ``forward`` of ``module`` and record it. Raises ``Unrecordable``, before or after ``forward`` was called."""
    _look_at(module, linear)
    called, given = spread_arguments(args, kwargs)
    tokens = _tokens(given)
    tensors = [(i, v) for i, v in enumerate(given) if isinstance(v, torch.Tensor)]
    inputs = [(i, v) for i, v in tensors if _is_rows(v, tokens)]
    others = [(i, v) for i, v in tensors if not _is_rows(v, tokens)]
    caches = [(i, v) for i, v in enumerate(given) if isinstance(v, PackedCache)]
    if not caches and has_state(module):
        raise Unrecordable("it keeps a state, and gets no cache")
    if len(caches) > 1 or len({id(tensor) for _, tensor in inputs}) < len(inputs):
        raise Unrecordable("it got one thing twice")
    recorder = Recorder(tokens, [tensor for _, tensor in inputs], [tensor for _, tensor in others], _FUNCTIONS)
    asked: list[Any] = []
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(_intercepted(recorder, part, linear))
        watches: dict[int, MappingWatch] = {}
        if caches:
            known = stack.enter_context(intercept_attention(recorder, attention, caches[0][1], asked))
            mappings = ((i, v) for i, v in enumerate(given) if isinstance(v, MutableMapping))
            watches = {id(mapping): MappingWatch(mapping, number, known) for number, mapping in mappings}
            if has_state(module):
                intercept_states(stack, module, recorder, caches[0][1], asked)
        stack.enter_context(recorder)
        try:
            hidden = {key: _hidden(value, watches) for key, value in kwargs.items()}
            out = forward(*(_hidden(value, watches) for value in args), **hidden)
        except Exception as error:
            raise error if isinstance(error, Unrecordable) else Unrecordable("it fails when it is watched") from error
    if len(asked) > 1 and any(isinstance(one, ConvolutionRequest) for one in asked):
        raise Unrecordable("more than one convolution or attention")
    codes = {op.code for block in recorder.blocks for op in block.operations}
    if recorder.plain_products and Opcode.TOPK not in codes:
        raise Unrecordable("a product with a weight of no linear module")
    outputs, form = tree_flatten(out)
    _results(recorder, outputs, [tensor for _, tensor in inputs])
    return out, ModuleRecording(
        tokens=tokens,
        called=called,
        inputs=inputs,
        axes=recorder.axes,
        same=[(i, v) for i, v in enumerate(given) if isinstance(v, _PLAIN)],
        ignored=[(number, _kind(tensor)) for number, tensor in others],
        untouched=[(i, type(v)) for i, v in enumerate(given) if not isinstance(v, _KNOWN)],
        cache_at=caches[0][0] if caches else None,
        blocks=recorder.blocks,
        asked=asked,
        outputs=outputs,
        form=form,
        handed=[one for watch in watches.values() for one in watch.seen],
    )


def _intercepted(recorder: Recorder, part: torch.nn.Module, linear: Linear) -> AbstractContextManager[None]:
    """Within it, the products of ``part`` are recorded as what they are."""
    if (found := linear(part)) is not None:
        return intercept_product(recorder, part, *found)
    if (experts := packed_experts(part)) is not None:
        return intercept_experts(recorder, part, experts)
    return refuse_linear(recorder, part) if isinstance(part, torch.nn.Linear) else nullcontext()


class _Untouched:
    """Replaces an argument of an unknown type: a module may pass it on; any other use raises Unrecordable."""

    def _look(self, *args: Any) -> Any:
        raise Unrecordable("it looks at an argument of an unknown kind")

    __getattribute__ = __setattr__ = __getitem__ = __setitem__ = __contains__ = __iter__ = __len__ = __bool__ = _look
    __call__ = __eq__ = __ne__ = __hash__ = __str__ = __repr__ = _look


def _hidden(value: Any, watches: dict[int, MappingWatch]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_hidden(one, watches) for one in value)
    return value if isinstance(value, _KNOWN) else watches.get(id(value), _Untouched())


def _look_at(module: torch.nn.Module, linear: Linear) -> None:
    """Raises Unrecordable for a submodule whose forward was replaced, or that has hooks."""
    for part in module.modules():
        if part is module:
            continue
        if "forward" in vars(part) and linear(part) is None and not keeps_state(part):
            raise Unrecordable("a module within it is wrapped")
        if part._forward_hooks or part._forward_pre_hooks:
            raise Unrecordable("a module within it has hooks")


def _results(recorder: Recorder, outputs: list[Any], inputs: list[torch.Tensor]) -> None:
    """Record the module's results, which end its last block. Raises Unrecordable unless they are rows in memory of
    their own, and enough is computed to be worth a program.
    """
    if not any(isinstance(one, torch.Tensor) for one in outputs):
        raise Unrecordable("it returns nothing")
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    for one in outputs:
        if isinstance(one, torch.Tensor):
            if one.untyped_storage().data_ptr() in given:
                raise Unrecordable("it returns what it got")
            before = one.shape[: recorder.result(one)]
            if one.is_contiguous() and any(size != 1 for size in before):
                raise Unrecordable("it returns what does not lie in rows")
        elif one is not None:
            raise Unrecordable("it returns more than tensors")
    if recorder.computed < _FEWEST:
        raise Unrecordable("it is a function of torch by another name")


def spread_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The form of a call (number of arguments, keywords, types and lengths of sequences), and all its arguments as a
    flat list.
    """
    form: list[Any] = [len(args), *kwargs]
    given: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (tuple, list)):
            form += (type(value), len(value))
            given += value
        else:
            form.append(None)
            given.append(value)
    return form, given


def _with(shape: torch.Size, axis: int, rows: int) -> torch.Size:
    return torch.Size((*shape[:axis], rows, *shape[axis + 1 :]))


def _tokens(given: list[Any]) -> int:
    """The number of tokens, from the first tensor argument: ``[1, T, ...]`` or ``[T, n]``. Raises Unrecordable."""
    first = next((value for value in given if isinstance(value, torch.Tensor)), None)
    axis = 0 if first is not None and first.dim() == 2 else 1
    if first is None or first.dim() < 2 or first.shape[axis] < 2 or any(size != 1 for size in first.shape[:axis]):
        raise Unrecordable("it is not called with rows")
    return first.shape[axis]


def _kind(tensor: torch.Tensor) -> Kind:
    return tensor.dtype, tensor.dim()


def _is_rows(value: Any, tokens: int) -> bool:
    """Whether it holds numbers of each token, one token after the other."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    axes = [axis for axis, size in enumerate(value.shape) if size == tokens]
    return len(axes) == 1 and all(size == 1 for size in value.shape[: axes[0]]) and _lies_in_rows(value, axes[0])


def _lies_in_rows(tensor: torch.Tensor, axis: int) -> bool:
    """Whether the numbers of a token, if there is one, lie one after the other."""
    return tensor.is_contiguous() or (tensor.shape[axis] > 0 and tensor.select(axis, 0).is_contiguous())


def _signature(op: Operation | None) -> Any:
    if op is None:
        return None
    refs = tuple((r.slot.start, r.offset, r.period, _values(r.slot.values)) for r in op.refs)
    extra = op.extra
    if isinstance(extra, np.ndarray):
        extra = extra.tobytes()
    elif op.code in (Opcode.LOAD, Opcode.STORE):
        extra = (extra.kind, extra.number, extra.shape, extra.axis, extra.dtype)
    return op.code, op.n, op.out.start, refs, extra


def _values(values: torch.Tensor | None) -> bytes | None:
    return None if values is None else values.numpy().tobytes()


def _equal(got: Sequence[Any], want: Sequence[Any], coarsest: float, tokens: int | None = None) -> None:
    """Raises Unrecordable unless results are equal but for rounding: what is of float32 may be made of what was rounded
    as ``coarsest`` says. ``tokens``: rounding may choose other experts for some of so many tokens, so only most of
    these must be equal.
    """
    for one, other in zip(got, want, strict=True):
        if other is None:
            continue
        if one.shape != other.shape:
            raise Unrecordable("the program returns another shape")
        difference, size, allowed = one.float() - other.float(), other.float(), max(coarsest, _ROUNDING[other.dtype])
        if tokens in other.shape:
            axis = other.shape.index(tokens)
            difference, size = (part.movedim(axis, 0).flatten(1) for part in (difference, size))
            right = difference.square().mean(1).sqrt() <= allowed * size.square().mean().sqrt()
            same = float(right.float().mean()) >= _ALIKE
        else:
            same = bool(difference.square().mean().sqrt() <= allowed * size.square().mean().sqrt())
        if not same:
            raise Unrecordable("the program does not say what the module says")
