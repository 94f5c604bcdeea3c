"""Programs that an earlier load has compared with their modules: they are recorded without products, and come out the
same.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen3_5
from engine_kit import probed
from gguf_kit import Q8_0
from gguf_loaded import quiet, read
from gguf_models import written
from gguf_shapes import GENERATING
from tiny_models import make_model
from wide import widely

from scheduler.accel.cpu.experts import pack_experts
from scheduler.accel.cpu.fusion import Fusion
from scheduler.accel.cpu.linear import pack
from scheduler.accel.cpu.packing import Packing
from scheduler.accel.cpu.program_kernel import ProgramKernel, kernel
from scheduler.accel.cpu.quantised import keep_packed
from scheduler.forward.mode import Mode
from scheduler.model.known_model import KnownModel
from scheduler.model.measurement import MeasuredError, Measurement, describe
from scheduler.model.verdict import Verdict

pytestmark = quiet
_NARROW = "llama qwen3 gemma3 gpt-oss deepseek2 qwen3moe qwen3next lfm2 minicpm3 nemotron_h"


def packed(path: Path) -> tuple[Any, Packing]:
    """The model of a file, its weights packed."""
    model = read(path, torch.float32, packed=True)
    packing = pack(model)
    pack_experts(model, packing)
    keep_packed(model, packing)
    return model, packing


def loaded_twice(path: Path) -> tuple[Verdict, Verdict]:
    """The verdicts of a first load, and of one that knows it."""
    model, packing = packed(path)
    before = probed(model, packing=packing)
    model, packing = packed(path)
    return before, probed(model, known=KnownModel(describe(before.mode), {}, before.measured), packing=packing)


@pytest.mark.parametrize("label", widely(GENERATING, _NARROW))
def test_known_programs_are_those_of_the_first_load(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel() is None:
        pytest.skip("nothing is compiled here")
    left_out, plain = [], ProgramKernel.without_products

    def without_products(self: ProgramKernel) -> AbstractContextManager[None]:
        left_out.append(self)
        return plain(self)

    monkeypatch.setattr(ProgramKernel, "without_products", without_products)
    before, again = loaded_twice(written(tmp_path / "model.gguf", label, Q8_0)[0])
    assert again.report.startswith(f"{describe(before.mode)} as before: agrees")
    assert again.mode.programs == before.mode.programs
    assert bool(left_out) is (before.mode.name == "packed" and not before.mode.stateful)


def test_layers_attend_to_latents_of_which_packed_weights_make_keys(tmp_path: Path) -> None:
    path, want = written(tmp_path / "model.gguf", "minicpm3", Q8_0)
    model, packing = packed(path)
    mode: Any = probed(model, packing=packing).mode
    assert sorted(mode.attention.absorbed) == [0, 1]
    for number, absorbed in mode.attention.absorbed.items():
        weight = want.model.layers[number].self_attn.kv_b_proj.weight.view(4, 96, 64)
        torch.testing.assert_close(absorbed.keys.transpose(1, 2), weight[:, :32], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(absorbed.values, weight[:, 32:], rtol=1e-4, atol=1e-4)


def test_a_rule_of_states_is_found_by_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros follow any: here keys that are not normalised."""
    for name in [name for name in vars(qwen3_5) if name.endswith("gated_delta_rule")]:
        rule = getattr(qwen3_5, name)

        def unnormed(*args: Any, _rule: Any = rule, **options: Any) -> Any:
            return _rule(*args, **{**options, "use_qk_l2norm_in_kernel": False})

        monkeypatch.setattr(qwen3_5, name, functools.wraps(rule)(unnormed))
    before, again = loaded_twice(written(tmp_path / "model.gguf", "qwen35", Q8_0)[0])
    assert again.report.startswith("packed as before: agrees")
    assert again.mode.programs == before.mode.programs


def test_what_was_wrong_together_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward as a whole that is wrong for several sessions: the model keeps its own."""
    plain, measured, wholly = Fusion.run, Measurement.measure, []

    def run(self: Fusion, given: dict[str, Any], whole: bool) -> torch.Tensor | None:
        out = plain(self, given, whole)
        return out if out is None or given["input_ids"].shape[1] != 14 else torch.zeros_like(out)

    def measure(self: Measurement, mode: Mode) -> MeasuredError:
        wholly.append(mode)
        return measured(self, mode)

    monkeypatch.setattr(Fusion, "run", run)
    monkeypatch.setattr(Measurement, "measure", measure)
    model = make_model("llama")
    before = probed(model, packing=pack(model))
    assert before.measured is not None
    assert (before.measured.programs.chained, before.measured.programs.recorded) == (2, False)
    wholly.clear()
    model = make_model("llama")
    again = probed(model, known=KnownModel("packed", {}, before.measured), packing=pack(model))
    assert again.report.startswith("packed as before: agrees")
    assert not wholly
    assert again.mode.programs == before.mode.programs
