"""The README names only what is there."""

import re
from pathlib import Path

import pytest

from server.config.command_line import flag
from server.config.serve_options import ServeConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
FLAGS = {flag(name) for name in ServeConfig.model_fields if name != "model"}


def test_every_make_target_exists() -> None:
    named = set(re.findall(r"`?make ([a-z][a-z-]*)", README))
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    assert named >= {"serve", "test", "check"}
    assert named <= targets


def test_the_makefiles_targets_are_phony() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert set(phony.group(1).split()) == targets


def test_the_table_has_every_flag_and_no_other() -> None:
    assert set(re.findall(r"^\| `(--[a-z-]+)`", README, re.MULTILINE)) == FLAGS
    assert set(re.findall(r"(?<![a-z-])--[a-z][a-z-]*", README)) <= FLAGS


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:docs|\.ci)/[a-z./]+|[A-Z]+)`", README)) - {"NAME"}))
def test_every_file_exists(name: str) -> None:
    assert (ROOT / name).exists() or name.startswith("WARMTURN_")


def test_ci_runs_the_readmes_own_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert {"make check", "make test"} <= {line.partition("#")[0].strip() for line in script.splitlines()}
