"""Makes a transformers model from a GGUF file.

The model is built without memory for its parameters; each of them is then a view of the file, or computed from it a few
rows at a time. Errors name tensors and parameters, never a path.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import nn
from transformers.initialization import no_init_weights

from scheduler.gguf_pooling import DENSE
from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.named import damage_told
from scheduler.weights.gguf.names import find_tensors
from scheduler.weights.gguf.routed import route_experts
from scheduler.weights.gguf.source import all_values
from scheduler.weights.gguf.sparse import HASHED
from scheduler.weights.gguf.types import PLAIN_TYPES
from scheduler.weights.gguf.values import Values

_ROPE_FACTORS = "rope_freqs.weight"
_UNUSED = ("rope_freqs.", "rope_factors_")  # tensors that are no parameters
_IN_CONFIGURATIONS = ("gemma4",)  # say which frequencies the factors leave
_HEAD = "output."  # begins the names of tensors of a head
_POOLER = "pooler."  # and of parameters behind hidden states, which no file has
_LAYER = "blk."
_OF_PICTURES = "exp_probs_b_vl."  # how experts are chosen for pictures
_KEYS_AND_VALUES = ("attn_k.", "attn_k_norm.", "attn_v.")


def build_model(
    file: GgufFile,
    config: Any,
    kind: Any,
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
    packed: bool = False,
) -> Any:
    """The model of class ``kind`` (one of transformers' auto classes) with the file's weights as ``dtype``; None: as
    most of them are stored. ``options`` are for the model's class. ``packed``: matrices that the file has packed are
    not unpacked; parameters are ``WeightStandIn`` of a ``QuantisedWeight`` in their place. Raises ``GgufError`` where
    the file and the configuration do not fit.
    """
    dtype = dtype or stored_dtype(file)
    with damage_told("the file says wrongly how its model is built"), _parameters_without_memory(), no_init_weights():
        model = kind.from_config(config, dtype=dtype, **options)
        route_experts(model, file.architecture)
    _keep_precise(model, dtype)
    if packed:
        model.config._is_quantized = True  # as transformers' quantisers do: modules call others, and read no weights
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = {*parameters, *model.state_dict()}
    found = find_tensors(names, file.tensors)
    _check(file, parameters, found, config, model.get_output_embeddings() is None)
    values = Values(file, model, packed)
    for name in sorted(found):
        with damage_told(f"the tensors of {name!r} are of other shapes than the model's"):
            _set(model, name, values.of(name, found[name]))
        file.drop_pages()
    for name in parameters.keys() - found.keys():  # biases that the file leaves out, and what is behind hidden states
        _set(model, name, nn.Parameter(torch.zeros_like(parameters[name], device="cpu"), False))
    _turn(file, model)
    _set_hashes(model)
    return model


def stored_dtype(file: GgufFile) -> torch.dtype:
    """The type of most bytes of weights if it is a plain one; float32 if they are packed. Tables of whole numbers are
    no weights.
    """
    sizes: Counter[torch.dtype | None] = Counter()
    for tensor in file.tensors.values():
        dtype = PLAIN_TYPES.get(tensor.kind)
        if dtype is None or dtype.is_floating_point:
            sizes[dtype] += tensor.data.numel()
    return max(sizes, key=lambda each: sizes[each], default=None) or torch.float32


def digested_settings(config: Any) -> str:
    """What a model's digest is made of besides its weights: its configuration without ids of tokens, such as those that
    end replies. KV does not depend on them.
    """

    def without_tokens(said: Any) -> Any:
        if not isinstance(said, dict):
            return said
        return {key: without_tokens(value) for key, value in said.items() if not str(key).endswith("_token_id")}

    return json.dumps(without_tokens(config.to_dict()), sort_keys=True, default=str)


def file_digest(file: GgufFile, settings: str) -> str:
    """A digest of ``settings`` and of every byte of the weights, as they are stored."""
    found = hashlib.blake2b(settings.encode(), digest_size=16)
    for name in sorted(file.tensors):
        tensor = file.tensors[name]
        content = xxhash.xxh3_128_digest(tensor.data.numpy().data)
        found.update(f"{name!r} {tensor.shape} {tensor.kind}".encode() + content)
        file.drop_pages()
    return found.hexdigest()


def _check(
    file: GgufFile, parameters: Iterable[str], found: Mapping[str, tuple[str, ...]], config: Any, headless: bool
) -> None:
    """Raise ``GgufError`` unless every parameter has a tensor, and every tensor a parameter. ``headless``: a model that
    gives hidden states, which has no place for a head.
    """
    lacking = sorted(name for name in parameters if name not in found and not name.endswith(".bias"))
    if lacking := [name for name in lacking if not (headless and name.startswith(_POOLER))]:
        raise GgufError(f"{len(lacking)} weights are missing in the file, {lacking[0]} first")
    used = {tensor for tensors in found.values() for tensor in tensors}
    used |= {f"{name}.weight" for name in DENSE.get(file.architecture, ())}  # behind a pooling
    said = file.keys_of_architecture()
    blocks = max(said.get("block_count", 0), config.num_hidden_layers + said.get("nextn_predict_layers", 0))
    left = sorted(name for name in file.tensors if name not in used and not _beside(name, config, blocks))
    left = [name for name in left if not (headless and name.startswith(_HEAD))]
    if left:
        raise GgufError(f"the model has no place for {len(left)} tensors of the file, {left[0]!r} first")


def _beside(name: str, config: Any, blocks: int) -> bool:
    """Whether a tensor may be left: factors of rotary positions, which are read elsewhere; layers for predicting
    further tokens, which are numbered after the last layer and among the file's ``blocks``; keys and values of layers
    that read those of another one; what is for pictures.
    """
    number, _, leaf = name.removeprefix(_LAYER).partition(".")
    if name.startswith(_UNUSED) or not (name.startswith(_LAYER) and number.isdigit()):
        return name.startswith(_UNUSED)
    layers = config.num_hidden_layers
    reads = int(number) >= layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    further = layers <= int(number) < blocks
    return further or leaf.startswith(_OF_PICTURES) or (reads and leaf.startswith(_KEYS_AND_VALUES))


def _keep_precise(model: Any, dtype: torch.dtype) -> None:
    """Give the parameters and buffers a type of their own that transformers does not load as ``dtype``."""
    for part, own in model._get_dtype_plan(dtype).items():
        pattern = re.compile(part.replace("*", ".*"))
        for name, value in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
            if value.is_floating_point() and pattern.search(name):
                _set(model, name, nn.Parameter(value.to(own), False))


def _set(model: Any, name: str, value: Any) -> None:
    """Make ``value`` a parameter or buffer of the model."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = value
    else:
        owner._buffers[leaf] = value.data


def _turn(file: GgufFile, model: Any) -> None:
    """Divide the rotary frequencies by the factors that the file has for each of them."""
    tensor = file.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return
    factors, taken = all_values(tensor, torch.float32), False
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = module._buffers.get(name)
            if frequencies is None:
                continue
            if frequencies.shape != factors.shape:
                raise GgufError("the factors of the rotary positions are not one for each frequency")
            module._buffers[name], taken = frequencies / factors, True
    if not taken and file.architecture not in _IN_CONFIGURATIONS:
        raise GgufError("the file has factors of the rotary positions, which transformers' model of it has not")


def _set_hashes(model: Any) -> None:
    """Put the numbers by which n-grams are hashed in their place, if the configuration has them from a file."""
    for module in model.modules():
        for name in HASHED:
            numbers, buffer = getattr(model.config, name, None), module._buffers.get(name)
            if numbers is None or buffer is None:
                continue
            with damage_told("the numbers by which n-grams are hashed are not those of the model"):
                module._buffers[name] = torch.tensor(numbers, dtype=buffer.dtype).view(len(buffer))


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Parameters that are registered here have a shape and no memory; buffers are as always."""
    register = nn.Module.register_parameter

    def register_without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None:
            self._parameters[name] = nn.Parameter(param.to("meta"), False)

    nn.Module.register_parameter = register_without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
