"""What the deployments share: what the image gives, and how long a server takes to stop."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import yaml

from deploy.check_image.dockerfile import read
from server.config.command_line import environment_variable
from server.config.serve_options import ServeConfig
from server.engine.engine_link import TERMINATE_GRACE
from server.engine.engine_process import EngineProcess
from server.instance import FLUSH_SECONDS, HTTP_SECONDS

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
SETTINGS = {environment_variable(ServeConfig, name): name for name in ServeConfig.model_fields}
OTHERS = {"HF_TOKEN"}  # variables that are others' than ours

_IMAGE = read((ROOT / "Dockerfile").read_text())[-1].instructions
VOLUMES = {word for each in _IMAGE if each.keyword == "VOLUME" for word in each.words}
USER, GROUP = (int(number) for each in _IMAGE if each.keyword == "USER" for number in each.text.split(":"))
PORT = next(int(each.text) for each in _IMAGE if each.keyword == "EXPOSE")


def longest_stop(drain: str | None) -> float:
    """Seconds from SIGTERM to the exit, at most, with this value of WARMTURN_DRAIN_SECONDS."""
    config = ServeConfig() if drain is None else ServeConfig(drain_seconds=float(drain))
    seconds = config.drain_seconds
    engine = float(inspect.signature(EngineProcess.stop).parameters["grace"].default) + TERMINATE_GRACE
    return seconds + min(seconds, FLUSH_SECONDS) + engine + 2 * HTTP_SECONDS


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]
