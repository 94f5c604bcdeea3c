"""``PositionTable``: what a module returns for each position, where it depends on nothing else: cosines and sines of
rotary embeddings. Reading them takes a fraction of the time of the dozen functions of torch that compute them, which
beside small layers is seen in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from scheduler.accel.cpu.fused_module import any_hook, hooks_of

_POSITIONS = 8192  # of the table; a step with later ones calls the module
_LATE = torch.tensor([[1 << 20]])
_TRIED = tuple(torch.tensor([[at]]) for at in (0, 1, 2, 63, 64, 1023, _POSITIONS - 1))


class PositionTable:
    """Called as the module is; computes what the module would."""

    def __init__(
        self, module: torch.nn.Module, key: int | str, rows: list[torch.Tensor], make: Callable[..., Any]
    ) -> None:
        """``key`` of the argument that has the positions, int64 ``[1, T]``. ``rows``: the module's results for all
        positions of the table, ``[1, positions, D]`` each, and ``make`` what they are together.
        """
        self._module, self._key, self._rows, self._make = module, key, rows, make
        self._own, self._hooks = vars(module), hooks_of([module])

    @classmethod
    def of(
        cls, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: int | str
    ) -> PositionTable | None:
        """The table of a module that is called with these arguments, tried; None if its results depend on more than the
        position of their row, or if it has parameters, other modules, another forward or hooks.
        """
        if "forward" in vars(module) or any_hook(hooks_of([module])):
            return None
        if any(True for _ in module.parameters()) or any(True for _ in module.children()):
            return None
        positions = args[key] if isinstance(key, int) else kwargs[key]

        def call(at: torch.Tensor, blank: bool = False) -> Any:
            given = [at if number == key else _blank(value) if blank else value for number, value in enumerate(args)]
            named = {name: at if name == key else _blank(value) if blank else value for name, value in kwargs.items()}
            return module(*given, **named)

        with _unchanged(module):
            try:
                found = call(torch.arange(_POSITIONS)[None])
                rows = _rows(found, _POSITIONS)
                if rows is None or not _is_same(call(positions, blank=True), rows, positions):
                    return None
                if not all(_is_same(call(at), rows, at) for at in (positions, *_TRIED)):
                    return None
                before = _state(module)
                call(_LATE)
                if _state(module) != before:  # it would have to be called in every step
                    return None
            except Exception:  # whatever its code raises at other numbers of positions
                return None
        return cls(module, key, rows, (lambda parts: parts[0]) if isinstance(found, torch.Tensor) else type(found))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        key = self._key
        positions = (args[key] if isinstance(key, int) else kwargs[key])[0]
        last = positions.item() if positions.shape[0] == 1 else int(positions.max())
        if last >= _POSITIONS or any(self._hooks) or "forward" in self._own:
            return self._module(*args, **kwargs)
        return self._make([rows.index_select(1, positions) for rows in self._rows])


def _blank(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def _rows(found: Any, count: int) -> list[torch.Tensor] | None:
    """The tensors ``[1, count, ...]`` that a module has returned; None if it has returned something else."""
    if type(found) not in (torch.Tensor, tuple, list):
        return None
    parts = [found] if isinstance(found, torch.Tensor) else list(found)
    right = all(isinstance(one, torch.Tensor) and one.dim() > 1 and one.shape[:2] == (1, count) for one in parts)
    return parts if right else None


def _is_same(found: Any, rows: list[torch.Tensor], positions: torch.Tensor) -> bool:
    """Whether results are those of the table, bit for bit."""
    parts = _rows(found, positions.shape[1]) or []
    return len(parts) == len(rows) and all(
        one.dtype == of.dtype and torch.equal(one, of.index_select(1, positions[0]))
        for one, of in zip(parts, rows, strict=True)
    )


def _state(module: torch.nn.Module) -> list[tuple[str, int]]:
    """Which objects are its attributes and buffers."""
    return [(name, id(value)) for name, value in (*vars(module).items(), *module._buffers.items())]


@contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Behind it the module has the attributes and buffers that it had: some remember the latest position."""
    own, buffers = dict(vars(module)), dict(module._buffers)
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(own)
        module._buffers.clear()
        module._buffers.update(buffers)
