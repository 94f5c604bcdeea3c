"""Which parameters of a test ``make test`` leaves to ``make test-wide``."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def widely(names: Iterable[str], narrow: str | Collection[str]) -> list[Any]:
    """These parameters, of which ``make test`` runs the ones in ``narrow``, which a string separates by spaces."""
    chosen = narrow.split() if isinstance(narrow, str) else narrow
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.wide) for name in names]
