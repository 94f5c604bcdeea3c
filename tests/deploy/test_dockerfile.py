"""The Dockerfile: linted, and held against what it installs and starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath

import pytest
from packaging.specifiers import SpecifierSet

from deploy.check_image.dockerfile import Ignored, Instruction, Stage, context_files, read
from server.config.command_line import environment_variable, parse
from server.config.serve_options import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
STAGES = read((ROOT / "Dockerfile").read_text())
IGNORED = Ignored((ROOT / ".dockerignore").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETTINGS = {environment_variable(ServeConfig, name) for name in ServeConfig.model_fields}


def found(keyword: str, stages: list[Stage] = STAGES) -> list[Instruction]:
    return [each for stage in stages for each in stage.instructions if each.keyword == keyword]


def environment() -> dict[str, str]:
    return {name: value for each in found("ENV", STAGES[-1:]) for name, value in each.pairs.items()}


def test_the_linter_finds_nothing() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    ran = subprocess.run([linter, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.stdout == ""
    assert ran.returncode == 0


def test_torch_is_the_pinned_one() -> None:
    arguments = {name: value for each in found("ARG") for name, value in each.pairs.items()}
    pinned = re.search(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None
    assert arguments["TORCH"] == pinned[1]
    assert set(arguments["EXTRAS"].split()) <= set(PROJECT["project"]["optional-dependencies"])


def test_all_stages_have_the_same_python_and_it_will_do() -> None:
    images = {stage.base for stage in STAGES} - {stage.name for stage in STAGES}
    assert len(images) == 1
    version = re.match(r"python:(\d\.\d+)-slim", images.pop())
    assert version is not None
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(version[1])
    assert set(re.findall(r"python(\d\.\d+)", (ROOT / "Dockerfile").read_text())) == {version[1]}


def test_what_is_installed_before_the_source_are_the_projects_requirements(tmp_path: Path) -> None:
    [step] = [each.text for each in found("RUN") if "tomllib" in each.text]
    command = step.partition("&&")[0].replace("$EXTRAS", "postgres gguf").replace("python3", sys.executable)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    project = PROJECT["project"]
    expected = [*project["dependencies"], *project["optional-dependencies"]["postgres"]]
    assert (tmp_path / "requirements.txt").read_text().split("\n") == [*expected, "gguf>=0.17", ""]


def test_the_packages_of_the_wheel_are_copied_and_nothing_besides_is_sent() -> None:
    copied = [word for each in found("COPY") if "from" not in each.flags for word in each.words[:-1]]
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
    for name in copied:
        assert context_files(ROOT, IGNORED, name), name
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    sent = {name for name in tracked if not IGNORED(PurePosixPath(name))}
    if tracked:  # else this is no clone
        assert {name for name in sent if not name.startswith(tuple(f"{copy}/" for copy in copied))} <= set(copied)


def test_its_settings_are_settings_and_its_folders_are_volumes() -> None:
    given = {name: value for name, value in environment().items() if name.startswith("WARMTURN_")}
    assert set(given) <= SETTINGS
    volumes = {word for each in found("VOLUME") for word in each.words}
    assert {given["WARMTURN_DATA_DIR"], environment()["HF_HOME"]} == volumes
    assert environment()["TRITON_CACHE_DIR"].startswith(given["WARMTURN_DATA_DIR"] + "/")
    assert environment()["TORCHINDUCTOR_CACHE_DIR"].startswith(given["WARMTURN_DATA_DIR"] + "/")
    assert [each.text for each in found("EXPOSE")] == [given["WARMTURN_PORT"]]


def test_the_command_is_one_and_the_user_a_number() -> None:
    [entry], [command], [user] = found("ENTRYPOINT"), found("CMD"), found("USER")
    assert entry.words == ["tini", "--", *PROJECT["project"]["scripts"]]
    assert isinstance(parse(command.words), ServeConfig)
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user.text)


@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check_asks_the_port_that_is_set(status: int) -> None:
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    [check] = found("HEALTHCHECK")
    program, *arguments = Instruction("CMD", check.text.removeprefix("CMD ")).words
    assert program == "python"
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = {"WARMTURN_PORT": str(server.server_address[1])}
        command = [sys.executable, *arguments]
        ran = subprocess.run(command, env={**os.environ, **port}, capture_output=True, check=False, timeout=60)
        server.shutdown()
    assert asked == ["/health"]
    assert (ran.returncode == 0) is (status == 200)
