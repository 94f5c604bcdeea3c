"""The verbs of `warmturn sessions` and their arguments. ``server.cli.sessions_terminal`` runs them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from server.config.client_options import ClientConfig


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
    """A whole number, or nothing for "none". Raises ArgumentTypeError."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError("expected a number of seconds, or none") from None


SESSION = Argument("session", "its id", "SESSION")
NEW_ID = Argument("--id", "id of the new session (default: chosen by the server)", "ID")
METADATA = Argument("--metadata", "a pair, repeatable", "KEY=VALUE", many=True)
JSON = Argument("--json", "print the server's answer as JSON")

VERBS: dict[str, tuple[str, tuple[Argument, ...]]] = {
    "list": (
        "List sessions, the most recently used first.",
        (
            Argument("--limit", "at most so many, 1 to 100 (default: 20)", "N", int),
            Argument("--after", "those after this one in the list", "SESSION"),
            Argument("--order", "desc: most recently used first (default); asc: last", "asc|desc"),
            Argument("--prefix", "only ids that begin with this", "TEXT"),
            Argument("--used-after", "only those used after this time, in Unix seconds", "TIME", int),
            Argument("--used-before", "only those used before this time, in Unix seconds", "TIME", int),
            Argument("--metadata", "only those with this pair, repeatable", "KEY=VALUE", many=True),
        ),
    ),
    "show": ("Show a session, and which tiers hold its KV.", (SESSION,)),
    "turns": ("List its turns.", (SESSION,)),
    "messages": ("List its messages.", (SESSION,)),
    "create": (
        "Create a session before its first turn.",
        (
            Argument("session", "its id (default: chosen by the server)", "SESSION", optional=True),
            Argument("--message", "first messages, repeatable; ROLE: system, user, assistant", "ROLE=TEXT", many=True),
            METADATA,
            Argument("--ttl", "delete it when it has not been used for so long", "SECONDS", int),
            Argument("--pin", "evict its KV last for so long", "SECONDS", int),
        ),
    ),
    "fork": (
        "Create a session with the same history.",
        (SESSION, NEW_ID, Argument("--turn", "the last turn that is copied (default: all)", "N", int)),
    ),
    "rewind": (
        "Cut it back to an earlier turn or token.",
        (
            SESSION,
            Argument("--turn", "the last turn that is kept; 0: none", "N", int),
            Argument("--tokens", "the number of tokens that are kept", "N", int),
        ),
    ),
    "edit": (
        "Replace a message and drop everything after it.",
        (
            SESSION,
            Argument("index", "index of the message; 0 is the first", "INDEX", int),
            Argument("content", "the new text", "TEXT"),
        ),
    ),
    "regenerate": (
        "Generate the last reply again.",
        (
            SESSION,
            Argument("--temperature", "0: always the most likely token", "NUMBER", float),
            Argument("--max-tokens", "most tokens of the reply", "N", int),
            Argument("--seed", "equal seeds give equal replies", "N", int),
        ),
    ),
    "cancel": ("Stop its running turn and keep what it has generated.", (SESSION,)),
    "pin": (
        "Evict its KV last for some time.",
        (SESSION, Argument("seconds", "for how long; 0: unpin", "SECONDS", int)),
    ),
    "ttl": (
        "Delete it automatically when it has not been used for some time.",
        (SESSION, Argument("seconds", "for how long; none: never", "SECONDS|none", seconds_or_none)),
    ),
    "delete": ("Delete it for good; a running turn ends.", (SESSION,)),
    "export": (
        "Write it to a file: log and KV.",
        (SESSION, Argument("file", "the file to write", "FILE"), Argument("--no-kv", "only the log")),
    ),
    "import": (
        "Create a session from an exported file.",
        (
            Argument("file", "the file to read", "FILE"),
            Argument("--id", "id of the new session (default: as in the file)", "ID"),
        ),
    ),
}
