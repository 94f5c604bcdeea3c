"""Checkpoints of packed integers on a CPU, without the libraries that made them.

transformers reads their tensors as they are, under the names that they have, into ``_Held`` modules in the place of
linear ones; afterwards these get their weights back as `QuantisedWeight`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.modeling_utils import str_to_torch_dtype
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from scheduler.model.weights import digest
from scheduler.weights.packed_formats import PackedFormat, format_of
from scheduler.weights.quantised_weight import QuantisedWeight
from scheduler.weights.stand_in import WeightStandIn

_METHOD = "packed integers"  # under which transformers finds what is registered here
_PLAIN = ("weight", "bias")


class NoPlace(ValueError):
    """A weight is packed that is no linear module's: of experts, for example. Or there is none."""


class PackedCheckpoint:
    """The format that the configuration of a checkpoint declares, in which its weights stay. Within it, transformers'
    loader meets ours in the configuration, and may raise ``NoPlace``.
    """

    def __init__(self, settings: Any, said: Any, form: PackedFormat) -> None:
        self._settings, self._said, self._form = settings, said, form
        self.digest = ""  # of the loaded model

    @classmethod
    def of(cls, settings: Any) -> PackedCheckpoint | None:
        """The packed checkpoint that a configuration describes; None where it describes no format of ours."""
        said = next((part.quantization_config for part in _parts(settings)), None)
        form = format_of(said)
        return None if form is None else cls(settings, said, form)

    def __enter__(self) -> None:
        for part in _parts(self._settings):
            del part.quantization_config
        self._settings.quantization_config = {"quant_method": _METHOD, "marker": self._form.marker}

    def __exit__(self, *error: object) -> None:
        self._settings.quantization_config = self._said

    def finish(self, model: Any) -> Any:
        """Make the digest of a loaded model and give its linear modules their weights. Raises ``ValueError`` where
        tensors do not fit.
        """
        model.config.quantization_config = self._said
        del model.hf_quantizer
        self.digest = digest(model)
        for name, held in _held(model):
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, held.restored(self._form))
        return model


def _parts(settings: Any) -> Iterator[Any]:
    """The configurations that say how weights are quantised."""
    for part in {id(part): part for part in (settings, settings.get_text_config(decoder=True))}.values():
        if getattr(part, "quantization_config", None) is not None:
            yield part


class _Held(nn.Module):
    """The tensors of one packed weight, as buffers, and the module that they are for."""

    def __init__(self, original: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._original = [original]  # no submodule
        self.register_parameter("bias", original._parameters.get("bias"))
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def restored(self, form: PackedFormat) -> nn.Module:
        """The module, with a weight that stands for these tensors. Raises ``ValueError``."""
        module, tensors = self._original[0], {name: t for name, t in self._buffers.items() if t is not None}
        like = module._parameters["weight"]
        assert like is not None
        source = form.source(tensors, *like.shape)
        weight = QuantisedWeight(source, like.dtype, lasting=False)
        module._parameters["weight"] = WeightStandIn(weight, like)  # type: ignore[assignment]
        module._parameters["bias"] = self._parameters["bias"]
        return module.eval()


def _held(model: nn.Module) -> list[tuple[str, _Held]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _Held)]


@register_quantization_config(_METHOD)
class _Config(QuantizationConfigMixin):  # type: ignore[misc]
    """What the loader of transformers finds in the configuration."""

    def __init__(self, marker: str, **kwargs: Any) -> None:
        self.quant_method, self.marker = _METHOD, marker


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    """Puts ``_Held`` modules where the checkpoint has packed weights."""

    is_trainable = False

    def is_serializable(self) -> bool:
        """Never saved."""
        return False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        stored = _stored(kwargs.get("checkpoint_files") or (), self.quantization_config.marker)
        if not stored:
            raise NoPlace("no weight is packed")
        for prefix, tensors in stored.items():
            path, _, leaf = _place(model, prefix).rpartition(".")
            owner = model.get_submodule(path)
            setattr(owner, leaf, _Held(getattr(owner, leaf), tensors))
        return model


def _place(model: Any, prefix: str) -> str:
    """The name of the linear module that is ``prefix`` in the checkpoint. Raises ``NoPlace``."""
    base = getattr(model, "base_model_prefix", "")
    for name in (prefix, f"{base}.{prefix}", prefix.removeprefix(f"{base}.")):
        try:
            found = model.get_submodule(name)
        except AttributeError:
            continue
        weight = found._parameters.get("weight")
        if weight is not None and weight.dim() == 2:
            return name
    raise NoPlace(f"the model has no linear module {prefix!r}, which is packed in the checkpoint")


def _stored(files: Sequence[str], marker: str) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors without memory like those of each packed weight, by the weight's name and theirs."""
    found: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for path in files:
        if not str(path).endswith(".safetensors"):
            raise ValueError("packed weights are read from .safetensors files only")
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                prefix, _, leaf = name.rpartition(".")
                part = file.get_slice(name)
                found[prefix][leaf] = torch.empty(
                    part.get_shape(), dtype=str_to_torch_dtype[part.get_dtype()], device="meta"
                )
    packed = {prefix: tensors for prefix, tensors in found.items() if marker in tensors}
    return {prefix: {n: t for n, t in tensors.items() if n not in _PLAIN} for prefix, tensors in packed.items()}
