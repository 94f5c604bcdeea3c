"""`warmturn sessions VERB ...`: the verbs and their arguments. What they do is in ``server.cli.sessions_terminal``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from server.config.serve_options import ClientConfig


@dataclass(frozen=True)
class SessionsCommand:
    """A parsed command: where the server is, what is wanted, and of what. Every argument of the verb has a key."""

    config: ClientConfig
    verb: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Argument:
    """A positional when ``name`` has no dashes. ``metavar`` None: a flag without a value; ``many``: repeatable."""

    name: str
    help: str
    metavar: str | None = None
    kind: Callable[[str], object] = str
    many: bool = False
    optional: bool = False

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """As argparse has it."""
        options: dict[str, Any] = {"help": self.help}
        if self.metavar is None:
            options["action"] = "store_true"
        else:
            options |= {"metavar": self.metavar, "type": self.kind}
        if self.many:
            options |= {"action": "append", "default": []}
        if self.optional:
            options["nargs"] = "?"
        parser.add_argument(self.name, **options)


def seconds_or_none(text: str) -> int | None:
    """A whole number, or nothing for "none"."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError("expected a number of seconds, or none") from None


SESSION = Argument("session", "its id", "SESSION")
NEW_ID = Argument("--id", "id of the new session (default: one that the server makes)", "ID")
METADATA = Argument("--metadata", "a pair, repeatable", "KEY=VALUE", many=True)
JSON = Argument("--json", "print what the server answers, as JSON")

VERBS: dict[str, tuple[str, tuple[Argument, ...]]] = {
    "list": (
        "The sessions, those used last first.",
        (
            Argument("--limit", "at most so many, 1 to 100 (default: 20)", "N", int),
            Argument("--after", "those behind this one in the list", "SESSION"),
            Argument("--order", "desc: used last first (default); asc: used last at the end", "asc|desc"),
            Argument("--prefix", "only ids that begin with this", "TEXT"),
            Argument("--used-after", "only those used later, in Unix seconds", "TIME", int),
            Argument("--used-before", "only those used earlier, in Unix seconds", "TIME", int),
            Argument("--metadata", "only those with this pair, repeatable", "KEY=VALUE", many=True),
        ),
    ),
    "show": ("All about one session, and where its cache lies.", (SESSION,)),
    "turns": ("Its turns.", (SESSION,)),
    "messages": ("Its messages.", (SESSION,)),
    "create": (
        "Make a session before its first turn.",
        (
            Argument("session", "its id (default: one that the server makes)", "SESSION", optional=True),
            Argument(
                "--message", "what it begins with, repeatable; ROLE: system, user, assistant", "ROLE=TEXT", many=True
            ),
            METADATA,
            Argument("--ttl", "delete it when it was not used for so long", "SECONDS", int),
            Argument("--pin", "keep its cache before that of others for so long", "SECONDS", int),
        ),
    ),
    "fork": (
        "Copy it: a new session with the same past.",
        (SESSION, NEW_ID, Argument("--turn", "the last turn that is copied (default: all)", "N", int)),
    ),
    "rewind": (
        "Drop what came last.",
        (
            SESSION,
            Argument("--turn", "the last turn that stays; 0: none", "N", int),
            Argument("--tokens", "how many tokens stay", "N", int),
        ),
    ),
    "edit": (
        "Replace a message, and drop everything behind it.",
        (
            SESSION,
            Argument("index", "which: 0 is the first", "INDEX", int),
            Argument("content", "the new text", "TEXT"),
        ),
    ),
    "regenerate": (
        "Answer the last user message (again).",
        (
            SESSION,
            Argument("--temperature", "0: always the likeliest token", "NUMBER", float),
            Argument("--max-tokens", "at most so many", "N", int),
            Argument("--seed", "the same seed, the same reply", "N", int),
        ),
    ),
    "cancel": ("Stop its running turn; what was said so far stays.", (SESSION,)),
    "pin": (
        "Keep its cache before that of others for a time.",
        (SESSION, Argument("seconds", "for how long; 0: no longer", "SECONDS", int)),
    ),
    "ttl": (
        "Delete it by itself when it was not used for a time.",
        (SESSION, Argument("seconds", "for how long; none: never", "SECONDS|none", seconds_or_none)),
    ),
    "delete": ("Delete it for ever, a running turn too.", (SESSION,)),
    "export": (
        "Write it into a file: log and cache.",
        (SESSION, Argument("file", "the file to write", "FILE"), Argument("--no-kv", "only the log")),
    ),
    "import": (
        "Make a session out of an exported file.",
        (
            Argument("file", "the file to read", "FILE"),
            Argument("--id", "id of the new session (default: as in the file)", "ID"),
        ),
    ),
}
