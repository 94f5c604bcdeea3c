"""The tool that measures what products with packed weights change."""

from __future__ import annotations

import pytest
import torch
from program_kit import compiled
from tiny_models import make_model

from tools.weight_drift import FORMS, drift


@pytest.mark.parametrize("form", ["8 bits (Q8_0)", "4 bits with minima (Q4_1, torchao)", "floats of 8 bits (fp8)"])
@torch.inference_mode()
def test_what_products_change(form: str) -> None:
    model, ids = make_model("llama"), torch.arange(10, 40).view(1, -1)
    sizes = [drift(model, ids, FORMS[form], count) for count in (2, 1)]
    if model.config.hidden_size % FORMS[form].group:
        assert sizes == [None, None]
        return
    exact, coarse = (size[0] for size in sizes if size is not None)
    assert exact < 1e-3
    rounds = compiled().multiplies_bytes and "floats" not in form
    assert coarse > 5 * exact if rounds else coarse == exact
    assert compiled().activation_bytes == 2
