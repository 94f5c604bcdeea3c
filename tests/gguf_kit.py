"""Writes GGUF files for tests, by the format's description and llama.cpp's conventions, without any library."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

F32, F16, Q4_0, Q8_0, I32, BF16 = 0, 1, 2, 8, 26, 30


class Stored(NamedTuple):
    """A tensor as it is in a file: ``data`` ``[..., bytes of a row]``, and the values that it stands for."""

    data: np.ndarray[Any, Any]
    shape: tuple[int, ...]
    kind: int
    values: torch.Tensor

    def rows(self, index: torch.Tensor) -> Stored:
        """Its rows in another order."""
        data = self.data.reshape(self.shape[0], -1)[index.numpy()]
        return Stored(data.reshape(self.data.shape), self.shape, self.kind, self.values[index])


def store(weight: torch.Tensor, kind: int = F32) -> Stored:
    """A tensor as the file has it; what is not a whole number of blocks wide is stored as float32."""
    weight = weight.detach().float().contiguous()
    shape = tuple(weight.shape)
    if kind in _PACKERS and (len(shape) < 2 or shape[-1] % 32):
        kind = F32
    if kind in _PACKERS:
        data, values = _PACKERS[kind](weight.view(-1, shape[-1] // 32, 32))
        return Stored(data.reshape(*shape[:-1], -1), shape, kind, values.view(shape))
    dtype = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16, I32: torch.int32}[kind]
    data = weight.to(dtype).view(torch.uint8).numpy().reshape(*shape[:-1], -1)
    return Stored(data, shape, kind, weight.to(dtype).float())


def _q8_0(blocks: torch.Tensor) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    codes = (blocks / scale.float()).nan_to_num().round().clamp(-127, 127).to(torch.int8)
    data = np.concatenate([scale.numpy().view(np.uint8), codes.numpy().view(np.uint8)], axis=-1)
    return data, codes.float() * scale.float()


def _q4_0(blocks: torch.Tensor) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    scale = (blocks.abs().amax(-1, keepdim=True) / 7).half()
    codes = (blocks / scale.float()).nan_to_num().round().clamp(-8, 7).to(torch.int8) + 8
    nibbles = (codes[..., :16] | codes[..., 16:] << 4).numpy().view(np.uint8)
    return np.concatenate([scale.numpy().view(np.uint8), nibbles], axis=-1), (codes.float() - 8) * scale.float()


_PACKERS: dict[int, Callable[[torch.Tensor], tuple[np.ndarray[Any, Any], torch.Tensor]]] = {Q8_0: _q8_0, Q4_0: _q4_0}


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A value behind its type: bool 7, string 8, array 9, int32 5, uint32 4, float 6."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    assert isinstance(value, list)
    items = [_value(each) for each in value] or [struct.pack("<I", 8)]
    return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(value)) + b"".join(each[4:] for each in items)


def write_file(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    """A file of version 3 with the usual alignment."""
    head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    head += [_string(key) + _value(value) for key, value in metadata.items()]
    offset, data = 0, []
    for name, each in tensors.items():
        dims = struct.pack(f"<I{len(each.shape)}Q", len(each.shape), *reversed(each.shape))
        head.append(_string(name) + dims + struct.pack("<IQ", each.kind, offset))
        content = each.data.tobytes()
        data.append(content + bytes(-len(content) % 32))
        offset += len(data[-1])
    start = b"".join(head)
    path.write_bytes(start + bytes(-len(start) % 32) + b"".join(data))
    return path


def interleaved(rows: int, heads: int) -> torch.Tensor:
    """The order in which llama.cpp stores the rows of queries and keys of Llama-like models: where each comes from."""
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).flatten()


def byte_tokens(count: int = 259) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer of ``count`` tokens: 256 bytes, two marks, an end, and unused ones."""
    letters = bytes_to_unicode()
    tokens = [letters[byte] for byte in range(256)] + ["<|im_start|>", "<|im_sep|>", "<|endoftext|>"]
    unused = [f"<|unused{number}|>" for number in range(count - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, *unused],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * (count - 256),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.padding_token_id": 256,
    }
