"""``ClientTool``: a tool that the client runs, as a function that the model calls; and the names of these functions.

A tool of the API has a type, a name and perhaps a namespace; templates and models know functions with one name. Each
tool becomes a function with a name of its own (``ToolNames``), and a call of it becomes an item of the tool's type
again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from server.schemas.call_items import CallKind

LONGEST = 64  # characters of a name that is made here: every parser and every vendor takes so many
SEPARATOR = "__"  # between namespace and name, as in the names of tools of MCP servers
DIGEST = 4  # bytes
Execution = Literal["client", "server"]


@dataclass(frozen=True)
class ToolKey:
    """What the client calls a tool. ``kind``: of the items that its calls are."""

    kind: CallKind
    name: str
    namespace: str = ""

    @property
    def joined(self) -> str:
        """Namespace and name as one; not unique."""
        if not self.namespace:
            return self.name
        return self.namespace + ("" if self.namespace.endswith(SEPARATOR) else SEPARATOR) + self.name

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that differ for different tools."""
        told = "\0".join((self.kind, self.namespace, self.name))
        return hashlib.blake2b(told.encode(), digest_size=DIGEST).hexdigest()


SEARCH = ToolKey("tsc", "tool_search")
SHELL = ToolKey("lsh", "local_shell")


@dataclass(frozen=True)
class ClientTool:
    """A tool of a request."""

    key: ToolKey
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def plain(self, name: str) -> dict[str, Any]:
        """The function under this ``name``, as templates and the log take it."""
        function: dict[str, Any] = {"name": name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        if self.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


class ToolNames:
    """The function name of each tool of a request, and back. A tool's name depends on those before it only where two
    would have the same: the later one then ends with a digest, as do names that would be too long.
    """

    def __init__(self, keys: Iterable[ToolKey] = ()) -> None:
        self._keys: dict[str, ToolKey] = {}
        self._names: dict[ToolKey, str] = {}
        for key in keys:
            if key not in self._names:
                self._names[key] = name = self._free_name(key)
                self._keys[name] = key

    def name(self, key: ToolKey) -> str:
        """The function's name; also for a tool that is not among those of the request."""
        return self._names.get(key) or self._free_name(key)

    def key(self, name: str) -> ToolKey:
        """The tool that a function's name stands for; a name of no tool is that of a function."""
        return self._keys.get(name) or ToolKey("fc", name)

    def plain(self, tools: Iterable[ClientTool]) -> list[dict[str, Any]]:
        """Tools as templates and the log take them; of those with the same name the last."""
        named = {self.name(tool.key): tool for tool in tools}
        return [tool.plain(name) for name, tool in named.items()]

    def _free_name(self, key: ToolKey) -> str:
        name = key.joined
        if name in self._keys or (key.namespace and len(name) > LONGEST):
            name = f"{name[: LONGEST - 2 * DIGEST - 1]}_{key.digest}"
        return name
