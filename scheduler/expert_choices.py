"""`ExpertChoices`: which experts a from-scratch forward chose for each token, so that a mode is measured with them.

A router takes the largest of some numbers. Where two are nearly equal, rounding decides, and what follows differs by
far more than rounding: such a difference would say nothing about a mode.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_Asked = tuple[int, int]  # among how many, and how many of them
_TOPK = (torch.topk, torch.Tensor.topk)


class ExpertChoices:
    """What ``torch.topk`` chose in a forward of each timeline."""

    def __init__(self) -> None:
        self._made: list[dict[_Asked, list[torch.Tensor]]] = []  # of each timeline, call by call: [tokens, m, chosen]

    def __bool__(self) -> bool:
        return any(part.numel() for made in self._made for calls in made.values() for part in calls)

    @contextmanager
    def noted(self, tokens: int) -> Iterator[None]:
        """A forward of the next timeline, which has so many tokens."""
        made: defaultdict[_Asked, list[torch.Tensor]] = defaultdict(list)

        def note(numbers: torch.Tensor, found: Any) -> Any:
            among, chosen = numbers.shape[-1], found.indices.shape[-1]
            experts = chosen and among != tokens and _is_of(numbers, tokens)  # as many as tokens: those are keys
            parts = found.indices.reshape(tokens, -1, chosen).clone() if experts else torch.empty(0)
            made[among, chosen].append(parts)
            return found

        with _Topk(note):
            yield
        self._made.append(dict(made))

    @contextmanager
    def repeated(self, spans: Sequence[tuple[int, int, int]]) -> Iterator[None]:
        """A forward whose rows are tokens of timelines: ``(timeline, first, last + 1)`` each. What is chosen in it is
        what was chosen for these, where it is asked for in the same order, for all rows at once.
        """
        calls: Counter[_Asked] = Counter()

        def repeat(numbers: torch.Tensor, found: Any) -> Any:
            asked = numbers.shape[-1], found.indices.shape[-1]
            number, calls[asked] = calls[asked], calls[asked] + 1
            parts = []
            for timeline, first, last in spans:
                made = self._made[timeline].get(asked, [])
                parts.append(made[number][first:last] if number < len(made) else torch.empty(0))
            alike = all(part.numel() and parts[0].shape[1:] == part.shape[1:] for part in parts)
            if not alike or not _is_of(numbers, sum(len(part) for part in parts)):
                return found
            if (chosen := torch.cat(parts)).numel() != found.indices.numel():
                return found
            indices = chosen.view_as(found.indices)
            return torch.return_types.topk((numbers.gather(-1, indices), indices))

        with _Topk(repeat):
            yield


class _Topk(TorchFunctionMode):
    """Gives what ``torch.topk`` takes and finds in the last dimension to a function, and returns what that returns."""

    def __init__(self, see: Callable[[torch.Tensor, Any], Any]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK or not _is_usual(*args, **(kwargs or {})):
            return found
        return self._see(args[0] if args else kwargs["input"], found)


def _is_of(numbers: torch.Tensor, rows: int) -> bool:
    """Whether a tensor has something for each of so many rows, one after the other."""
    return rows == 1 or [size for size in numbers.shape[:-1] if size != 1][:1] == [rows]


def _is_usual(
    input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, **more: Any
) -> bool:
    return largest and not more and dim in (-1, input.dim() - 1)
