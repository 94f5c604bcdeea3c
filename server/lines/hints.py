"""``Hint``: which conversation a request belongs to, as its client tells in headers and fields of the body.

A hint is neither secret nor unique: requests that have nothing in common may share one. It only says which lines to
compare a request with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from server.turns.side_call_counts import LINE

MOST_LINES = 16  # of one hint; the one that was used longest ago gives way to a new one
MOST_CHARS = 512  # of an id; a longer one is no hint
SHOWN_CHARS = 128  # of an agent's id
FIELD = "body."  # what the names of fields begin with in this table
USER_ID = "metadata.user_id"
SESSION_MARK = "_session_"  # before the session in a user id that is no JSON
WINDOWS = ("x-codex-window-id", f"{FIELD}client_metadata.x-codex-window-id")  # of the form THREAD:GENERATION


METADATA = (f"{FIELD}metadata.session_id", f"{FIELD}metadata.sessionId")


@dataclass(frozen=True)
class Source:
    """One way to name a conversation. ``line``, ``agent``, ``parent_line`` and ``parent_agent`` are names of headers,
    or of fields if they begin with ``FIELD``: the conversation's id, that of the agent within it, and those of the one
    that it was begun from. ``calls_tools``: conversations of its clients have tools from their first request on.
    """

    line: str
    agent: str = ""
    parent_line: str = ""
    parent_agent: str = ""
    calls_tools: bool = False


SOURCES = (
    Source(
        "x-claude-code-session-id",
        agent="x-claude-code-agent-id",
        parent_agent="x-claude-code-parent-agent-id",
        calls_tools=True,
    ),
    Source(
        f"{FIELD}{USER_ID}.session_id", parent_line=f"{FIELD}{USER_ID}.parent_session_id", calls_tools=True
    ),  # the same ids, where a proxy has dropped the headers
    Source(
        f"{FIELD}client_metadata.thread_id",
        parent_line=f"{FIELD}client_metadata.x-codex-parent-thread-id",
        calls_tools=True,
    ),  # a WebSocket's headers are those of all its requests
    Source("thread-id", parent_line="x-codex-parent-thread-id", calls_tools=True),
    *(Source(name, calls_tools=True) for name in WINDOWS),
    Source("session-id", calls_tools=True),
    Source("session_id", calls_tools=True),
    Source("conversation_id", calls_tools=True),
    Source(f"{FIELD}client_metadata.session_id", calls_tools=True),
    Source("x-session-affinity", parent_line="x-parent-session-id", calls_tools=True),
    Source("x-openwebui-chat-id"),
    Source("x-qwen-code-session-id", calls_tools=True),
    Source("x-task-id", calls_tools=True),
    Source("x-grok-conv-id"),
    Source("x-litellm-session-id"),
    Source("x-context-id", calls_tools=True),
    Source("agent-session-id", calls_tools=True),
    Source("x-goose-session-id", calls_tools=True),
    Source("x-session-id", parent_line="x-parent-session-id"),  # which names no session that was made here
    *(Source(name) for name in METADATA),
    Source(f"{FIELD}prompt_cache_key"),
)


@dataclass(frozen=True)
class Hint:
    """``via``: the header or field that the hint came in. ``names`` are all names that lines of it can have,
    ``parent_names`` those of the conversation that it was begun from. ``agent``: the id of the agent, "" for the main
    one. ``calls_tools``: see Source.
    """

    via: str
    names: tuple[str, ...]
    parent_names: tuple[str, ...] = ()
    agent: str = ""
    calls_tools: bool = False


def hint_of(headers: Mapping[str, str], fields: Mapping[str, str]) -> Hint | None:
    """The hint of a request; None if it has none. ``fields``: those of its body that may name a conversation, by their
    paths.
    """
    values = values_of(headers, fields)
    source = next((source for source in SOURCES if source.line in values), None)
    if source is None:
        return None
    line, agent = values[source.line], values.get(source.agent, "")
    parent = parent_of(source, values, line, agent)
    return Hint(
        source.line.removeprefix(FIELD),
        names_of(line, agent),
        () if parent is None else names_of(*parent),
        "".join(character for character in agent if character.isprintable())[:SHOWN_CHARS],
        source.calls_tools,
    )


HEADERS = tuple(source.line for source in SOURCES if not source.line.startswith(FIELD) and source.line not in WINDOWS)


def conversation_in(headers: Mapping[str, str]) -> str | None:
    """The id of a conversation in headers with small names, for load balancers; None if there is none."""
    return next((headers[name] for name in HEADERS if headers.get(name)), None)


def conversation_in_body(fields: Mapping[str, str]) -> str | None:
    """The same of fields of a body, by their paths."""
    values = values_of({}, fields)
    return next((values[source.line] for source in SOURCES if source.line in values), None)


def names_conversation(fields: Mapping[str, str]) -> bool:
    """Whether the metadata of a request names its conversation."""
    return any(name in METADATA for name in values_of({}, fields))


def values_of(headers: Mapping[str, str], fields: Mapping[str, str]) -> dict[str, str]:
    """The ids in a request by the names of the table, without those that are empty or too long."""
    found = {name.lower(): value for name, value in headers.items()}
    found |= {f"{FIELD}{name}": value for name, value in fields.items()}
    if (user := fields.get(USER_ID)) is not None:
        found |= {f"{FIELD}{USER_ID}.{name}": value for name, value in parse_user_id(user).items()}
    for name in WINDOWS:
        if name in found:
            found[name] = found[name].rpartition(":")[0] or found[name]
    stripped = {name: value.strip() for name, value in found.items()}
    return {name: value for name, value in stripped.items() if 0 < len(value) <= MOST_CHARS}


def parent_of(source: Source, values: Mapping[str, str], line: str, agent: str) -> tuple[str, str] | None:
    """Id and agent of the conversation that this one was begun from; None if it is not known."""
    if source.parent_line in values:
        return values[source.parent_line], ""
    return (line, values.get(source.parent_agent, "")) if agent else None


def parse_user_id(given: str) -> dict[str, str]:
    """The ids of sessions in Anthropic's ``metadata.user_id``, as coding agents write it: a JSON object, or a text that
    ends with the session. {} for a user id that names no session.
    """
    if len(given) > 4 * MOST_CHARS:
        return {}
    if not given.startswith("{"):
        _, mark, session = given.rpartition(SESSION_MARK)
        return {"session_id": session} if mark else {}
    try:
        parsed = json.loads(given)
    except ValueError:
        return {}
    names = ("session_id", "parent_session_id")
    return {name: parsed[name] for name in names if isinstance(parsed, dict) and isinstance(parsed.get(name), str)}


def names_of(line: str, agent: str) -> tuple[str, ...]:
    """The names that lines of a conversation can have: of a digest, as ids may be personal."""
    digest = hashlib.blake2b(json.dumps([line, agent]).encode(), digest_size=10).hexdigest()
    return tuple(f"{LINE}{digest}-{number}" for number in range(MOST_LINES))
