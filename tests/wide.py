"""Which parameters of a test ``make test`` leaves to ``make test-wide``."""

from collections.abc import Iterable
from typing import Any

import pytest


def widely(names: Iterable[str], narrow: str) -> list[Any]:
    """These parameters, of which ``make test`` runs the ones in ``narrow``, separated by spaces."""
    return [name if name in narrow.split() else pytest.param(name, marks=pytest.mark.wide) for name in names]
