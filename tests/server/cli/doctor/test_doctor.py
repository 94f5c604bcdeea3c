"""`warmturn doctor`: what it prints, its exit status, that nothing stops it; and what it finds of a machine."""

from __future__ import annotations

import io
import json
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.cli.doctor import doctor_machine
from server.cli.doctor.doctor import COLUMNS, doctor
from server.cli.doctor.findings import Finding, Level, fault, ok, size, warning, within
from server.config.doctor_options import DoctorConfig

FACTS: dict[str, Any] = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "cuda": "13.0",
    "gpus": [],
    "trouble": None,
    "instructions": "AVX512",
    "matrix_units": True,
    "bfloat16": True,
    "threads": 2,
    "processors": 2.0,
    "bandwidth": 2e10,
    "kernels": {"attention": None, "program": None},
}
GPU = {"name": "G1", "memory": 80 << 30, "free": 70 << 30, "capability": "9.0", "error": None}
DRIVER = ["G1, 81920 MiB, 570.1"]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def config(**values: Any) -> DoctorConfig:
    return DoctorConfig(**values)


def well(config: DoctorConfig) -> Iterator[Finding]:
    yield ok("one", "all is well", seconds=1.5)


def tired(config: DoctorConfig) -> Iterator[Finding]:
    yield warning("two", "slow " * 30, "sleep more")


def ill(config: DoctorConfig) -> Iterator[Finding]:
    yield fault("three", "broken", "mend it")


def breaking(config: DoctorConfig) -> Iterator[Finding]:
    yield ok("four", "so far")
    raise RuntimeError("secret")


@pytest.mark.parametrize(("last", "status"), [(well, 0), (tired, 0), (breaking, 0), (ill, 1)])
def test_only_a_fault_is_a_failure(last: Any, status: int) -> None:
    assert doctor(config(), io.StringIO(), [("a", 60, well), ("b", 60, last)]) == status


def test_what_people_read() -> None:
    out = io.StringIO()
    doctor(config(), out, [("a", 60, well), ("b", 60, tired), ("c", 60, ill), ("d", 60, breaking)])
    told = out.getvalue()
    lines = told.splitlines()
    assert lines[0] == "ok       one      all is well"
    assert lines[1].startswith("warning  two      slow slow")
    assert lines[2].startswith(" " * 18 + "slow")
    assert "                  -> sleep more" in lines
    assert "fault    three    broken" in lines
    assert lines[-1] == "1 fault, 2 warnings"
    assert max(map(len, lines)) <= COLUMNS[1]
    assert "RuntimeError" in told
    assert "                  -> see the other lines" in lines
    assert "secret" not in told


def test_what_programs_read() -> None:
    out = io.StringIO()
    assert doctor(config(as_json=True), out, [("a", 60, well), ("c", 60, ill)]) == 1
    told = json.loads(out.getvalue())
    assert (told["object"], told["faults"], told["warnings"]) == ("doctor", 1, 0)
    assert told["findings"][0] == {
        "check": "one",
        "level": "ok",
        "text": "all is well",
        "advice": "",
        "figures": {"seconds": 1.5},
    }


def test_a_check_that_hangs_is_a_fault_and_the_others_run() -> None:
    never = threading.Event()

    def hanging(config: DoctorConfig) -> Iterator[Finding]:
        yield ok("disk", "begun")
        never.wait()

    out = io.StringIO()
    try:
        assert doctor(config(as_json=True), out, [("disk", 0.1, hanging), ("a", 60, well)]) == 1
    finally:
        never.set()
    levels = [(found["check"], found["level"]) for found in json.loads(out.getvalue())["findings"]]
    assert levels == [("disk", "ok"), ("disk", "fault"), ("one", "ok")]


def test_a_model_out_of_reach_is_not_loaded() -> None:
    def hub(config: DoctorConfig) -> Iterator[Finding]:
        yield fault("hub", "no such model", "see its name")

    out = io.StringIO()
    doctor(config(as_json=True), out, [("hub", 60, hub), ("model", 60, ill)])
    assert [found["check"] for found in json.loads(out.getvalue())["findings"]] == ["hub"]


def test_findings_come_as_they_are_made() -> None:
    second = threading.Event()

    def slow() -> Iterator[Finding]:
        yield ok("a", "first")
        second.wait(60)
        yield ok("a", "second")

    found = within(60, "a", slow)
    assert next(found).text == "first"
    second.set()
    assert [finding.text for finding in found] == ["second"]


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1 << 20, "1 MiB"), (1010 << 20, "1010 MiB"), (3 << 40, "3 TiB")],
)
def test_sizes(count: int, told: str) -> None:
    assert size(count) == told


# --- the machine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "facts", "seen", "level", "said"),
    [
        ("auto", {"cuda": None}, [], Level.OK, "runs on the CPU"),
        ("cuda", {"cuda": None}, [], Level.FAULT, "built without CUDA"),
        ("auto", {"cuda": None}, DRIVER, Level.WARNING, "built without CUDA"),
        ("cuda", {"cuda": None}, DRIVER, Level.FAULT, "built without CUDA"),
        ("cpu", {"cuda": None}, DRIVER, Level.OK, "not asked for"),
        ("auto", {"trouble": "The NVIDIA driver on your system is too old"}, DRIVER, Level.WARNING, "too old"),
        ("cuda", {"trouble": "Found no NVIDIA driver"}, [], Level.FAULT, "Found no NVIDIA driver"),
        ("auto", {"trouble": "Found no NVIDIA driver"}, [], Level.OK, "runs on the CPU"),
        ("auto", {"gpus": [GPU]}, DRIVER, Level.WARNING, "G1, 70 GiB of 80 GiB free; no version of warmturn has"),
        ("auto", {"gpus": [GPU | {"error": "no kernel image"}]}, DRIVER, Level.FAULT, "no kernel image"),
        ("auto", {"gpus": [GPU, GPU | {"error": "in use"}]}, DRIVER, Level.WARNING, "70 GiB"),  # one is asked for
    ],
)
def test_a_gpu_and_torch(device: Any, facts: dict[str, Any], seen: list[str], level: Level, said: str) -> None:
    found = doctor_machine.gpu(config(device=device), FACTS | facts, seen)
    assert (found.level, said in found.text) == (level, True)
    assert (found.advice != "") == (level is not Level.OK)


def test_gpus_for_every_rank_and_hidden_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor_machine.gpu(config(tensor_parallel=2), FACTS | {"gpus": [GPU]}, DRIVER)
    assert found.level is Level.FAULT
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = doctor_machine.gpu(config(), FACTS | {"trouble": "no GPU"}, DRIVER)
    assert "CUDA_VISIBLE_DEVICES" in found.advice


def test_a_processor_and_its_kernels() -> None:
    assert [found.level for found in doctor_machine.processor(FACTS)] == [Level.OK, Level.OK]
    poor = FACTS | {"kernels": {"attention": "there is no C++ compiler", "program": None}}
    found = list(doctor_machine.processor(poor))[1]
    assert (found.level, found.figures) == (Level.WARNING, {"missing": {"attention": "there is no C++ compiler"}})
    assert "g++" in found.advice


@pytest.mark.parametrize(
    ("count", "limit", "chosen", "level", "advice"),
    [
        (8, 8.0, False, Level.OK, ""),
        (8, 2.0, False, Level.WARNING, "OMP_NUM_THREADS=2"),
        (8, 1.5, True, Level.WARNING, "OMP_NUM_THREADS=1"),
        (2, 1.5, False, Level.OK, ""),
        (4, 0.5, False, Level.WARNING, "OMP_NUM_THREADS=1"),
        (1, 4.0, False, Level.WARNING, "OMP_NUM_THREADS=4"),
        (1, 4.0, True, Level.OK, ""),
    ],
)
def test_threads_and_processors(count: int, limit: float, chosen: bool, level: Level, advice: str) -> None:
    found = doctor_machine.threads(count, limit, chosen)
    assert found.level is level
    assert advice in found.advice


@pytest.mark.parametrize("limit", [1 << 20, None])
def test_the_memory_that_may_be_used(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    monkeypatch.setattr(doctor_machine, "memory_limit", lambda: limit)
    (found,) = doctor_machine.memory(config())
    assert (found.level, found.figures["limit"]) == (Level.OK, limit or found.figures["total"])
    assert ("limited to 1 MiB here" in found.text) is (limit is not None)


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for hard, level in ((256, Level.WARNING), (65536, Level.OK), (-1, Level.OK)):
        monkeypatch.setattr("resource.getrlimit", lambda what, hard=hard: (64, hard))
        (found,) = doctor_machine.files(config())
        assert found.level is level


def test_extras_that_are_there() -> None:
    found = {finding.check: finding for finding in doctor_machine.python(config())}
    assert "dev" in found["extras"].figures["installed"]
    assert "postgres" in doctor_machine.extras()
    assert doctor_machine.extras()["postgres"] == ["psycopg"]


def says(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_torch_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "nvidia_smi", list)
    told = json.dumps(FACTS | {"cuda": None})
    found = list(doctor_machine.torch(config(), says(f"print('''{told}''')")))
    assert [finding.check for finding in found] == ["torch", "gpu", "cpu", "kernels", "threads"]
    found = list(doctor_machine.torch(config(), says("import sys; sys.exit('libtorch.so: no such file')")))
    assert [(f.level, "libtorch.so: no such file" in f.text) for f in found] == [(Level.FAULT, True)]
    monkeypatch.setattr(doctor_machine, "CHECKUP_SECONDS", 0.2)
    found = list(doctor_machine.torch(config(), says("import time; time.sleep(600)")))
    assert [finding.level for finding in found] == [Level.FAULT]


def test_kernels_for_a_gpu_need_what_triton_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton: list[object] = []
    monkeypatch.setattr(doctor_machine, "nvidia_smi", lambda: DRIVER)
    monkeypatch.setattr(doctor_machine, "find_spec", lambda name: triton[0] if name == "triton" and triton else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    told = says(f"print({json.dumps(FACTS | {'gpus': [GPU]})!r})")

    def found() -> tuple[Level, str]:
        there = {finding.check: finding for finding in doctor_machine.torch(config(), told)}
        assert set(there) == {"torch", "gpu", "kernels"}
        return there["kernels"].level, there["kernels"].text

    def program(name: str) -> None:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)

    program("cc")  # which Triton does not try
    assert found() == (Level.WARNING, "there is no Triton: torch's own functions run instead, slower")
    triton.append(object())
    assert found()[0] is Level.WARNING
    assert "C compiler" in found()[1]
    program("clang")
    assert str(tmp_path / "Python.h") in found()[1]
    (tmp_path / "Python.h").touch()
    assert found() == (Level.OK, f"Triton compiles them with {tmp_path / 'clang'}")
    program("gcc")
    assert found()[1].endswith("gcc")
    monkeypatch.setenv("CC", "other")
    assert "C compiler" in found()[1]
    program("other")
    assert found()[1].endswith("other")


@pytest.mark.slow
@pytest.mark.wide
def test_the_real_torch_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(doctor_machine, "nvidia_smi", list)
    found = {finding.check: finding for finding in doctor_machine.torch(config(device="cpu"))}
    assert found["torch"].level is Level.OK
    assert found["cpu"].figures["bandwidth"] > 1e8
    assert found["kernels"].figures["missing"] == dict.fromkeys(
        ("attention", "program", "team"), "there is no C++ compiler"
    )
    assert found["threads"].figures["threads"] >= 1


def test_the_checkup_is_what_the_doctor_reads() -> None:
    from scheduler.checkup import Checkup, sources

    msgspec.convert(FACTS, Checkup, strict=True)
    assert {source.stem for source in sources()} == {"attention", "program", "team"}
