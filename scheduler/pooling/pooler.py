"""``Pooler``: a model that gives vectors, run on padded batches of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from scheduler.pooling.modules import PoolingModule, Vectors, normalised
from scheduler.pooling_messages import PoolInput
from scheduler.protocol import pack_ids, unpack_ids

WASTE = 1.1  # padded tokens of a forward over those of its inputs, at most
LENGTHS = (5, 23, 11)  # tokens of the inputs on which padding is measured
AGREE = 1e-4  # of the largest number; of half the bits in low precision
PRECISE = torch.float32


class VectorHead:
    """What a model's output becomes: pooled hidden states of an embedding model, scores of a cross-encoder."""

    def __init__(
        self, pooling: PoolingModule | None, then: Sequence[Vectors] = (), activation: nn.Module | None = None
    ) -> None:
        """``pooling``: None for scores, to which ``activation`` is applied. ``then``: on pooled vectors, in order."""
        self.pooling, self._then, self._activation = pooling, then, activation

    @property
    def normalises(self) -> bool:
        """Whether the last step makes vectors of unit length."""
        return bool(self._then) and self._then[-1] is normalised

    def __call__(self, output: Any, mask: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        """Vectors ``[B, D]`` in float32."""
        if self.pooling is None:
            scores: torch.Tensor = output.logits.float()
            return scores if self._activation is None else self._activation(scores)
        vectors = self.pooling(output.last_hidden_state, mask, skip)
        for step in self._then:
            vectors = step(vectors)
        return vectors


class Pooler:
    """``model`` of transformers with its ``head``. ``pads``: whether inputs of different lengths may share a forward,
    which is measured (``measure``): until then, and where it is False, only those of one length do.
    """

    def __init__(self, model: Any, head: VectorHead, pad_id: int, typed: bool) -> None:
        """``pad_id`` fills shorter inputs up. ``typed``: the model is told which text of a pair a token is of."""
        self.model, self.head = model, head
        self._pad_id, self._typed = pad_id, typed
        self.pads = False

    @torch.inference_mode()
    def run(self, inputs: Sequence[PoolInput]) -> torch.Tensor:
        """The vectors ``[N, D]`` of these inputs, float32 on the host, in one forward."""
        device = self.model.device
        rows = [unpack_ids(one.ids) for one in inputs]
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), self._pad_id, dtype=torch.long)
        mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
        for number, (row, one) in enumerate(zip(rows, inputs, strict=True)):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
            if one.types:
                types[number, : len(row)] = torch.tensor(list(one.types))
        given = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        if self._typed:
            given["token_type_ids"] = types.to(device)
        skip = torch.tensor([one.skip for one in inputs], device=device)
        return self.head(self.model(**given, return_dict=True), given["attention_mask"], skip).cpu()

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which inputs, by their places, share a forward: those of similar lengths, so that little is padded."""
        groups: list[list[int]] = []
        held = 0  # tokens of the inputs in the last group
        for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
            if groups and self._joins(lengths[groups[-1][0]], lengths[place], len(groups[-1]), held):
                groups[-1].append(place)
                held += lengths[place]
            else:
                groups.append([place])
                held = lengths[place]
        return groups

    def _joins(self, longest: int, length: int, count: int, held: int) -> bool:
        """Whether an input joins a group of ``count`` with ``held`` tokens."""
        return longest == length or (self.pads and longest * (count + 1) <= WASTE * (held + length))

    def measure(self, width: int) -> None:
        """Find out whether a padded forward gives what each input gives alone. ``width``: of the vocabulary."""
        generator = torch.Generator().manual_seed(width)
        usable = [i for i in range(min(width, 4096)) if i != self._pad_id]
        draws = [torch.randint(0, len(usable), (count,), generator=generator).tolist() for count in LENGTHS]
        made = [PoolInput(pack_ids([usable[i] for i in draw])) for draw in draws]
        alone = torch.cat([self.run([one]) for one in made])
        try:
            together = self.run(made)
        except Exception:  # a model that takes one input at a time says so in its own way
            self.pads = False
            return
        allowed = AGREE if self.model.dtype is PRECISE else float(torch.finfo(self.model.dtype).eps) * 8
        error = (together - alone).abs().max() / alone.abs().max().clamp(min=1e-12)
        self.pads = bool(error <= allowed)
