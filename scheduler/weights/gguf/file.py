"""`GgufFile`: the metadata and the tensors of a GGUF file, whose data is mapped.

A model may be split into several files (`name-00001-of-00003.gguf`); the first one names the model, and the others are
found beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scheduler.weights.gguf.header import GgufError, read_once, split_parts
from scheduler.weights.gguf.types import PLAIN_TYPES, TYPES
from scheduler.weights.known_files import OpenedFile
from scheduler.weights.mapped_file import MappedFile

_STACKS = frozenset({"altup_proj.weight", "altup_unembd_proj.weight"})
_ALIGNMENT = "general.alignment"
_F32 = 0  # a block type
_WEIGHTS = "xielu."  # begins keys of numbers that models have as weights, one for each layer


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as the file stores it.

    ``shape`` is in torch's order. ``data`` is a view of the file's mapping: uint8 ``[rows, bytes of a row]`` where the
    last dimension of ``shape`` is a row.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    data: torch.Tensor

    @property
    def plain(self) -> bool:
        """Whether the elements are floats of a usual type."""
        return self.kind in PLAIN_TYPES


class GgufFile:
    """One model in one file or several; ``metadata`` by key, ``tensors`` by name."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError`` or ``GgufError``."""
        self._files: list[MappedFile] = []
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self.nbytes = 0
        parts = split_parts(path)
        for number, part in enumerate(parts):
            self._read(part, number, len(parts))
        self.tensors |= {one.name: one for one in _numbers_of_layers(self.metadata)}

    @property
    def opened(self) -> list[OpenedFile]:
        """Which files these are."""
        return [each.opened for each in self._files]

    @property
    def architecture(self) -> str:
        """What the file says its architecture is. Raises ``GgufError`` if it does not say."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str) or not found:
            raise GgufError("the file does not name its architecture")
        return found

    def keys_of_architecture(self) -> Mapping[str, Any]:
        """The metadata of the architecture, without its name in front of the keys."""
        prefix = self.architecture + "."
        return {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}

    def drop_pages(self) -> None:
        """Give the memory of the mapping's pages back; they are read from the file again when they are needed."""
        for each in self._files:
            each.drop_pages()

    def _read(self, path: Path, number: int, count: int) -> None:
        if not path.stat().st_size:
            raise GgufError("the file is empty")
        mapped = MappedFile(path)
        metadata, table, length = read_once(mapped.opened.facts, mapped.memory)
        if metadata.get("split.count", 1) not in (count, 0):
            raise GgufError("the file is one of several, and its name does not say which (name-00001-of-00002.gguf)")
        if metadata.get("split.no", number) != number:
            raise GgufError("the parts of the model are not in the order of their names")
        if number == 0:
            self.metadata = metadata
        self._files.append(mapped)
        self.nbytes += mapped.nbytes
        alignment = metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise GgufError("the alignment of its data is not a multiple of 8")
        start = -(-length // alignment) * alignment
        for name, shape, kind, offset in table:
            if name in self.tensors:
                raise GgufError("two of its tensors have the same name")
            if offset % alignment:
                raise GgufError("a tensor does not begin where the alignment says")
            tensor = GgufTensor(name, shape, kind, _rows(mapped.data, shape, kind, start + offset))
            self.tensors |= {one.name: one for one in _matrices(tensor)}


def largest(value: Any) -> Any:
    """A number for all layers; where there is one for each, the largest (0 is said of layers of another kind)."""
    return max(value) if isinstance(value, list) and value else value


def _matrices(tensor: GgufTensor) -> list[GgufTensor]:
    """The matrices of a tensor that is a stack of those of several modules, by names with their numbers."""
    if len(tensor.shape) != 3 or tensor.name not in _STACKS:
        return [tensor]
    stem, _, kind = tensor.name.rpartition(".")
    parts = torch.split(tensor.data, tensor.shape[1])
    return [GgufTensor(f"{stem}.{i}.{kind}", tensor.shape[1:], tensor.kind, part) for i, part in enumerate(parts)]


def _numbers_of_layers(metadata: Mapping[str, Any]) -> list[GgufTensor]:
    """The numbers in the metadata that are weights, as tensors of the layers. Raises ``GgufError`` where they are not
    numbers.
    """
    found = []
    for key in [key for key in metadata if key.startswith(_WEIGHTS)]:
        try:
            numbers = torch.tensor(metadata[key], dtype=torch.float32).view(-1, 1)
        except (TypeError, ValueError, RuntimeError):
            raise GgufError(f"{key[:40]!r} in its metadata is not a list of numbers") from None
        for layer, row in enumerate(torch.split(numbers.view(torch.uint8), 1)):
            found.append(GgufTensor(f"blk.{layer}.{key}", (1,), _F32, row))
    return found


def _rows(whole: torch.Tensor, shape: tuple[int, ...], kind: int, start: int) -> torch.Tensor:
    """The bytes of a tensor, ``[rows, bytes of a row]``."""
    if kind not in TYPES:
        known = ", ".join(each.name for each in TYPES.values())
        raise GgufError(f"a tensor is of block type {kind}; supported are {known}")
    elements, size = TYPES[kind].elements, TYPES[kind].nbytes
    inside = shape[-1] if shape else 1
    if inside % elements:
        raise GgufError("a row of a tensor is not a whole number of blocks")
    rows, row = math.prod(shape[:-1]), inside // elements * size
    if start + rows * row > len(whole):
        raise GgufError("the file is shorter than its table of tensors says")
    return whole[start : start + rows * row].view(rows, row)
