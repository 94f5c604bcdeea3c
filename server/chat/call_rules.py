"""``CallRules``: which tools a reply may call, and whether it must call one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CallRules:
    """``tools`` may be called, as in OpenAI's requests; ``required``: at least one call must be made; ``parallel``:
    more than one may be made.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    required: bool = False
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The parameters of each tool by its name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}

    @property
    def constrained(self) -> bool:
        """Whether a grammar is needed to keep a reply to these rules."""
        strict = any(tool["function"].get("strict") for tool in self.tools)
        return bool(self.tools) and (self.required or strict or not self.parallel)


NO_CALLS = CallRules()
