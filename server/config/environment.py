"""Finds misspelt environment variables: names with our prefix that no command knows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

PREFIX = "WARMTURN_"
# Kubernetes tells each container of the services beside it, in variables that begin with their names.
SERVICE_LINKS = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")


def misspelt(environment: Iterable[str], known: Mapping[str, str]) -> str | None:
    """The first variable that no command knows, as a line for the user; ``known`` is variable -> flag."""
    for name in sorted(environment):
        upper = name.upper()  # as settings are read
        if not upper.startswith(PREFIX) or upper in known or SERVICE_LINKS.search(upper):
            continue
        ends = {variable.removeprefix(PREFIX): variable for variable in known}  # what they share makes none alike
        near = [ends[end] for end in difflib.get_close_matches(upper.removeprefix(PREFIX), ends, 1)]
        hint = f"did you mean {near[0]} ({known[near[0]]})?" if near else "see --help for those that there are"
        return f"{name}: there is no such setting; {hint}"
    return None
