"""Reads the file of `warmturn cluster --env-file`: secrets, in the format of systemd's EnvironmentFile."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from server.config.command_line import environment_variable
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError

SECRETS = ("api_key", "database", "remote")  # fields of ServeConfig that Ray is never told: it logs what it is told
OTHERS = 0o077  # permissions of everybody but the owner
MOST_BYTES = 2**20
ASSIGNMENT = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"
    r"(?:'(?P<single>[^']*)'|\"(?P<double>(?:[^\"\\]|\\.)*)\"|(?P<plain>(?:(?:[^'\"\\]|\\.)(?:[^\\]|\\.)*)?))"
)


def read(path: Path) -> dict[str, str]:
    """The variables of the file at ``path``. Raises UsageError, which says nothing of the file's contents but names of
    variables, unless it is a plain file of this user that nobody else may read or write, and all of it is understood.
    Of the settings of the server only the secrets may be in it; variables of others (AWS_..., HF_TOKEN) may too."""
    variables = parse(_text(path))
    known = [environment_variable(ServeConfig, name) for name in SECRETS]
    for name in variables:
        if name.upper().startswith("WARMTURN_") and name not in known:
            raise UsageError(f"--env-file: {name} is not one of {', '.join(known)}; other settings are flags")
    return variables


def fields(variables: Mapping[str, str]) -> dict[str, str]:
    """The secrets among ``variables``, by the names of their fields."""
    named = {name: environment_variable(ServeConfig, name) for name in SECRETS}
    return {name: variables[variable] for name, variable in named.items() if variable in variables}


def parse(text: str) -> dict[str, str]:
    """The variables in ``text``: NAME=VALUE lines, and empty lines and comments (# or ;). Quotes and backslashes in
    values are read as systemd does; a value is on one line. Raises UsageError, which names the line's number only."""
    variables: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        found = ASSIGNMENT.fullmatch(line)
        if found is None or "\0" in line:
            raise UsageError(f"--env-file: line {number} is not NAME=VALUE on one line, with closed quotes")
        if found["single"] is not None:
            value = found["single"]
        elif found["double"] is not None:
            value = re.sub(r'\\(["\\`$])', r"\1", found["double"])
        else:
            value = re.sub(r"\\(.)", r"\1", found["plain"])
        variables[found["name"]] = value
    return variables


def _text(path: Path) -> str:
    """What is in the file, which is checked after it was opened, so that no other file can take its place."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise UsageError(f"--env-file: {path} is not a plain file")
            if about.st_uid != os.geteuid():
                raise UsageError(f"--env-file: {path} belongs to another user")
            if about.st_mode & OTHERS:
                raise UsageError(f"--env-file: {path} must not be accessible to other users: chmod 600")
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--env-file: {path} cannot be read on this node: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise UsageError(f"--env-file: {path} is larger than 1 MiB")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise UsageError(f"--env-file: {path} is not UTF-8") from None
