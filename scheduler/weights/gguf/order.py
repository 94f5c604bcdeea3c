"""`StoredOrder`: the order in which llama.cpp's converter stores the rows and columns of matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from scheduler.weights.gguf.file import GgufTensor
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.names import JOINED, QUERIES_KEYS_VALUES

# The architectures whose rows of queries and keys are stored in the order of interleaved rotary positions.
_PERMUTED = frozenset(
    {
        "arcee",
        "baichuan",
        "deci",
        "granite",
        "granite_swa",
        "granitehybrid",
        "granitemoe",
        "internlm2",
        "llama",
        "minicpm",
        "mistral",
        "mistral3",
        "nemotron_h",
        "nemotron_h_moe",
        "olmo",
        "smollm3",
        "xverse",
    }
)
# Those whose rows of queries and keys that rotary positions turn are stored in halves, not in pairs, if positions have
# several numbers.
_HALVED = frozenset({"glm4"})
# Those whose turned ends of queries and keys are stored in pairs, as the model was trained, and llama.cpp turns them:
# transformers' model turns halves.
_IN_PAIRS = frozenset({"hy_v4"})
# Those whose heads of values of linear attention are stored in turns: the first of each head of keys, then the second.
_IN_TURNS = frozenset({"qwen35", "qwen35moe", "qwen4exp"})
_OF_VALUES = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias")

_ONE_BEHIND_ANOTHER = ("input_linear.weight", "gate_up_proj.weight", "index_qk_proj.weight")


class StoredOrder:
    """Where the rows and columns of a model's parameters are in the tensors of its file."""

    def __init__(self, architecture: str, model: Any, keys: Mapping[str, Any]) -> None:
        """``architecture``: what the file calls it; ``keys``: what it says of it."""
        self._architecture, self._model, self._config, self._keys = architecture, model, model.config, keys

    def rows(self, name: str, parts: list[GgufTensor]) -> torch.Tensor | None:
        """int64 ``[out]``: which row of the tensors, one after the other, each row of the parameter ``name`` is; None
        if they are in order. Raises ``GgufError`` where the tensors do not have whole heads.
        """
        part, out = parts[0], sum(part.shape[0] for part in parts)
        if ".query_key_value." in name:
            return _by_head(out, self._config)
        if ".in_proj_qkvz." in name and len(parts) > 1:
            if any(each.shape[1:] != part.shape[1:] for each in parts):
                raise GgufError(f"{part.name!r} and {parts[1].name!r} are not of one width")
            return _by_key_head(out, self._config)
        if len(parts) > 1 and name.endswith(_ONE_BEHIND_ANOTHER):
            return torch.arange(out)
        if self._in_turns(name) and name.removesuffix(".weight").rpartition(".")[2] in _OF_VALUES:
            return self._values_of_keys(part, out)
        if self._architecture in _IN_PAIRS and (turned := self._turned_ends(name, out)) is not None:
            return turned
        place = next((place for place, leaf in enumerate(QUERIES_KEYS_VALUES) if f"{leaf}." in name), None)
        if place is None:
            return None
        joined, of_head = JOINED in part.name, self._of_head() if place < 2 else None
        first, out = self._rows_of(name, place, part) if joined else (0, out)
        if of_head is None:
            return torch.arange(first, first + out) if joined else None
        if out % self._width:
            raise GgufError(f"{part.name!r} does not have whole heads")
        return (torch.arange(first, first + out, self._width)[:, None] + of_head).flatten()

    def columns(self, name: str, parts: list[GgufTensor]) -> torch.Tensor | None:
        """int64 ``[inside]``: which input each column of the tensors is multiplied by; None if they are in order.
        Raises ``GgufError`` where the tensors do not have whole heads.
        """
        if not self._in_turns(name) or not name.endswith(".out_proj.weight"):
            return None
        keys, each, width = self._heads()
        if parts[0].shape[1:] != (keys * each * width,):
            raise GgufError(f"{parts[0].name!r} does not have whole heads")
        return torch.arange(keys * each * width).view(keys, each, width).transpose(0, 1).flatten()

    @property
    def _width(self) -> int:
        """Of a head."""
        width = getattr(self._config, "head_dim", None)
        return int(width or self._config.hidden_size // self._config.num_attention_heads)

    def _of_head(self) -> torch.Tensor | None:
        """Which row of a head of queries or keys in the file each of its rows is; None if they are in order. Raises
        ``GgufError`` where they are not in pairs.
        """
        permuted = self._architecture in _PERMUTED
        halved = self._architecture in _HALVED and any(self._keys.get("rope.dimension_sections", ()))
        if not permuted and not halved:
            return None
        width, turned = self._width, self._keys.get("rope.dimension_count") or self._width
        if width % 2 or (halved and (turned % 2 or turned > width)):
            raise GgufError("the heads of queries and keys in the file are not pairs of rows")
        if permuted:
            return torch.arange(width).view(-1, 2).t().flatten()
        return torch.cat([torch.arange(turned).view(2, -1).t().flatten(), torch.arange(turned, width)])

    def _turned_ends(self, name: str, out: int) -> torch.Tensor | None:
        """The rows of a parameter whose heads have ends that are turned; None for others."""
        config = self._config
        turned, chosen = config.qk_rope_head_dim, config.index_head_dim
        widths = {
            ".q_b_proj.": config.qk_nope_head_dim + turned,
            ".kv_a_proj_with_mqa.": config.kv_lora_rank + turned,
            ".indexer.wq_b.": chosen,
            ".indexer.wk.": chosen,
            ".indexer.k_norm.": chosen,
        }
        width = next((width for part, width in widths.items() if part in name), None)
        if width is None or out % width:
            return None
        rows = torch.arange(out).view(-1, width)
        ends = rows[:, -turned:].reshape(len(rows), -1, 2).transpose(1, 2)
        rows[:, -turned:] = ends.flatten(1)
        return rows.flatten()

    def _rows_of(self, name: str, place: int, part: GgufTensor) -> tuple[int, int]:
        """The first row of queries (0), keys (1) or values (2), which the parameter ``name`` is, in a tensor of all of
        them, and how many they have.
        """
        attention = self._model.get_submodule(name.rpartition(QUERIES_KEYS_VALUES[place])[0])
        counts = [getattr(attention, leaf.removeprefix(".")).out_features for leaf in QUERIES_KEYS_VALUES]
        if sum(counts) != part.shape[0]:
            raise GgufError(f"{part.name!r} does not have the rows of all heads")
        return sum(counts[:place]), counts[place]

    def _in_turns(self, name: str) -> bool:
        """Whether a parameter is of linear attention whose heads of values are stored in turns."""
        if self._architecture not in _IN_TURNS or ".linear_attn." not in name:
            return False
        return bool(self._config.linear_num_value_heads != self._config.linear_num_key_heads)

    def _heads(self) -> tuple[int, int, int]:
        """Heads of keys of linear attention, heads of values of each, and the width of one."""
        keys, values = self._config.linear_num_key_heads, self._config.linear_num_value_heads
        if values % keys:
            raise GgufError("linear attention does not have as many heads of values for each head of keys")
        return keys, values // keys, self._config.linear_value_head_dim

    def _values_of_keys(self, part: GgufTensor, out: int) -> torch.Tensor:
        """Rows of queries and keys, if there are any, as they are, and those of values by their heads of keys."""
        keys, each, width = self._heads()
        before = 2 * keys * self._config.linear_key_head_dim
        if out == keys * each:
            before, width = 0, 1
        elif out == keys * each * width:
            before = 0
        elif out != before + keys * each * width:
            raise GgufError(f"{part.name!r} does not have whole heads")
        rows = torch.arange(before, out).view(each, keys, width).transpose(0, 1).flatten()
        return torch.cat([torch.arange(before), rows])


def _by_head(out: int, config: Any) -> torch.Tensor:
    """Queries, keys and values in that order, as rows that have those of each group of heads together."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_kv_heads", None)
    if not getattr(config, "new_decoder_architecture", True):
        groups = 1 if config.multi_query else heads
    groups = groups or heads
    width = out // (heads + 2 * groups)
    if width * (heads + 2 * groups) != out:
        raise GgufError("the queries, keys and values of a layer do not have whole heads")
    query, key, value = torch.split(torch.arange(out), [heads * width, groups * width, groups * width])
    return torch.cat([each.view(groups, -1, width) for each in (query, key, value)], dim=1).flatten()


def _by_key_head(out: int, config: Any) -> torch.Tensor:
    """Queries, keys, values and gates of linear attention in that order, as rows that have those of each head of keys
    together.
    """
    heads = config.linear_num_key_heads
    keys, values = heads * config.linear_key_head_dim, config.linear_num_value_heads * config.linear_value_head_dim
    if out != 2 * (keys + values) or values % heads:
        raise GgufError("the queries, keys, values and gates of a layer do not have whole heads")
    kinds = torch.split(torch.arange(out), [keys, keys, values, values])
    return torch.cat([each.view(heads, -1) for each in kinds], dim=1).flatten()
