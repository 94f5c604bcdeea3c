"""The doctor on models: engines that load, refuse or die, and the demo model as users ask for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import scripted_engine
from scripted_server import environment
from template_styles import STYLES, tokens_with

from cache.tier import Tier, TierStats
from scheduler.engine_stats import Stats
from scheduler.model_facts import (
    ActivationRounding,
    KvRounding,
    MediaMarks,
    PoolingFacts,
    WeightReading,
    WeightRounding,
)
from scheduler.speech_messages import SpeechFacts
from server.chat.dialect import Dialect
from server.chat.template import Divergence, Stability
from server.cli.doctor import doctor_model
from server.cli.doctor.doctor_model import MeasuredModel
from server.cli.doctor.findings import Finding, Level
from server.config.doctor_options import DoctorConfig

FACTS = scripted_engine.FACTS
PATIENCE = 300.0


def found(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    monkeypatch.setattr(doctor_model, "words", lambda config: iter(()))
    config = DoctorConfig(model=model, data_dir=tmp_path)
    return {finding.check: finding for finding in doctor_model.model(config, scripted_engine.COMMAND)}


def test_nothing_is_loaded_unless_asked_for() -> None:
    assert list(doctor_model.model(DoctorConfig())) == []


def test_a_model_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = found("ok", tmp_path, monkeypatch)
    assert {name: finding.level for name, finding in told.items()} == dict.fromkeys(
        ("model", "weights", "room"), Level.OK
    )
    assert told["model"].figures["mode"] == "packed"
    assert told["weights"].figures["engine_memory"] > 1 << 20
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = found("fail", tmp_path, monkeypatch)
    assert [(f.check, f.level, f.text) for f in told.values()] == [("model", Level.FAULT, "no such model: fail")]


def test_what_rounded_weights_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounding = WeightRounding("int4", 0.0625, 0.875)
    facts = msgspec.structs.replace(FACTS, weight_rounding=rounding)

    async def loaded(*_: Any) -> MeasuredModel:
        return MeasuredModel(1.0, facts, Stats())

    monkeypatch.setattr(doctor_model, "load_model", loaded)
    told = found("ok", tmp_path, monkeypatch)["rounding"]
    assert (told.level, told.text) == (Level.OK, rounding.line)
    assert told.figures == {"weights": "int4", "error": 0.0625, "same": 0.875}
    assert "int4: logits differ by 6.2%" in told.text
    assert "the same for 88% of 64" in told.text
    assert "could not be measured" in WeightRounding("int8", None, None).line


@pytest.mark.parametrize(
    ("idle", "told_of_them"),
    [("the checkpoint is quantised", "are not used: the checkpoint is quantised"), ("", "draft for --speculate auto")],
)
def test_layers_for_multi_token_prediction_are_named(
    idle: str, told_of_them: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def loaded(*_: Any) -> MeasuredModel:
        return MeasuredModel(1.0, msgspec.structs.replace(FACTS, mtp_layers=2, mtp_idle=idle), Stats())

    monkeypatch.setattr(doctor_model, "load_model", loaded)
    told = found("ok", tmp_path, monkeypatch)["drafting"]
    assert (told.level, told.figures) == (Level.OK, {"mtp_layers": 2, "used": not idle})
    assert f"2 layers for multi-token prediction, which {told_of_them}" in told.text


def test_an_engine_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = found("die", tmp_path, monkeypatch)
    assert (told["model"].level, "killed by SIGKILL" in told["model"].text) == (Level.FAULT, True)
    assert "memory" in told["model"].advice


def test_an_engine_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_model, "LOAD_SECONDS", 0.0)
    monkeypatch.setattr(doctor_model, "STOP_SECONDS", 0.1)
    told = found("ok", tmp_path, monkeypatch)
    assert (told["model"].level, "not loaded after" in told["model"].text) == (Level.FAULT, True)


def test_how_fast_weights_are_read(tmp_path: Path) -> None:
    speeds = ((8e9, 9e9), (5e9, 7e9), (2e9, 1e9))
    ways = (("in order", "prefetching"),) * 3
    read = WeightReading(1000, 2, 10e9, 0.5, (1, 4, 16), ways, speeds, (1, 1, 0))
    finding = doctor_model.check_reading(read)
    assert finding.level == Level.OK
    assert "one row read 9.0 GB/s of weights, 90 % of the 10.0 GB/s that memory gives (2 threads, 50 %" in finding.text
    assert "1 row: in order 8.0, prefetching 9.0 (used) GB/s; 4 rows: in order 5.0" in finding.text
    assert (finding.figures["share"], finding.figures["chosen"]) == (0.9, (1, 1, 0))


@pytest.mark.parametrize(
    ("kv", "level", "told"),
    [
        (
            KvRounding("int8", 30, 32, 0.0125, 0.988),
            Level.OK,
            "int8 in 30 of 32 layers: against exact KV logits differ",
        ),
        (KvRounding("fp8", 32, 32, 0.2, 0.7), Level.WARNING, "by 20.0% (root mean square), and the likeliest token is"),
        (KvRounding("int8", 0, 32, None, None, "no"), Level.WARNING, "--kv-dtype int8 is not used, KV is exact: no"),
    ],
)
def test_what_rounded_kv_changes(kv: KvRounding, level: Level, told: str) -> None:
    finding = doctor_model.rounded(kv)
    assert (finding.level, told in finding.text) == (level, True)


@pytest.mark.parametrize(
    ("found", "level", "told"),
    [
        (ActivationRounding("int8", 0.0125, 0.988), Level.OK, "rounded to int8: logits differ by 1.2% (root"),
        (
            ActivationRounding("int8", None, None, "no"),
            Level.WARNING,
            "is not used, inputs of products keep 16 bits",
        ),
    ],
)
def test_what_rounded_inputs_change(found: ActivationRounding, level: Level, told: str) -> None:
    finding = doctor_model.rounded_activations(found)
    assert (finding.level, told in finding.text) == (level, True)


def test_the_room_of_each_tier(tmp_path: Path) -> None:
    facts = msgspec.structs.replace(FACTS, max_context=2048, kv_bytes_per_token=1000, dtype="bfloat16", pages=256)
    measured = MeasuredModel(1.0, facts, Stats(tiers={Tier.HOST: TierStats(capacity=630)}))
    for at_rest, on_disk in (("exact", 9), ("int8", 19)):
        values: dict[str, Any] = {"disk_space": 10_000_000, "kv_at_rest": at_rest}
        config = DoctorConfig(data_dir=tmp_path, **values)
        room = doctor_model.room(config, measured, facts)
        assert (room.level, room.figures["sessions"][0]) == (
            Level.OK,
            {"tokens": 1024, "device": 4, "host": 9, "disk": on_disk},
        )
        assert room.figures["sessions"][-1]["tokens"] == 2048
    assert "of 1,024 tokens: 4 on the device, 9 in host memory, 19 on disk" in room.text
    windowed = msgspec.structs.replace(facts, kv_bytes_by_length={"1024": 500, "2048": 250})
    sessions = doctor_model.room(config, measured, windowed).figures["sessions"]
    assert [one["device"] for one in sessions] == [8, 8]
    assert "a token takes 500 at 1,024, 250 at 2,048 tokens" in doctor_model.memory(measured, windowed).text
    rounded = msgspec.structs.replace(facts, kv_rounding=KvRounding("int8", 4, 4, 0.01, 0.98))
    sessions = doctor_model.room(config, measured, rounded).figures["sessions"]
    assert sessions[0]["disk"] == 9  # files keep rounded KV as it is
    small = msgspec.structs.replace(facts, pages=100)
    assert doctor_model.room(config, measured, small).level is Level.WARNING


def test_more_kv_than_there_is_memory() -> None:
    facts = msgspec.structs.replace(FACTS, kv_bytes_per_token=1 << 20)  # 64 pages of 16 tokens: 1 GiB
    for available, level in ((2 << 30, Level.OK), (1 << 29, Level.WARNING), (0, Level.OK)):
        assert doctor_model.memory(MeasuredModel(1.0, facts, Stats(), 1, available), facts).level is level


def test_a_model_that_runs_alone() -> None:
    facts = msgspec.structs.replace(FACTS, mode="alone")
    assert doctor_model.check_mode("m", MeasuredModel(1.0, facts), facts).level is Level.WARNING


@pytest.mark.parametrize(
    ("there", "found", "level"),
    [
        (True, Stability(True), Level.OK),
        (True, Stability(None), Level.WARNING),
        (True, Stability(False, Divergence("turn 2", "a", "b")), Level.WARNING),
        (False, Stability(None), Level.WARNING),
    ],
)
def test_templates(there: bool, found: Stability, level: Level) -> None:
    assert doctor_model.template(there, found).level is level


@pytest.mark.parametrize("style", STYLES)
def test_how_calls_are_written(style: str) -> None:
    tokens = tokens_with(STYLES[style])
    told = doctor_model.tools(tokens.dialect, True)
    assert (told.level, told.figures) == (Level.OK, {"native": tokens.dialect.native})
    tokens.close()


def test_weights_are_told_as_they_are_stored() -> None:
    facts = msgspec.structs.replace(FACTS, parameters=7 * 10**9, weight_bytes=4 << 30, dtype="bfloat16")
    found = doctor_model.memory(MeasuredModel(1.0, facts, Stats()), facts)
    assert found.text.startswith("7,000.0 million parameters in 4 GiB, used in bfloat16; ")
    assert found.figures["bytes"] == 4 << 30


def test_tools_in_words() -> None:
    assert "in words" in doctor_model.tools(Dialect(), True).text


@pytest.mark.slow
@pytest.mark.wide
def test_the_demo_model_as_users_ask_for_it(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "server", "doctor", "demo", "--json", "--port", "0"]
    command += ["--data-dir", str(tmp_path / "data"), "--device", "cpu", "--kv-memory", "8MiB", "--disk-space", "8MiB"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    told: dict[str, Any] = json.loads(ran.stdout)
    assert (ran.returncode, told["faults"]) == (0, 0), ran.stdout
    checks = {finding["check"]: finding for finding in told["findings"]}
    assert checks["model"]["figures"]["mode"] == "packed"
    assert checks["weights"]["figures"]["kv_bytes_per_token"] == 1024
    assert checks["room"]["figures"]["sessions"][0] == {"tokens": 1024, "device": 8, "host": 0, "disk": 8}
    assert checks["template"]["figures"] == {"prefix_stable": True}
    assert "loading the weights" in ran.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_model_that_sees_needs_pillow(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(doctor_model, "has_pillow", lambda: there)
    told = doctor_model.media(["image", "audio"])
    assert told.level is (Level.OK if there else Level.FAULT)
    assert "image and audio" in told.text
    assert there or "[media]" in told.advice


def test_what_a_model_gives_that_generates_no_text() -> None:
    facts = PoolingFacts(384, ("mean",), True, True, {"query": "q: "})
    made = doctor_model.pooling("embed", facts)
    assert (made.level, "384 numbers" in made.text, "unit length" in made.text) == (Level.OK, True, True)
    assert doctor_model.pooling("score", PoolingFacts(1, pads=False)).level is Level.WARNING


@pytest.mark.parametrize("there", [True, False])
def test_a_model_that_hears_needs_what_decodes_sounds(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_model, "has_sounds", lambda: there)
    speech = SpeechFacts(16_000, 30.0, ("en",), timestamps=True, together=8)
    for told in (doctor_model.hearing(speech), doctor_model.media(["audio"])):
        assert told.level is (Level.OK if there else Level.FAULT)
        assert there or "[media]" in told.advice
    assert "30 s at once, 8 windows in a batch" in doctor_model.hearing(speech).text


def test_a_model_that_transcribes_has_neither_room_nor_words(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = msgspec.structs.replace(FACTS, speech=SpeechFacts(16_000, 30.0))

    async def loaded(*_: Any) -> MeasuredModel:
        return MeasuredModel(1.0, facts, Stats())

    monkeypatch.setattr(doctor_model, "load_model", loaded)
    checks = [finding.check for finding in doctor_model.model(DoctorConfig(model="x"))]
    assert checks == ["model", "weights", "speech"]


@pytest.mark.parametrize(("media", "noun"), [(("audio",), "sounds"), (("image",), "pictures")])
def test_what_enters_a_model_is_told(media: tuple[str, ...], noun: str) -> None:
    marks = MediaMarks("<x>", 1, "as embeddings", "f", media[0])
    told = doctor_model.check_media_marks(msgspec.structs.replace(FACTS, media=media, media_marks=marks))
    assert told.text == f"it takes {noun}, which enter as embeddings"
