"""An MCP server with one tool, over standard input and output: what a client adds in the middle of a session.

It needs nothing but Python: a message is a line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

NAME, TOOL = "clock", "strike"
TOOLS = [
    {
        "name": TOOL,
        "description": "Strikes the hour, and says which one it is.",
        "inputSchema": {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]},
    }
]


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result of a request; the tool's is what its note says."""
    if method == "initialize":
        version = params.get("protocolVersion", "2025-06-18")
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": NAME, "version": "1"}}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": f"It is five o'clock. {params['arguments']['note']}"}]}
    return {}


def main() -> None:
    """Until the input ends; messages without an id are not answered."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            result = answer(message["method"], message.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
