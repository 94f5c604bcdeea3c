"""``RecordedCall``: a call that a model's forward makes. In its arguments, a ``StepValue`` stands for what is another
value in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Fill = Callable[[Mapping[int | str, Any]], Any]
# Takes the numbers of the rows whose results are wanted, or None for all, and the arguments of the first module of a
# chain; returns the result of the last one, or None if the chain cannot run. Raises MemoryError.
RunAhead = Callable[..., torch.Tensor | None]


class StepValue(NamedTuple):
    """A value of a step: an argument of the forward, by its name, or the result of a call, by its number; and where in
    it.
    """

    of: int | str
    path: tuple[Any, ...] = ()


class Slice(NamedTuple):
    """A slice whose ends may be ``StepValue``."""

    start: Any
    stop: Any
    step: Any


@dataclass(frozen=True)
class RecordedCall:
    """A call whose arguments have ``StepValue`` for the values of a step."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    problem: str  # why it cannot be repeated
    chain: list[int] = field(default_factory=list)  # of the first module of a chain: the calls of all of its modules
    run_ahead: RunAhead | None = None  # of these calls, if no other needs a result between; of a last layer, alone

    @property
    def needs(self) -> Iterator[StepValue]:
        """The values of the step among its arguments."""
        return step_values((self.args, self.kwargs))


def filler(template: Any) -> Fill:
    """A function that makes a template's values of those of a step, compiled once, as it is called in every step."""
    constants: dict[str, Any] = {}

    def source(part: Any) -> str:
        kind = type(part)
        if kind is StepValue:
            return f"values[{part.of!r}]" + "".join(f"[{key!r}]" for key in part.path)
        if kind is tuple or kind is list:
            inside = "".join(f"{source(one)}, " for one in part)
            return f"({inside})" if kind is tuple else f"[{inside}]"
        if kind is dict:
            return "{" + "".join(f"{source(key)}: {source(one)}, " for key, one in part.items()) + "}"
        if kind is Slice:
            return f"slice({source(part.start)}, {source(part.stop)}, {source(part.step)})"
        constants[name := f"constant_{len(constants)}"] = part
        return name

    filled: Fill = eval(f"lambda values: {source(template)}", constants)
    return filled


def step_values(template: Any) -> Iterator[StepValue]:
    """All that are in a template."""
    if isinstance(template, StepValue):
        yield template
    elif isinstance(template, (tuple, list, dict)):
        for part in template.values() if isinstance(template, dict) else template:
            yield from step_values(part)


def users(calls: Mapping[int, RecordedCall], number: int) -> list[int]:
    """The calls that get the result of another one."""
    return [user for user, call in calls.items() if any(one.of == number for one in call.needs)]
