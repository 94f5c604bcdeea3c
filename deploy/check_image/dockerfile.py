"""A Dockerfile as stages of instructions, and a .dockerignore as the files that it lets through.

As much of the two formats as ours use; anything else is a ``ValueError`` rather than a guess.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

KEYWORDS = "ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM HEALTHCHECK LABEL RUN STOPSIGNAL USER VOLUME WORKDIR".split()
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


@dataclass(frozen=True)
class Instruction:
    """``flags`` are those with two dashes; ``text`` is what follows them, on one line."""

    keyword: str
    text: str
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The arguments, in the form of a JSON list or of words with quotes."""
        if self.text.startswith("["):
            listed = json.loads(self.text)
            return [str(word) for word in listed]
        return shlex.split(self.text)

    @property
    def pairs(self) -> dict[str, str]:
        """NAME=VALUE arguments; a name without a value is ''."""
        return {name: value for name, _, value in (word.partition("=") for word in self.words)}


@dataclass(frozen=True)
class Stage:
    """``base`` is an image or the name of an earlier stage."""

    base: str
    name: str | None
    instructions: tuple[Instruction, ...]


def read(text: str) -> list[Stage]:
    """The stages of a Dockerfile, in order."""
    stages: list[Stage] = []
    waiting: list[Instruction] = []
    head: Instruction | None = None
    for instruction in [*_instructions(text), None]:
        if instruction is not None and instruction.keyword != "FROM":
            if head is None:
                raise ValueError(f"{instruction.keyword} before FROM")
            waiting.append(instruction)
            continue
        if head is not None:
            base, *rest = head.words
            stages.append(Stage(base, rest[1] if rest else None, tuple(waiting)))
        head, waiting = instruction, []
    return stages


def _instructions(text: str) -> Iterator[Instruction]:
    for line in _lines(text):
        keyword, _, rest = line.partition(" ")
        if keyword.upper() not in KEYWORDS:
            raise ValueError(f"{keyword} is not understood here")
        flags: dict[str, str] = {}
        rest = rest.strip()
        while rest.startswith("--"):
            flag, _, rest = rest.partition(" ")
            name, _, value = flag[2:].partition("=")
            flags[name] = value
            rest = rest.strip()
        yield Instruction(keyword.upper(), rest, flags)


def _lines(text: str) -> Iterator[str]:
    """Without comments and empty lines, continued lines joined."""
    joined = ""
    for line in text.splitlines():
        if line.strip().startswith("#") or not line.strip():
            continue
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1]
        else:
            yield (joined + line).strip()
            joined = ""


def substituted(text: str, values: Mapping[str, str]) -> str:
    """``$NAME`` and ``${NAME}`` replaced; a name without a value is ''."""
    return _VARIABLE.sub(lambda found: values.get(found[1] or found[2], ""), text)


class Ignored:
    """What a .dockerignore keeps out of a build: the last pattern that matches a path or a folder above it decides."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self._patterns = [line for line in lines if line and not line.startswith("#")]

    def __call__(self, path: PurePosixPath) -> bool:
        ignored = False
        for pattern in self._patterns:
            kept = pattern.startswith("!")
            if any(_matches(above, pattern.removeprefix("!")) for above in (path, *path.parents)):
                ignored = not kept
        return ignored


def _matches(path: PurePosixPath, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return any(_matches(PurePosixPath(*path.parts[n:]), pattern[3:]) for n in range(len(path.parts)))
    parts = pattern.strip("/").split("/")
    return len(parts) == len(path.parts) and all(map(fnmatchcase, path.parts, parts))


def context_files(context: Path, ignored: Ignored, wanted: str) -> list[PurePosixPath]:
    """What the build may see of ``wanted``, a file or folder of the context: files, relative to the context."""
    start = context / wanted
    found = [start] if start.is_file() else sorted(path for path in start.rglob("*") if path.is_file())
    paths = [PurePosixPath(path.relative_to(context).as_posix()) for path in found]
    return [path for path in paths if not ignored(path)]
