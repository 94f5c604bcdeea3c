"""The ``pip`` command that installs an extra of this package, from the index or from the source tree."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def install_command(extra: str) -> str:
    if (_ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{_ROOT}[{extra}]'"
    return f"pip install 'warmturn[{extra}]'"
