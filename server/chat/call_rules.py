"""``CallRules``: which tools a reply may call, and whether it must call one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallRules:
    """``tools`` may be called, as OpenAI's requests have them; ``required``: at least one of them is;
    ``parallel``: more than one may be."""

    tools: Sequence[Mapping[str, Any]] = ()
    required: bool = False
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The parameters of each tool by its name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}

    @property
    def constrained(self) -> bool:
        """Whether a reply that is free to do what it likes could break a promise."""
        strict = any(tool["function"].get("strict") for tool in self.tools)
        return bool(self.tools) and (self.required or strict or not self.parallel)


NO_CALLS = CallRules()
