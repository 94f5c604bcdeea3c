"""`warmturn cluster --env-file`: secrets that each replica reads itself, and Ray is not told."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from cluster.test_deploying import ENVIRONMENT, NoRay, config, started

from server.cluster import env_file, ray_serve, replica
from server.cluster.replica import Replica
from server.config.command_line import parse
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError
from server.telemetry import log_context

SECRETS = ("s3cret", "key1", "key2", "bucket", "cloud-key")
OF_PYTEST = {"PYTEST_CURRENT_TEST"}  # a variable that pytest sets


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(log_context, "configure", lambda *_: None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secrets.env"
    lines = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    path.write_text("\n".join(["# of the cluster", *lines, "AWS_SECRET_ACCESS_KEY='cloud-key'", ""]))
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("", {}),
        ("# A=1\n; B=2\n\n \t\nC=3", {"C": "3"}),
        ("A=1\r\n  B =  two words \t\n", {"A": "1", "B": "two words"}),
        ("A=", {"A": ""}),
        ("A=postgresql://u:p@h/d?a=b#c", {"A": "postgresql://u:p@h/d?a=b#c"}),
        ('A=it\'s "so"', {"A": 'it\'s "so"'}),
        ("A=' \"b\\$c '", {"A": ' "b\\$c '}),
        ('A=" \\"\\$\\\\\\`\\n#\' "', {"A": " \"$\\`\\n#' "}),
        ("A=a\\ \\\\b", {"A": "a \\b"}),
        ("A=1\nA=2", {"A": "2"}),
    ],
)
def test_it_is_read_as_by_systemd(text: str, variables: dict[str, str]) -> None:
    assert env_file.parse(text) == variables


@pytest.mark.parametrize(
    "line",
    ["s3cret", "export A=s3cret", "=s3cret", "A='s3cret", 'A="s3cret', "A='s3cret'b", "A=s3cret\\", "A=s3cret\0"],
)
def test_a_line_that_is_not_understood_is_refused_and_not_shown(line: str) -> None:
    with pytest.raises(UsageError, match=r"^--env-file: line 2 is not NAME=VALUE") as refused:
        env_file.parse(f"A=1\n{line}\nB=2")
    assert "s3cret" not in str(refused.value)


def test_it_is_of_this_user_and_closed_to_others(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in (0o600, 0o400):
        file.chmod(mode)
        assert env_file.fields(env_file.read(file))["database"] == ENVIRONMENT["WARMTURN_DATABASE"]
    for mode in (0o640, 0o604, 0o620, 0o601):
        file.chmod(mode)
        with pytest.raises(UsageError, match=r"^--env-file: .* must not be accessible to other users: chmod 600$"):
            env_file.read(file)
    file.chmod(0o600)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UsageError, match=r"^--env-file: .* belongs to another user$"):
        env_file.read(file)


def test_what_is_no_such_file_is_refused(tmp_path: Path, file: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path, fault in ((tmp_path / "none", "cannot be read"), (tmp_path / "fifo", "is not a plain file")):
        with pytest.raises(UsageError, match=f"^--env-file: {path} {fault}"):
            env_file.read(path)
    for content, fault in ((b"A=\xff", "is not UTF-8"), (b"#" * (2**20 + 1), "is larger than 1 MiB")):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=fault):
            env_file.read(file)


@pytest.mark.parametrize("name", ["WARMTURN_KV_MEMORY", "WARMTURN_API_KEYS", "warmturn_api_key"])
def test_other_settings_are_not_in_it(file: Path, name: str) -> None:
    file.write_text(f"{name}=s3cret")
    with pytest.raises(UsageError, match=f"^--env-file: {name} is not one of WARMTURN_API_KEY, ") as refused:
        env_file.read(file)
    assert "s3cret" not in str(refused.value)


def test_only_its_path_is_told(ray: None, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    for there in ([], ["--ray-address", "auto"]):
        given = config("--env-file", file.name, *there)
        whole = ray_serve.with_file(given, given.model_fields_set)
        ray_serve.check_shared(whole)
        assert whole.api_key == {"ann": "key1", "bob": "key2"}
        no_ray = NoRay()
        ray_serve.begin(no_ray, whole)
        assert {*no_ray.inherited} <= OF_PYTEST
        (application,) = ray_serve.deployment(whole)["applications"]
        built = ray_serve.build(application["args"])
        deployment = built._bound_deployment
        settings, needs, path = deployment.init_args
        assert (needs, path) == ([*ENVIRONMENT], str(file))
        serialised = deployment._deployment_config.to_proto_bytes() + pickle.dumps((settings, needs, path))
        told = str((no_ray.told, ray_serve.deployment(whole), deployment._replica_config.ray_actor_options)).encode()
        assert not [secret for secret in SECRETS if secret.encode() in serialised + told]
        assert {*os.environ} <= OF_PYTEST


def test_what_is_in_it_is_not_told_otherwise(ray: None, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"api_key": "eve=other", "database": "postgresql://other", "remote": "s3://other"}
    for name, value in arguments.items():
        variable = f"WARMTURN_{name.upper()}"
        flags = config("--env-file", str(file), f"--{name.replace('_', '-')}", value)
        with pytest.raises(UsageError, match=f"^--env-file: {variable} is in the file and ") as refused:
            ray_serve.cluster(flags)
        assert "other" not in str(refused.value)
        with pytest.raises(UsageError, match=f"^--env-file: {variable} "):
            ray_serve.build({"env_file": str(file), name: value})
        monkeypatch.setitem(os.environ, variable, value)
        with pytest.raises(UsageError, match=f"^--env-file: {variable} "):
            ray_serve.cluster(config("--env-file", str(file)))
        monkeypatch.delitem(os.environ, variable)


def test_a_replica_reads_it_before_its_configuration(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Read(Exception):
        pass

    def seen(served: ServeConfig, _: Any) -> ServeConfig:
        assert served.api_key == {"ann": "key1", "bob": "key2"}
        assert (served.database, served.remote) == (ENVIRONMENT["WARMTURN_DATABASE"], ENVIRONMENT["WARMTURN_REMOTE"])
        raise Read

    monkeypatch.setattr(replica, "own_folder", seen)
    os.environ["WARMTURN_API_KEY"] = "of=the-node"
    with pytest.raises(Read):
        started(Replica({}, [*ENVIRONMENT], str(file)))
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "cloud-key"


def test_a_replica_whose_node_lacks_it_says_so(file: Path) -> None:
    missing = file.with_name("none")
    told = f"--env-file: {missing} cannot be read on this node: No such file or directory"
    failed = Replica({}, [*ENVIRONMENT], str(missing))
    assert started(failed) == [{"type": "lifespan.startup.failed", "message": told}]
    file.write_text("WARMTURN_API_KEY=key1")
    (sent,) = started(Replica({}, ["WARMTURN_API_KEY"], str(file)))
    assert sent["type"] == "lifespan.startup.failed"
    assert sent["message"].startswith("WARMTURN_API_KEY: expected NAME=KEY")
    assert "key1" not in sent["message"]


def test_it_is_a_flag_of_the_cluster_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["cluster", "--help"])
    assert "--env-file FILE" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--env-file"):
        parse(["serve", "--env-file", "file"])
