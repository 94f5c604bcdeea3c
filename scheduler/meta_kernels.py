"""Postpones the import of torch's Python operators for the device ``meta`` (tensors with a shape and without memory).

While it is imported, torch replaces most of its C++ operators for ``meta`` by Python functions, for the use of
compilers. This takes a quarter of the import, and their first use imports sympy. Loading a model needs almost none of
them.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

NAME = "torch._meta_registrations"


class _Postponed(ModuleType):
    """In place of the module that replaces them, until somebody wants something of it."""

    def __getattr__(self, wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        complete()
        return getattr(sys.modules[NAME], wanted)


def import_torch() -> None:
    """Import torch; its operators on ``meta`` stay those in C++. Nothing changes where it has been imported before."""
    if "torch" in sys.modules:
        return
    sys.modules[NAME] = _Postponed(NAME)
    import torch

    make_usable = getattr(torch._C, "_set_generator_metaclass", None)  # by a module that the postponed one imports
    if make_usable is not None:
        make_usable(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)
    try:
        torch.Generator()
    except RuntimeError:  # another torch may want more
        complete()


def complete() -> bool:
    """Have all operators, now. Returns whether some were missing."""
    if not isinstance(sys.modules.get(NAME), _Postponed):
        return False
    del sys.modules[NAME]
    importlib.import_module(NAME)
    return True
