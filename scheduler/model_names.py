"""A faster way for transformers to read the names of its models.

On import, transformers reads the source of all its models for the names that they export, and reads it again for
``transformers.models``. That takes most of a second in each process. This module makes it read them once and in a third
of the time, and keeps the result for later processes (``scheduler.kept_names``). It imports neither transformers nor
torch.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from scheduler.kept_names import Names, keep_names

READER = "transformers.utils.import_utils"


def read_quickly() -> None:
    """From now on; nothing changes where transformers is imported already."""
    if READER not in sys.modules and not any(isinstance(finder, _NamesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NamesFinder())


class _NamesFinder(MetaPathFinder):
    """Finds the module that reads the names."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != READER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Quick(spec.loader)
        return spec


class _Quick(Loader):
    """Loads that module, and changes two of its functions; they return what they did."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        listed, structure = module.fetch__all__, module.define_import_structure
        folder = Path(module.__file__).parents[1] / "models"

        def fetch__all__(content: str) -> list[str]:
            names: list[str] = listed(content[content.rfind("\n__all__") + 1 :])  # it would look at every line
            return names

        def define_import_structure(path: Any, prefix: str | None = None) -> Any:
            if Path(path) not in (folder, folder / "__init__.py"):
                return structure(path, prefix=prefix)

            def read() -> Names:
                names: Names = structure(folder, prefix=prefix)
                return names

            return keep_names(f"transformers-{prefix}.names", (str(folder), module.__file__), read)

        module.fetch__all__, module.define_import_structure = fetch__all__, define_import_structure
