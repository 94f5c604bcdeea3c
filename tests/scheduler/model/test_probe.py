"""The probe takes a mode that is right, and refuses a model that none serves right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from engine_kit import PAGE, ours, probed
from tiny_models import ARCHITECTURES, MODES, TWO_PARTS, logits, make_model, make_tokenizer
from wide import widely

from cache.attention import cpu
from cache.attention.absorbed import Absorbed
from cache.memory.codec import Codec
from cache.memory.memory_tier import PageShape
from cache.pages.layers import AttentionLayer, Reach, Windows, read_layers
from cache.pages.packed import PackedStep
from cache.pages.session import SessionCache
from scheduler.accel.cpu.fusion import Fusion, KnownPrograms
from scheduler.accel.cpu.linear import pack
from scheduler.accel.cpu.packing import Packing
from scheduler.forward.mode import installed
from scheduler.forward.modes import PackedMode
from scheduler.forward.seq2seq import RecomputedDecoderMode
from scheduler.forward.trace import KnownTrace, trace
from scheduler.model import measurement as measurement_module
from scheduler.model import probe as probe_module
from scheduler.model.known_model import KnownModel
from scheduler.model.kv_rounding import round_kv
from scheduler.model.loader import prepare
from scheduler.model.measurement import Measurement, describe
from scheduler.model.probe import UnsupportedModel, probe
from scheduler.model.runner import ModelRunner
from scheduler.model.verdict import Verdict

PROMPT = list(range(60, 90))


@pytest.fixture
def only_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other mode may step in for one that was broken on purpose."""
    monkeypatch.setattr(probe_module, "MODES", (PackedMode,))
    monkeypatch.setattr(probe_module, "LAST_RESORT", ())


def error_of(verdict: Verdict) -> float:
    """The measured error of the mode that was chosen, the last number of the report."""
    return float(verdict.report.split()[-1])


@pytest.mark.parametrize("name", widely(ARCHITECTURES, "llama gemma3 gpt_oss deepseek_v3 llama4"))
def test_attention_of_all_kinds_runs_packed(name: str) -> None:
    model = make_model(name)
    verdict = probed(model)
    assert verdict.mode.name == "packed"
    assert not verdict.mode.stateful
    assert error_of(verdict) < 1e-4
    assert sorted(verdict.shapes) == [*range(model.config.num_hidden_layers)]


def test_layers_that_use_what_the_cache_gives_them_are_read_in_place() -> None:
    verdict = probed(make_model("llama"))
    assert verdict.mode.in_place == {0, 1}
    assert verdict.shapes[0].nbytes == 2 * 2 * 16 * 4


def test_layers_that_expand_what_the_cache_gives_them_attend_to_rows_of_it() -> None:
    verdict = probed(make_model("deepseek_v3"))
    assert verdict.mode.in_place == frozenset()
    shape = verdict.shapes[0]
    assert shape.joined
    assert (shape.key_heads, shape.key_dim, shape.value_dim) == (1, 16 + 8, 16)  # latents and RoPE keys
    assert verdict.token_bytes == 2 * 24 * 4
    assert error_of(verdict) < 1e-4


def test_rows_of_latents_that_give_other_results_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = Absorbed.outputs
    monkeypatch.setattr(Absorbed, "outputs", lambda self, latents: 1.01 * outputs(self, latents))
    verdict = probed(make_model("deepseek_v3"))
    assert verdict.mode.name == "packed"
    assert not verdict.mode.joined
    assert not any(shape.joined for shape in verdict.shapes.values())
    assert error_of(verdict) < 1e-4


def test_what_was_wrongly_learned_is_found_where_it_is_measured_with_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(mode: PackedMode) -> bool:
        mode.in_place = frozenset(range(2))
        return True

    monkeypatch.setattr(PackedMode, "learn", learn)
    model = make_model("deepseek_v3")
    verdict = probed(model, packing=Packing({}))
    assert verdict.mode.name == "packed"
    assert not verdict.mode.in_place


def test_steps_that_are_recorded_have_lengths_that_no_tensor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    model.register_parameter("of_7", torch.nn.Parameter(torch.empty(7)))
    model.register_parameter("of_10", torch.nn.Parameter(torch.empty(10)))
    model.register_parameter("of_50", torch.nn.Parameter(torch.empty(50)))
    measurement = Measurement(model, read_layers(model.config), PAGE, None)
    mode, fed = next(measurement.candidates((PackedMode,))), []
    run = ModelRunner.run

    def watched(runner: ModelRunner, work: Any, keep: Any) -> torch.Tensor:
        fed.append(work[0][1])
        return run(runner, work, keep)

    monkeypatch.setattr(ModelRunner, "run", watched)
    with installed(mode):
        for _ in measurement.steps(mode):
            pass
    assert fed == [11, 13]  # 5 may be how many times as long one side of a tensor is as another


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_reason_to_refuse(dtype: torch.dtype) -> None:
    verdict = probed(make_model("llama").to(dtype))
    assert verdict.mode.name == "packed"
    assert verdict.shapes[0].dtype is dtype


def test_the_mode_is_installed_when_the_probe_returns() -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    verdict = probe(model, read_layers(model.config), PAGE)
    assert model.config._attn_implementation != before
    verdict.mode.remove()
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("name", "window"),
    [  # the model crosses it itself, or its twin does
        ("gemma3", 8),
        ("gemma3", 1024),
        pytest.param("gpt_oss", 8, marks=pytest.mark.wide),
        pytest.param("gpt_oss", 1024, marks=pytest.mark.wide),
        pytest.param("mistral", 8, marks=pytest.mark.wide),
        ("mistral", 1024),
    ],
)
def test_keys_behind_a_window_may_leave(name: str, window: int) -> None:
    verdict = probed(make_model(name, sliding_window=window))
    assert verdict.windows is not None
    assert verdict.windows.layers == ({0, 1} if name == "mistral" else {0, 2})


def test_a_model_without_windows_has_none_and_one_with_a_window_of_512_does() -> None:
    assert probed(make_model("llama")).windows is None
    assert probed(make_model("gemma2", sliding_window=512)).windows is not None


@pytest.mark.parametrize("window", [8, 1024])
def test_keys_stay_where_results_would_differ_without_them(
    window: int, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    def too_many(self: Windows, length: int) -> int:
        return self.first_key(length) and self.first_key(length) + PAGE

    monkeypatch.setattr(Windows, "first_kept", too_many)
    verdict = probed(make_model("gemma3", sliding_window=window))
    assert verdict.mode.name == "packed"
    assert verdict.windows is None
    assert [message for message in ours(said) if "keep all keys" in message]


def test_keys_stay_where_parts_of_pages_are_mixed_up(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PackedStep, "write_positions", lambda self, layer: self.write_index)
    assert probed(make_model("gemma3", sliding_window=1024)).windows is None
    assert [message for message in ours(said) if "keep all keys" in message]


# -- broken on purpose ----------------------------------------------------------------------------------------------


def check_refused(model: Any, layers: list[AttentionLayer] | None = None) -> str:
    before = logits(model, PROMPT)
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as caught:
        probe(model, layers or read_layers(model.config), PAGE)
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits(model, PROMPT), before)
    assert str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("only_packed")
@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("name", widely(["gemma3", "gpt_oss", "llama4"], "gemma3 llama4"))
def test_a_window_off_by_one(name: str, off: int) -> None:
    model = make_model(name)
    layers = [
        layer if layer.window is None else replace(layer, window=layer.window + off)
        for layer in read_layers(model.config)
    ]
    assert "error" in check_refused(model, layers)


@pytest.mark.usefixtures("only_packed")
def test_one_layer_of_the_wrong_kind() -> None:
    model = make_model("gemma3")
    layers = read_layers(model.config)
    layers[0] = AttentionLayer(Reach.FULL, None, stores=True)
    assert "error" in check_refused(model, layers)


@pytest.mark.usefixtures("only_packed")
def test_sessions_that_leak_into_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_for_all(self: SessionCache, device: torch.device, near: bool = False) -> torch.Tensor:
        return torch.arange(11, device=device)

    monkeypatch.setattr(SessionCache, "table", one_for_all)
    assert "error" in check_refused(make_model("llama"))


@pytest.mark.usefixtures("only_packed")
def test_chunks_that_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_hidden(self: PackedStep, *_: Any) -> None:
        return None

    monkeypatch.setattr(PackedStep, "mask", nothing_hidden)
    monkeypatch.setattr(cpu, "cpu_backend", lambda: None)  # it has no mask that could be taken away
    assert "error" in check_refused(make_model("llama"))


@pytest.mark.usefixtures("only_packed")
def test_positions_that_begin_anew_with_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    build = PackedStep.__init__

    def forgetful(self: PackedStep, *args: Any) -> None:
        build(self, *args)
        self.positions = torch.cat([torch.arange(span.size) for span in self.spans])[None]

    monkeypatch.setattr(PackedStep, "__init__", forgetful)
    assert "error" in check_refused(make_model("llama"))


def test_a_model_that_computes_no_numbers() -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(UnsupportedModel):
        probe(model, read_layers(model.config), PAGE)


def test_a_recurrent_model_keeps_its_states_beside_the_pages_of_its_attention() -> None:
    verdict = probed(make_model("qwen3_next"))
    assert verdict.mode.stateful
    assert error_of(verdict) < 1e-4
    assert sorted(verdict.shapes) == [1]


def test_an_earlier_verdict_is_measured_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    first = prepare(make_model("bloom"), tokenizer, tmp_path)
    assert describe(first.verdict.mode) == "alone"
    (remembered,) = tmp_path.iterdir()
    assert json.loads(remembered.read_text())["mode"] == "alone"
    again = prepare(make_model("bloom"), tokenizer, tmp_path)
    assert again.verdict.report.startswith("alone as before: agrees")  # nothing else was tried
    remembered.write_text('{"mode": "packed"}')  # a lie costs a measurement and no more
    assert describe(prepare(make_model("bloom"), tokenizer, tmp_path).verdict.mode) == "alone"
    assert json.loads(remembered.read_text())["mode"] == "alone"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was run on the whole: measurements and from-scratch forwards."""
    found: list[str] = []

    def spy(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def run(*args: Any) -> Any:
            found.append(name)
            return plain(*args)

        monkeypatch.setattr(owner, name, run)

    spy(Measurement, "measure")
    spy(Measurement, "measure_divided")
    spy(measurement_module, "reference_logits")
    spy(measurement_module, "trace")
    spy(probe_module, "Thresholds")
    return found


@pytest.mark.parametrize(
    "kind", widely(sorted(MODES.keys() - {"longrope"}), "llama mistral qwen3_next deepseek_v3 jamba llama4 gemma4 t5")
)
def test_a_verdict_of_this_program_is_compared_with_few_tokens(kind: str, ran: list[str]) -> None:
    model = make_model(kind)
    before = probed(model, packing=pack(model))
    assert before.measured is not None
    ran.clear()
    model = make_model(kind)
    again = probed(model, known=KnownModel(describe(before.mode), {}, before.measured), packing=pack(model))
    if kind in TWO_PARTS:  # whose modes are chosen among others
        assert ran
        return
    assert ran == ["trace"] * (before.measured.trace is None)
    assert again.report.startswith(f"{describe(before.mode)} as before: agrees")
    assert (again.shapes, again.token_bytes, again.windows) == (before.shapes, before.token_bytes, before.windows)
    assert (again.crossed, again.unproven, again.measured) == (before.crossed, before.unproven, before.measured)
    assert (again.mode.in_place, again.mode.programs) == (before.mode.in_place, before.mode.programs)


@pytest.mark.parametrize(
    ("kind", "last", "mode"),
    [("llama", "recomputed", "packed"), ("t5", RecomputedDecoderMode.name, "encoder-decoder")],
)
def test_what_another_program_recomputed_is_tried_anew(kind: str, last: str, mode: str) -> None:
    assert probed(make_model(kind), known=KnownModel(last), packing=Packing({})).mode.name == mode


@pytest.mark.parametrize("wrong", ["logits", "program", "programs", "forward", "columns"])
def test_a_verdict_that_no_longer_holds_is_measured_on_the_whole(
    wrong: str, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    before, vocabulary = probed(model, packing=pack(model)), model.config.vocab_size
    assert before.measured is not None
    ran.clear()
    measured = before.measured
    if wrong == "logits":
        measured = msgspec.structs.replace(measured, logits=measured.logits[:-4] + b"\0\0\0\x42")
    if wrong == "columns":
        measured = msgspec.structs.replace(measured, logits=measured.logits[:-4])
    if wrong == "program":
        measured = msgspec.structs.replace(measured, made_by="another")
    if wrong == "programs":
        measured = msgspec.structs.replace(measured, programs=msgspec.structs.replace(measured.programs, chained=0))
    if wrong == "forward":
        monkeypatch.setattr(Fusion, "run", lambda self, given, whole: torch.zeros(100, vocabulary))
    model = make_model("llama")
    again = probed(model, known=KnownModel("packed", {}, measured), packing=pack(model))
    assert (ran.count("measure") > 1) is (wrong == "forward")
    assert again.report.startswith("packed: agrees")
    assert (again.shapes, again.token_bytes) == (before.shapes, before.token_bytes)
    unlike = {"in_place": False, "programs": KnownPrograms()} if wrong == "forward" else {}
    assert before.measured.programs == KnownPrograms(("model.layers.0", "model.layers.1", "model.norm"), 2, True)
    assert again.measured == msgspec.structs.replace(before.measured, **unlike)


def test_what_a_plain_forward_showed_of_other_modules_is_shown_again(ran: list[str]) -> None:
    model = make_model("llama")
    before = probed(model, packing=pack(model)).measured
    assert before is not None
    assert before.trace is not None
    assert before.in_place
    ran.clear()
    model = make_model("llama")
    lie = msgspec.structs.replace(before, trace=msgspec.structs.replace(before.trace, late=("no module",)))
    again = probed(model, known=KnownModel("packed", {}, lie), packing=pack(model))
    assert ran == ["trace"]
    assert again.report.startswith("packed as before: agrees")


def test_keys_that_are_not_read_in_place_are_not_believed_to_be(ran: list[str]) -> None:
    model = make_model("deepseek_v3")
    before = probed(model, packing=pack(model))
    assert before.measured is not None
    assert not before.measured.in_place
    lie = msgspec.structs.replace(before.measured, in_place=True)
    model = make_model("deepseek_v3")
    again = probed(model, known=KnownModel("packed", {}, lie), packing=pack(model))
    assert again.report.startswith("packed: agrees")
    assert again.error < 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "mistral", "gemma3", "bloom", "deepseek_v3"])
def test_a_trace_is_remembered_by_names(kind: str) -> None:
    model = make_model(kind)
    shown = trace(model)
    known = KnownTrace.of(shown, model)
    assert known is not None
    again = known.restored(make_model(kind))
    assert again is not None
    assert KnownTrace.of(again, model) is None  # its modules are another's
    names = {module: name for name, module in model.named_modules()}
    assert [names[module] for module in shown.mixers] == list(known.mixers)
    same = known.restored(model)
    assert same is not None
    assert (same.argument, same.first_position, same.by_row) == (shown.argument, shown.first_position, shown.by_row)
    assert (same.mixers, same.readers) == (shown.mixers, shown.readers)
    assert same.late == shown.late & names.keys()
    assert type(same.fresh(model.config)) is type(shown.fresh(model.config))


@pytest.mark.parametrize(("noise", "kept"), [(0.09, True), (0.6, False)])
def test_a_sensitive_model_keeps_its_programs(
    noise: float, kept: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs that change its results by more than rounding may, and by less than a unit in the last place of the
    embeddings does.
    """
    monkeypatch.setattr(Measurement, "sensitivity", lambda self, mode, seed: 0.15)
    plain, generator = Fusion.run, torch.Generator().manual_seed(0)

    def run(self: Fusion, given: dict[str, Any], whole: bool) -> torch.Tensor | None:
        out = plain(self, given, whole)
        return out if out is None else out + noise * out.std() * torch.randn(out.shape, generator=generator)

    monkeypatch.setattr(Fusion, "run", run)
    monkeypatch.setattr(Fusion, "unrecord", lambda self: None)
    caplog.set_level("INFO")
    model = make_model("llama")
    before = probed(model, packing=pack(model))
    assert (before.mode.fusion is not None) is kept
    assert ("rounding changes it by 1.5e-01" in " ".join(ours(caplog))) is kept
    if kept:
        model = make_model("llama")
        again = probed(model, known=KnownModel("packed", {}, before.measured), packing=pack(model))
        assert again.report.startswith("packed as before: agrees")


def test_how_sensitive_a_model_is() -> None:
    for dtype, least, most in ((torch.bfloat16, 1e-3, 0.2), (torch.float32, 1e-8, 1e-5)):
        model = make_model("llama").to(dtype)
        scene = Measurement(model, read_layers(model.config), PAGE, None)
        (mode,) = scene.candidates((PackedMode,))
        with installed(mode):
            assert least < scene.sensitivity(mode, 0) < most
            assert not model.get_input_embeddings()._forward_hooks
            mode.remove()


@torch.no_grad()
def test_a_mode_is_measured_with_the_experts_of_a_plain_forward() -> None:
    """Of a model whose experts are so nearly equal to its router that rounding decides between them."""
    model = make_model("qwen3_next")
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight[1::2] = weight[::2] * (1 + 1e-7)
    scene = Measurement(model, read_layers(model.config), PAGE, None)
    assert scene.is_routed
    assert not Measurement(make_model("llama"), read_layers(make_model("llama").config), PAGE, None).is_routed
    (mode, *_) = scene.candidates((PackedMode,))
    with installed(mode):
        assert scene.measure(mode).error < 1e-4
        scene._routed = False
        assert scene.measure(mode).error > 1e-2
        mode.remove()


def test_programs_that_cannot_be_made_do_not_fail_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("in any module")

    monkeypatch.setattr(Fusion, "find", fail)
    model = make_model("llama")
    verdict = probed(model, packing=pack(model))
    assert verdict.mode.fusion is None
    assert verdict.report.endswith(", 0 modules run as programs")


def test_what_rounded_kv_changes_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    model, codec = make_model("llama"), Codec.INT8
    caplog.set_level("INFO")
    verdict = probed(model, codec=codec)
    assert {shape.codec for shape in verdict.shapes.values()} == {codec} == {verdict.codec}
    assert verdict.token_bytes == sum(shape.nbytes for shape in verdict.shapes.values()) == 2 * 2 * (2 * 16 + 16)
    kv = verdict.kv
    assert kv is not None
    assert (kv.layers, kv.stored, kv.refused) == (2, 2, "")
    assert kv.error is not None
    assert kv.same is not None
    assert 1e-4 < kv.error < 0.02
    assert kv.same > 0.9
    assert kv.line in ours(caplog)


def test_a_model_whose_kv_cannot_be_rounded_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("falcon")  # runs with masks: its own attention computes with what is gathered
    verdict = probed(model, codec=Codec.INT8)
    assert verdict.codec is Codec.EXACT
    assert {shape.codec for shape in verdict.shapes.values()} == {Codec.EXACT}
    assert verdict.kv is not None
    assert verdict.kv.line.startswith("--kv-dtype int8 is not used, KV is exact: none of its layers")
    assert verdict.kv.line in ours(caplog)


def test_rounded_kv_that_gives_no_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurement, "compare", lambda *args: (float("inf"), 0.0))
    mode: Any = SimpleNamespace(in_place=frozenset({0}))
    measurement: Any = Measurement.__new__(Measurement)
    shapes = {0: PageShape(2, 16, 2, 16, torch.float32)}
    assert round_kv(measurement, mode, shapes, Codec.INT8)[0] == shapes
    assert round_kv(measurement, mode, shapes, Codec.INT8)[1].refused == "the results are not numbers"
