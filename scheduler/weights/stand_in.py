"""`WeightStandIn`: a tensor in the place of a packed weight."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

_CPU = torch.device("cpu")


class PackedWeight(Protocol):
    """What has a packed weight."""

    touched: bool  # whether other code has read it

    def dense(self) -> torch.Tensor:
        """The plain weight, in the shape of the parameter."""
        ...


@runtime_checkable
class HasRows(Protocol):
    """A packed weight of which single rows can be had, as embeddings need them."""

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of int64 ``ids [...]``: ``[..., inside]``."""
        ...


class WeightStandIn(torch.Tensor):
    """A tensor in the place of a packed weight. Shape, dtype and device are right; embeddings look up its rows; any
    other operation is done on an unpacked copy, which is slow and recorded in ``touched``. Writing to it raises
    RuntimeError.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, of: PackedWeight, like: torch.Tensor, device: torch.device = _CPU) -> WeightStandIn:
        shadow: WeightStandIn = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)
        return shadow

    def __init__(self, of: PackedWeight, like: torch.Tensor, device: torch.device = _CPU) -> None:
        self.of = of
        self._rows = of if isinstance(of, HasRows) else None
        self._is_param = True  # for isinstance(weight, torch.nn.Parameter)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as of an instance there
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            raise RuntimeError("a packed weight cannot be written")
        first = args[0] if args else None
        if isinstance(first, cls):
            if func is torch.ops.aten.detach.default:
                return first
            if func is torch.ops.aten.embedding.default and first._rows is not None:
                return first._rows.take(args[1])
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls._dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _dense(self) -> torch.Tensor:
        self.of.touched = True
        with torch.inference_mode(False), torch.no_grad():  # of an inference tensor torch cannot return a view
            return self.of.dense()
