"""Servers of tiny models with windows of real sizes and little memory, and chats with them, for tests over HTTP."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from server_process import ServerProcess, until
from tiny_models import logits, make_model, make_tokenizer, token_of

LAYER = 2 * 2 * 16 * 4  # bytes of a token: K and V, heads, dim, float32
TEXT = 8  # tokens of a reply: bytes that are no text come back as others
WORDS = ("red ", "green ", "blue ", "one ", "two ", "three ", "four ", "stone ")


class Case(NamedTuple):
    """A model with a window or chunk of so many tokens, and the bytes of a token in its windowed and other layers."""

    name: str
    window: int
    windowed: int = 2 * LAYER
    whole: int = LAYER

    @property
    def token(self) -> int:
        return self.windowed + self.whole


class Said(NamedTuple):
    """What was said to ``talk``: tokens and their log-probabilities."""

    talk: list[dict[str, str]]
    text: str
    ids: list[int]
    told: torch.Tensor


class Site:
    """A server of one model, and the model itself; it is there within ``with``."""

    def __init__(self, server: ServerProcess, model: Any) -> None:
        self.server = server
        self._http = httpx.Client(timeout=300)
        self._model = model
        self._tokenizer = make_tokenizer()
        self.talks: dict[str, list[dict[str, str]]] = {}

    def __enter__(self) -> Site:
        self.server.__enter__()
        self._http.base_url = httpx.URL(self.server.url)
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self.server.__exit__()

    def say(self, session: str, length: int, *, checked: bool = True) -> dict[str, Any]:
        """A turn of the session, whose message has so many tokens; returns its receipt. ``checked``: see ``check``."""
        talk = self.talks.setdefault(session, [])
        rng = random.Random(f"{session} {len(talk)} {length}")
        talk.append({"role": "user", "content": "".join(rng.choices(WORDS, k=length))[:length]})
        said, receipt = self.turn(session, talk)
        if checked:
            self.check(said)
        talk.append({"role": "assistant", "content": said.text})
        return receipt

    def turn(self, session: str, talk: list[dict[str, str]], **fields: Any) -> tuple[Said, dict[str, Any]]:
        """What is said to ``talk``, and the receipt. ``fields``: more ones of the request."""
        body = {"messages": talk, "max_tokens": 6, "temperature": 0, "logprobs": True, "ignore_eos": True, **fields}
        reply = self.post("/v1/chat/completions", body, session)
        (choice,) = reply["choices"]
        entries = choice["logprobs"]["content"]
        told = torch.tensor([entry["logprob"] for entry in entries])
        return Said([*talk], choice["message"]["content"], [*map(token_of, entries)], told), reply["cache"]

    def check(self, said: Said) -> None:
        """The reply is what the model says from scratch."""
        rows = self.rows(said)
        assert said.ids == rows.argmax(-1).tolist()
        wanted = torch.log_softmax(rows, -1).max(-1).values
        assert float((said.told - wanted).abs().max()) <= 1e-4 * float(rows.abs().max())

    def rows(self, said: Said) -> torch.Tensor:
        """The logits of the reply's tokens, from scratch."""
        prompt = self._tokenizer.apply_chat_template(said.talk, add_generation_prompt=True)["input_ids"]
        return logits(self._model, [*prompt, *said.ids])[len(prompt) - 1 : -1]

    def post(self, path: str, body: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        headers = {} if session is None else {"X-Session-ID": session, "X-Session-Create": "true"}
        answer = self._http.post(path, json=body, headers=headers)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def held(self, session: str, tier: str = "device") -> tuple[int, int]:
        """Tokens and bytes that a tier has of a session."""
        kv = self._http.get(f"/v1/sessions/{session}").json()["kv"]
        return (kv[tier]["tokens"], kv[tier]["bytes"]) if tier in kv else (0, 0)

    def stored(self, session: str) -> None:
        """Wait until all of a session is on disk."""
        until(lambda: self.held(session, "disk")[0] >= self.held(session)[0], 60.0)


def served(case: Case, folder: Path, *flags: str) -> tuple[ServerProcess, Any]:
    """A server with memory for a little less than a session of 1.5 windows and 560 tokens and two of a window and 330
    tokens, and its model.
    """
    setting = {"llama4": "attention_chunk_size", "llama": ""}.get(case.name, "sliding_window")
    windows = {setting: case.window} if setting else {}
    model = make_model(case.name, max_position_embeddings=16384, **windows)
    path = folder / case.name
    if not path.exists():
        model.save_pretrained(path)
        make_tokenizer().save_pretrained(path)
    memory = str(int(0.93 * (3.5 * case.window + 1220) * case.token))
    return ServerProcess(path, folder, "--dtype", "float32", "--kv-memory", memory, *flags), model


def crowd(site: Site, case: Case, count: int, *, checked: bool = True) -> None:
    """Sessions that need the room; the first turn is ``checked``."""
    for number in range(count):
        site.say(f"crowd-{number}", case.window + 300, checked=checked and number == 0)
        site.stored(f"crowd-{number}")
