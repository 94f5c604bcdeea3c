"""``ModelUse``: a context manager for the time in which a request uses its model."""

from __future__ import annotations

from typing import Protocol

from starlette.requests import HTTPConnection
from starlette.types import Receive

from server.models.offered_model import OfferedModel
from server.models.tasks import Tasks


class UsedModels(Protocol):
    """The registry, as far as uses know it."""

    async def begin_use(
        self, connection: HTTPConnection, name: str, receive: Receive | None, tasks: Tasks
    ) -> OfferedModel: ...
    def end_use(self, model: OfferedModel) -> None: ...


class ModelUse:
    """The time in which a request uses its model; see ``ModelRegistry.using``. It waits with each request, so it is
    small.
    """

    __slots__ = ("_connection", "_model", "_name", "_receive", "_registry", "_tasks")

    def __init__(
        self,
        registry: UsedModels,
        connection: HTTPConnection,
        name: str,
        receive: Receive | None,
        tasks: Tasks,
    ) -> None:
        self._registry, self._connection, self._name, self._receive = registry, connection, name, receive
        self._tasks = tasks
        self._model: OfferedModel | None = None

    async def __aenter__(self) -> OfferedModel:
        self._model = await self._registry.begin_use(self._connection, self._name, self._receive, self._tasks)
        return self._model

    async def __aexit__(self, *_: object) -> None:
        assert self._model is not None
        self._registry.end_use(self._model)
