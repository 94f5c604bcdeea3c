"""`SafetensorsFiles`: the tensors of a checkpoint, as views of its mapped files.

The library for these files maps them as well, but does not let go of pages that were read.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import xxhash
from transformers.modeling_utils import str_to_torch_dtype

from scheduler.weights.known_files import digest_of
from scheduler.weights.mapped_file import MappedFile

_DTYPES = {**str_to_torch_dtype, "F8_E8M0": torch.float8_e8m0fnu}


class SafetensorsFiles:
    """``tensors`` by name. ``drop_pages`` gives the memory back that they were read into."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Raises ``OSError``, ``ValueError``."""
        self._files: list[MappedFile] = []
        self.tensors: dict[str, torch.Tensor] = {}
        for path in paths:
            if not str(path).endswith(".safetensors"):
                raise ValueError("packed weights are read from .safetensors files only")
            self._read(Path(path))

    def drop_pages(self) -> None:
        """Give the memory of the mappings back; it is read again when it is needed."""
        for file in self._files:
            file.drop_pages()

    def digest(self, of: str) -> str:
        """A digest of ``of`` and of every byte of all tensors."""
        return digest_of([file.opened for file in self._files], of, partial(self._read_digest, of))

    def _read_digest(self, of: str) -> str:
        found = hashlib.blake2b(of.encode(), digest_size=16)
        for name, tensor in sorted(self.tensors.items()):
            content = xxhash.xxh3_128_digest(tensor.reshape(-1).view(torch.uint8).numpy().data)
            found.update(f"{name!r} {tuple(tensor.shape)} {tensor.dtype}".encode() + content)
            self.drop_pages()
        return found.hexdigest()

    def _read(self, path: Path) -> None:
        file = MappedFile(path)
        self._files.append(file)
        (length,) = struct.unpack("<Q", bytes(file.memory[:8]))
        table = json.loads(bytes(file.memory[8 : 8 + length]))
        for name, facts in table.items():
            if name == "__metadata__":
                continue
            first, last = (8 + length + offset for offset in facts["data_offsets"])
            dtype = _DTYPES.get(facts["dtype"])
            if dtype is None:
                raise ValueError(f"the checkpoint has a tensor of type {facts['dtype']}, which is not supported")
            data = file.data[first:last]
            if first % dtype.itemsize:
                data = data.clone()
            self.tensors[name] = data.view(dtype).view(facts["shape"])
