"""A generation config: what is read of it, and what of it cannot hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.model.generation_defaults import generation_of, read_generation
from scheduler.sampling_params import Generation


def test_what_it_says_holds_and_what_it_does_not_say_is_openais() -> None:
    said = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    assert generation_of({**said, "eos_token_id": 2}, "model") == Generation("model", **said)  # type: ignore[arg-type]
    assert generation_of({}, "model") == Generation("model", 1.0, 1.0, 0, 0.0, 1.0, ())


@pytest.mark.parametrize(("said", "stop"), [("END", ("END",)), (["a", "b"], ("a", "b")), (None, ())])
def test_stop_strings(said: object, stop: tuple[str, ...]) -> None:
    assert generation_of({"stop_strings": said}, "file").stop == stop


@pytest.mark.parametrize(
    ("said", "temperature"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"do_sample": True}, 1.0),
        ({"do_sample": None}, 1.0),
    ],
)
def test_do_sample_false_is_greedy(said: dict[str, Any], temperature: float) -> None:
    assert generation_of(said, "model").temperature == temperature


WRONG = [
    ("temperature", 2.5, "must be from 0 to 2"),
    ("temperature", "hot", "must be a number"),
    ("top_p", -0.1, "must be from 0 to 1"),
    ("top_k", 1.5, "must be a whole number"),
    ("top_k", -2, "must be from -1 to 2147483647"),
    ("min_p", True, "must be a number"),
    ("repetition_penalty", 0, "must be above 0 to 10"),
    ("stop_strings", [""], "must have strings of 1 to 1000 characters"),
    ("stop_strings", {"a": 1}, "must have at most 16 strings"),
]


@pytest.mark.parametrize(("name", "value", "problem"), WRONG)
def test_an_operators_wrong_value_is_refused_and_a_models_left_out(
    name: str, value: Any, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=f"--generation-config: {name} {problem}"):
        generation_of({name: value}, "file")
    assert generation_of({name: value, "do_sample": False}, "model") == Generation("model", temperature=0.0)
    assert [record.getMessage() for record in caplog.records] == [
        f"a value of the model's generation config is ignored: {name} {problem}"
    ]


def test_every_token_is_minus_one_or_zero() -> None:
    assert generation_of({"top_k": -1}, "file").top_k == 0


def test_a_file_or_a_folder_that_holds_one(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 3}))
    assert read_generation(tmp_path) == read_generation(tmp_path / "generation_config.json") == {"top_k": 3}


@pytest.mark.parametrize(
    ("name", "meant"), [("temprature", "temperature"), ("topp", "top_p"), ("stop_string", "stop_strings")]
)
def test_a_misspelt_name(tmp_path: Path, name: str, meant: str) -> None:
    (path := tmp_path / "x.json").write_text(json.dumps({name: 1}))
    with pytest.raises(ValueError, match=f"^--generation-config: {name} is no parameter; did you mean {meant}\\?$"):
        read_generation(path)


def test_names_that_mean_nothing_here(tmp_path: Path) -> None:
    said = {"top_h": 0.5, "typical_p": 1.0, "max_window_size": 24000, "chat_format": "chatml"}  # the last: Qwen
    (path := tmp_path / "x.json").write_text(json.dumps(said))
    assert read_generation(path) == said


@pytest.mark.parametrize("text", ["", "[1]", "{", "\udcff"])
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "x.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"^--generation-config: .*JSON"):
        read_generation(path)
