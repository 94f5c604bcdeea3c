"""The modules of sentence-transformers that stand behind a model: pooling, dense layers, normalisation."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from scheduler.pooling.recipe import BadRecipe, ModuleSource, pooling_modes
from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.source import all_values

TINY = 1e-9  # in place of a sum of no weights
TANH = "torch.nn.modules.activation.Tanh"  # of dense layers that name no activation

Vectors = Callable[[torch.Tensor], torch.Tensor]  # [B, D] -> [B, D']


class PoolingModule:
    """Hidden states ``[B, T, H]`` -> vectors ``[B, D]``; with several modes D is H for each of them, joined.

    ``mask`` ``[B, T]`` is 1 for the tokens of an input, which begin at 0; ``skip`` ``[B]`` of them are a prompt, which
    is left out where the checkpoint says so. Sums are made in float32.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Raises ``BadRecipe``."""
        self.modes = pooling_modes(options)
        self.include_prompt = options.get("include_prompt", True) is not False

    def __call__(self, hidden: torch.Tensor, mask: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        hidden = hidden.float()
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        lengths = mask.sum(dim=1)
        begins = torch.zeros_like(lengths) if self.include_prompt else torch.where(skip < lengths, skip, 0)
        kept = ((positions >= begins[:, None]) & (positions < lengths[:, None]))[:, :, None].float()  # [B, T, 1]
        return torch.cat([self._pool(mode, hidden, kept, begins, lengths) for mode in self.modes], dim=-1)

    def _pool(
        self, mode: str, hidden: torch.Tensor, kept: torch.Tensor, begins: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        rows = torch.arange(len(hidden), device=hidden.device)
        if mode == "cls":
            return hidden[rows, begins]
        if mode == "lasttoken":
            return hidden[rows, lengths - 1]
        if mode == "max":
            return hidden.masked_fill(kept == 0, -torch.inf).amax(dim=1)
        weights = kept
        if mode == "weightedmean":  # later tokens weigh more, by their place in the whole input
            weights = kept * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
        total = weights.sum(dim=1).clamp(min=TINY)
        return (hidden * weights).sum(dim=1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


class DenseModule(nn.Module):
    """A linear layer with an activation, as ``Dense`` of sentence-transformers saves it."""

    def __init__(self, options: Mapping[str, Any], weights: Path | None, tensor: str = "") -> None:
        """``tensor``: its weight in a GGUF file. Raises ``BadRecipe``."""
        super().__init__()
        if weights is None:
            raise BadRecipe("the weights of its dense layer are missing")
        into, out = int(options["in_features"]), int(options["out_features"])
        self.linear = nn.Linear(into, out, bias=options.get("bias", True) is not False)
        self.residual: nn.Module | None = None
        if options.get("use_residual"):
            self.residual = nn.Identity() if into == out else nn.Linear(into, out, bias=False)
        self.activation = activation(str(options.get("activation_function", TANH)))
        self.load_state_dict(read_tensor(weights, tensor) if tensor else read_weights(weights))
        self.float().eval()

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """``[n, out_features]`` of ``vectors [n, in_features]``, float32."""
        made: torch.Tensor = self.activation(self.linear(vectors))
        return made if self.residual is None else made + self.residual(vectors)


class LayerNormModule(nn.Module):
    """A layer norm over the vector."""

    def __init__(self, options: Mapping[str, Any], weights: Path | None) -> None:
        """Raises ``BadRecipe``."""
        super().__init__()
        if weights is None:
            raise BadRecipe("the weights of its layer norm are missing")
        self.norm = nn.LayerNorm(int(options["dimension"]))
        self.load_state_dict(read_weights(weights))
        self.float().eval()

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """``vectors [n, dimension]``, normalised, float32."""
        made: torch.Tensor = self.norm(vectors)
        return made


def normalised(vectors: torch.Tensor) -> torch.Tensor:
    """``vectors [n, width]`` at unit length."""
    return nn.functional.normalize(vectors, p=2, dim=-1)


def vector_module(source: ModuleSource, device: torch.device) -> Vectors:
    """What a module behind the pooling does. Raises ``BadRecipe``."""
    named = [source.options.get(f"module_{end}_name") or "sentence_embedding" for end in ("input", "output")]
    if any(name != "sentence_embedding" for name in named):
        raise BadRecipe(f"its module {source.kind} reads or writes {' and '.join(named)}: only the vector is supported")
    if source.kind == "Normalize":
        return normalised
    if source.kind == "Dense":
        return DenseModule(source.options, source.weights, source.tensor).to(device)
    if source.kind == "LayerNorm":
        return LayerNormModule(source.options, source.weights).to(device)
    raise BadRecipe(f"its module {source.kind} is not supported")


def activation(name: str) -> nn.Module:
    """The activation of torch with this dotted name. Raises ``BadRecipe`` for anything but a module of torch.nn."""
    package, _, kind = name.rpartition(".")
    found = getattr(importlib.import_module(package), kind, None) if package.startswith("torch.nn") else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise BadRecipe("it names an activation that is none of torch.nn")
    made: nn.Module = found()
    return made


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of weights; nothing in it is executed."""
    if path.suffix == ".safetensors":
        return load_file(path)
    found: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return found


def read_tensor(path: Path, name: str) -> dict[str, torch.Tensor]:
    """The weight of a dense layer in a GGUF file. Raises ``BadRecipe`` where there is none."""
    tensor = GgufFile(path).tensors.get(name)
    if tensor is None:
        raise BadRecipe(f"the file has no {name}")
    return {"linear.weight": all_values(tensor, torch.float32)}
