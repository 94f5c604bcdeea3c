"""`warmturn keys`: adds, lists and revokes API keys in a key file, which a running server reads again."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from server.config.keys_options import KeysConfig
from server.config.usage_error import UsageError
from server.middleware.key_file import KeyEntry, KeyFileError, new_key, read_keys, write_keys

HEADING = ("ID", "TENANT", "CREATED", "REQUESTS/MIN", "TOKENS/MIN", "SESSIONS", "BYTES", "MODELS")


def keys(config: KeysConfig, terminal: TextIO | None = None) -> int:
    """Run the action; the exit status: 0, or 1 where there is no such key. Raises UsageError."""
    out = terminal or sys.stdout
    if config.key_file is None:
        raise UsageError("--key-file: name the file of the keys (or set WARMTURN_KEY_FILE)")
    if config.name is None and config.action != "list":
        raise UsageError(f"NAME: {config.action} needs {'a tenant' if config.action == 'add' else 'the id of a key'}")
    path = config.key_file.expanduser()
    try:
        entries = read_keys(path) if path.exists() else []
        if config.action == "list":
            out.writelines(f"{line}\n" for line in table(entries))
            return 0
        assert config.name is not None
        if config.action == "add":
            return add(config, path, entries, out)
        return revoke(config.name, path, entries, out)
    except KeyFileError as error:
        raise UsageError(f"--key-file: the file {error}") from None


def add(config: KeysConfig, path: Path, entries: list[KeyEntry], out: TextIO) -> int:
    """Add a key and print it: it is kept nowhere."""
    assert config.name is not None
    rates = config.requests_per_minute, config.tokens_per_minute
    most_bytes = None if config.max_bytes is None else int(config.max_bytes)
    key, entry = new_key(config.name, *rates, config.key_models, config.max_sessions, most_bytes)
    write_keys(path, [*entries, entry])
    out.write(f"{key}\n")
    print(f"key {entry.id} of {entry.tenant}: it is shown this once", file=sys.stderr)
    return 0


def revoke(name: str, path: Path, entries: list[KeyEntry], out: TextIO) -> int:
    """Remove the key with this id, or all keys of a tenant of this name."""
    gone = [entry for entry in entries if name in (entry.id, entry.tenant)]
    if not gone:
        print("warmturn: there is no such key", file=sys.stderr)
        return 1
    write_keys(path, [entry for entry in entries if entry not in gone])
    out.writelines(f"revoked {entry.id} of {entry.tenant}\n" for entry in gone)
    return 0


def table(entries: list[KeyEntry]) -> list[str]:
    """The keys, a line each, below a heading."""
    rows: list[tuple[str, ...]] = [HEADING]
    for entry in entries:
        created = datetime.fromtimestamp(entry.created, UTC).strftime("%Y-%m-%d") if entry.created else "-"
        limits = entry.requests_per_minute, entry.tokens_per_minute, entry.max_sessions, entry.max_bytes
        told = ["-" if limit is None else str(limit) for limit in limits]
        models = "all" if entry.models is None else ",".join(entry.models)
        rows.append((entry.id, entry.tenant, created, *told, models))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
