"""``--activations int8``: inputs of products with packed weights are rounded to 8 bits, as in llama.cpp, and not to 16,
if that changes little. It is measured before the model is, which is done with 16 bits.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from scheduler.accel.cpu.program_kernel import kernel
from scheduler.accel.cpu.rounding import MADE_UP, difference, made_up_logits
from scheduler.expert_choices import ExpertChoices
from scheduler.model_facts import ActivationRounding

log = logging.getLogger("warmturn.engine")
MOST_ERROR = 0.2  # of the logits, relative (root mean square): with more, inputs keep 16 bits


@torch.no_grad()
def measure_activations(model: Any) -> ActivationRounding:
    """What 8 bits change for ``model``, whose weights are packed. Nothing is changed yet: see ``round_activations``."""
    ours = kernel()
    if ours is None:
        return _told(None, None, "it needs a C++ compiler, and there is none that works")
    if not ours.multiplies_bytes:
        return _told(None, None, "this processor has no instruction that multiplies bytes")
    choices = ExpertChoices()
    with choices.noted(MADE_UP):
        before = made_up_logits(model)
    ours.activation_bytes = 1
    try:
        with choices.repeated([(0, 0, MADE_UP)]):
            after = made_up_logits(model)
    finally:
        ours.activation_bytes = 2
    error, same = difference(before, after)
    if error is None:
        return _told(None, None, "what it changes could not be measured")
    if error == 0:
        return _told(None, None, "none of its weights is packed")
    why = "" if error <= MOST_ERROR else f"logits would differ by {error:.1%}, more than {MOST_ERROR:.0%}"
    return _told(error, same, why)


def round_activations(found: ActivationRounding | None) -> None:
    """Use 8 bits from now on, where they are asked for and not refused."""
    if found is None and not kernel.cache_info().currsize:
        return  # nothing is compiled for this, on a GPU
    ours = kernel()
    if ours is not None:
        ours.activation_bytes = 1 if found is not None and not found.refused else 2


def _told(error: float | None, same: float | None, why: str) -> ActivationRounding:
    found = ActivationRounding("int8", error, same, why)
    log.log(logging.WARNING if found.refused else logging.INFO, "%s", found.line)
    return found
