"""The command `warmturn`. For `warmturn serve` it starts the engine process before anything else is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from server.engine.launcher import ENGINE_COMMAND, EngineLauncher

HELP = {"-h", "--help"}
INTERRUPTED = 130  # as shells have it


def main(arguments: Sequence[str] | None = None, engine: Sequence[str] = ENGINE_COMMAND) -> int:
    """Run one command; its exit status, see ``server.commands.run``. ``engine`` is the command of an engine process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    launcher = EngineLauncher(engine)
    try:
        if given[:1] == ["serve"] and not HELP & set(given):
            launcher.start_early()
        from server.commands import run  # takes a third of a second, in which the engine imports its modules

        return run(given, launcher)
    except KeyboardInterrupt:  # of a command that measures; the others handle it themselves
        return INTERRUPTED
    finally:
        launcher.discard()


if __name__ == "__main__":
    sys.exit(main())
