"""Reads an adapter as peft saves it: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
import xxhash
from safetensors.torch import load_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # what peft puts in front of the model's own names
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])\.(?:[\w-]+\.)?weight")
_MOST_CONFIG = 1 << 20  # bytes
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # of training, that leave the model's weights alone
# What changes more than low-rank products; the adapter is refused where one of these is set.
_BEYOND = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "monteclora_config",
)


class BadAdapter(Exception):
    """The adapter cannot be used; the message is one line for people, without a path."""


class LowRankPair(NamedTuple):
    """What is added to a linear map: ``scale * x @ down.T @ up.T``, with ``down [rank, in]`` and ``up [out, rank]``."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """The number of columns between the two."""
        return self.down.shape[0]


@dataclass(frozen=True)
class AdapterCheckpoint:
    """An adapter as it was saved: its pairs by the names of their modules, and a digest of all that its results depend
    on.
    """

    pairs: dict[str, LowRankPair]
    digest: str


def read_adapter(folder: Path) -> AdapterCheckpoint:
    """Read the adapter in a folder. Raises ``BadAdapter``."""
    config = _read_config(folder)
    parts: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in _read_tensors(folder).items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise BadAdapter(f"{WEIGHTS} has a tensor that is no part of a LoRA of a linear map: {name[:200]}")
        parts[found["module"].removeprefix(_PREFIX)][found["part"]] = tensor
    if not parts:
        raise BadAdapter(f"{WEIGHTS} has no tensors")
    pairs = {name: _pair(name, both, config) for name, both in parts.items()}
    _check_targets(config.get("target_modules"), list(pairs))
    return AdapterCheckpoint(pairs, _digest(pairs))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        with (folder / CONFIG).open("rb") as file:
            config = json.loads(file.read(_MOST_CONFIG))
    except OSError:
        raise BadAdapter(f"there is no {CONFIG} that can be read") from None
    except (ValueError, RecursionError):
        raise BadAdapter(f"{CONFIG} is no JSON") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise BadAdapter(f"{CONFIG} does not describe a LoRA: its peft_type is another")
    if beyond := next((name for name in _BEYOND if config.get(name)), None):
        raise BadAdapter(f"{beyond} is not supported: this server adds low-rank products and nothing else")
    if config.get("bias", "none") != "none":
        raise BadAdapter("bias is not supported: this server adds low-rank products and nothing else")
    if config.get("init_lora_weights") not in _STARTS:
        raise BadAdapter(
            "init_lora_weights names a start that has changed the model's own weights; save the adapter with "
            "path_initial_model_for_weight_conversion"
        )
    return config


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        other = " (adapter_model.bin is not read)" if (folder / "adapter_model.bin").exists() else ""
        raise BadAdapter(f"there is no {WEIGHTS}{other}")
    try:
        return load_file(path)
    except (OSError, ValueError, safetensors.SafetensorError):
        raise BadAdapter(f"{WEIGHTS} is damaged or cannot be read") from None


def _pair(name: str, parts: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> LowRankPair:
    """The pair of one module, with the rank and alpha that the configuration has for it."""
    if len(parts) < 2:
        raise BadAdapter(f"{WEIGHTS} has only one half of the LoRA of {name[:200]}")
    down, up = parts["A"], parts["B"]
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1] or not down.shape[0]:
        raise BadAdapter(f"the shapes of the two halves of the LoRA of {name[:200]} do not fit: {_shapes(down, up)}")
    if not (down.is_floating_point() and up.is_floating_point()):
        raise BadAdapter(f"the LoRA of {name[:200]} is not of floating-point numbers")
    rank = _find_setting(config, "rank_pattern", name, config.get("r"))
    alpha = _find_setting(config, "alpha_pattern", name, config.get("lora_alpha"))
    if rank != down.shape[0]:
        raise BadAdapter(f"the LoRA of {name[:200]} has rank {down.shape[0]}, where {CONFIG} says another one")
    return LowRankPair(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _find_setting(config: Mapping[str, Any], patterns: str, module: str, default: Any) -> float:
    """A number that holds for all modules, or for those that a pattern matches, as peft finds it."""
    listed = config.get(patterns) or {}
    found = default
    if not isinstance(listed, dict):
        raise BadAdapter(f"{patterns} in {CONFIG} is no object")
    for pattern, value in listed.items():
        if matches(rf"(.*\.)?({pattern})$", module, patterns):
            found = value
            break
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e9:
        raise BadAdapter(f"{CONFIG} has no sound rank or alpha (r, lora_alpha, rank_pattern, alpha_pattern)")
    return found


def matches(pattern: str, text: str, where: str) -> bool:
    """Whether a regular expression of the configuration matches all of ``text``. Raises ``BadAdapter``."""
    try:
        return re.fullmatch(pattern, text) is not None
    except re.error:
        raise BadAdapter(f"{where} in {CONFIG} is no regular expression") from None


def _check_targets(targets: Any, modules: list[str]) -> None:
    """Raises ``BadAdapter`` where the configuration names a module of which there are no tensors."""
    if isinstance(targets, list):
        for target in targets:
            if not any(name == target or name.endswith(f".{target}") for name in modules):
                raise BadAdapter(f"target_modules has a name of which {WEIGHTS} has no tensors: {str(target)[:200]}")


def _shapes(*tensors: torch.Tensor) -> str:
    return " and ".join(str(list(tensor.shape)) for tensor in tensors)


def _digest(pairs: Mapping[str, LowRankPair]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name, pair in sorted(pairs.items()):
        found.update(f"{name} {pair.scale!r}".encode())
        for tensor in (pair.down, pair.up):
            data = tensor.contiguous().reshape(-1).view(torch.uint8)
            found.update(f"{list(tensor.shape)} {tensor.dtype}".encode() + xxhash.xxh3_128_digest(data.numpy().data))
    return found.hexdigest()
