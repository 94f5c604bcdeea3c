"""How an extra is installed here: by its name, or where the server runs from a source tree, from that."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def install_command(extra: str) -> str:
    """The command that installs it."""
    if (_ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{_ROOT}[{extra}]'"
    return f"pip install 'warmturn[{extra}]'"
