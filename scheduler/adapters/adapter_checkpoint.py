"""Reads an adapter as peft saves it: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
import xxhash
from safetensors.torch import load_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # what peft puts in front of the model's own names
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])\.(?:[\w-]+\.)?(?P<name>weight|bias)")
_MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.(?:[\w-]+\.)?weight)?")
_BIAS = re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.bias")
_PARAMETER = re.compile(r"(?P<module>.+?)(?:\.modules_to_save(?:\.[\w-]+)?)?\.(?P<name>\w+)")
_MOST_CONFIG = 1 << 20  # bytes
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # of training, that leave the model's weights alone
# What is not known here; the adapter is refused where one of these is set.
_BEYOND = (
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
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
    """An adapter as it was saved, by the names of modules: its pairs; of DoRA the lengths of the rows of their weights,
    ``magnitudes [out]``; ``biases`` in place of the model's, and ``added`` by the upper halves; ``saved``: other
    weights of whole modules. ``invocation``: see ``Adapter``. ``digest``: of all that its results depend on.
    """

    pairs: dict[str, LowRankPair]
    digest: str
    magnitudes: dict[str, torch.Tensor] = field(default_factory=dict)
    biases: dict[str, torch.Tensor] = field(default_factory=dict)
    added: dict[str, torch.Tensor] = field(default_factory=dict)
    saved: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    invocation: tuple[int, ...] = ()


def read_adapter(folder: Path) -> AdapterCheckpoint:
    """Read the adapter in a folder. Raises ``BadAdapter``."""
    config = _read_config(folder)
    made = AdapterCheckpoint({}, "", invocation=_read_invocation(config))
    parts: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in _read_tensors(folder).items():
        _sort(name.removeprefix(_PREFIX), tensor, config, parts, made)
    if not parts:
        raise BadAdapter(f"{WEIGHTS} has no tensors of a LoRA")
    made.pairs.update({name: _pair(name, both, config) for name, both in parts.items()})
    _check_targets(config.get("target_modules"), list(made.pairs))
    if bool(config.get("use_dora")) != bool(made.magnitudes):
        raise BadAdapter(f"{CONFIG} and {WEIGHTS} do not agree on use_dora")
    if config.get("modules_to_save") and not made.saved:
        raise BadAdapter(f"modules_to_save in {CONFIG} names modules of which {WEIGHTS} has no tensors")
    return replace(made, digest=_digest(made))


def _sort(
    name: str,
    tensor: torch.Tensor,
    config: Mapping[str, Any],
    parts: defaultdict[str, dict[str, torch.Tensor]],
    made: AdapterCheckpoint,
) -> None:
    """Put a tensor to where it belongs. Raises ``BadAdapter`` for one that belongs nowhere."""
    if found := _TENSOR.fullmatch(name):
        if found["name"] == "weight":
            parts[found["module"]][found["part"]] = tensor
        elif found["part"] == "B" and config.get("lora_bias"):
            made.added[found["module"]] = tensor
        else:
            raise BadAdapter(f"{WEIGHTS} has a bias that {CONFIG} does not tell of: {name[:200]}")
    elif found := _MAGNITUDE.fullmatch(name):
        made.magnitudes[found["module"]] = tensor
    elif (found := _PARAMETER.fullmatch(name)) and _is_saved(found["module"], config):
        made.saved.setdefault(found["module"], {})[found["name"]] = tensor
    elif (found := _BIAS.fullmatch(name)) and config.get("bias", "none") != "none":
        made.biases[found["module"]] = tensor
    else:
        raise BadAdapter(f"{WEIGHTS} has a tensor that is no part of a LoRA of a linear map: {name[:200]}")


def _is_saved(module: str, config: Mapping[str, Any]) -> bool:
    """Whether ``modules_to_save`` names a module, or one that it is in."""
    listed = config.get("modules_to_save") or []
    if not (isinstance(listed, list) and all(isinstance(name, str) and name for name in listed)):
        raise BadAdapter(f"modules_to_save in {CONFIG} is no list of names")
    parts = module.split(".")
    return any(".".join(parts[:end]).endswith(name) for end in range(1, len(parts) + 1) for name in listed)


def _read_invocation(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens from which on an activated LoRA is active."""
    listed = config.get("alora_invocation_tokens") or []
    if not isinstance(listed, list) or not all(type(token) is int and 0 <= token < 1 << 29 for token in listed):
        raise BadAdapter(f"alora_invocation_tokens in {CONFIG} is no list of token ids")
    return tuple(listed)


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
        raise BadAdapter(f"{beyond} is not supported")
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        raise BadAdapter(f"bias in {CONFIG} is none that peft has")
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


def _digest(made: AdapterCheckpoint) -> str:
    found = hashlib.blake2b(digest_size=16)

    def take(name: str, *tensors: torch.Tensor) -> None:
        found.update(name.encode())
        for tensor in tensors:
            data = tensor.contiguous().reshape(-1).view(torch.uint8)
            found.update(f"{list(tensor.shape)} {tensor.dtype}".encode() + xxhash.xxh3_128_digest(data.numpy().data))

    for name, pair in sorted(made.pairs.items()):
        take(f"{name} {pair.scale!r}", pair.down, pair.up)
    for kind, tensors in (("magnitude", made.magnitudes), ("bias", made.biases), ("added", made.added)):
        for name, tensor in sorted(tensors.items()):
            take(f"{kind} {name}", tensor)
    for name, weights in sorted(made.saved.items()):
        for part, weight in sorted(weights.items()):
            take(f"saved {name}.{part}", weight)
    if made.invocation:
        found.update(f"from {made.invocation}".encode())
    return found.hexdigest()
