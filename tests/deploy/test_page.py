"""docs/deploy.md names only what is there."""

from __future__ import annotations

import re

from deploy_kit import DEPLOY, ROOT, SETTINGS, documents

from server import __version__
from server.config.command_line import flag

PAGE = (ROOT / "docs" / "deploy.md").read_text()
FOREIGN = """--build --build-arg --cap-drop --from-literal --gpus --profile --read-only --rm --security-opt --set
--shm-size --stop-timeout --tmpfs --system --home-dir --shell --now"""


def test_settings_and_flags_exist() -> None:
    assert set(re.findall(r"WARMTURN_[A-Z_]+", PAGE)) <= set(SETTINGS)
    ours = {flag(name) for name in SETTINGS.values()}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE)) <= {*ours, *FOREIGN.split()}


def test_files_targets_and_profiles_exist() -> None:
    names = set(re.findall(r"`((?:deploy|docs)/[\w./-]+|[A-Za-z]+\.(?:md|txt|toml))`", PAGE))
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", PAGE)) <= targets
    [compose] = documents(DEPLOY / "compose.yaml")
    profiles = {profile for service in compose["services"].values() for profile in service["profiles"]}
    assert set(re.findall(r"--profile (\w+)", PAGE)) == profiles


def test_images_have_this_version() -> None:
    assert set(re.findall(r"warmturn:([\d.]+\d)|newTag: ([\d.]+\d)", PAGE)) == {(__version__, ""), ("", __version__)}
