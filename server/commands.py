"""Parses the command line and runs the command. Slow imports are left to the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from server.config.bench_options import BenchConfig
from server.config.cluster_options import ClusterConfig
from server.config.command_line import parse
from server.config.connect_options import ConnectConfig
from server.config.doctor_options import DoctorConfig
from server.config.keys_options import KeysConfig
from server.config.serve_options import ServeConfig
from server.config.sessions_options import SessionsCommand
from server.config.usage_error import UsageError
from server.engine.launcher import EngineLauncher


def run(arguments: Sequence[str], launcher: EngineLauncher) -> int:
    """Run one command; its exit status: 0, 1 when not all of it could be done, 2 after one line on standard error.
    ``launcher`` starts the engine of `warmturn serve`.
    """
    try:
        config = parse(arguments)
        if isinstance(config, DoctorConfig):
            from server.cli.doctor.doctor import doctor

            return doctor(config)
        if isinstance(config, BenchConfig):
            from server.cli.bench.bench import bench

            return bench(config)
        if isinstance(config, ClusterConfig):
            from server.cluster.ray_serve import cluster

            return cluster(config)
        if isinstance(config, ConnectConfig):
            from server.cli.connect.connect import connect

            return connect(config)
        if isinstance(config, KeysConfig):
            from server.cli.keys import keys

            return keys(config)
        if isinstance(config, ServeConfig):
            from server.server_import_savings import leave_out_unused

            leave_out_unused()
            from server.serve import serve

            return serve(config, launcher)
        if isinstance(config, SessionsCommand):
            from server.cli.sessions_terminal import sessions

            return sessions(config)
        from server.cli.chat.chat_command import chat

        return chat(config)
    except UsageError as error:
        print(f"warmturn: {error}", file=sys.stderr)
        return 2
