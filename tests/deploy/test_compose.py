"""compose.yaml: valid, with settings that exist, and time to stop."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import PurePosixPath
from typing import Any

import pytest
from deploy_kit import DEPLOY, OTHERS, PORT, SETTINGS, VOLUMES, documents, longest_stop

from deploy.check_image.__main__ import GRACE
from server import __version__
from server.config.command_line import parse
from server.config.serve_options import ServeConfig

FILE = DEPLOY / "compose.yaml"
[COMPOSE] = documents(FILE)
SERVERS: dict[str, dict[str, Any]] = {
    name: service for name, service in COMPOSE["services"].items() if service["image"].startswith("warmturn:")
}
CLUSTER = [service["environment"] for service in SERVERS.values() if service["profiles"] == ["cluster"]]


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def test_it_is_a_compose_file() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_there_is_a_profile_for_each_use() -> None:
    assert {profile for service in COMPOSE["services"].values() for profile in service["profiles"]} == {
        "cpu",
        "gpu",
        "cluster",
    }
    assert all(service["image"].partition(":")[2].startswith(__version__) for service in SERVERS.values())


@pytest.mark.parametrize("name", SERVERS)
def test_every_setting_exists(name: str) -> None:
    service = SERVERS[name]
    assert set(service["environment"]) <= {*SETTINGS, *OTHERS}
    values = {SETTINGS[key]: value for key, value in service["environment"].items() if key in SETTINGS and value}
    assert ServeConfig(**values)
    command = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"]]
    assert isinstance(parse(command), ServeConfig)


@pytest.mark.parametrize("name", SERVERS)
def test_all_that_is_written_outlives_the_container(name: str) -> None:
    service = SERVERS[name]
    assert service["read_only"]
    assert service["tmpfs"] == ["/tmp"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}
    assert set(mounted) == VOLUMES
    assert set(mounted.values()) <= set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_has_the_time_that_it_takes_to_stop(name: str) -> None:
    service = SERVERS[name]
    grace = seconds(service["stop_grace_period"])
    assert longest_stop(service["environment"].get("WARMTURN_DRAIN_SECONDS")) < grace
    assert grace == GRACE
    assert grace <= seconds(COMPOSE["services"]["router"]["stop_grace_period"])


def test_only_this_machine_reaches_a_server_unless_told_otherwise() -> None:
    for service in COMPOSE["services"].values():
        for port in service.get("ports", []):
            assert re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", port) == f"127.0.0.1:8000:{PORT}"


def test_replicas_share_all_but_their_data_dirs() -> None:
    own = [each["WARMTURN_DATA_DIR"] for each in CLUSTER]
    shared = [{name: value for name, value in each.items() if name != "WARMTURN_DATA_DIR"} for each in CLUSTER]
    assert len(set(own)) == len(own) == 2
    assert shared[0] == shared[1]
    log = shared[0]["WARMTURN_DATABASE"].removeprefix("sqlite:///")
    remote = shared[0]["WARMTURN_REMOTE"].removeprefix("file://")
    below = {PurePosixPath(path).parent for path in [*own, log, remote]}
    assert {str(folder) for folder in below} <= VOLUMES


def test_the_router_knows_the_replicas() -> None:
    router = COMPOSE["services"]["router"]
    [file, spool] = [volume.split(":") for volume in router["volumes"]]
    text = (FILE.parent / file[0]).read_text()
    assert f"client_body_temp_path {spool[1]};" in text  # capsules of gigabytes: not into memory
    upstreams = set(re.findall(r"^\s*server\s+([\w.-]+):(\d+)\b", text, re.MULTILINE))
    assert upstreams == {(name, str(PORT)) for name in router["depends_on"]}
    assert set(router["depends_on"]) == {name for name in SERVERS if SERVERS[name]["profiles"] == ["cluster"]}
    assert re.search(rf"^\s*listen\s+(\S+:)?{PORT}\b", text, re.MULTILINE)
