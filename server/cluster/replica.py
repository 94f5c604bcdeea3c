"""One replica of a Ray Serve deployment: a whole server without a port, as Ray's proxy has the port."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope, Send

from server.cluster import env_file
from server.config.command_line import configure
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError
from server.engine.engine import EngineFailed
from server.engine.launcher import EngineLauncher
from server.instance import FLUSH_SECONDS, HTTP_SECONDS, Instance, quiet, summary
from server.log import data_dir
from server.telemetry import log_context
from server.telemetry.log_context import say

MOST_FOLDERS = 1024  # replicas on one machine


class Unhealthy(Exception):
    """The replica has to be replaced by a fresh one."""


class Replica:
    """The deployment's class, one object in each process of Ray's. The lifespan of the app that
    ``__serve_build_asgi_app__`` makes is this server's life: a replica is ready when its model is, and when it goes it
    drains."""

    def __init__(self, settings: Mapping[str, Any], needs: Sequence[str], env_file: str | None = None) -> None:
        """``settings`` are fields of ServeConfig; ``data_dir`` has the folders of all replicas of this machine.
        ``needs``: variables of the environment without which it would serve without keys, or sessions of its own.
        ``env_file``: a file on this node with variables that are added to its environment, or replace those there."""
        self._settings = settings
        self._needs = needs
        self._env_file = env_file
        self._instance: Instance | None = None

    def __serve_build_asgi_app__(self) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """The ASGI app."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes no bound method for one
            if scope["type"] == "lifespan":
                await self._live(receive, send)
            else:
                assert self._instance is not None
                await self._instance.entrance(scope, receive, send)

        return app

    async def check_health(self) -> None:
        """Raises Unhealthy where only a fresh replica helps: an engine that hangs. One that died is restarted by us."""
        if self._instance is not None and self._instance.hangs():
            raise Unhealthy("the engine hangs")

    async def _live(self, receive: Receive, send: Send) -> None:
        """From the lifespan's start to its end."""
        await receive()
        async with AsyncExitStack() as stack:
            try:
                instance = self._instance = await self._start(stack)
                facts = await instance.wait_until_loaded(stack)
            except (EngineFailed, UsageError) as error:
                say(str(error), logging.ERROR)
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            say(f"a replica is ready ({summary(facts)})")
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await instance.drain()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self, stack: AsyncExitStack) -> Instance:
        where = ""
        if self._env_file is not None:
            where = ", nor in its --env-file"
            os.environ.update(env_file.read(Path(self._env_file)))
        if missing := [name for name in self._needs if name not in os.environ]:
            raise UsageError(f"{missing[0]} is not in the environment of this node{where}")
        config = configure(ServeConfig, {**self._settings})
        log_context.configure(config.log_format, config.log_level)
        quiet()
        with ExitStack() as folders:
            config = own_folder(config, folders)
            stack.push(folders.pop_all())
        instance = Instance(config, EngineLauncher(), config.data_dir)
        await instance.start(stack)
        return instance


def own_folder(config: ServeConfig, stack: ExitStack) -> ServeConfig:
    """The configuration with the first folder below ``data_dir`` that no other replica uses, locked until ``stack`` is
    closed: so a replica goes on with the cache of one that is no more. Raises UsageError."""
    for number in itertools.count():
        try:
            folder = stack.enter_context(data_dir.locked(config.data_dir / f"replica-{number}"))
        except data_dir.InUse:
            if number < MOST_FOLDERS:
                continue
            raise
        return config.model_copy(update={"data_dir": folder})
    raise AssertionError


def longest_goodbye(config: ServeConfig) -> float:
    """The most seconds that a replica may take to shut down."""
    return config.drain_seconds + min(config.drain_seconds, FLUSH_SECONDS) + 4 * HTTP_SECONDS
