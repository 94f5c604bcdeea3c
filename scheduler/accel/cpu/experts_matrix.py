"""``ExpertsMatrix``: the weights of one product of all experts of a layer, as the ROUTED instruction of programs reads
them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from scheduler.accel.cpu.matrix import GROUP, Matrix


class ExpertsMatrix:
    """Weights ``[count, out, inside]`` in one ``Matrix``, expert after expert, and biases ``[count, out]`` float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, tiled: bool) -> None:
        """``weight [count, out, inside]`` is used as it is if it is contiguous, and copied if it is to be ``tiled``."""
        self.count, self.out, self.inside = weight.shape
        padded = F.pad(weight, (0, 0, 0, -self.out % GROUP)) if tiled else weight
        self.matrix = Matrix(padded.reshape(-1, self.inside), tiled)
        self.limit: int | None = None  # rows up to which it is at least as fast as torch; None: any
        self.bias = None if bias is None else bias.detach().float().contiguous()

    @property
    def nbytes(self) -> int:
        """The size of the weights in bytes."""
        return self.matrix.nbytes

    def dense(self) -> torch.Tensor:
        """The plain weights ``[count, out, inside]``."""
        return self.matrix.dense().view(self.count, -1, self.inside)[:, : self.out]
