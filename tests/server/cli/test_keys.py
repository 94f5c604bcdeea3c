"""`warmturn keys`: adds, lists and revokes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from server.cli.keys import keys
from server.config.command_line import parse
from server.config.keys_options import KeysConfig
from server.config.usage_error import UsageError


def run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    config: Any = parse(["keys", *arguments])
    assert isinstance(config, KeysConfig)
    return keys(config, out), out.getvalue()


def test_a_key_is_printed_once_listed_by_its_id_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ("--key-file", str(tmp_path / "keys.json"))
    status, key = run("add", "ann", *file, "--requests-per-minute", "60")
    assert (status, key[:3]) == (0, "wt-")
    run("add", "bob", *file, "--max-sessions", "3", "--max-bytes", "2MiB", "--model", "small", "--model", "large")
    _, listed = run("list", *file)
    heading, ann, bob = listed.splitlines()
    assert heading.split() == ["ID", "TENANT", "CREATED", "REQUESTS/MIN", "TOKENS/MIN", "SESSIONS", "BYTES", "MODELS"]
    assert ann.split()[1] == "ann"
    assert ann.split()[3:] == ["60", "-", "-", "-", "all"]
    assert bob.split()[3:] == ["-", "-", "3", "2097152", "small,large"]
    assert key.strip() not in listed
    assert run("revoke", ann.split()[0], *file)[0] == 0
    assert run("revoke", "bob", *file)[0] == 0
    assert bob.split()[1] == "bob"
    assert len(run("list", *file)[1].splitlines()) == 1
    assert run("revoke", "bob", *file)[0] == 1
    assert "no such key" in capsys.readouterr().err


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--key-file"):
        run("list")
    with pytest.raises(UsageError, match="NAME"):
        run("add", "--key-file", str(tmp_path / "keys.json"))
    (tmp_path / "keys.json").write_text("x")
    with pytest.raises(UsageError, match="is no key file"):
        run("list", "--key-file", str(tmp_path / "keys.json"))
