"""`warmturn`: parse the command line, then run the command. What is slow to import is imported by the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from server.bench_config import BenchConfig
from server.cluster_config import ClusterConfig
from server.command_line import parse
from server.config import ServeConfig, UsageError
from server.doctor_config import DoctorConfig
from server.session_verbs import SessionsCommand

INTERRUPTED = 130  # as shells have it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0, 1 when not all of it could be done, 2 after one line on standard error."""
    try:
        config = parse(sys.argv[1:] if arguments is None else arguments)
        if isinstance(config, DoctorConfig):
            from server.doctor import doctor

            return doctor(config)
        if isinstance(config, BenchConfig):
            from server.bench import bench

            return bench(config)
        if isinstance(config, ClusterConfig):
            from server.cluster import cluster

            return cluster(config)
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
    except KeyboardInterrupt:  # of a command that measures; the others take it as they need it
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
