"""``Adaptation``: what of a request was taken otherwise than it is written, named in the receipt."""

from __future__ import annotations

from contextvars import ContextVar

import msgspec
from msgspec import UNSET, UnsetType

MOST = 32  # different adaptations that a receipt names
_adapted: ContextVar[dict[tuple[str, str], int] | None] = ContextVar("adapted", default=None)


class Adaptation(msgspec.Struct, frozen=True):
    """``rule``: what was done, one of the names in ``docs/receipts.md``; ``param``: the field of the request, the
    type of tool or content, or the keyword of a schema that it was done to; ``count``: how often.
    """

    rule: str
    param: str | UnsetType = UNSET
    count: int = 1


def begin_adaptations() -> None:
    """Forget the adaptations of this task, as a request begins."""
    _adapted.set({})


def adapt(rule: str, param: str = "", count: int | None = None) -> None:
    """Note an adaptation of this task's request. ``param`` is never text that only the client knows: it is shown.
    ``count``: how often in all, for a rule that may be applied to a request more than once; None: once more.
    """
    noted = _adapted.get()
    if noted is not None and count == 0:
        noted.pop((rule, param), None)
        return
    if noted is not None and ((rule, param) in noted or len(noted) < MOST):
        noted[rule, param] = noted.get((rule, param), 0) + 1 if count is None else count


def adaptations() -> list[Adaptation]:
    """The adaptations of this task's request so far, in the order in which they were first noted."""
    return [Adaptation(rule, param or UNSET, count) for (rule, param), count in (_adapted.get() or {}).items()]
