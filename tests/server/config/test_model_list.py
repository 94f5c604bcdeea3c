"""The models of `warmturn serve`: of the command line, of a folder, of a TOML file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pooling_kit import save_cross_encoder, save_embedder

from server.config.command_line import parse
from server.config.engine_options import engine_config
from server.config.model_list import ModelEntry, model_list, most_models
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError


def listed(*arguments: str) -> list[ModelEntry]:
    return model_list(config(*arguments))


def config(*arguments: str) -> ServeConfig:
    made = parse(["serve", *arguments])
    assert isinstance(made, ServeConfig)
    return made


def names(entries: list[ModelEntry]) -> list[str]:
    return [entry.config.name for entry in entries]


def test_a_model_that_is_alone_is_pinned_unless_it_may_be_idle() -> None:
    (entry,) = listed()
    assert (entry.config.name, entry.pinned) == ("demo", True)
    (entry,) = listed("org/x", "--idle-unload", "10m")
    assert (entry.config.name, entry.pinned, entry.config.idle_unload) == ("org/x", False, 600.0)


def test_several_models_of_the_command_line_share_its_options() -> None:
    given = ("org/x", "org/y", "--also", "demo", "--dtype", "float32", "--model-alias", "fast")
    entries = listed(*given)
    assert names(entries) == ["org/x", "org/y", "demo"]
    assert [entry.config.dtype for entry in entries] == ["float32"] * 3
    assert [entry.config.model_alias for entry in entries] == [["fast"], [], []]
    assert not any(entry.pinned for entry in entries)
    assert most_models(config(*given), 3) == 3
    assert most_models(config(*given), 9) == 4
    assert most_models(config(*given, "--max-models", "2"), 3) == 2


def test_a_folder_has_models_in_folders_and_files(tmp_path: Path) -> None:
    for name in ("large", "small", "notes"):
        (tmp_path / name).mkdir()
    for name in ("large/config.json", "small/config.json", "tiny.gguf", "readme.txt"):
        (tmp_path / name).write_text("{}")
    assert names(listed("--models", str(tmp_path))) == ["large", "small", "tiny"]
    assert names(listed("demo", "--models", str(tmp_path))) == ["demo", "large", "small", "tiny"]


def test_a_file_gives_each_model_options_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "models.toml").write_text("""
        [models.small]
        model = "here"
        alias = ["fast", "gpt-4o-mini"]
        pinned = true
        max-context = 512
        [models."org/large"]
        model = "org/large"
        dtype = "bfloat16"
    """)
    small, large = listed("--models", str(tmp_path / "models.toml"), "--dtype", "float32", "--kv-memory", "64M")
    assert (small.config.name, small.config.source, small.pinned) == ("small", str(tmp_path / "here"), True)
    assert (small.config.model_alias, small.config.max_context) == (["fast", "gpt-4o-mini"], 512)
    assert (small.config.dtype, large.config.dtype, large.config.max_context) == ("float32", "bfloat16", None)
    assert (large.config.name, large.pinned, large.config.kv_memory) == ("org/large", False, 64_000_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.a]\n", "a: model is needed"),
        ("[models.a]\nmodel = 1\n", "a: model is needed"),
        ("[models.a]\nmodel = 'x/y'\nport = 1\n", "a: port is no option of a model"),
        ("[models.a]\nmodel = 'x/y'\npinned = 1\n", "a: pinned: expected true or false"),
        ("[models.a]\nmodel = 'x/y'\ndtype = 'float8'\n", "a: WARMTURN_DTYPE|a: --dtype: expected"),
        ("[models.a]\nmodel = './none'\n", "a: .*there is no such folder"),
        ("[models.a]\nmodel='x/y'\n[models.b]\nmodel='x/z'\nalias=['a']\n", "two models have the name a"),
        ("models = 3\n", "no tables"),
        ("", "no tables"),
        ("[models", "is no TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        listed("--models", str(tmp_path / "models.toml"))


def test_what_is_no_list_of_models_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no model in this folder"):
        listed("--models", str(tmp_path))
    with pytest.raises(UsageError, match="cannot be read"):
        listed("--models", str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match="two models have the name org/x"):
        listed("org/x", "org/x")
    with pytest.raises(UsageError, match="--idle-unload"):
        config("--idle-unload", "soon")


def test_memory_and_disk_are_divided() -> None:
    made = engine_config(config("org/x", "--disk-space", "10G"), 0.5, 2)
    assert (made.memory_share, made.disk_space) == (0.5, 5_000_000_000)
    assert engine_config(config("org/x", "--disk-space", "10G")).disk_space == 10_000_000_000


def test_models_that_generate_come_before_those_that_embed(tmp_path: Path) -> None:
    save_embedder(tmp_path / "embedder")
    save_cross_encoder(tmp_path / "ranker")
    entries = listed(str(tmp_path / "embedder"), "org/unknown", str(tmp_path / "ranker"), "demo")
    assert names(entries) == ["org/unknown", "demo", "embedder", "ranker"]
    assert [(entry.task, entry.keeps_kv) for entry in entries] == [
        (None, True),
        ("generate", True),
        ("embed", False),
        ("score", False),
    ]


def test_whether_a_model_with_an_encoder_of_sounds_transcribes_is_not_known_from_its_files(tmp_path: Path) -> None:
    for name, both, sounds in (("both", True, {"sampling_rate": 16000}), ("decoder", False, {"sampling_rate": 16000})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"is_encoder_decoder": both}))
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(sounds))
    entries = listed(str(tmp_path / "both"), str(tmp_path / "decoder"))
    assert {name: entry.task for name, entry in zip(names(entries), entries, strict=True)} == {
        "both": None,
        "decoder": "generate",
    }
