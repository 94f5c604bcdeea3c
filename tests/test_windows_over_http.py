"""Windows of real sizes, over HTTP: with memory for few sessions every reply is that of a forward from scratch, to its
logits, though the keys that windowed layers do not see have left: after a rewind, in a fork, after a restart.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from server_process import ServerProcess
from tiny_models import logits, make_model, make_tokenizer

LAYER = 2 * 2 * 16 * 4  # bytes of a token: K and V, heads, dim, float32
TEXT = 8  # tokens of a reply: bytes that are no text come back as others
WORDS = ("red ", "green ", "blue ", "one ", "two ", "three ", "four ", "stone ")


class Case(NamedTuple):
    """A model with a window or chunk of so many tokens, and the bytes of a token in its windowed and other layers."""

    name: str
    window: int
    windowed: int = 3 * LAYER
    whole: int = LAYER

    @property
    def token(self) -> int:
        return self.windowed + self.whole


CASES = (
    Case("gemma3", 1024),
    pytest.param(Case("mistral", 4096, 4 * LAYER, 0), marks=pytest.mark.wide),
    pytest.param(Case("llama4", 1024), marks=pytest.mark.slow),
    pytest.param(Case("gpt_oss", 1024), marks=pytest.mark.slow),
    pytest.param(Case("gemma4", 1024, 2 * LAYER, 4 * LAYER), marks=pytest.mark.slow),
)


class Site:
    """A server of one model, and the model itself; it is there within ``with``."""

    def __init__(self, server: ServerProcess, model: Any) -> None:
        self._server = server
        self._http = httpx.Client(timeout=300)
        self._model = model
        self._tokenizer = make_tokenizer()
        self.talks: dict[str, list[dict[str, str]]] = {}

    def __enter__(self) -> Site:
        self._server.__enter__()
        self._http.base_url = httpx.URL(self._server.url)
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._server.__exit__()

    def say(self, session: str, length: int, *, checked: bool = True) -> dict[str, Any]:
        """A turn of the session, whose message has so many tokens; returns its receipt. The reply is what the model
        says from scratch, where it is ``checked``.
        """
        talk = self.talks.setdefault(session, [])
        rng = random.Random(f"{session} {len(talk)} {length}")
        talk.append({"role": "user", "content": "".join(rng.choices(WORDS, k=length))[:length]})
        body = {"messages": talk, "max_tokens": 6, "temperature": 0, "logprobs": True, "ignore_eos": True}
        reply = self.post("/v1/chat/completions", body, session)
        (choice,) = reply["choices"]
        if checked:
            self._check(talk, choice)
        talk.append({"role": "assistant", "content": choice["message"]["content"]})
        receipt: dict[str, Any] = reply["cache"]
        return receipt

    def _check(self, talk: list[dict[str, str]], choice: dict[str, Any]) -> None:
        told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        prompt = self._tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
        ids = [self._id(entry) for entry in choice["logprobs"]["content"]]
        rows = logits(self._model, [*prompt, *ids])[len(prompt) - 1 : -1]
        assert ids == rows.argmax(-1).tolist()
        wanted = torch.log_softmax(rows, -1).max(-1).values
        assert float((torch.tensor(told) - wanted).abs().max()) <= 1e-4 * float(rows.abs().max())

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
        until = time.monotonic() + 60
        while self.held(session, "disk")[0] < self.held(session)[0]:
            assert time.monotonic() < until
            time.sleep(0.05)

    def _id(self, entry: dict[str, Any]) -> int:
        data: list[int] = entry["bytes"]
        return data[0] if len(data) == 1 else int(self._tokenizer.convert_tokens_to_ids(bytes(data).decode()))


def served(case: Case, folder: Path, *flags: str) -> tuple[ServerProcess, Any]:
    """A server with memory for a little less than a session of 1.5 windows and 560 tokens and two of a window and 330
    tokens, and its model.
    """
    setting = "attention_chunk_size" if case.name == "llama4" else "sliding_window"
    model = make_model(case.name, max_position_embeddings=16384, **{setting: case.window})
    path = folder / case.name
    if not path.exists():
        model.save_pretrained(path)
        make_tokenizer().save_pretrained(path)
    memory = str(int(0.93 * (3.5 * case.window + 1220) * case.token))
    return ServerProcess(path, folder, "--dtype", "float32", "--kv-memory", memory, *flags), model


def crowd(site: Site, case: Case, count: int) -> None:
    """Sessions that need the room."""
    for number in range(count):
        site.say(f"crowd-{number}", case.window + 300, checked=number == 0)
        site.stored(f"crowd-{number}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_windows_are_crossed_rewound_forked_and_restarted(case: Case, tmp_path: Path) -> None:
    server, model = served(case, tmp_path)
    with Site(server, model) as site:
        site.say("a", case.window + 500)
        site.say("a", case.window // 2)  # another part of the window is not seen any more
        site.stored("a")
        tokens, _ = site.held("a")
        crowd(site, case, 2)
        kept, nbytes = site.held("a")
        assert kept == tokens
        assert nbytes < 0.95 * case.token * tokens  # keys have left, and their session has not
        assert server.metric("warmturn_evictions_total", tier="device") == 0
        receipt = site.say("a", 30)
        assert receipt["reused"]["device"] >= tokens - TEXT, receipt

        forked = site.post("/v1/sessions/a/fork", {"id": "b", "turn": 1})
        site.talks["b"] = site.talks["a"][:2]
        assert forked["turns"] == 1
        receipt = site.say("b", 40)
        assert receipt["recomputed"] <= TEXT  # from the disk, where no session has it in memory
        site.say("a", 20)

        site.stored("a")
        crowd(site, case, 3)
        site.talks["a"] = site.talks["a"][:2]  # a rewind behind a window
        receipt = site.say("a", 50)
        assert receipt["recomputed"] <= TEXT
        assert receipt["reused"]["disk"] + receipt["reused"]["device"] > case.window
        site.stored("a")
    assert server.process.returncode == 0
    server, _ = served(case, tmp_path)
    with Site(server, model) as again:
        again.talks = site.talks
        receipt = again.say("a", 60)
        assert receipt["reused"]["disk"] > case.window + 500
        assert receipt["recomputed"] <= TEXT
        again.say("b", 60)


@pytest.mark.parametrize("case", CASES[:1], ids=lambda case: case.name)
def test_what_no_tier_holds_is_computed_again_and_told(case: Case, tmp_path: Path) -> None:
    server, model = served(case, tmp_path, "--disk-space", "0")
    with Site(server, model) as site:
        site.say("a", case.window + 500)
        site.say("a", case.window)
        for number in range(2):
            site.say(f"crowd-{number}", case.window + 300)
        assert server.metric("warmturn_evictions_total", tier="device") == 0
        assert site.held("a")[1] < 0.95 * case.token * site.held("a")[0]
        site.talks["a"] = site.talks["a"][:2]
        receipt = site.say("a", 50)
        assert receipt["miss"]["reason"] == "window_freed"
        assert receipt["recomputed"] > 0
        assert sum(receipt["reused"].values()) + receipt["recomputed"] + receipt["new"] + 1 >= receipt["prompt_tokens"]


def test_bytes_of_a_token_are_told(tmp_path: Path) -> None:
    case = Case("gemma3", 1024)
    server, _ = served(case, tmp_path)
    with server:
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    told = model["warmturn"]
    assert told["kv_bytes_per_token"] == case.token
    for length in (1024, 8192, 32768):
        seen = min(length, case.window - 1 + (case.window - 1) // 16)
        assert told["kv_bytes_by_length"][str(length)] == int(case.whole + case.windowed * seen / length)
