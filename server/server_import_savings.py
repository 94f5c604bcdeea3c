"""Leaves out parts of libraries that a server has no use for, which would take a tenth of its memory.

They are imported after all if something asks for them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def leave_out_unused() -> None:
    """FastAPI looks whether types are models of pydantic's first version; of uvicorn, one process serves, which is not
    started anew when a file changes, and its own command line needs click. Call it before they are imported; what is
    there already stays.
    """
    _LeftOut.enter("pydantic.v1", BaseModel=type("BaseModel", (), {}))
    _LeftOut.enter("uvicorn.main", Server=None, main=None, run=None)
    _LeftOut.enter("uvicorn.supervisors", ChangeReload=None, Multiprocess=None)


class _LeftOut(ModuleType):
    """In place of a module until somebody asks for more of it than ``given``."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(given)

    @classmethod
    def enter(cls, name: str, **given: Any) -> None:
        """Be there, unless the module is already."""
        sys.modules.setdefault(name, cls(name, given))

    def __getattr__(self, wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), wanted)


@contextmanager
def models_built_at_first_use() -> Iterator[None]:
    """Pydantic models that are defined inside are built when they are first used: pydantic's ``defer_build``, for the
    models of a library. Those of FastAPI describe OpenAPI documents, for which few clients ask.
    """
    from pydantic import BaseModel, ConfigDict

    config, rebuild = BaseModel.model_config, vars(BaseModel)["model_rebuild"]

    def build(cls: Any, /, **first_use: Any) -> bool | None:
        """What the module asks for at its end is left to the first use, which names its options."""
        return rebuild.__func__(cls, **first_use) if first_use else None

    BaseModel.model_config = ConfigDict(defer_build=True)
    BaseModel.model_rebuild = classmethod(build)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        BaseModel.model_config = config
        BaseModel.model_rebuild = rebuild  # type: ignore[method-assign]
