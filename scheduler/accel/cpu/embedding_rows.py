"""``EmbeddingRows``: what an embedding with a packed weight returns, without the way through torch's dispatch."""

from __future__ import annotations

import torch

from scheduler.accel.cpu.fused_module import hooks_of
from scheduler.weights.stand_in import HasRows, WeightStandIn


class EmbeddingRows:
    """Called as the module is, which it calls itself where that has hooks, another forward or another weight."""

    def __init__(self, module: torch.nn.Embedding, weight: WeightStandIn, rows: HasRows) -> None:
        self._module, self._weight, self._take = module, weight, rows.take
        self._own, self._hooks = vars(module), hooks_of([module])

    @classmethod
    def of(cls, module: torch.nn.Module) -> EmbeddingRows | None:
        """That of an embedding whose forward only looks rows up in a packed weight; None for another module."""
        if type(module).forward is not torch.nn.Embedding.forward or not isinstance(module, torch.nn.Embedding):
            return None
        weight = module.weight
        rows = weight.of if isinstance(weight, WeightStandIn) else None
        return cls(module, weight, rows) if isinstance(rows, HasRows) and module.max_norm is None else None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of int64 ``ids [...]``: ``[..., D]``."""
        own = self._own
        if any(self._hooks) or "forward" in own or own["_parameters"]["weight"] is not self._weight:
            return self._module(ids)  # type: ignore[no-any-return]
        return self._take(ids)
