"""The value of each parameter from the tensors of a GGUF file, where llama.cpp's converter has changed it back as
transformers' model has it: the order of rows, norms that multiply by ``weight + 1``, transposed matrices, experts.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from scheduler.weights.gguf.file import GgufFile, GgufTensor
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.names import EMBEDDINGS
from scheduler.weights.gguf.order import StoredOrder
from scheduler.weights.gguf.source import GgufSource, all_values, values
from scheduler.weights.joined_source import JoinedSource
from scheduler.weights.packed_source import PackedSource
from scheduler.weights.packed_values import in_order
from scheduler.weights.quantised_weight import QuantisedWeight
from scheduler.weights.stand_in import WeightStandIn
from scheduler.weights.widened_source import widen

_ROWS = 64  # that are unpacked at a time
_BEHIND = {"q_a_layernorm": "q_lora_scale", "kv_a_layernorm": "kv_lora_scale"}
_NORM_INPUT = 3.0  # of two signs, see ``_adds_one``


class Values:
    """Makes the parameters of one model."""

    def __init__(self, file: GgufFile, model: Any, packed: bool) -> None:
        """``model`` has no memory for its parameters yet. ``packed``: matrices that the file has packed stay so, with
        stand-ins as parameters.
        """
        self._file, self._model, self._packed = file, model, packed
        self._order = StoredOrder(file.architecture, model, file.keys_of_architecture())
        self._made: dict[str, Any] = {}
        self._added: dict[type, bool] = {}

    def of(self, name: str, tensors: tuple[str, ...]) -> Any:
        """The parameter ``name``, which is made of ``tensors``. Raises ``GgufError`` where the shapes do not fit."""
        if name.endswith("weight") and tensors[0].startswith(EMBEDDINGS) and tensors[0] in self._made:
            return self._made[tensors[0]]  # the embeddings are the head as well
        parts = [self._file.tensors[tensor] for tensor in tensors]
        path, _, leaf = name.rpartition(".")
        owner = self._model.get_submodule(path)
        like = owner._parameters.get(leaf)
        like = owner._buffers[leaf] if like is None else like
        made: Any = self._keep_packed(owner, name, parts, like)
        if made is None:
            made = nn.Parameter(self._value(owner, name, parts, like), False)
        if tuple(made.shape) != tuple(like.shape):
            raise GgufError(f"{tensors[0]!r} is of shape {parts[0].shape}, and {name} of {tuple(like.shape)}")
        self._made[tensors[0]] = made
        return made

    def _keep_packed(
        self, owner: nn.Module, name: str, parts: list[GgufTensor], like: torch.Tensor
    ) -> WeightStandIn | None:
        """A stand-in for matrices that stay packed; None where they do not."""
        if not self._packed or len(parts[0].shape) != len(like.shape) or like.dim() not in (2, 3):
            return None
        if isinstance(owner, Conv1D) or any(part.plain for part in parts):
            return None
        if like.dim() == 2:
            if not name.endswith("weight"):
                return None
            source = _source(parts, self._order.rows(name, parts), self._order.columns(name, parts))
            if (source.out, source.inside) != tuple(like.shape):
                return None
            found = QuantisedWeight(source, like.dtype)
        elif any(part.kind != parts[0].kind for part in parts):
            return None
        else:
            flipped = bool(getattr(owner, "is_transposed", False))
            rows = _rows_of_experts(owner, parts, like.transpose(1, 2) if flipped else like)
            found = QuantisedWeight(GgufSource(parts, rows), like.dtype, len(like), flipped)
        found.release = self._file.drop_pages
        return WeightStandIn(found, like)

    def _value(self, owner: nn.Module, name: str, parts: list[GgufTensor], like: torch.Tensor) -> torch.Tensor:
        if len(like.shape) == 3 and len(parts[0].shape) == 3:
            return _experts(owner, parts, like)
        if isinstance(owner, Conv1D) and len(parts[0].shape) == 2:
            return all_values(parts[0], like.dtype).t().contiguous()
        if ".kv_b_proj." in name and len(parts) > 1:
            return _of_latents(*(all_values(part, like.dtype) for part in parts))
        if ".conv1d." in name and len(parts) > 1:
            return torch.cat([all_values(part, like.dtype).view(-1, 1, part.shape[-1]) for part in parts])
        rows = self._order.rows(name, parts)
        if rows is None and len(parts) > 1:
            return _interleave(owner, [all_values(part, like.dtype) for part in parts], -1)
        logarithm, less = name.endswith(".A_log"), self._adds_one(owner) and name.endswith(".weight")
        scale = self._scale_behind(name)
        dtype = torch.float32 if logarithm or less or scale else like.dtype
        value = all_values(parts[0], dtype) if rows is None else _order_rows(parts, rows, dtype)
        value = in_order(value, self._order.columns(name, parts))
        if logarithm:
            value = torch.log(value.abs())  # stored with either sign
        elif less:
            value = value - 1
        elif scale:
            value = value / scale
        same = [size for size in value.shape if size > 1] == [size for size in like.shape if size > 1]
        same |= like.dim() == 1 and value.numel() == like.numel()  # by groups
        return (value.reshape(like.shape) if same else value).to(like.dtype)

    def _scale_behind(self, name: str) -> float:
        """What a module multiplies the results of a norm of latents by, which is in the norm's weight in the file; 0 if
        it does not.
        """
        path, _, norm = name.removesuffix(".weight").rpartition(".")
        scale = _BEHIND.get(norm)
        return float(getattr(self._model.get_submodule(path), scale, 0.0)) if scale is not None else 0.0

    def _adds_one(self, norm: nn.Module) -> bool:
        """Whether a norm multiplies by its weight and one; the file has what it multiplies by."""
        if type(norm) not in self._added:
            self._added[type(norm)] = _adds_one(norm)
        return self._added[type(norm)]


def _adds_one(norm: nn.Module) -> bool:
    """Measured: whether anything is left where the weight is 0."""
    weight = norm._parameters.get("weight")
    if weight is None or len(weight.shape) != 1:
        return False
    trial = copy.deepcopy(norm)
    for name, parameter in trial._parameters.items():
        if parameter is not None:
            trial._parameters[name] = nn.Parameter(torch.zeros_like(parameter, device="cpu"), False)
    x = torch.full((1, len(weight)), _NORM_INPUT, dtype=weight.dtype)
    x[:, ::2] *= -1
    try:
        with torch.no_grad():
            return bool(trial(x).any())
    except (TypeError, AttributeError):  # it takes more than that: a gated norm, which does not add
        return False


def _source(parts: list[GgufTensor], rows: torch.Tensor | None, columns: torch.Tensor | None) -> PackedSource:
    """The rows of packed tensors, which may be of several types, see ``GgufSource``."""
    if rows is None or all(part.kind == parts[0].kind for part in parts):
        return GgufSource(parts, rows, columns)
    return JoinedSource(widen([GgufSource([part]) for part in parts]), rows)


def _order_rows(parts: list[GgufTensor], rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of tensors, one after the other, in another order."""
    if len(parts) > 1:
        return torch.cat([all_values(part, dtype) for part in parts])[rows]
    part = parts[0]
    if part.plain:
        return values(part)[rows].to(dtype)
    source = GgufSource([part], rows)
    whole = torch.empty(source.out, source.inside, dtype=dtype)
    for start in range(0, source.out, _ROWS):
        whole[start : start + _ROWS] = source.dequantise(start, min(start + _ROWS, source.out))
    return whole


def _of_latents(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What makes keys and values of latents, ``[heads * (key + value), latent]``, from ``[heads, latent, key]`` and
    ``[heads, value, latent]``.
    """
    if keys.dim() != 3 or values.dim() != 3 or (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
        raise GgufError("the keys and values of a layer are not of one number of heads, or of one width of latents")
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def _experts(owner: nn.Module, parts: list[GgufTensor], like: torch.Tensor) -> torch.Tensor:
    """The matrices of all experts, ``[experts, out, in]`` or as their module has them; several parts by rows."""
    whole = torch.empty(like.shape, dtype=like.dtype)
    target = whole.transpose(1, 2) if getattr(owner, "is_transposed", False) else whole
    _check_experts(parts, target)
    for place, part in enumerate(parts):
        mine = _part(owner, target, place, len(parts), 1)
        for expert in range(len(whole)):
            if part.plain:
                mine[expert] = values(part)[expert]
                continue
            source, first, out = GgufSource([part]), expert * part.shape[1], part.shape[1]
            for start in range(0, out, _ROWS):
                stop = min(start + _ROWS, out)
                mine[expert, start:stop] = source.dequantise(first + start, first + stop)
    return whole


def _rows_of_experts(owner: nn.Module, parts: list[GgufTensor], target: torch.Tensor) -> torch.Tensor:
    """Which row of all parts, one after the other, each row of all experts is: int64."""
    _check_experts(parts, target)
    rows, first = torch.empty(target.shape[:2], dtype=torch.int64), 0
    for place, part in enumerate(parts):
        count = part.shape[0] * part.shape[1]
        mine = _part(owner, rows, place, len(parts), 1)
        mine.copy_(torch.arange(first, first + count).view(mine.shape))
        first += count
    return rows.flatten()


def _check_experts(parts: list[GgufTensor], target: torch.Tensor) -> None:
    """Raise ``GgufError`` unless the parts together are experts ``[experts, out, in]`` of this shape."""
    if any(part.shape[0] != len(target) or part.shape[2] != target.shape[2] for part in parts):
        raise GgufError(f"{parts[0].name!r} is of another shape than the model's experts")
    if sum(part.shape[1] for part in parts) != target.shape[1] or target.shape[1] % len(parts):
        raise GgufError(f"{parts[0].name!r} is of another shape than the model's experts")


def _part(owner: nn.Module, whole: torch.Tensor, place: int, count: int, dim: int) -> torch.Tensor:
    """Where one of ``count`` parts is in what they are joined to: one after the other, or in turns."""
    if count == 1:
        return whole
    if getattr(owner, "is_concatenated", True):
        return whole.chunk(count, dim)[place]
    turns = [slice(None)] * whole.dim()
    turns[dim] = slice(place, None, count)
    return whole[tuple(turns)]


def _interleave(owner: nn.Module, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Biases of experts, joined as their weights are."""
    shape = [*parts[0].shape[:-1], sum(part.shape[-1] for part in parts)]
    whole = torch.empty(shape, dtype=parts[0].dtype)
    for place, part in enumerate(parts):
        _part(owner, whole, place, len(parts), whole.dim() - 1).copy_(part)
    return whole
