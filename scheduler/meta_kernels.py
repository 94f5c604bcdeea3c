"""Operators on torch's device ``meta``, which gives tensors a shape and no memory: those in C++ first.

While it is imported, torch replaces most of them by functions in Python, which compilers follow. These take a quarter
of its import, and their first use imports sympy. A model that is loaded needs next to none of them.
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
