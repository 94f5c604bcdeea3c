"""The weights of a model as they are stored, quantised or not: their digest and their size."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import xxhash
from torch.overrides import TorchFunctionMode

from scheduler import cores, meta_kernels
from scheduler.accel.gpu.device_weight import device_weight_of
from scheduler.parallel import division
from scheduler.weights.quantised_weight import quantised_weight_of


class AllOperators(TorchFunctionMode):
    """Within it, an operator that has no kernel in C++ for weights without memory gets the one in Python."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:  # NotImplementedError is one
            if not meta_kernels.complete():
                raise
            return func(*args, **(kwargs or {}))


def digest(model: Any) -> str:
    """Config and weights, every byte of them, divided or not; all ranks must ask for it together.

    Not after a forward: the state dict of bitsandbytes then undoes its packing, and on a CPU not rightly.
    """
    found = hashlib.blake2b(model.config.to_json_string().encode(), digest_size=16)
    for name, weight in model.state_dict().items():
        for tensor in _plain_tensors(division.whole(weight)):
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            content = xxhash.xxh3_128_digest(data.numpy().data)  # blake2b would take seconds a gigabyte
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + content)
    return found.hexdigest()


def stored_bytes(model: Any) -> int:
    """Bytes of the weights with what quantising keeps beside them, tied ones once; of all ranks together where they are
    divided. Not after a forward, see ``digest``.
    """
    sizes: dict[Any, int] = {}
    for weight in model.state_dict(keep_vars=True).values():  # to detach some imports much of torch
        packed = quantised_weight_of(weight) or device_weight_of(weight)
        if packed is not None:
            sizes[id(packed)] = packed.nbytes
            continue
        divided = cores.is_divided(weight)
        for tensor in (weight.to_local(),) if divided else _plain_tensors(weight):
            sizes[tensor.device, tensor.data_ptr(), tensor.shape] = weight.nbytes if divided else tensor.nbytes
    return sum(sizes.values())


def _plain_tensors(weight: Any) -> list[torch.Tensor]:
    """The plain tensors that a weight is made of: more than one where a class of its own keeps it quantised."""
    if not isinstance(weight, torch.Tensor):
        return []  # what a quantised module saves beside its tensors
    if not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    return [tensor for name in weight.__tensor_flatten__()[0] for tensor in _plain_tensors(getattr(weight, name))]
