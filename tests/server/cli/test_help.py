"""Every page of help: in 80 columns, complete, and its examples are command lines that work."""

from __future__ import annotations

import re
import shlex

import pytest

from server.config import help_text
from server.config.command_line import COMMANDS, environment_variable, flag, parse
from server.config.serve_options import ServeConfig
from server.config.sessions_options import VERBS

PAGES = [
    (),
    *((name,) for name in COMMANDS),
    *(("sessions", verb) for verb in VERBS),
]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for config, _ in COMMANDS.values():
        for name in config.model_fields:
            monkeypatch.delenv(environment_variable(config, name), raising=False)


def page(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        parse([*arguments, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", PAGES, ids=" ".join)
def test_a_page_fits_80_columns_and_tells_the_exit_statuses(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    told = page(arguments, capsys)
    assert max(map(len, told.splitlines())) <= 80
    assert told.startswith(f"usage: {' '.join(('warmturn', *arguments))} ")
    assert "exit status:" in told
    assert not re.search(r"PydanticUndefined|\bNone\b|<class", told)


@pytest.mark.parametrize("columns", ["40", "60"])
def test_a_narrow_terminal_gets_narrow_paragraphs(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    flags = page(("serve",), capsys).partition("units:")[0]
    described = [line for line in flags.splitlines() if line.startswith(" " * 12)]
    assert len(described) > 50
    assert max(map(len, described)) <= int(columns)


@pytest.mark.parametrize("text", [help_text.PROGRAM, *help_text.ENDS.values()], ids=["warmturn", *help_text.ENDS])
def test_the_examples_are_understood(text: str) -> None:
    examples = re.findall(r"^  (warmturn [^\n]*?)(?:  .*)?$", text.partition("examples:")[2].partition("\n\n")[0], re.M)
    assert len(examples) >= 3
    for example in examples:
        parse([part.replace("./my-model", ".") for part in shlex.split(example)[1:]])


def test_every_flag_of_serve_stands_in_one_group() -> None:
    grouped = [name for names in help_text.GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert {name for name in ServeConfig.model_fields if name != "model"} == set(grouped)


def test_the_groups_are_shown_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    told = page(("serve",), capsys)
    places = [told.index(f"\n  {flag(name)} ") for names in help_text.GROUPS.values() for name in names]
    assert places == sorted(places)
    titles = [told.index(f"\n{title}:\n") for title in help_text.GROUPS]
    assert titles == sorted(titles)


def test_the_doctor_leaves_the_flags_of_serve_to_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    told = page(("doctor",), capsys)
    assert "--json" in told
    assert "--kv-memory BYTES" not in told
    assert "every flag and variable of warmturn serve" in told
