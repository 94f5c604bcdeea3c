"""The configuration of each client for a server: files below the home folder, and the command that starts the client.

``clients.json`` has them as lines with ``$name`` where a fact about the server stands: a JSON string or number, which
TOML and YAML read as well, and a quoted word in what a shell reads.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

DATA = Path(__file__).with_name("clients.json")
OUTPUT_TOKENS = 32_000  # of a reply at most, where a client wants to know; less with a short context
SHELL = ".env"  # files that a shell reads


@dataclass(frozen=True)
class ServedModel:
    """What a client has to know: ``url`` without /v1, the key, the model's name, its context in tokens."""

    url: str
    key: str
    name: str
    context: int

    def words(self) -> dict[str, str | int]:
        """The values of the names in ``clients.json``."""
        output = min(OUTPUT_TOKENS, self.context // 4)
        return {
            "url": self.url,
            "api": f"{self.url}/v1",
            "chat": f"{self.url}/v1/chat/completions",
            "key": self.key,
            "model": self.name,
            "openai_model": f"openai/{self.name}",
            "provider_model": f"warmturn/{self.name}",
            "context": self.context,
            "context_text": str(self.context),
            "output": output,
            "output_text": str(output),
        }


@dataclass(frozen=True)
class SettingsFile:
    """A file of a client. ``path`` is below the home folder; ``merge``: JSON that has other settings too."""

    path: str
    text: str
    merge: bool = False


@dataclass(frozen=True)
class ClientSettings:
    """The configuration of one client: its name for people, its files, the command that starts it with them."""

    title: str
    files: tuple[SettingsFile, ...]
    run: str


def client_names() -> dict[str, str]:
    """Every known client and its name for people."""
    return {name: client["title"] for name, client in _read().items()}


def client_settings(client: str, served: ServedModel) -> ClientSettings:
    """The configuration of ``client``. Raises KeyError for one that is not known."""
    found, words = _read()[client], served.words()
    files = tuple(
        SettingsFile(
            file["path"], _fill("\n".join(file["lines"]) + "\n", words, file["path"]), file.get("merge", False)
        )
        for file in found["files"]
    )
    return ClientSettings(found["title"], files, _fill(found["run"], words, SHELL))


def merge_settings(old: Any, new: Any, ours: bool = False) -> Any:
    """``old`` with what ``new`` adds: values that are there stay, but for those below a key "warmturn"."""
    if ours or not (isinstance(old, dict) and isinstance(new, dict)):
        return new if ours else old
    added = {key: value for key, value in new.items() if key not in old}
    return {
        key: merge_settings(value, new[key], key == "warmturn") if key in new else value for key, value in old.items()
    } | added


def _read() -> dict[str, Any]:
    clients: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return clients


def _fill(text: str, words: dict[str, str | int], path: str) -> str:
    """``text`` with the words in the syntax of the file that it is for."""
    quote = (lambda word: shlex.quote(str(word))) if path.endswith(SHELL) else json.dumps
    return Template(text).substitute({name: quote(word) for name, word in words.items()})
