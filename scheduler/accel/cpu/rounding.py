"""``--weights``: plain weights are rounded to 8 or 4 bits on the way in, and what that changes is measured."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from scheduler.accel.cpu.experts import is_experts
from scheduler.accel.cpu.linear import SMALLEST
from scheduler.accel.cpu.matrix import TYPES
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.accel.cpu.quantised import is_linear
from scheduler.model_facts import WeightRounding
from scheduler.weights.quantised_weight import QuantisedWeight
from scheduler.weights.rounded_source import GROUP, RoundedSource
from scheduler.weights.stand_in import WeightStandIn

log = logging.getLogger("warmturn.engine")
BITS = {"int8": 8, "int4": 4}
MADE_UP = 64  # tokens whose logits are compared


class Rounding:
    """The rounding of one model's weights."""

    @torch.no_grad()
    def __init__(self, model: Any, weights: str) -> None:
        """Replaces the weights of linear modules and experts by stand-ins; ``weights``: one of ``BITS``. The product
        that gives logits keeps 8 bits. Raises ``ValueError`` where there is none to round, or no compiler for the
        kernel that reads them.
        """
        self._weights, self._before = weights, made_up_logits(model)
        self.found: WeightRounding | None = None
        if kernel() is None:
            raise ValueError(f"--weights {weights} needs a C++ compiler, and there is none that works")
        vocabulary, count = model.get_output_embeddings(), 0
        for module, name, weight in _plain(model):
            bits = 8 if module is vocabulary else BITS[weights]
            flipped = weight.dim() == 3 and bool(getattr(module, "is_transposed", False))
            source = RoundedSource(weight.transpose(1, 2) if flipped else weight, bits)
            experts = len(weight) if weight.dim() == 3 else 1
            kept = QuantisedWeight(source, weight.dtype, experts, flipped, lasting=False)
            module._parameters[name] = WeightStandIn(kept, weight)  # type: ignore[assignment]
            count += 1
        if not count:
            raise ValueError(f"--weights {weights}: it has no weights that could be packed, or they are packed already")

    @torch.no_grad()
    def measure(self, model: Any) -> None:
        """Find out what it changed, when ``model`` computes with the rounded weights: ``found``."""
        self.found = WeightRounding(self._weights, *difference(self._before, made_up_logits(model)))
        self._before = None
        log.info("%s", self.found.line)


def _plain(model: Any) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """The weights of linear modules and of experts, with the modules and the names there."""
    for module in list(model.modules()):
        experts = is_experts(module)
        for name, weight in list(module._parameters.items()):
            if type(weight) is not torch.nn.Parameter or weight.dtype not in TYPES or weight.device.type != "cpu":
                continue
            fits = weight.numel() >= SMALLEST and weight.shape[-1] % GROUP == 0
            if experts and weight.dim() == 3 and getattr(module, "is_transposed", False):
                fits = weight.numel() >= SMALLEST and weight.shape[1] % GROUP == 0
            right = weight.dim() == 3 if experts else weight.dim() == 2 and name == "weight" and is_linear(module)
            if fits and right:
                yield module, name, weight.detach()


def difference(before: torch.Tensor | None, after: torch.Tensor | None) -> tuple[float, float] | tuple[None, None]:
    """The error of logits ``[T, vocabulary]``, relative (root mean square), and the part of tokens whose likeliest next
    one is the same; None where one of them is missing.
    """
    if before is None or after is None:
        return None, None
    error = float((after - before).norm() / before.norm().clamp_min(1e-30))
    return error, float((after.argmax(-1) == before.argmax(-1)).float().mean())


def made_up_logits(model: Any) -> torch.Tensor | None:
    """float32 ``[MADE_UP, vocabulary]`` for made-up tokens; None for a model that wants something else."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config(decoder=True).vocab_size, (1, MADE_UP), generator=generator)
    given = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with suppress(Exception):  # whatever a model raises that needs more than text
        found: torch.Tensor = model(input_ids=ids, use_cache=False, **given).logits[0].float()
        return found
    return None
