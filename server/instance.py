"""One server without its port: starts, loads and drains the session log, the engine and the app."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from scheduler.model_facts import ModelFacts
from scheduler.tokenizer_parts import TokenizerParts
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError
from server.daemon_thread import in_daemon_thread
from server.engine.engine_process import EngineProcess
from server.engine.launcher import EngineLauncher
from server.hub import is_offline
from server.log import data_dir
from server.telemetry import log_context
from server.telemetry.log_context import say

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.api.responses.background import BackgroundResponses
    from server.chat.template import Stability
    from server.chat.thinking_budget import ThinkingDefaults
    from server.chat.tokenizer import ChatTokenizer
    from server.housekeeping import Housekeeper
    from server.log.session_log import SessionLog
    from server.middleware.key_file import KeyFile
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


def opened_log(config: ServeConfig, folder: Path) -> SessionLog:
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
    """The parts of one server. Call ``start``, then ``loaded``, at the end ``drain``, then close the stack.
    ``entrance`` is the ASGI app for a port: it answers 503 until ``loaded`` has returned.
    """

    entrance: StartupApp  # from ``start`` on, as the two below
    _log: SessionLog
    _housekeeper: Housekeeper
    _keys: KeyFile | None

    def __init__(self, config: ServeConfig, launcher: EngineLauncher, folder: Path) -> None:
        """``launcher`` starts engine processes. ``folder`` is the data dir, which no other server uses."""
        self._config = config
        self._folder = folder
        self._sweeping: asyncio.Task[None] | None = None
        self._background: BackgroundResponses | None = None
        self.engine = EngineProcess(
            msgspec.structs.replace(config.engine_config(), offline=is_offline()),
            launcher,
            on_loading=say,
            on_ready=lambda facts: self._housekeeper.ready(),
            on_forgotten=lambda *of: self._housekeeper.forgotten(*of),
        )

    async def start(self, stack: AsyncExitStack) -> None:
        """Open the log and begin to load the model. What is pushed on the stack is closed after ``drain``. Raises
        UsageError.

        The engine process is started first, so that both processes import modules at the same time. It loads the model
        after the log is open, as a new log requires the KV cache to be emptied.
        """
        self.engine.prepare()
        try:
            await in_daemon_thread(import_parts, "imports")
            self._keys = opened_keys(self._config)
            self._log = opened_log(self._config, self._folder)
        except BaseException:
            await self.engine.stop()
            raise
        from server.housekeeping import Housekeeper
        from server.startup_app import StartupApp

        self.entrance = StartupApp(self._config.allow_origin)
        self._housekeeper = Housekeeper(self.engine, self._log, self._unwanted)
        await self.engine.start()
        stack.push_async_callback(self._log.close)
        stack.push_async_callback(self._housekeeper.close)
        stack.push_async_callback(ended, asyncio.create_task(self._housekeeper.live()))  # as long as anything is held
        self._sweeping = asyncio.create_task(self._housekeeper.run())

    async def loaded(self, stack: AsyncExitStack) -> ModelFacts:
        """Wait for the engine and the app, then open the entrance. Raises EngineFailed or UsageError."""
        preparing = asyncio.create_task(self._prepare_app())  # beside the engine, which takes longer
        try:
            facts = await self.engine.wait_ready()
        except BaseException:
            preparing.add_done_callback(lambda task: task.cancelled() or task.exception())
            preparing.cancel()
            raise
        config = self._config
        tokens, app = await preparing
        log_context.adopt()
        stack.callback(tokens.close)
        await stack.enter_async_context(app.router.lifespan_context(app))
        self._background = app.state.background
        seldom_collected()
        self.entrance.open(app)
        if not tokens.has_template:
            say("the model has no chat template: it completes text, and chats are refused", logging.WARNING)
        if config.max_context is not None and facts.max_context < config.max_context:
            text = f"--max-context: the model and the KV memory allow {facts.max_context}, not {config.max_context}"
            say(text, logging.WARNING)
        return facts

    async def _prepare_app(self) -> tuple[ChatTokenizer, FastAPI]:
        """The tokenizer, made on a thread, and the app around it. Raises UsageError."""
        await in_daemon_thread(import_app, "imports")
        parts = await self.engine.tokenizer()
        try:
            tokens, template = await in_daemon_thread(lambda: load_tokens(self._config, parts), "tokenizer")
        except Exception as error:
            raise UsageError(f"the tokenizer cannot be loaded: {first_line(error)}") from error
        from server.api.sessions.transfers import Transfers
        from server.app import create_app

        config = self._config
        app = create_app(
            self.engine,
            self._log,
            tokens,
            served_name=config.name,
            api_keys=config.api_key,
            key_file=self._keys,
            transfers=Transfers(config.data_dir / "transfer", int(config.max_capsule)),
            template=template,
            thinking=thinking_defaults(config),
            allowed_hosts=config.allowed_host,
            allowed_origins=config.allow_origin,
            ignore_unknown=config.unknown_fields == "ignore",
            vllm_names=config.metrics_compat == "vllm",
            line_seconds=config.line_seconds,
            aliases=config.model_alias,
            any_model=config.model_names == "any",
            ollama=config.ollama == "on",
        )
        return tokens, app

    async def drain(self) -> None:
        """Refuse new turns, wait up to ``--drain-seconds`` for running ones and their answers, then stop the engine,
        which writes KV to disk. Takes bounded time.
        """
        if self._sweeping is not None:
            await ended(self._sweeping)
        seconds = self._config.drain_seconds
        self.engine.drain()
        await within(seconds, lambda: self.engine.in_hand == 0)
        await self.engine.stop(flush=min(seconds, FLUSH_SECONDS))
        await within(HTTP_SECONDS, lambda: self.engine.in_hand == 0)  # turns that were ended are told so

    def _unwanted(self, tenant: str, session: str, response: str) -> None:
        if self._background is not None:
            self._background.cancel_unwanted(tenant, session, response)


def opened_keys(config: ServeConfig) -> KeyFile | None:
    """The key file of a configuration. Raises UsageError."""
    from server.middleware.key_file import KeyFile, KeyFileError

    if config.key_file is None:
        return None
    try:
        return KeyFile(config.key_file.expanduser())
    except KeyFileError as error:
        raise UsageError(f"--key-file: the file {error}") from None


def thinking_defaults(config: ServeConfig) -> ThinkingDefaults:
    """The default limit on reasoning, as the flags say."""
    from server.chat.thinking_budget import MESSAGE, ThinkingDefaults

    message = MESSAGE if config.thinking_budget_message is None else config.thinking_budget_message
    return ThinkingDefaults(None if config.thinking_budget < 0 else config.thinking_budget, message)


def seldom_collected() -> None:
    """Tune the garbage collector so that its pauses do not delay streams. Objects that exist now (all of transformers)
    are frozen; full collections, which take 0.3 s with 1,300 waiting requests, become rare, as requests leave no
    cycles.
    """
    gc.freeze()
    gc.set_threshold(*COLLECTED)
    gc.enable()


async def ended(task: asyncio.Task[None]) -> None:
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
    pages = f"{facts.pages} pages of {facts.page_size} tokens"
    return f"{facts.dtype} on {facts.device}, mode {facts.mode}, {pages}, context {facts.max_context}"


def first_line(error: Exception) -> str:
    """The first line of an exception's message."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def import_parts() -> None:
    """Import what takes long of what ``Instance.start`` needs: on a thread, while the loop starts the engine."""
    import server.housekeeping
    import server.log.session_log
    import server.startup_app  # noqa: F401


def import_app() -> None:
    """Import what takes long of what the app needs: on a thread, while the port is answered already."""
    import server.app
    import server.chat.template  # noqa: F401


def load_tokens(config: ServeConfig, parts: TokenizerParts | None = None) -> tuple[ChatTokenizer, Stability]:
    """The tokenizer of a configuration and the measured stability of its template. Without ``parts`` it is read by
    transformers. Raises any exception of theirs.
    """
    from server.chat.template import stability
    from server.chat.tokenizer import ChatTokenizer

    file, rules = config.response_template, config.prompt_rules
    declared = None if file is None else json.loads(file.expanduser().read_text())
    if parts is None:
        tokens = ChatTokenizer.load(config.source, declared, rules)
    else:
        tokens = ChatTokenizer.of_parts(parts, declared, rules)
    _ = tokens.dialect  # measured here, not by the first request
    return tokens, stability(tokens)
