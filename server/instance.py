"""One server without its port: starts, loads and drains the session log, the engine and the app."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.extras import install_command
from scheduler.model_facts import ModelFacts
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError
from server.daemon_thread import in_daemon_thread
from server.engine.launcher import EngineLauncher
from server.log import data_dir
from server.media.libraries import has_pillow, has_sounds
from server.models.engine_maker import EngineMaker
from server.server_import_savings import models_built_at_first_use
from server.telemetry import log_context
from server.telemetry.log_context import say

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.api.responses.background import BackgroundResponses
    from server.batches.batch_runner import BatchRunner
    from server.housekeeping import Housekeeper
    from server.log.session_log import SessionLog
    from server.media.fetching import Fetcher
    from server.middleware.key_file import KeyFile
    from server.models.registry import ModelRegistry
    from server.startup_app import StartupApp

FLUSH_SECONDS = 30.0  # at most, for KV that is not on disk yet when the turns are over
HTTP_SECONDS = 5  # for the last bytes of their answers, and once more for their readers to take them
LOOK_SECONDS = 0.05  # between two looks at whether something is over
COLLECTED = (2000, 4, 1000)  # new objects, collections of those, and of these: see gc.set_threshold


def quiet() -> None:
    """Silence the hub's retry messages, which both processes would log twice per attempt; the final error is still
    reported.
    """
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")


def open_session_log(config: ServeConfig, folder: Path) -> SessionLog:
    """The session log of a configuration, opened for the server that owns this data dir. Raises UsageError."""
    from server.log.database import LogUnavailable
    from server.log.session_log import SessionLog

    try:
        name = data_dir.identity(folder)
        where = config.database or folder / "log.sqlite"
        return SessionLog(where, config.durability, name, lambda: data_dir.empty_cache(folder))
    except LogUnavailable as error:
        raise UsageError(error.message) from None


class Instance:
    """The parts of one server. Call ``start``, then ``wait_until_loaded``, at the end ``drain``, then close the stack.
    ``entrance`` is the ASGI app for a port: it answers 503 until ``loaded`` has returned.
    """

    entrance: StartupApp  # from ``start`` on, as those below
    models: ModelRegistry
    _log: SessionLog
    _housekeeper: Housekeeper
    _keys: KeyFile | None
    _batches: BatchRunner | None = None

    def __init__(self, config: ServeConfig, launcher: EngineLauncher, folder: Path) -> None:
        """``launcher`` starts engine processes. ``folder`` is the data dir, which no other server uses. Raises
        UsageError.
        """
        self._config = config
        self._folder = folder
        self._tasks: list[asyncio.Task[None]] = []
        self._background: BackgroundResponses | None = None
        self._engines = EngineMaker(
            config, launcher, folder, lambda: self._housekeeper.ready(), lambda *of: self._housekeeper.forgotten(*of)
        )
        self.first_engine = self._engines.make(self._engines.entries[0])

    async def start(self, stack: AsyncExitStack) -> None:
        """Open the log and begin to load the model. What is pushed on the stack is closed after ``drain``. Raises
        UsageError.

        The engine process is started first, so that both processes import modules at the same time. It loads the model
        after the log is open, as a new log requires the KV cache to be emptied.
        """
        self.first_engine.prepare()
        try:
            await in_daemon_thread(import_parts, "imports")
            self._keys = open_keys(self._config)
            self._log = open_session_log(self._config, self._folder)
            from server.housekeeping import Housekeeper
            from server.models.assembly import Assembly
            from server.startup_app import StartupApp

            assembly = Assembly(self._config, self._engines, self._log, self.first_engine)
            stack.callback(assembly.close)
            self.models = assembly.registry
            self._tracer_provider = assembly.tracer_provider
        except BaseException:
            await self.first_engine.stop()
            raise
        self.entrance = StartupApp(self._config.allow_origin)
        self._housekeeper = Housekeeper(self.models.engines, self._log, self._cancel_unwanted)
        await self.first_engine.start()
        stack.push_async_callback(self._log.close)
        stack.push_async_callback(self._housekeeper.close)
        stack.push_async_callback(
            end_task, asyncio.create_task(self._housekeeper.live())
        )  # as long as anything is held
        self._tasks.append(asyncio.create_task(self._housekeeper.run()))

    async def wait_until_loaded(self, stack: AsyncExitStack) -> ModelFacts:
        """Wait for the engine and the app, then open the entrance. Raises EngineFailed or UsageError."""
        preparing = asyncio.create_task(self._prepare_app())  # beside the engine, which takes longer
        try:
            facts = await self.models.start()
        except BaseException:
            preparing.add_done_callback(lambda task: task.cancelled() or task.exception())
            preparing.cancel()
            raise
        config = self._config
        app = await preparing
        log_context.adopt()
        await stack.enter_async_context(app.router.lifespan_context(app))
        self._background, self._batches = app.state.background, app.state.batches
        self._tasks.append(asyncio.create_task(self.models.unload_idle()))
        seldom_collected()
        self.entrance.open(app)
        if "image" in facts.media and not has_pillow():
            say(f"the model takes pictures, but Pillow is missing: {install_command('media')}", logging.WARNING)
        if (facts.speech is not None or "audio" in facts.media) and not has_sounds():
            say(f"sounds are refused, as a library is missing: {install_command('media')}", logging.WARNING)
        context = self.models.first.context
        assert context is not None, "it was just loaded"
        if facts.speech is not None:
            say("the model turns speech into text: chats and completions are refused", logging.INFO)
        elif facts.pooling is not None:
            say(f"the model makes {'embeddings' if facts.task == 'embed' else 'scores'}: it generates no text")
        elif not context.tokens.has_template:
            say("the model has no chat template: it completes text, and chats are refused", logging.WARNING)
        elif context.template.prefix_stable is None:
            say("the model's chat template takes no simple conversation: chats may be refused", logging.WARNING)
        if config.max_context is not None and facts.max_context < config.max_context:
            text = f"--max-context: the model and the KV memory allow {facts.max_context}, not {config.max_context}"
            say(text, logging.WARNING)
        return facts

    async def _prepare_app(self) -> FastAPI:
        """The app around the models."""
        await in_daemon_thread(import_app, "imports")
        from server.api.sessions.transfers import Transfers
        from server.app import create_app
        from server.batches.storage import BatchStorage

        config = self._config
        return create_app(
            self.models,
            self._log,
            api_keys=config.api_key,
            key_file=self._keys,
            transfers=Transfers(config.data_dir / "transfer", int(config.max_capsule)),
            allowed_hosts=config.allowed_host,
            allowed_origins=config.allow_origin,
            ignore_unknown=config.unknown_fields == "ignore",
            adapter_folder=config.adapter_folder,
            vllm_names=config.metrics_compat == "vllm",
            ollama=config.ollama == "on",
            sharing=config.sharing == "on",
            fetcher=make_fetcher(config.media_domains),
            tracer_provider=self._tracer_provider,
            batches=BatchStorage(self._folder),
        )

    async def drain(self) -> None:
        """Refuse new turns, wait up to ``--drain-seconds`` for running ones and their answers, then stop the engine,
        which writes KV to disk. Takes bounded time.
        """
        for task in self._tasks:
            await end_task(task)
        if self._batches is not None:  # they go on at the next start
            await self._batches.close()
        seconds = self._config.drain_seconds
        self.models.drain()
        await within(seconds, lambda: self.models.in_hand == 0)
        await self.models.stop(flush=min(seconds, FLUSH_SECONDS))
        await within(HTTP_SECONDS, lambda: self.models.in_hand == 0)  # turns that were ended are told so

    def kill(self) -> None:
        """Kill all engine processes, for a server that exits without waiting."""
        self.models.kill()

    def hangs(self) -> bool:
        """Whether an engine is ready and gives no sign of life."""
        return any(engine.state() == "ready" and not engine.healthy for engine in self.models.loaded_engines())

    def _cancel_unwanted(self, tenant: str, session: str, response: str) -> None:
        if self._background is not None:
            self._background.cancel_unwanted(tenant, session, response)


def open_keys(config: ServeConfig) -> KeyFile | None:
    """The key file of a configuration. Raises UsageError."""
    from server.middleware.key_file import KeyFile, KeyFileError

    if config.key_file is None:
        return None
    try:
        return KeyFile(config.key_file.expanduser())
    except KeyFileError as error:
        raise UsageError(f"--key-file: the file {error}") from None


def make_fetcher(domains: Sequence[str]) -> Fetcher | None:
    """What downloads media from these hosts; None without any: its library takes long to import."""
    if not domains:
        return None
    from server.media.fetching import Fetcher

    return Fetcher(domains)


def seldom_collected() -> None:
    """Tune the garbage collector so that its pauses do not delay streams. Objects that exist now (all of transformers)
    are frozen; full collections, which take 0.3 s with 1,300 waiting requests, become rare, as requests leave no
    cycles.
    """
    gc.freeze()
    gc.set_threshold(*COLLECTED)
    gc.enable()


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it is over."""
    task.cancel()
    await asyncio.wait((task,))


async def within(seconds: float, over: Callable[[], bool]) -> None:
    """Wait until ``over()`` is true, for ``seconds`` at most."""
    until = time.monotonic() + seconds
    while not over() and time.monotonic() < until:
        await asyncio.sleep(LOOK_SECONDS)


def summary(facts: ModelFacts) -> str:
    """The model's dtype, device, mode, pages and context, in one line."""
    if facts.pooling is not None:
        numbers = f"{facts.pooling.width} numbers for an input of at most {facts.max_context} tokens"
        return f"{facts.dtype} on {facts.device}, {facts.task}, {numbers}"
    pages = f"{facts.pages} pages of {facts.page_size} tokens"
    return f"{facts.dtype} on {facts.device}, mode {facts.mode}, {pages}, context {facts.max_context}"


def import_parts() -> None:
    """Import what takes long of what ``Instance.start`` needs: on a thread, while the loop starts the engine."""
    with models_built_at_first_use():
        import fastapi.openapi.models  # noqa: F401
    import server.housekeeping
    import server.log.session_log
    import server.models.assembly
    import server.startup_app  # noqa: F401


def import_app() -> None:
    """Import what takes long of what the app needs: on a thread, while the port is answered already."""
    import server.app
    import server.chat.template

    for _ in server.api.routers():
        pass
