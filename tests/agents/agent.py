"""The coding agents that are tried: how each is run, and what its tools are called."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agents.script import Reply, Rule

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NPM = ROOT / ".agents" / "node_modules" / ".bin"
PIP = ROOT / ".agents" / "venv" / "bin"
MODEL = "agent-model"
Call = dict[str, Any]
CLOCK = HERE / "clock_server.py"
SHORT = {"provider": {"warmturn": {"models": {MODEL: {"limit": {"context": 12_000, "output": 1_000}}}}}}


def _goose() -> Path:
    """Goose's program, which comes in a package of this platform's."""
    found = sorted((NPM.parent / "@aaif").glob("goose-binary-*/bin/goose"))
    return found[0] if found else NPM / "goose"


def call(name: str, **arguments: Any) -> Call:
    """A call as a script has it."""
    return {"name": name, "arguments": arguments}


@dataclass(frozen=True)
class Tools:
    """The calls with which a client writes a file, reads one, runs a command, and starts a sub-agent."""

    write: Callable[[Path, str], Call]
    read: Callable[[Path], Call]
    shell: Callable[[str], Call]
    delegate: Callable[[str], Call] | None = None


@dataclass(frozen=True)
class Agent:
    """A client. ``first`` and ``again`` begin and continue a session, with the message behind them.

    ``compact`` is the last flags and the message with which it summarises its history, perhaps in the environment
    ``tight``; ``asks`` is found in the prompt with which it does so. ``awaits``: rules for its own calls.
    """

    name: str  # as `warmturn connect` has it
    program: Path
    first: tuple[str, ...]
    again: tuple[str, ...]
    tools: Tools | None = None  # none: files are written in the reply's text
    compact: tuple[str, ...] = ()
    tight: Mapping[str, str] = field(default_factory=dict)
    asks: str = "$never^"
    awaits: tuple[Rule, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    variant: str = ""  # what is not as by default
    login: tuple[str, ...] = ()  # how it is told of the server, where it has no file for that
    leave: tuple[str, ...] = ()  # how what it leaves running is ended
    forgets: bool = False  # each message begins a conversation
    with_clock: tuple[str, ...] = ()  # flags that add the MCP server of clock_server.py for one run
    strike: str = ""  # what its tool is called then
    find: Call | None = None  # the call that finds this tool, where the client only tells its name
    package: Path | None = None  # the package.json of what is installed for it, where that is not the program

    @property
    def title(self) -> str:
        """Its name in tables, and of the folder of its recordings."""
        return "-".join(part for part in (self.name, self.variant) if part)

    @property
    def installed(self) -> bool:
        """Whether `make test-agents` has installed it."""
        return self.program.exists() and (self.package is None or self.package.exists())


CLAUDE = Agent(
    name="claude",
    program=NPM / "claude",
    first=("-p", "--settings", "{home}/.claude/warmturn.json", "--dangerously-skip-permissions"),
    again=("-p", "--settings", "{home}/.claude/warmturn.json", "--dangerously-skip-permissions", "--continue"),
    tools=Tools(
        write=lambda path, text: call("Write", file_path=str(path), content=text),
        read=lambda path: call("Read", file_path=str(path)),
        shell=lambda command: call("Bash", command=command, description="Run a command"),
        delegate=lambda prompt: call("Agent", description="Look", prompt=prompt, subagent_type="general-purpose"),
    ),
    compact=("/compact",),
    asks="(?i)your task is to create a detailed summary",
    environment={
        "IS_SANDBOX": "1",  # as the tests may run as root
        "MCP_CONNECTION_NONBLOCKING": "0",  # its tools are known in the first request
        "MCP_CONNECT_TIMEOUT_MS": "60000",
    },
    with_clock=("--mcp-config", json.dumps({"mcpServers": {"clock": {"command": "python3", "args": [str(CLOCK)]}}})),
    strike="mcp__clock__strike",
    find=call("ToolSearch", query="select:mcp__clock__strike,STEP-found", max_results=5),
)
CODEX = Agent(
    name="codex",
    program=NPM / "codex",
    first=("exec", "--profile", "warmturn", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
    again=(
        *("exec", "--profile", "warmturn", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("resume", "--last"),
    ),
    tools=Tools(
        write=lambda path, text: call("exec_command", cmd=f"printf '%s' '{text}' > {path}"),
        read=lambda path: call("exec_command", cmd=f"cat {path}"),
        shell=lambda command: call("exec_command", cmd=command),
        delegate=lambda prompt: call("multi_agent_v1__spawn_agent", message=prompt),
    ),
    compact=("-c", "model_auto_compact_token_limit=1000", "Is it good? STEP-brief"),
    asks="CONTEXT CHECKPOINT COMPACTION",
    awaits=(Rule(r'"agent_id": ?"([^"]+)"[^{]*$', Reply("", [call("multi_agent_v1__wait_agent", targets=["FOUND"])])),),
    with_clock=(
        *("-c", 'mcp_servers.clock.command="python3"'),
        *("-c", f"mcp_servers.clock.args={json.dumps([str(CLOCK)])}"),
    ),
    strike="mcp__clock__strike",
)
SOCKET = ("-c", "model_providers.warmturn.supports_websockets=true")
CODEX_SOCKET = replace(CODEX, variant="websocket", first=(*CODEX.first, *SOCKET), again=(*CODEX.again, *SOCKET))
OPENCODE = Agent(
    name="opencode",
    program=NPM / "opencode",
    first=("run", "--model", f"warmturn/{MODEL}"),
    again=("run", "--model", f"warmturn/{MODEL}", "--continue"),
    tools=Tools(
        write=lambda path, text: call("write", filePath=str(path), content=text),
        read=lambda path: call("read", filePath=str(path)),
        shell=lambda command: call("bash", command=command, description="Run a command"),
        delegate=lambda prompt: call("task", description="Look", prompt=prompt, subagent_type="general"),
    ),
    compact=("Is it good? STEP-brief",),
    tight={"OPENCODE_CONFIG_CONTENT": json.dumps(SHORT)},
    asks="(?i)summary of our conversation|prompt for continuing|anchored summary",
)
QWEN = Agent(
    name="qwen",
    program=NPM / "qwen",
    first=("--auth-type", "openai", "--yolo", "--prompt"),
    again=("--auth-type", "openai", "--yolo", "--continue", "--prompt"),
    tools=Tools(
        write=lambda path, text: call("write_file", file_path=str(path), content=text),
        read=lambda path: call("read_file", file_path=str(path)),
        shell=lambda command: call("run_shell_command", command=command, is_background=False),
        delegate=lambda prompt: call("agent", description="Look", prompt=prompt, subagent_type="general-purpose"),
    ),
    compact=("/compress",),
    asks="generate the <state_snapshot>",
)
AIDER = Agent(
    name="aider",
    program=PIP / "aider",
    first=(
        *("--config", "{home}/.aider.warmturn.yml", "--model-metadata-file", "{home}/.aider.warmturn.json"),
        *("--no-git", "--yes-always", "--analytics-disable", "--no-show-model-warnings", "--message"),
    ),
    again=(
        *("--config", "{home}/.aider.warmturn.yml", "--model-metadata-file", "{home}/.aider.warmturn.json"),
        *("--no-git", "--yes-always", "--analytics-disable", "--no-show-model-warnings", "--restore-chat-history"),
        "--message",
    ),
)
PI = Agent(
    name="pi",
    program=NPM / "pi",
    first=("--provider", "warmturn", "--model", MODEL, "-p"),
    again=("--provider", "warmturn", "--model", MODEL, "--continue", "-p"),
    tools=Tools(
        write=lambda path, text: call("write", path=str(path), content=text),
        read=lambda path: call("read", path=str(path)),
        shell=lambda command: call("bash", command=command),
    ),
    environment={"PI_OFFLINE": "1"},
)
GOOSE = Agent(
    name="goose",
    program=_goose(),
    first=("run", "--text"),
    again=("run", "--resume", "--text"),
    tools=Tools(
        write=lambda path, text: call("write", path=str(path), content=text),
        read=lambda path: call("shell", command=f"cat {path}"),
        shell=lambda command: call("shell", command=command),
        delegate=lambda prompt: call("delegate", instructions=prompt),
    ),
    compact=("/compact",),
    asks="Distill the conversation below",
    environment={"GOOSE_WARMTURN_KEY": "none", "GOOSE_PROVIDER": "warmturn", "GOOSE_MODEL": MODEL},
)
CONTINUE = Agent(
    name="continue",
    program=NPM / "cn",
    first=("--config", "{home}/.continue/warmturn.yaml", "--auto", "-p"),
    again=("--config", "{home}/.continue/warmturn.yaml", "--auto", "--resume", "-p"),
    tools=Tools(
        write=lambda path, text: call("Write", filepath=str(path), content=text),
        read=lambda path: call("Read", filepath=str(path)),
        shell=lambda command: call("Bash", command=command),
    ),
)
CLINE = Agent(
    name="cline",
    program=NPM / "cline",
    first=("--auto-approve", "true"),
    again=("--auto-approve", "true"),  # an earlier session is only resumed on a terminal
    tools=Tools(
        write=lambda path, text: call("editor", path=str(path), new_text=text),
        read=lambda path: call("read_files", files=[{"path": str(path)}]),
        shell=lambda command: call("run_commands", commands=[command]),
        delegate=lambda prompt: call("spawn_agent", systemPrompt="You look at files.", task=prompt),
    ),
    environment={"AI_SDK_LOG_WARNINGS": "false"},
    login=("auth", "openai-compatible", "--apikey", "none", "--baseurl", "{url}/v1", "--modelid", MODEL),
    leave=("hub", "stop"),
    forgets=True,
)
LIBRECHAT = Agent(
    name="librechat",
    program=Path(shutil.which("node") or "node"),
    first=(str(HERE / "librechat" / "chat.mjs"), "{home}/librechat-warmturn.yaml", "{home}/conversation.json"),
    again=(str(HERE / "librechat" / "chat.mjs"), "{home}/librechat-warmturn.yaml", "{home}/conversation.json"),
    tools=Tools(
        write=lambda path, text: call("write_file", path=str(path), text=text),
        read=lambda path: call("read_file", path=str(path)),
        shell=lambda command: call("shell", command=command),
    ),
    package=NPM.parents[1] / "librechat" / "node_modules" / "@librechat" / "agents" / "package.json",
)
_ALL = (CLAUDE, CODEX, CODEX_SOCKET, OPENCODE, QWEN, AIDER, PI, GOOSE, CONTINUE, CLINE, LIBRECHAT)
AGENTS = {agent.title: agent for agent in _ALL}
