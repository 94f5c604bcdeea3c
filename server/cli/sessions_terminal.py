"""`warmturn sessions VERB ...`: each verb sends one request and prints the answer as a table or as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TextIO

import httpx

from server.cli.remote_server import (
    Answer,
    RemoteServer,
    RequestFailed,
    base_url,
    explain,
    key_header,
    no_server,
    session_path,
)
from server.config.sessions_options import SessionsCommand
from server.config.usage_error import UsageError

CAPSULE = {"content-type": "application/zip"}
TIMEOUT = httpx.Timeout(
    10.0, read=None, write=60.0
)  # an export begins when it is packed; a disk may take a file slowly


def sessions(command: SessionsCommand, client: httpx.Client | None = None, terminal: TextIO | None = None) -> int:
    """Run one verb; the exit status: 0, or 1 after one line on standard error. Raises UsageError for arguments that
    no server could take, and when none answers."""
    out = terminal or sys.stdout
    url = command.config.url
    headers = key_header(command.config.api_key)
    try:
        with client or httpx.Client(base_url=base_url(url), headers=headers, timeout=TIMEOUT) as http:
            answer = VERBS[command.verb](RemoteServer(http), command.arguments)
    except RequestFailed as error:
        print(f"warmturn: {error}", file=sys.stderr)
        return 1
    except httpx.ConnectError:
        raise no_server(url) from None
    except httpx.HTTPError as error:
        print(f"warmturn: the connection to the server was lost ({type(error).__name__})", file=sys.stderr)
        return 1
    if command.arguments.get("json"):
        json.dump(answer, out, ensure_ascii=False, indent=2)
        out.write("\n")
    else:
        out.write("".join(f"{line}\n" for line in show_answer(answer)))
    return 0


def at(arguments: Answer) -> str:
    """The path of the session that is meant. Raises UsageError."""
    return session_path(arguments["session"])


def pairs(given: Iterable[str], flag: str) -> dict[str, str]:
    """KEY=VALUE arguments. Raises UsageError."""
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{flag}: expected KEY=VALUE")
        found[key] = value
    return found


def list_sessions(remote: RemoteServer, given: Answer) -> Answer:
    names = ("limit", "after", "order", "prefix", "used_after", "used_before")
    metadata: Answer = {f"metadata[{key}]": value for key, value in pairs(given["metadata"], "--metadata").items()}
    return remote.ask("GET", parameters={**{name: given[name] for name in names}, **metadata})


def create(remote: RemoteServer, given: Answer) -> Answer:
    """See the verb. Raises UsageError."""
    messages = []
    for text in given["message"]:
        role, equals, content = text.partition("=")
        if not equals:
            raise UsageError("--message: expected ROLE=TEXT")
        messages.append({"role": role, "content": content})
    body = {
        "id": given["session"],
        "messages": messages,
        "metadata": pairs(given["metadata"], "--metadata"),
        "ttl_seconds": given["ttl"],
        "pin_seconds": given["pin"],
    }
    return remote.ask("POST", body=body)


def regenerate(remote: RemoteServer, given: Answer) -> Answer:
    body = {name: given[name] for name in ("temperature", "max_tokens", "seed")}
    return remote.ask("POST", f"{at(given)}/regenerate", body)


def export(remote: RemoteServer, given: Answer) -> Answer:
    """The file appears under its name when it is complete, readable by this user only.
    Raises UsageError and RequestFailed.
    """
    path = Path(given["file"])
    part = path.with_name(f"{path.name}.part")
    parameters = {"kv": "false"} if given["no_kv"] else None
    size = 0
    try:
        with remote.http.stream("GET", f"/v1/sessions{at(given)}/export", params=parameters) as response:
            if not response.is_success:
                response.read()
                raise RequestFailed(explain(response))
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for data in response.iter_raw(1 << 20):
                    size += file.write(data)
        part.replace(path)
    except OSError as error:
        raise UsageError(f"FILE: {path} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return {"object": "session.exported", "id": given["session"], "file": str(path), "bytes": size}


def import_(remote: RemoteServer, given: Answer) -> Answer:
    """See the verb. Raises UsageError."""
    parameters = None if given["id"] is None else {"id": given["id"]}
    try:
        with Path(given["file"]).open("rb") as file:
            url = "/v1/sessions/import"
            return remote.read(remote.http.post(url, content=file, headers=CAPSULE, params=parameters))
    except OSError as error:
        raise UsageError(f"FILE: {given['file']} cannot be read: {error.strerror}") from None


VERBS: dict[str, Callable[[RemoteServer, Answer], Answer]] = {
    "list": list_sessions,
    "show": lambda remote, given: remote.ask("GET", at(given)),
    "turns": lambda remote, given: remote.ask("GET", f"{at(given)}/turns"),
    "messages": lambda remote, given: remote.ask("GET", f"{at(given)}/messages"),
    "create": create,
    "fork": lambda remote, given: remote.ask("POST", f"{at(given)}/fork", {"id": given["id"], "turn": given["turn"]}),
    "rewind": lambda remote, given: remote.ask(
        "POST", f"{at(given)}/rewind", {"turn": given["turn"], "tokens": given["tokens"]}
    ),
    "edit": lambda remote, given: remote.ask(
        "PUT", f"{at(given)}/messages/{given['index']}", {"content": given["content"]}
    ),
    "regenerate": regenerate,
    "cancel": lambda remote, given: remote.ask("POST", f"{at(given)}/cancel"),
    "pin": lambda remote, given: remote.ask("POST", at(given), {"pin_seconds": given["seconds"]}),
    "ttl": lambda remote, given: remote.ask("POST", at(given), {"ttl_seconds!": given["seconds"]}),
    "delete": lambda remote, given: remote.ask("DELETE", at(given)),
    "export": export,
    "import": import_,
}


# --- for people ---------------------------------------------------------------------------------------------


def show_answer(answer: Answer) -> Iterable[str]:
    """An answer as lines of text."""
    match answer.get("object"):
        case "list":
            return list_answer(answer)
        case "session":
            return describe_session(answer)
        case "session.deleted":
            return [f"{answer['id']} is deleted"]
        case "session.cancelled":
            return [f"the turn of {answer['id']} is stopped" if answer["cancelled"] else "no turn was running"]
        case "session.exported":
            return [f"{answer['file']}: {answer['bytes']} bytes"]
        case _:
            return [str(choice["message"]["content"]) for choice in answer["choices"]]


def list_answer(answer: Answer) -> Iterable[str]:
    """A list as a table, messages as text."""
    data = answer["data"]
    match data[0]["object"] if data else None:
        case None:
            return ["nothing"]
        case "session":
            head = "SESSION TURNS TOKENS LAST-USED METADATA".split()
            rows = [(s["id"], s["turns"], s["tokens"], moment(s["last_used_at"]), tags(s["metadata"])) for s in data]
            more = [f"more: --after {answer['last_id']}"] if answer["has_more"] else []
            return [*table(head, rows), *more]
        case "session.turn":
            head = "TURN AT PROMPT CACHED REPLY END".split()
            names = ("prompt_tokens", "cached_tokens", "completion_tokens", "finish_reason")
            return table(head, [(t["number"], moment(t["created_at"]), *(t[name] for name in names)) for t in data])
        case _:
            return [f"[{m['index']}] {m['role']}: {m['content']}{list_calls(m)}" for m in data]


def list_calls(message: Answer) -> str:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return "".join(f"\n    {function['name']}({function['arguments']})" for function in functions)


def describe_session(session: Answer) -> Iterable[str]:
    """A session, a line per fact."""
    facts: list[tuple[str, object]] = [
        ("session", session["id"]),
        ("created", moment(session["created_at"])),
        ("last used", moment(session["last_used_at"])),
        ("length", f"{session['turns']} turns, {session['messages']} messages, {session['tokens']} tokens"),
    ]
    if session["metadata"]:
        facts.append(("metadata", tags(session["metadata"])))
    if session["expires_at"] is not None:
        facts.append(("expires", moment(session["expires_at"])))
    if session["pinned_until"] is not None:
        facts.append(("pinned until", moment(session["pinned_until"])))
    if session["parent"] is not None:
        facts.append(("fork of", f"{session['parent']['session_id']}, turn {session['parent']['turn']}"))
    if not session["model_matches"]:
        facts.append(("model", "another one than is served: the next turn renders it anew"))
    for tier, held in (session.get("kv") or {}).items():
        facts.append((f"on {tier}", f"{held['tokens']} tokens, {held['bytes']} bytes"))
    if session.get("running"):
        facts.append(("now", "a turn is running"))
    if "imported" in session:
        told = session["imported"]
        why = f" ({told['reason']})" if told["reason"] else ""
        facts.append(("cache", f"{told['kv_tokens']} of {told['tokens']} tokens came with the file{why}"))
    return [f"{name:<13}{value}" for name, value in facts]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns as wide as they need; numbers to the right."""
    cells = [head, *[[str(value) for value in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    right = [bool(rows) and isinstance(rows[0][i], int) for i in range(len(head))]
    lines = []
    for row in cells:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines


def moment(seconds: float) -> str:
    """A time as people here read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def tags(metadata: dict[str, str]) -> str:
    """Pairs in one line; what would break it is left out."""
    return " ".join(f"{key}={value}" if f"{key}{value}".isprintable() else key for key, value in metadata.items())
