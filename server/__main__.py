"""`warmturn`: parse the command line, then run the command. What is slow to import is imported by the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from server.command_line import parse
from server.config import ServeConfig, UsageError
from server.session_verbs import SessionsCommand


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0, 1 when a server refused it, or 2 after one line on standard error."""
    try:
        config = parse(sys.argv[1:] if arguments is None else arguments)
        if isinstance(config, ServeConfig):
            from server.serve import serve

            return serve(config)
        if isinstance(config, SessionsCommand):
            from server.sessions_terminal import sessions

            return sessions(config)
        from server.terminal import chat

        return chat(config)
    except UsageError as error:
        print(f"warmturn: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
