"""``ModelRoom``: how many models may be loaded at once, and how much memory they may take together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from scheduler.cgroups import physical_memory
from scheduler.model_facts import ModelFacts
from server.models.offered_model import OfferedModel

SHARE = 0.9  # of the machine's memory, unless told otherwise
WEIGHTS = (".safetensors", ".gguf", ".bin")


class ModelRoom:
    """The limits on loaded models. ``most``: how many. ``memory``: bytes that the weights and the KV memory of all may
    take; None: of models in this machine's memory nine tenths of it, of those on a GPU as much as they find there.
    """

    def __init__(self, most: int, memory: int | None = None, kv_bytes: int = 0) -> None:
        """``kv_bytes``: KV memory of a model that was never loaded, as far as that is known."""
        self._most = most
        self._memory = memory
        self._kv_bytes = kv_bytes

    def ever_fits(self, model: OfferedModel) -> bool:
        return self._fits([model])

    def fits(self, model: OfferedModel, loaded: Iterable[OfferedModel]) -> bool:
        return self._fits([model, *loaded])

    def _fits(self, models: list[OfferedModel]) -> bool:
        if len(models) > self._most:
            return False
        counted = [model for model in models if self._memory is not None or not on_gpu(model.facts)]
        memory = int(SHARE * physical_memory()) if self._memory is None else self._memory
        return sum(map(self._need, counted)) <= memory

    def _need(self, model: OfferedModel) -> int:
        """Bytes, as measured when it was last loaded; before its first load as its files have them."""
        if model.facts is None:
            return model.weight_bytes + (self._kv_bytes if model.task in ("generate", None) else 0)
        return need_of(model.facts)


def need_of(facts: ModelFacts) -> int:
    """Bytes of a loaded model: its weights and its KV memory."""
    return facts.weight_bytes + facts.pages * facts.page_size * facts.kv_bytes_per_token


def on_gpu(facts: ModelFacts | None) -> bool:
    """Whether a model was loaded onto a GPU, whose memory this process cannot see."""
    return facts is not None and facts.device.startswith("cuda")


def weight_bytes(source: str) -> int:
    """Bytes of the files of weights of a model on this machine; 0 for a hub id. Of several formats the largest."""
    path = Path(source)
    if path.is_file():
        return path.stat().st_size
    if not path.is_dir():
        return 0
    sizes = dict.fromkeys(WEIGHTS, 0)
    for file in path.iterdir():
        if file.suffix in sizes and file.is_file():
            sizes[file.suffix] += file.stat().st_size
    return max(sizes.values())
