"""GGUF files as models: reads configuration and weights with our own reader.

A few architectures that only transformers' reader knows are left to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

from scheduler.accel.gpu.quantised_modules import move_packed
from scheduler.weights.gguf.architectures import ARCHITECTURES
from scheduler.weights.gguf.config import read_gguf_config
from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import read_metadata
from scheduler.weights.gguf.model import build_model, digested_settings, file_digest
from scheduler.weights.known_files import digest_of


def reads(path: Path) -> bool:
    """Whether our reader takes the file; transformers' takes the others. Raises ``OSError`` or ``GgufError``."""
    architecture = read_metadata(path).get("general.architecture")
    theirs = architecture in GGUF_CONFIG_MAPPING or architecture in GGUF_CONFIG_ARCHS
    return architecture in ARCHITECTURES or not theirs or (path.parent / "config.json").is_file()


def read_config(path: Path) -> Any:
    """The configuration of the model in a file. Raises ``OSError`` or ``GgufError``."""
    return read_gguf_config(GgufFile(path), path)


def read_model(
    path: Path, settings: Any, kind: Any, dtype: torch.dtype | None, options: Mapping[str, Any], device: torch.device
) -> tuple[Any, str]:
    """The model in a file, of the auto class ``kind``, and its digest; its weights stay packed. Raises
    ``OSError`` or ``GgufError``.
    """
    file = GgufFile(path)
    model = build_model(file, settings, kind, dtype, options, packed=True)
    if device.type != "cpu":
        model = move_packed(model, device)
        file.drop_pages()
    if (path.parent / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(path.parent))
    said = digested_settings(settings)
    digest = digest_of(file.opened, said, partial(file_digest, file, said))
    file.drop_pages()
    file.metadata = {}  # of hundreds of thousands of words, while weights keep the file
    return model.eval(), digest
