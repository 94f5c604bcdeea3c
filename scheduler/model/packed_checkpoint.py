"""Checkpoints of packed weights, without the libraries that made them.

transformers loads the plain tensors; the packed ones stay in the mapped files. Where they belong is found by the
renamings and conversions that transformers has for the model: a conversion is run on numbers of rows in the place of
weights, which tells what rows of which packed weights a parameter is made of, experts that are stacked among them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from scheduler.weights.joined_source import JoinedSource
from scheduler.weights.packed_format import NotOurs, PackedFormat
from scheduler.weights.packed_formats import format_of
from scheduler.weights.packed_source import PackedSource
from scheduler.weights.quantised_weight import QuantisedWeight
from scheduler.weights.safetensors_file import SafetensorsFiles
from scheduler.weights.stand_in import WeightStandIn

_METHOD = "packed weights"  # under which transformers finds what is registered here
# Libraries with kernels of their own for GPUs, which keep weights packed there, by the method that a checkpoint states.
_KERNELS = {"gptq": "gptqmodel", "awq": "gptqmodel", "torchao": "torchao", "bitsandbytes": "bitsandbytes"}


def library_keeps_packed(settings: Any) -> bool:
    """Whether the library of a checkpoint's format is installed, and keeps weights packed on a GPU. Those of the other
    formats unpack them, before the first step or in it.
    """
    said = next((part.quantization_config for part in _parts(settings)), None)
    library = _KERNELS.get(str(said.get("quant_method", "")).lower()) if isinstance(said, Mapping) else None
    return library is not None and find_spec(library) is not None


class PackedCheckpoint:
    """The format that the configuration of a checkpoint declares, in which its weights stay. Within it, transformers'
    loader meets ours in the configuration, and may raise ``NotOurs``.
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
        self._settings.quantization_config = {"quant_method": _METHOD, "form": self._form}

    def __exit__(self, *error: object) -> None:
        self._settings.quantization_config = self._said

    def finish(self, model: Any) -> Any:
        """Make the digest of a loaded model and give its modules their packed weights. Raises ``ValueError``."""
        files: SafetensorsFiles = model.hf_quantizer.files
        del model.hf_quantizer
        model.config.quantization_config = self._said
        self.digest = files.digest(model.config.to_json_string())
        for name, held in [(name, module) for name, module in model.named_modules() if isinstance(module, _Held)]:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, held.restore(files))
        return model


def _parts(settings: Any) -> Iterator[Any]:
    """The configurations that say how weights are quantised."""
    for part in {id(part): part for part in (settings, settings.get_text_config(decoder=True))}.values():
        if getattr(part, "quantization_config", None) is not None:
            yield part


class _Held(nn.Module):
    """A module without those parameters that are packed, in its place while the others are loaded."""

    def __init__(self, original: nn.Module, packed: Mapping[str, PackedSource]) -> None:
        super().__init__()
        self._original, self._packed = [original], packed  # no submodule
        self._parameters = {name: one for name, one in original._parameters.items() if name not in packed}
        self._buffers, self._modules = original._buffers, original._modules

    def restore(self, files: SafetensorsFiles) -> nn.Module:
        """The module, with stand-ins for the packed weights."""
        module = self._original[0]
        module._parameters.update(self._parameters)
        for name, source in self._packed.items():
            like = module._parameters[name]
            assert like is not None
            count = len(like) if like.dim() == 3 else 1
            flipped = like.dim() == 3 and like.shape[1] == source.inside and _is_flipped(module)
            weight = QuantisedWeight(source, like.dtype, count, flipped, files.drop_pages, lasting=False)
            module._parameters[name] = WeightStandIn(weight, like)  # type: ignore[assignment]
        return module.eval()


def _is_flipped(module: nn.Module) -> bool:
    """Whether a module of experts has its weights as ``[experts, inside, out]``."""
    return bool(getattr(module, "is_transposed", False))


@register_quantization_config(_METHOD)
class _Config(QuantizationConfigMixin):  # type: ignore[misc]
    """What the loader of transformers finds in the configuration."""

    def __init__(self, form: PackedFormat, **kwargs: Any) -> None:
        self.quant_method, self.form = _METHOD, form


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    """Puts ``_Held`` modules where the checkpoint has packed weights."""

    is_trainable = False

    def is_serializable(self) -> bool:
        """Never saved."""
        return False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.files = SafetensorsFiles(kwargs.get("checkpoint_files") or ())
        placed: defaultdict[str, dict[str, PackedSource]] = defaultdict(dict)
        with torch.device("cpu"):  # it is "meta" here
            for name, source in _Placing(model, self.quantization_config.form, self.files).sources():
                path, _, leaf = name.rpartition(".")
                placed[path][leaf] = source
        if not placed:
            raise NotOurs("no weight is packed")
        for path, packed in placed.items():
            owner, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(owner), leaf, _Held(model.get_submodule(path), packed))
        model._keys_to_ignore_on_load_unexpected = {".*"}  # the packed ones are
        return model


@dataclass
class _Made:
    """What a parameter is made of, in the order of the checkpoint: names there, and the patterns that they match."""

    names: list[str] = field(default_factory=list)
    patterns: list[str | None] = field(default_factory=list)


class _Placing:
    """Finds the parameters of a model that are packed in a checkpoint."""

    def __init__(self, model: Any, form: PackedFormat, files: SafetensorsFiles) -> None:
        self._model, self._form, self._files = model, form, files
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._state = model.state_dict()

    def sources(self) -> Iterator[tuple[str, PackedSource]]:
        """The packed parameters, by name. Raises ``NotOurs`` and ``ValueError``."""
        packed = self._form.find(self._files.tensors)
        parts = {name for each in packed.values() for name in each.values()}
        made: defaultdict[str, _Made] = defaultdict(_Made)
        for name in sorted({*packed, *self._files.tensors}, key=dot_natural_key):
            if name in packed or name not in parts:
                place, pattern = self._place(name)
                made[place].names.append(name)
                made[place].patterns.append(pattern)
        for place, of in made.items():
            count = sum(name in packed for name in of.names)
            if count and count < len(of.names):
                raise NotOurs(f"{place!r} is packed in parts")
            if count:
                yield from self._make_sources(place, of, packed)

    def _place(self, name: str) -> tuple[str, str | None]:
        """The parameter that a tensor of the checkpoint is for, and the pattern of the conversion if there is one."""
        prefix = self._model.base_model_prefix
        found: tuple[str, str | None] = rename_source_key(name, self._renamings, self._converters, prefix, self._state)
        if found[0] not in self._state and name in self._state:
            found = rename_source_key(name, [], [], prefix, self._state)
        return found

    def _make_sources(
        self, place: str, of: _Made, packed: Mapping[str, Mapping[str, str]]
    ) -> Iterator[tuple[str, PackedSource]]:
        like = self._state.get(place)
        if like is None or like.dim() not in (2, 3):
            raise NotOurs(f"the model has no weight {place!r}, which is packed in the checkpoint")
        owner = self._model.get_submodule(place.rpartition(".")[0])
        inside = like.shape[1 if like.dim() == 3 and _is_flipped(owner) else -1]
        sources = [self._source(packed[name], inside) for name in of.names]
        if of.patterns[0] is None:
            (source,) = sources
            yield place, self._check(place, source)
            return
        for name, numbers in self._convert_rows(place, of, sources).items():
            try:
                yield name, self._check(name, JoinedSource(sources, numbers))
            except ValueError as error:
                raise NotOurs(str(error)) from error

    def _source(self, parts: Mapping[str, str], inside: int) -> PackedSource:
        return self._form.source({end: self._files.tensors[name] for end, name in parts.items()}, inside)

    def _convert_rows(self, place: str, of: _Made, sources: list[PackedSource]) -> dict[str, torch.Tensor]:
        """Which rows of all sources those of each parameter are: int64 ``[out]``, by name."""
        found = next(one for one in self._converters if of.patterns[0] in one.source_patterns)
        converter, first = copy.deepcopy(found), 0
        for name, pattern, source in zip(of.names, of.patterns, sources, strict=True):
            numbers = torch.arange(first, first + source.out)[:, None]
            converter.add_tensor(place, name, pattern, numbers)
            first += source.out
        try:
            made = converter.convert(place, model=self._model, config=self._model.config)
        except Exception as error:  # whatever a conversion raises that looks at more than rows
            raise NotOurs(f"the parts of {place!r} cannot be followed") from error
        made = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return {name: value.flatten() for name, value in made.items()}

    def _check(self, place: str, source: PackedSource) -> PackedSource:
        like = self._state.get(place)
        if like is None or like.numel() != source.out * source.inside:
            raise ValueError("the tensors of a packed weight do not fit the model")
        return source
