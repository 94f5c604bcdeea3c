"""`ChatSession`: what the terminal knows of the session it talks in, and the requests that change it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx

from server.cli.chat.reply_view import ReplyView
from server.cli.chat.streamed_turn import TurnAnswer, TurnFailed, stopping, stream
from server.cli.remote_server import RemoteServer, session_path

Message = dict[str, Any]


@dataclass
class ChatSession:
    """A session and the settings of its next turns. ``context`` is the model's, in tokens. ``system`` is sent before
    the next message. ``used`` are the tokens of the session, 0 if unknown. ``replaced`` is
    the turn that the next message takes the place of, with all turns behind it.
    """

    http: httpx.Client
    model: str
    context: int | None
    session: str
    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    replaced: int | None = None
    last: TurnAnswer | None = None
    used: int = 0

    def send(self, text: str, view: ReplyView) -> bool:
        """A turn; whether it is part of the session. Raises RequestFailed where the turn to replace is gone."""
        if self.replaced is not None:
            turn, self.replaced = self.replaced, None
            self.rewind(turn - 1)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, {"role": "user", "content": text}]
        done = self._turn("/v1/chat/completions", {"session_id": self.session, "messages": messages}, view)
        if done:
            self.system = None  # it is part of the session now
        return done

    def regenerate(self, view: ReplyView) -> bool:
        """Another reply in place of the last one; whether there is one."""
        return self._turn(f"/v1/sessions{session_path(self.session)}/regenerate", {}, view)

    def _turn(self, path: str, body: dict[str, Any], view: ReplyView) -> bool:
        reply = TurnAnswer()
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        try:
            with view.replying() as shown, stopping(self.http, self.session):
                for piece in stream(self.http, path, {"model": self.model, **body, **streamed, **self.settings}, reply):
                    shown.add(piece)
        except KeyboardInterrupt:
            view.note("stopped; this turn is not part of the session")
            return False
        except TurnFailed as error:
            view.note(str(error))
            return False
        self.last = reply
        if reply.usage is not None:
            self.used = reply.usage["prompt_tokens"] + reply.usage["completion_tokens"]
        view.note(("stopped; the reply so far is kept · " if reply.finish == "cancelled" else "") + reply.summary())
        return True

    # --- the session itself; all raise RequestFailed ---------------------------------------------------------------

    def begin(self, name: str | None = None) -> None:
        """Talk in a new session, or in the one of this name."""
        session_path(name or "new")
        self.session = name or new_session_name()
        self.replaced, self.last, self.used = None, None, 0

    def state(self) -> Message:
        found = self._ask("GET")
        self.used = found["tokens"]
        return found

    def messages(self) -> list[Message]:
        data: list[Message] = self._ask("GET", "/messages")["data"]
        return data

    def fork(self, turn: int | None) -> None:
        """Go on in a copy of the session, up to ``turn``."""
        made = self._ask("POST", "/fork", {"turn": turn})
        self.begin(made["id"])
        self.used = made["tokens"]

    def rewind(self, turn: int) -> None:
        """Drop the turns behind ``turn``. A system message that opened a session which is empty then is sent again."""
        first = self.messages()[0] if turn == 0 else None
        self.used, self.last = self._ask("POST", "/rewind", {"turn": turn})["tokens"], None
        if first is not None and first["role"] in ("system", "developer") and self.system is None:
            self.system = first["content"]

    def _ask(self, method: str, path: str = "", body: Message | None = None) -> Message:
        return RemoteServer(self.http).ask(method, session_path(self.session) + path, body)


def new_session_name() -> str:
    return f"chat-{uuid.uuid4().hex[:12]}"
