"""`warmturn connect CLIENT`: prints the configuration of a client for a running server, or writes it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import httpx

from server.cli.connect.client_settings import (
    ClientSettings,
    ServedModel,
    SettingsFile,
    client_names,
    client_settings,
    merge_settings,
)
from server.cli.remote_server import explain
from server.config.connect_options import ConnectConfig
from server.config.usage_error import UsageError

TIMEOUT = 10.0  # seconds until a server that does not answer is given up
NO_KEY = "none"  # clients want some key


class NotWritten(Exception):
    """A file was left as it is; the text is one line for the user."""


def connect(config: ConnectConfig, client: httpx.Client | None = None, terminal: TextIO | None = None) -> int:
    """Print or write; the exit status: 0, or 1 after one line on standard error where a file cannot be written. Raises
    UsageError for a client that is not known, and when no server answers."""
    out = terminal or sys.stdout
    names = client_names()
    if not config.client:
        out.writelines(f"{name:<10} {title}\n" for name, title in names.items())
        return 0
    if config.client not in names:
        raise UsageError(f"CLIENT: expected one of {', '.join(names)}")
    settings = client_settings(config.client, _ask(config, client))
    try:
        for file in settings.files:
            if config.write:
                out.write(f"wrote {_write(file, Path.home())}\n")
            else:
                out.write(f"# ~/{file.path}{' (to be merged)' if file.merge else ''}\n{file.text}\n")
    except (NotWritten, OSError) as error:
        reason = error if isinstance(error, NotWritten) else f"~/{file.path}: {error.strerror}"
        print(f"warmturn: {reason}", file=sys.stderr)
        return 1
    out.write(_start(settings, config.write))
    return 0


def _start(settings: ClientSettings, written: bool) -> str:
    """The last lines: how the client is started."""
    lead = f"start {settings.title} with:" if written or not settings.files else "# then:"
    return f"{lead}\n{settings.run}\n"


def _ask(config: ConnectConfig, client: httpx.Client | None) -> ServedModel:
    """The model that the server has, and its context."""
    base = config.url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    try:
        with client or httpx.Client(base_url=base, timeout=TIMEOUT) as http:
            answer = http.get("/v1/models", headers=headers)
    except httpx.HTTPError:
        raise UsageError(f"no server answers at {config.url}; `warmturn serve` starts one") from None
    if answer.status_code == 401:
        raise UsageError("--api-key: the server refused this key, or needs one")
    if not answer.is_success:
        raise UsageError(f"--url: {explain(answer)}")
    try:
        models: list[Any] = answer.json()["data"]
        found = next((model for model in models if config.model in (None, model["id"])), None)
        if found is None:
            raise UsageError(f"--model: the server has {', '.join(model['id'] for model in models)}")
        if found["warmturn"] is None:
            raise UsageError(f"--model: {found['id']} is not loaded: a request for it loads it")
        return ServedModel(base, config.api_key or NO_KEY, found["id"], int(found["warmturn"]["max_context"]))
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"the program at {config.url} does not have this API") from None


def _write(file: SettingsFile, home: Path) -> Path:
    """Write a file that only its owner can read, as there may be a key in it. What was there and is changed is kept
    beside it, with ``.bak`` behind its name. Raises NotWritten."""
    path = home / file.path
    old = path.read_text(encoding="utf-8") if path.exists() else None
    text = file.text if old is None or not file.merge else _merge(file, old)
    if old == text:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if old is not None:
        _replace(path.with_name(f"{path.name}.bak"), old)
    _replace(path, text)
    return path


def _merge(file: SettingsFile, old: str) -> str:
    """The settings of a file with ours."""
    try:
        there = json.loads(old) if old.strip() else {}
    except ValueError:
        there = None
    if not isinstance(there, dict):
        raise NotWritten(f"~/{file.path} is not plain JSON: add by hand what is printed without --write")
    whole = merge_settings(there, json.loads(file.text))
    return old if whole == there else json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _replace(path: Path, text: str) -> None:
    """A whole new file in place of the old one, with mode 0600; a link is followed."""
    path = path.resolve()
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            out.write(text)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
