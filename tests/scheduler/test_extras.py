"""The command that installs an extra is one that works where it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler import extras


def test_in_a_source_tree_it_is_the_trees_own() -> None:
    root = Path(extras.__file__).resolve().parent.parent
    assert extras.install_command("gguf") == f"pip install -e '{root}[gguf]'"


def test_of_an_installed_package_it_is_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    assert extras.install_command("ray") == "pip install 'warmturn[ray]'"
