"""The commands of `warmturn chat`: lines that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.cli.chat.conversation import ChatSession, Message
from server.cli.chat.reply_view import ReplyView
from server.cli.remote_server import RemoteServer, RequestFailed
from server.cli.sessions_terminal import describe_session, export, moment
from server.config.usage_error import UsageError

LISTED = 20  # sessions
SHOWN_TURNS = 2  # of a session that is continued
SETTINGS = (
    "temperature top_p top_k min_p seed max_tokens frequency_penalty presence_penalty repetition_penalty stop "
    "reasoning_effort"
).split()


class Quit(Exception):
    """The user leaves."""


@dataclass
class Terminal:
    """What commands act on. ``names`` are the sessions of the last list; ``prefilled`` stands in the next input."""

    conversation: ChatSession
    view: ReplyView
    names: list[str]
    prefilled: str = ""


@dataclass(frozen=True)
class SlashCommand:
    """A command: its arguments as the help has them, what it does, and the function that does it."""

    arguments: str
    summary: str
    run: Callable[[Terminal, str], None]


def obey(terminal: Terminal, line: str) -> None:
    """Run the command in ``line``, which begins with a slash; faults are told in a line. Raises Quit."""
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        terminal.view.note(f"/{name} is no command; /help lists them. A message can begin with a space and a slash.")
        return
    try:
        command.run(terminal, argument.strip())
    except (RequestFailed, UsageError) as error:
        terminal.view.note(str(error))


def show_last_turns(terminal: Terminal) -> None:
    """The end of the session's conversation, as it was, or that it is new."""
    try:
        messages = terminal.conversation.messages()
    except RequestFailed:
        terminal.view.note("a new session")
        return
    questions = [message["index"] for message in messages if message["role"] == "user"]
    first = questions[-SHOWN_TURNS] if len(questions) >= SHOWN_TURNS else 0
    if first:
        terminal.view.note(counted(len(questions) - SHOWN_TURNS, "earlier turn"))
    for message in messages[first:]:
        show_message(terminal.view, message)


def show_message(view: ReplyView, message: Message) -> None:
    """A message of the log; the model's are Markdown."""
    text = plain_text(message)
    if message["role"] == "assistant":
        view.show(text)
    else:
        view.note(f"{'>' if message['role'] == 'user' else message['role'] + ':'} {text}")


def plain_text(message: Message) -> str:
    """The text of a message, with its calls."""
    content = message["content"]
    if isinstance(content, list):
        content = "\n".join(part.get("text", f"[{part.get('type')}]") for part in content)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return "\n".join([content or "", *(f"{call['name']}({call['arguments']})" for call in calls)]).strip()


def _help(terminal: Terminal, _: str) -> None:
    rows = [(f"/{name} {command.arguments}".rstrip(), command.summary) for name, command in COMMANDS.items()]
    width = max(len(usage) for usage, _ in rows)
    keys = "Enter sends; Alt-Enter or a \\ at the end of a line begins another one; Ctrl-C stops a reply and keeps it."
    terminal.view.note("\n".join([*(f"{usage:<{width}}  {summary}" for usage, summary in rows), keys]))


def _new(terminal: Terminal, name: str) -> None:
    terminal.conversation.begin(name or None)
    terminal.view.note(f"session {terminal.conversation.session}")


def _list(terminal: Terminal, prefix: str) -> None:
    wanted = {"limit": LISTED, "prefix": prefix or None}
    sessions = RemoteServer(terminal.conversation.http).ask("GET", parameters=wanted)["data"]
    terminal.names = [session["id"] for session in sessions]
    lines = [f"{number:>2}  {describe(session)}" for number, session in enumerate(sessions, 1)]
    terminal.view.note("\n".join(lines) or "no sessions")


def describe(session: Message) -> str:
    """A session of a list in a line: its time, its name, and its title where it has one."""
    parts = [moment(session["last_used_at"]), session["id"], counted(session["turns"], "turn"), session.get("title")]
    return " · ".join(part for part in parts if part)


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _open(terminal: Terminal, name: str) -> None:
    if name.isdigit() and 1 <= int(name) <= len(terminal.names):
        name = terminal.names[int(name) - 1]
    if not name:
        raise UsageError("/open: which session? A name, or a number of /list")
    before = terminal.conversation.session
    terminal.conversation.begin(name)
    try:
        terminal.conversation.state()
    except RequestFailed:
        terminal.conversation.begin(before)
        raise
    terminal.view.note(f"session {name}")
    show_last_turns(terminal)


def _fork(terminal: Terminal, turn: str) -> None:
    terminal.conversation.fork(whole_number("/fork", turn) if turn else None)
    terminal.view.note(f"session {terminal.conversation.session}, a copy; the other one stays as it is")


def _undo(terminal: Terminal, count: str) -> None:
    turns = terminal.conversation.state()["turns"]
    left = turns - (whole_number("/undo", count) if count else 1)
    if left < 0:
        raise UsageError(f"/undo: the session has {counted(turns, 'turn')}")
    terminal.conversation.rewind(left)
    terminal.view.note(f"{counted(left, 'turn')} {'is' if left == 1 else 'are'} left")


def _edit(terminal: Terminal, text: str) -> None:
    asked = [message for message in terminal.conversation.messages() if message["role"] == "user" and message["turn"]]
    if not asked:
        raise UsageError("/edit: no turn has a message")
    terminal.conversation.replaced = asked[-1]["turn"]
    if text:
        terminal.conversation.send(text, terminal.view)
    else:
        terminal.prefilled = plain_text(asked[-1])
        terminal.view.note("the next message takes the place of this one; Ctrl-C leaves it as it was")


def _retry(terminal: Terminal, _: str) -> None:
    terminal.conversation.regenerate(terminal.view)


def _save(terminal: Terminal, name: str) -> None:
    if not name:
        raise UsageError("/save: to which file? FILE.md, FILE.json, or FILE.zip for a capsule with the cache")
    path = Path(name).expanduser()
    if path.exists():
        raise UsageError(f"/save: {path} exists")
    if path.suffix == ".zip":
        given = {"session": terminal.conversation.session, "file": str(path), "no_kv": False}
        export(RemoteServer(terminal.conversation.http), given)
    else:
        messages = terminal.conversation.messages()
        try:
            path.write_text(as_json(messages) if path.suffix == ".json" else as_markdown(messages), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"/save: {path} cannot be written: {error.strerror}") from None
    terminal.view.note(f"saved to {path}")


def as_json(messages: list[Message]) -> str:
    """The conversation as a list of chat messages."""
    kept = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
    listed = [{name: message[name] for name in kept if message.get(name) is not None} for message in messages]
    return json.dumps(listed, ensure_ascii=False, indent=2) + "\n"


def as_markdown(messages: list[Message]) -> str:
    return "\n".join(f"## {message['role'].capitalize()}\n\n{plain_text(message)}\n" for message in messages)


def _system(terminal: Terminal, text: str) -> None:
    if text:
        terminal.conversation.system = text
    waiting = terminal.conversation.system
    terminal.view.note("no system message waits" if waiting is None else f"sent with the next message: {waiting}")


def _set(terminal: Terminal, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if name and name not in SETTINGS:
        raise UsageError(f"/set: there is no setting {name}; there are {', '.join(SETTINGS)}")
    if value.strip():
        terminal.conversation.settings[name] = setting_value(value.strip())
    elif name:
        terminal.conversation.settings.pop(name, None)
    held = terminal.conversation.settings
    text = ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in held.items())
    terminal.view.note(text or f"the model's defaults hold; /set NAME VALUE with {' '.join(SETTINGS)}")


def setting_value(text: str) -> Any:
    """A value as JSON, or as the text that it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _stats(terminal: Terminal, _: str) -> None:
    conversation = terminal.conversation
    lines = list(describe_session(conversation.state()))
    if conversation.context is not None:
        lines.append(f"{'context':<13}{conversation.context} tokens")
    if conversation.last is not None:
        lines.append(f"{'last turn':<13}{conversation.last.summary()}")
    terminal.view.note("\n".join(lines))


def _quit(_terminal: Terminal, _: str) -> None:
    raise Quit


def whole_number(command: str, text: str) -> int:
    """A number of turns. Raises UsageError."""
    if not text.isdigit():
        raise UsageError(f"{command}: expected a whole number")
    return int(text)


COMMANDS = {
    "help": SlashCommand("", "these lines", _help),
    "new": SlashCommand("[NAME]", "begin another session", _new),
    "list": SlashCommand("[PREFIX]", "the sessions used last", _list),
    "open": SlashCommand("NAME|NUMBER", "continue a session", _open),
    "fork": SlashCommand("[TURN]", "go on in a copy of this session, up to a turn", _fork),
    "undo": SlashCommand("[COUNT]", "drop the last turn, or the last COUNT", _undo),
    "edit": SlashCommand("[TEXT]", "change the last message and send it again", _edit),
    "retry": SlashCommand("", "another reply in place of the last one", _retry),
    "save": SlashCommand("FILE", "write the conversation to a .md, .json or .zip file", _save),
    "system": SlashCommand("[TEXT]", "a system message, sent with the next message", _system),
    "set": SlashCommand("[NAME [VALUE]]", "a setting of the next turns; without VALUE the default", _set),
    "stats": SlashCommand("", "length and cache of the session, cost of the last turn", _stats),
    "quit": SlashCommand("", "leave; so does Ctrl-D. The session stays", _quit),
}
