"""`warmturn connect`: what it prints and writes, and what it leaves as it is."""

from __future__ import annotations

import io
import json
import re
import shlex
import tomllib
from pathlib import Path

import httpx
import pytest
import yaml

from server.cli.connect.client_settings import ServedModel, client_names, client_settings
from server.cli.connect.connect import connect
from server.config.connect_options import ConnectConfig
from server.config.usage_error import UsageError

NAME = 'org/a "model" $x'  # whatever a folder may be called
SERVED = ServedModel("http://host:1", "k'1", NAME, 65_536)


def run(home: Path, monkeypatch: pytest.MonkeyPatch, status: int = 200, answer: object = None, **given: object) -> str:
    """What the command prints for a server that answers like this."""
    monkeypatch.setenv("HOME", str(home))
    models = {"data": [{"id": "m", "warmturn": {"max_context": 4096}}]}

    def server(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json=answer or models)

    out = io.StringIO()
    client = httpx.Client(base_url="http://host:1", transport=httpx.MockTransport(server))
    config = ConnectConfig.model_validate({"url": "http://host:1/v1/", **given})
    assert connect(config, client, out) == 0
    return out.getvalue()


@pytest.mark.parametrize("name", client_names())
def test_every_file_is_valid_in_its_own_syntax_whatever_the_model_is_called(name: str) -> None:
    settings = client_settings(name, SERVED)
    shlex.split(settings.run)
    for file in settings.files:
        suffix = Path(file.path).suffix
        if suffix == ".env":
            words = shlex.split(file.text)
            assert f"OPENAI_MODEL={NAME}" in words
        else:
            parsed = {".json": json.loads, ".toml": tomllib.loads, ".yml": yaml.safe_load, ".yaml": yaml.safe_load}[
                suffix
            ](file.text)
            assert NAME in json.dumps(parsed, ensure_ascii=False).replace('\\"', '"')
    assert "http://host:1" in "".join(file.text for file in settings.files) + settings.run
    assert re.search(r"k'(\"'\")?'?1", "".join(file.text for file in settings.files) + settings.run)


def test_without_a_client_all_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [line.split()[0] for line in run(tmp_path, monkeypatch).splitlines()]
    assert listed == list(client_names())
    assert {"claude", "codex", "opencode", "qwen", "aider", "goose"} <= {*listed}


def test_it_prints_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run(tmp_path, monkeypatch, client="codex", api_key="secret1")
    assert "# ~/.codex/warmturn.config.toml" in printed
    assert 'base_url = "http://host:1/v1"' in printed
    assert "model_context_window = 4096" in printed
    assert "secret1" in printed
    assert printed.endswith("codex --profile warmturn\n")
    assert list(tmp_path.iterdir()) == []


def test_it_writes_and_keeps_the_other_settings_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".config" / "opencode" / "opencode.json"
    path.parent.mkdir(parents=True)
    before = {"model": "mine/x", "provider": {"mine": {"a": 1}, "warmturn": {"models": {"old": {}}}}}
    path.write_text(json.dumps(before))
    assert str(path) in run(tmp_path, monkeypatch, client="opencode", write=True)
    after = json.loads(path.read_text())
    assert after["model"] == "mine/x"
    assert after["provider"]["mine"] == {"a": 1}
    assert list(after["provider"]["warmturn"]["models"]) == ["m"]
    assert json.loads(path.with_name("opencode.json.bak").read_text()) == before
    assert path.stat().st_mode & 0o777 == 0o600
    path.with_name("opencode.json.bak").unlink()
    run(tmp_path, monkeypatch, client="opencode", write=True)  # the same again changes nothing
    assert not path.with_name("opencode.json.bak").exists()


def test_a_file_that_is_no_plain_json_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ".config" / "opencode" / "opencode.json"
    path.parent.mkdir(parents=True)
    path.write_text("{} // mine")
    with pytest.raises(AssertionError):
        run(tmp_path, monkeypatch, client="opencode", write=True)
    assert "add by hand" in capsys.readouterr().err
    assert path.read_text() == "{} // mine"
    assert [file.name for file in path.parent.iterdir()] == ["opencode.json"]


def test_a_file_of_our_own_is_replaced_and_the_old_one_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".codex" / "warmturn.config.toml"
    path.parent.mkdir()
    path.write_text("old")
    run(tmp_path, monkeypatch, client="codex", write=True)
    assert tomllib.loads(path.read_text())["model"] == "m"
    assert path.with_name("warmturn.config.toml.bak").read_text() == "old"


@pytest.mark.parametrize(
    ("given", "status", "answer", "said"),
    [
        ({"client": "emacs"}, 200, None, "CLIENT: expected one of claude, "),
        ({"client": "codex", "model": "other"}, 200, None, "--model: the server has m"),
        ({"client": "codex"}, 401, None, "--api-key: "),
        ({"client": "codex"}, 503, {"error": {"message": "It is loading."}}, "--url: It is loading."),
        ({"client": "codex"}, 200, {"data": [{"id": "m"}]}, "does not have this API"),
        ({"client": "codex"}, 200, {"models": []}, "does not have this API"),
    ],
)
def test_what_is_refused(
    given: dict[str, object],
    status: int,
    answer: object,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        run(tmp_path, monkeypatch, status, answer, **given)


def test_no_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no server answers at http://127\.0\.0\.1:9"):
        connect(ConnectConfig(url="http://127.0.0.1:9", client="codex"))
