"""``Pooler``: a model that gives vectors, run on inputs that are packed side by side, or padded."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from scheduler.pooling.modules import PoolingModule, Vectors, normalised
from scheduler.pooling.packed_inputs import PackedInputs
from scheduler.pooling_messages import PoolInput
from scheduler.protocol import pack_ids, unpack_ids

WASTE = 1.1  # padded tokens of a forward over those of its inputs, at most
SCORED = 3.0  # the same, where layers have run and the head of a cross-encoder takes a token or a mean
LENGTHS = (5, 23, 11)  # tokens of the inputs on which it is measured how they may share a forward
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
    """``model`` of transformers with its ``head``. How inputs of different lengths share a forward is measured
    (``measure``): side by side, padded to one length (``pads``), or not at all.
    """

    def __init__(self, model: Any, head: VectorHead, pad_id: int, typed: bool) -> None:
        """``pad_id`` fills shorter inputs up. ``typed``: the model is told which text of a pair a token is of."""
        self.model, self.head = model, head
        self._pad_id, self._typed = pad_id, typed
        self._packed: PackedInputs | None = None
        self.pads = False

    @property
    def shares(self) -> bool:
        """Whether inputs of different lengths share a forward."""
        return self.pads or self._packed is not None

    @property
    def mode(self) -> str:
        """How inputs share a forward, for people."""
        return "packed" if self._packed is not None else "padded" if self.pads else "equal lengths"

    @torch.inference_mode()
    def run(self, inputs: Sequence[PoolInput]) -> torch.Tensor:
        """The vectors ``[N, D]`` of these inputs, float32 on the host, in one forward."""
        if self._packed is not None:
            return self._run_packed(self._packed, inputs)
        given = self._padded(inputs)
        return self.head(self.model(**given, return_dict=True), given["attention_mask"], self._skips(inputs)).cpu()

    def _padded(self, inputs: Sequence[PoolInput]) -> dict[str, torch.Tensor]:
        """What the model is given for these inputs at one length, ``[B, T]`` each."""
        rows = [unpack_ids(one.ids) for one in inputs]
        ids, mask = self._pad([torch.tensor(row) for row in rows], self._pad_id)
        given = {"input_ids": ids, "attention_mask": mask}
        if self._typed:
            given["token_type_ids"] = self._pad(
                [torch.tensor([*(one.types or bytes(len(row)))]) for one, row in zip(inputs, rows, strict=True)], 0
            )[0]
        return given

    def _run_packed(self, packed: PackedInputs, inputs: Sequence[PoolInput]) -> torch.Tensor:
        """The same side by side. Inputs of similar lengths are pooled together, which takes them padded."""
        rows = [unpack_ids(one.ids) for one in inputs]
        states = packed.run(rows, [one.types for one in inputs] if self._typed else None)
        vectors: list[torch.Tensor] = [states[0]] * len(inputs)
        for group in self._alike([len(row) for row in rows], WASTE if packed.head is None else SCORED):
            hidden, mask = self._pad([states[place] for place in group], 0)
            some = [inputs[place] for place in group]
            output = SimpleNamespace(last_hidden_state=hidden)
            if packed.head is not None:
                output = packed.head(hidden, self._padded(some))
            for place, vector in zip(group, self.head(output, mask, self._skips(some)).cpu(), strict=True):
                vectors[place] = vector
        return torch.stack(vectors)

    def _skips(self, inputs: Sequence[PoolInput]) -> torch.Tensor:
        return torch.tensor([one.skip for one in inputs], device=self.model.device)

    def _pad(self, rows: list[torch.Tensor], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[n, ...]`` as one tensor ``[B, T, ...]`` on the model's device, and its mask ``[B, T]``."""
        whole = pad_sequence(rows, batch_first=True, padding_value=fill).to(self.model.device)
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(whole.shape[1]) < lengths[:, None]).long()
        return whole, mask.to(self.model.device)

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which inputs, by their places, share a forward: all, the longest first, or those of similar lengths, so that
        little is padded.
        """
        if self._packed is not None:
            return [sorted(range(len(lengths)), key=lambda place: -lengths[place])]
        return self._alike(lengths)

    def _alike(self, lengths: Sequence[int], waste: float = WASTE) -> list[list[int]]:
        """Places of inputs of similar lengths."""
        groups: list[list[int]] = []
        held = 0  # tokens of the inputs in the last group
        for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
            if groups and self._joins(lengths[groups[-1][0]], lengths[place], len(groups[-1]), held, waste):
                groups[-1].append(place)
                held += lengths[place]
            else:
                groups.append([place])
                held = lengths[place]
        return groups

    def _joins(self, longest: int, length: int, count: int, held: int, waste: float) -> bool:
        """Whether an input joins a group of ``count`` with ``held`` tokens."""
        return longest == length or (self.shares and longest * (count + 1) <= waste * (held + length))

    def measure(self, width: int, rounding: float = 0.0) -> None:
        """Find out how inputs may share a forward so that each gives what it gives alone. ``width``: of the
        vocabulary. ``rounding``: what two ways to compute the same may differ by, because products round their inputs.
        """
        generator = torch.Generator().manual_seed(width)
        usable = [i for i in range(min(width, 4096)) if i != self._pad_id]
        draws = [torch.randint(0, len(usable), (count,), generator=generator).tolist() for count in LENGTHS]
        made = [PoolInput(pack_ids([usable[i] for i in draw])) for draw in draws]
        alone = torch.cat([self.run([one]) for one in made])
        for first in dict.fromkeys((0, self._pad_id + 1)):
            try:
                self._packed = PackedInputs(self.model, first, self.head.pooling is None)
            except Exception:  # no such attention, which each model says in its own way
                break
            if self._agrees(made, alone, rounding):
                return
            self._packed.remove()
            self._packed = None
        self.pads = self._agrees(made, alone, rounding)

    def _agrees(self, made: Sequence[PoolInput], alone: torch.Tensor, rounding: float) -> bool:
        """Whether inputs that share a forward give what they give alone."""
        try:
            together = self.run(made)
        except Exception:  # a model that takes one input at a time says so in its own way
            return False
        allowed = AGREE if self.model.dtype is PRECISE else float(torch.finfo(self.model.dtype).eps) * 8
        error = (together - alone).abs().max() / alone.abs().max().clamp(min=1e-12)
        return bool(error <= max(allowed, rounding))
