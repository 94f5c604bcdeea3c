"""``PoolingRecipe``: what a checkpoint says about turning hidden states into vectors, read from the files that
sentence-transformers saves, or from a GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from scheduler.gguf_pooling import dense_layers, pooling_of
from scheduler.model_task import MODULES, Task, kinds_of, read_json, task_of
from scheduler.weights.gguf.header import GgufError, read_metadata
from scheduler.weights.gguf.path import find_file

BODY = "Transformer"  # the first module: the model of transformers itself
SAID = "config_sentence_transformers.json"
UNBIASED = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}  # dense layers of GGUF files
INERT = frozenset({"Dropout"})  # modules that change nothing when a model is used
SENTENCE_FILES = (  # of the first module's options; older versions named them by the architecture
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
MODES = {  # of pooling, by their older names, in the order in which their results are joined
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class BadRecipe(ValueError):
    """The files beside the model cannot be followed; the message is one line for people."""


@dataclass(frozen=True)
class ModuleSource:
    """One of the modules behind the model: its kind, its options, and where its weights are, if it has some: in a GGUF
    file ``tensor`` of all.
    """

    kind: str
    options: Mapping[str, Any]
    weights: Path | None = None
    tensor: str = ""


@dataclass(frozen=True)
class PoolingRecipe:
    """``modules`` are applied to the hidden states in this order; a cross-encoder has none. ``prompts``: text that is
    put before an input, by name. ``max_tokens``: the longest input; None: what tokenizer and model say.
    ``dimensions``: how many numbers of a vector are kept; None: all. ``activation``: the class of torch that is applied
    to scores, as a dotted name; "": as the number of scores says.
    """

    task: Task
    modules: tuple[ModuleSource, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lowercase: bool = False
    dimensions: int | None = None
    activation: str = ""


def read_recipe(model: str) -> PoolingRecipe | None:
    """The recipe of a hub id or folder; None for a model that generates. Raises ``BadRecipe``."""
    if Path(model).suffix == ".gguf":
        return read_gguf_recipe(model)

    def read(name: str) -> Any:
        path = find(model, name)
        return None if path is None else read_json(path)

    task = task_of(read)
    if task == "generate":
        return None
    said = as_dict(read(SAID))
    body = next((found for name in SENTENCE_FILES if (found := as_dict(read(name)))), {})
    return PoolingRecipe(
        task,
        read_modules(model, read(MODULES)) if task == "embed" else (),
        *read_prompts(said),
        as_count(body.get("max_seq_length")),
        body.get("do_lower_case") is True,
        as_count(said.get("truncate_dim")),
        activation_of(said, as_dict(read("config.json"))) if task == "score" else "",
    )


def read_gguf_recipe(model: str) -> PoolingRecipe | None:
    """The recipe of a GGUF file; None for a model that generates, and for a file that cannot be read. llama.cpp makes
    the vectors of all models unit vectors. Raises ``BadRecipe``.
    """
    try:
        path = find_file(model)
        metadata = {} if path is None else read_metadata(path)
    except (OSError, GgufError):  # whoever loads the model tells what is wrong
        return None
    try:
        mode = pooling_of(metadata)
        dense = {} if mode is None else dense_layers(metadata)
    except GgufError as error:
        raise BadRecipe(str(error)) from error
    if path is None or mode is None:
        return None
    layers = [
        ModuleSource("Dense", {**UNBIASED, "in_features": into, "out_features": out}, path, tensor)
        for tensor, (into, out) in dense.items()
    ]
    modules = (ModuleSource("Pooling", {"pooling_mode": mode}), *layers, ModuleSource("Normalize", {}))
    return PoolingRecipe("embed", modules, *read_prompts(as_dict(read_json(path.parent / SAID))))


def read_prompts(said: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the name of the one that is usual."""
    prompts = {name: text for name, text in as_dict(said.get("prompts")).items() if isinstance(text, str)}
    usual = said.get("default_prompt_name")
    return prompts, usual if usual in prompts else None


def read_modules(model: str, listed: Any) -> tuple[ModuleSource, ...]:
    """The modules behind the model, of which the first is the model itself. Raises ``BadRecipe``."""
    kinds = kinds_of(listed)
    if kinds[0] != BODY or len(kinds) != len(listed):
        raise BadRecipe(f"{MODULES} begins with {kinds[0] or 'nothing'}: only {BODY} is known there")
    if listed[0].get("path"):
        raise BadRecipe(f"{MODULES} has the model in a folder of its own, which is not supported")
    found = []
    for kind, one in zip(kinds[1:], listed[1:], strict=True):
        if kind in INERT:
            continue
        folder = str(one.get("path", ""))
        config = find(model, "config.json", folder) if folder else None
        weights = find(model, "model.safetensors", folder) or find(model, "pytorch_model.bin", folder)
        found.append(ModuleSource(kind, {} if config is None else as_dict(read_json(config)), weights))
    return tuple(found)


def pooling_modes(options: Mapping[str, Any]) -> tuple[str, ...]:
    """How hidden states are pooled; the results of several modes are joined. Raises ``BadRecipe``."""
    said = options.get("pooling_mode")
    modes = (said,) if isinstance(said, str) else tuple(said or ())
    if not modes:
        modes = tuple(mode for name, mode in MODES.items() if options.get(name)) or ("mean",)
    if unknown := next((mode for mode in modes if mode not in MODES.values()), None):
        raise BadRecipe(f"its pooling is {unknown}, which is not known")
    return modes


def activation_of(said: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The activation of a cross-encoder, where versions of sentence-transformers have written it."""
    nested = as_dict(settings.get("sentence_transformers")).get("activation_fn")
    found = nested or settings.get("sbert_ce_default_activation_function") or said.get("activation_fn")
    return found if isinstance(found, str) and found.startswith("torch.") else ""


def find(model: str, name: str, folder: str = "") -> Path | None:
    """A file of the model, which is downloaded if need be; None where there is none, or no such model."""
    try:
        found = cached_file(
            model,
            name,
            subfolder=folder,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError):  # whoever loads the model tells what is wrong
        return None
    return None if found is None else Path(found)


def as_dict(value: Any) -> dict[str, Any]:
    """An object of JSON; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_count(value: Any) -> int | None:
    """A positive whole number; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
