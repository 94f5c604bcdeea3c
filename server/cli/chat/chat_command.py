"""`warmturn chat`: a conversation in the terminal with a running server, or one message from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import httpx
from rich.console import Console

from server.cli.chat.conversation import ChatSession
from server.cli.chat.line_editor import LineEditor, history_path, keys_between_prompts
from server.cli.chat.reply_view import MarkdownView, PlainView, ReplyView
from server.cli.chat.slash_commands import COMMANDS, Quit, Terminal, obey, show_last_turns
from server.cli.remote_server import RemoteServer, RequestFailed, base_url, key_header
from server.config.client_options import ChatConfig
from server.config.usage_error import UsageError

TIMEOUT = httpx.Timeout(10.0, read=None)  # a long prompt may take its time until the first token


def chat(config: ChatConfig, client: httpx.Client | None = None, typed: Iterable[str] | None = None) -> int:
    """Talk until the input ends; the exit status: 0, or 1 where the one message of a pipe was not answered. ``typed``
    are lines in place of a terminal's. Raises UsageError when no server answers or the key is wrong.
    """
    with client or httpx.Client(
        base_url=base_url(config.url), headers=key_header(config.api_key), timeout=TIMEOUT
    ) as http:
        conversation = begin_chat(config, http)
        if typed is not None:
            return talk_plainly(conversation, typed)
        if config.message is not None or not sys.stdin.isatty():
            return answer_once(conversation, config.message)
        if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            return talk_plainly(conversation, sys.stdin)
        return talk(conversation)


def begin_chat(config: ChatConfig, http: httpx.Client) -> ChatSession:
    """The conversation that the configuration asks for. Raises UsageError."""
    first = RemoteServer(http).first_model(config.url)
    facts = first.get("warmturn") or {}
    settings = {} if config.temperature is None else {"temperature": config.temperature}
    model = config.model or str(first["id"])
    return ChatSession(http, model, facts.get("max_context"), config.session, config.system, settings)


def answer_once(conversation: ChatSession, message: str | None) -> int:
    """Answer the message and what comes through the pipe behind it. The reply alone goes to standard output; notes go
    to standard error where that is a terminal, and errors always. Raises UsageError.
    """
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    text = "\n\n".join(part for part in (message, piped.strip("\n")) if part)
    if not text.strip():
        raise UsageError("MESSAGE: nothing to send; give a message, or text through a pipe")
    if conversation.send(text, PlainView(sys.stdout, sys.stderr)):
        return 0
    return 1


def talk_plainly(conversation: ChatSession, typed: Iterable[str]) -> int:
    """Answer each line, without colours or editing."""
    view = PlainView(sys.stdout, sys.stdout)
    greet(conversation, view)
    return converse(Terminal(conversation, view, []), (line.strip() for line in typed))


def talk(conversation: ChatSession) -> int:
    """Talk with a person at a terminal."""
    console = Console()
    terminal = Terminal(conversation, MarkdownView(console), [])
    greet(conversation, terminal.view)
    show_last_turns(terminal)
    editor = LineEditor(history_path(), tuple(COMMANDS), lambda: status_line(conversation))
    with keys_between_prompts():
        return converse(terminal, messages(terminal, editor))


def messages(terminal: Terminal, editor: LineEditor) -> Iterable[str]:
    """What the user sends, until Ctrl-D. Ctrl-C drops what is typed."""
    while True:
        prefilled, terminal.prefilled = terminal.prefilled, ""
        try:
            yield editor.read(prefilled).strip("\n")
        except EOFError:
            return
        except KeyboardInterrupt:
            terminal.conversation.replaced = None


def converse(terminal: Terminal, typed: Iterable[str]) -> int:
    """Answer messages and obey commands until one of them, or the input, ends it."""
    for line in typed:
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                obey(terminal, line)
            else:
                terminal.conversation.send(line, terminal.view)
        except RequestFailed as error:
            terminal.view.note(str(error))
        except httpx.HTTPError as error:
            terminal.view.note(f"the connection to the server was lost ({type(error).__name__})")
        except Quit:
            break
    return 0


def greet(conversation: ChatSession, view: ReplyView) -> None:
    """The first line."""
    view.note(f"{conversation.model} · session {conversation.session} · Ctrl-C stops a reply, Ctrl-D leaves, /help")


def status_line(conversation: ChatSession) -> str:
    """Model, session, how full the context is, and what the last turn reused."""
    parts = [conversation.model, conversation.session]
    last, used = conversation.last, conversation.used
    if used and conversation.context:
        parts.append(f"context {used} of {conversation.context} ({100 * used / conversation.context:.0f} %)")
    if last is not None and last.usage is not None:
        reused = (last.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        parts.append(f"reused {reused} of {last.usage['prompt_tokens']}")
    return " · ".join(parts)
