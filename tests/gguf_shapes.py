"""Shapes of tiny models of the architectures that GGUF files are read of."""

from __future__ import annotations

from typing import Any

from gguf_dense import DENSE
from gguf_experts import WITH_EXPERTS
from gguf_hybrids import HYBRIDS

# By a label, whose first word is GGUF's name of the architecture.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {**DENSE, **WITH_EXPERTS, **HYBRIDS}
GENERATING = [label for label in MODELS if label != "gemma-embedding"]  # which looks both ways
