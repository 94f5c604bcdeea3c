"""`PackedFormat`: how checkpoints name and lay out the tensors of a packed weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from scheduler.weights.packed_source import PackedSource

Tensors = Mapping[str, torch.Tensor]  # of one weight, by the ends of their names
ITSELF = ""  # the end of a name that is the parameter's
MISFIT = "the tensors of a packed weight do not fit the model"


class NotOurs(ValueError):
    """A checkpoint that we do not read, and a library may."""


@dataclass(frozen=True)
class PackedFormat:
    """One format. ``ends``: how the names of tensors end, and what the parameter's name has instead; the first is what
    every packed weight has. ``source`` makes a weight ``[out, inside]`` of its tensors and ``inside``; it raises
    ``ValueError`` where they do not fit.
    """

    ends: Mapping[str, str]
    source: Callable[[Tensors, int], PackedSource]

    def find(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """The names of the tensors of each packed parameter, by their ends."""
        found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for name in names:
            for end, instead in self.ends.items():
                if name.endswith(end):
                    found[name.removesuffix(end) + instead][end] = name
        marker = next(iter(self.ends))
        packed = {parameter: parts for parameter, parts in found.items() if marker in parts}
        for parameter in packed.keys() & set(names):
            packed[parameter][ITSELF] = parameter
        return packed


def require_tensor(tensors: Tensors, end: str) -> torch.Tensor:
    """A tensor of a weight, in the shape that its format has. Raises ``ValueError``."""
    if end not in tensors:
        raise ValueError(f"a packed weight has no {end.lstrip('._') or 'values'}")
    return tensors[end]


def size_of(tensors: Tensors) -> int:
    """Bytes of a weight."""
    return sum(tensor.nbytes for tensor in tensors.values())
