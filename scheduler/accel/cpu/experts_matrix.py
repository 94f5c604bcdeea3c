"""``ExpertsMatrix``: the weights of one product of all experts of a layer, as the ROUTED instruction of programs reads
them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from scheduler.accel.cpu.kept_tiles import TilePlace
from scheduler.accel.cpu.matrix import GROUP, Matrix
from scheduler.accel.cpu.packed_matrix import PackedMatrix
from scheduler.weights.quantised_weight import QuantisedWeight


class ExpertsMatrix:
    """Weights ``[count, out, inside]`` in one ``Matrix``, expert after expert, and biases ``[count, out]`` float32."""

    def __init__(self, matrix: Matrix, count: int, out: int, bias: torch.Tensor | None) -> None:
        """``matrix`` has the ``out`` rows of each expert, and rows of zeros between them where it is in groups."""
        self.matrix, self.count, self.out, self.inside = matrix, count, out, matrix.inside
        self.limit: int | None = None  # rows up to which it is at least as fast as torch; None: any
        self.bias = None if bias is None else bias.detach().float().contiguous()

    @classmethod
    def of(
        cls, weight: torch.Tensor, bias: torch.Tensor | None, tiled: bool, place: TilePlace | None = None
    ) -> ExpertsMatrix:
        """``weight [count, out, inside]`` is used as it is if it is contiguous, and copied if it is to be ``tiled`` and
        is not in its ``place``.
        """
        count, out, inside = weight.shape
        padded = F.pad(weight, (0, 0, 0, -out % GROUP)) if tiled else weight
        return cls(Matrix(padded.reshape(-1, inside), tiled, place=place), count, out, bias)

    @classmethod
    def pack(cls, weight: QuantisedWeight, bias: torch.Tensor | None, place: TilePlace | None) -> ExpertsMatrix:
        """The packed weights of experts, copied if they are not in their ``place``; ``bias`` is ``[count, out]``.
        Raises ``NotPackable``.
        """
        matrix = PackedMatrix(weight.source, weight.count, place)
        weight.release()
        return cls(matrix, weight.count, weight.out, bias)

    @property
    def nbytes(self) -> int:
        """The size of the weights in bytes."""
        return self.matrix.nbytes

    def dense(self) -> torch.Tensor:
        """The plain weights ``[count, out, inside]``."""
        return self.matrix.dense().view(self.count, -1, self.inside)[:, : self.out]
