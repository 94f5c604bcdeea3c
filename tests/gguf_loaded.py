"""Models from GGUF files for tests: what they compute, and files that are changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_kit import Stored, write_file
from gguf_metadata import metadata_of
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from scheduler.weights.gguf.config import read_gguf_config
from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.model import build_model

IDS = torch.tensor([[(7 * i + 3) % 250 for i in range(24)]])
quiet = pytest.mark.filterwarnings("ignore")  # what transformers says of optional kernels


def class_of(config: Any) -> Any:
    """The auto class of a model for text: not all of them are in the one for causal models."""
    causal = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def read(path: Path, dtype: torch.dtype | None = None, packed: bool = False) -> Any:
    file = GgufFile(path)
    config = read_gguf_config(file, path)
    return build_model(file, config, class_of(config), dtype, {}, packed).eval()


def settings(path: Path) -> Any:
    """The configuration for the model in a file. Raises ``GgufError``."""
    return read_gguf_config(GgufFile(path), path)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def rewritten(path: Path, label: str, change: dict[str, Stored | None], **metadata: object) -> Path:
    """The file with other tensors and metadata; None for what it shall not have."""
    file = GgufFile(path)
    tensors = {
        each.name: Stored(each.data.numpy().copy(), each.shape, each.kind, torch.empty(0))
        for each in file.tensors.values()
    }
    tensors = {name: each for name, each in {**tensors, **change}.items() if each is not None}
    said = {key: value for key, value in {**metadata_of(label), **metadata}.items() if value is not None}
    return write_file(path.with_name("changed.gguf"), said, tensors)


def refusal(path: Path, label: str, key: str, wrong: object) -> str:
    """What is said of the file if one value of its architecture's metadata is another; None: if it does not have it."""
    architecture = label.partition(" ")[0]
    with pytest.raises(GgufError) as told:
        settings(rewritten(path, label, {}, **{f"{architecture}.{key}": wrong}))
    return str(told.value)
