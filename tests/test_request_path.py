"""The path of a chat request in docs/architecture.md is the one that a request takes."""

from __future__ import annotations

import asyncio
import dis
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from engine_kit import Kit
from http_context import site
from template_styles import HERMES, tokens_with

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SUSPENDS = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Hop(NamedTuple):
    """A function of a file, as code objects name it."""

    file: str
    name: str

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0]


HOPS = [
    Hop(file, name)
    for file, name in re.findall(
        r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", PAGE.split("## The path of a chat request")[1], re.MULTILINE
    )
]


class RequestPath:
    """``first``: each hop when it was called first, with the hops that had not returned then."""

    def __init__(self) -> None:
        self.first: dict[Hop, set[Hop]] = {}
        self._open: dict[int, Hop] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        file, code = frame.f_code.co_filename, frame.f_code
        if not file.startswith(str(ROOT)):
            return
        hop = Hop(file[len(str(ROOT)) + 1 :], code.co_qualname)
        if hop not in HOPS:
            return
        if event == "call":
            self.first.setdefault(hop, {*self._open.values()})
            self._open[id(frame)] = hop
        elif not (code.co_flags & SUSPENDS and dis.opname[code.co_code[frame.f_lasti]] == "YIELD_VALUE"):
            self._open.pop(id(frame), None)


@contextmanager
def tracing() -> Iterator[RequestPath]:
    """What this thread, and those that begin within, call."""
    path = RequestPath()
    before = sys.getprofile()
    threading.setprofile(path)
    sys.setprofile(path)
    try:
        yield path
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def check(path: RequestPath, hops: list[Hop]) -> None:
    """These were called in this order, and no folder was entered again after its hops had returned."""
    assert [*path.first] == hops
    assert all(path.first[hop] for hop in hops[1:]), "each is called within another one"
    for number, hop in enumerate(hops):
        others = {other.folder for other in hops[:number]}
        if hop.folder in others and hops[number - 1].folder != hop.folder:
            assert hop.folder in {other.folder for other in path.first[hop]}, hop


def test_the_page_has_the_whole_path_in_twelve_hops() -> None:
    assert 8 < len(HOPS) <= 12
    assert len({hop.file for hop in HOPS}) == len(HOPS)


def test_the_server_takes_its_hops_in_order() -> None:
    async def chat() -> int:
        async with site(tokens=tokens_with(HERMES)) as made:
            return int((await made.chat(session_id="s")).status_code)

    with tracing() as path:  # before the tokenizer's threads begin
        assert asyncio.run(chat()) == 200
    beyond = "server/engine/"  # the fake engine stands for it
    check(path, [hop for hop in HOPS if hop.file.startswith("server/") and not hop.file.startswith(beyond)])


def test_the_engine_takes_its_hops_in_order() -> None:
    kit = Kit()
    with tracing() as path:
        assert len(kit.ask([1, 2, 3], 2).tokens) == 2
    check(path, [hop for hop in HOPS if not hop.file.startswith("server/")])
