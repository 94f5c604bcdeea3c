"""Damages to the files of a stopped server: what is read again is right, or is not there."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from crash.damage import KINDS, content_of, damage
from engine_kit import Kit
from tiny_models import greedy, model_of

from cache.segments.chain import Owner
from cache.segments.segment_file import SegmentReader
from cache.tiers.segment_folder import file_name, folder_of
from cache.whole_files import CorruptFile
from server.log.database import SessionDamaged
from server.log.logged_message import LoggedMessage
from server.log.recovery.salvage import Salvage
from server.log.session_log import SessionLog
from server.log.timeline import NewTurn

pytestmark = pytest.mark.wide

DAMAGES = int(os.environ.get("CRASH_DAMAGES", "1000"))
SESSIONS = 4
MODELS = ("llama", "mamba2")  # pages alone; pages and states

Truth = dict[str, tuple[list[int], list[int]]]  # next prompt and the reply to it, by session
Told = dict[str, dict[str, Any] | None]  # what a log tells of each session; None: it is refused


def prompts(number: int, turns: int) -> list[int]:
    """The timeline of a session up to one turn; sessions begin alike, so that they share files' worth of tokens."""
    rng = random.Random(number)
    return [*range(20, 40), *(rng.randrange(20, 250) for _ in range(17 * turns))]


def talk(name: str, folder: Path, turns: range) -> None:
    """Some turns on every session, then a clean end."""
    kit = Kit(name, folder=folder)
    for turn in turns:
        for number in range(SESSIONS):
            kit.ask(prompts(number, turn), 4, session=f"s{number}", tenant="ab"[number % 2])
    kit.leave()


def again(name: str, folder: Path, truth: Truth) -> tuple[int, int, list[str]]:
    """A new engine on that folder: tokens not computed anew, files that it found damaged, and what is wrong."""
    kit = Kit(name, folder=folder)
    cached, wrong = 0, []
    for number, (session, (prompt, reply)) in enumerate(truth.items()):
        outcome = kit.ask(prompt, len(reply), session=session, tenant="ab"[number % 2])
        assert outcome.receipt is not None
        cached += outcome.receipt.cached
        if outcome.tokens != reply:
            wrong.append(f"{session}: {outcome.tokens}, not {reply}")
    damaged = kit.archive.disk.damaged
    kit.leave()
    return cached, damaged, wrong


def damage_cache(name: str, tmp_path: Path, count: int, seed: int) -> Counter[str]:
    """So many damages, each to a fresh copy; how they ended."""
    pristine, older, folder = (tmp_path / part for part in ("pristine", "older", "folder"))
    talk(name, pristine, range(1, 3))
    shutil.copytree(pristine, older)
    talk(name, pristine, range(3, 5))
    truth = {f"s{n}": (prompts(n, 5), greedy(model_of(name), prompts(n, 5), 6)) for n in range(SESSIONS)}
    rng, ended = random.Random(seed), Counter[str]()
    shutil.copytree(pristine, folder)
    whole = again(name, folder, truth)[0]
    assert whole >= 0.9 * sum(len(prompts(n, 4)) for n in range(SESSIONS))
    before = content_of(pristine)
    for _ in range(count):
        shutil.rmtree(folder)
        shutil.copytree(pristine, folder)
        what = damage(rng, folder, older)
        changed = [path for path, content in content_of(folder).items() if before.get(path) != content]
        believed = [path for path in changed if believable(folder / path)]
        cached, damaged, wrong = again(name, folder, truth)
        assert wrong == [], what
        assert believed == [], what
        ended["found" if damaged else "went without" if cached < whole else "not needed"] += 1
    return ended


def believable(path: Path) -> bool:
    """Whether a file passes for that of its owner, read from end to end."""
    try:
        with SegmentReader(path.parent, path.name) as reader:
            owner = Owner(reader.header.tenant, reader.header.session, reader.header.named)
            for name in reader.names:
                reader.read(name)
    except CorruptFile:
        return False
    return path.parent.name == folder_of(owner) and path.name == file_name(reader.header.sequence, reader.header.id)


@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_cache_is_right_or_absent(name: str, tmp_path: Path) -> None:
    assert damage_cache(name, tmp_path, 12, 1)["found"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_thousand_damages_to_a_cache(name: str, tmp_path: Path) -> None:
    print(damage_cache(name, tmp_path, DAMAGES // len(MODELS), 2))


# -- the log --------------------------------------------------------------------------------------------------------


async def write_log(path: Path, turns: range, copy: Path | None = None) -> list[Told]:
    """Some turns on every session; what the log tells after each. ``copy``: of its folder, before the end of it."""
    log, told = SessionLog(path), []
    for turn in turns:
        for number in range(SESSIONS):
            tokens = prompts(number, turn)
            texts = [f"message {n} of {number} " * 20 for n in range(2 * turn)]
            await log.commit(
                "ab"[number % 2],
                f"s{number}",
                NewTurn(
                    tokens=tokens,
                    messages=[LoggedMessage(("user", "assistant")[n % 2], text) for n, text in enumerate(texts)],
                    prompt_tokens=len(tokens) - 3,
                    fingerprint="f" * 32,
                    finish_reason="stop",
                ),
            )
            told.append(await everything(log))
    if copy is not None:
        shutil.copytree(path.parent, copy)
    await log.close()
    return told


async def everything(log: SessionLog) -> Told:
    """Every session without its times: what a client could tell to be wrong; None for one that is refused."""
    told: Told = {}
    for number in range(SESSIONS):
        try:
            record = await log.get("ab"[number % 2], f"s{number}")
        except SessionDamaged:
            told[f"s{number}"] = None
            continue
        if record is not None:
            turns = [(turn.number, turn.prompt_tokens, turn.tokens, turn.messages) for turn in record.turns]
            told[f"s{number}"] = {"tokens": record.tokens, "messages": record.messages, "turns": turns}
    return told


async def start(path: Path) -> tuple[Told, SessionLog]:
    """A server's start: what its log tells. A session that is refused can be deleted, and begins anew."""
    log = SessionLog(path)
    told = await everything(log)
    for number in range(SESSIONS):
        if told.get(f"s{number}", told) is None:
            assert await log.delete("ab"[number % 2], f"s{number}")
            assert await log.get("ab"[number % 2], f"s{number}") is None
    await log.close()
    return told, log


def damage_log(killed: bool, tmp_path: Path, count: int, seed: int) -> Counter[str]:
    """So many damages to the files of a log, each to a fresh copy; how they ended. ``killed``: as kill -9 leaves them.
    Every start succeeds. Each session is what it was at some time, or refused; what it was before only where the log
    as a whole is an older one, or where the log knows that its end is missing, and says so.
    """
    pristine, older, folder, work = (tmp_path / part for part in ("pristine", "older", "folder", "work"))
    work.mkdir()
    truths = asyncio.run(write_log(work / "log.sqlite", range(1, 3), older if killed else None))
    if not killed:
        shutil.copytree(work, older)
    truths += asyncio.run(write_log(work / "log.sqlite", range(3, 5), pristine if killed else None))
    if not killed:
        shutil.copytree(work, pristine)
    states = {f"s{number}": [truth.get(f"s{number}") for truth in truths] for number in range(SESSIONS)}
    rng, ended = random.Random(seed), Counter[str]()
    for _ in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(pristine, folder)
        what = damage(rng, folder, older)
        before = content_of(folder)
        told, log = asyncio.run(start(folder / "log.sqlite"))
        for session, state in told.items():
            assert state is None or state in states[session], what
        if log.salvage is not None and (log.salvage.torn or not killed):  # else SQLite has put the two together
            assert [*before.values()] == [aside(folder, log.salvage, path) for path in before], what
        ended[outcome(told, truths, log)] += 1
        assert outcome(told, truths, log) != "older, and nothing tells" or what == "the folder as it was", what
    return ended


def aside(folder: Path, salvage: Salvage, path: Path) -> bytes:
    """What became of a damaged file."""
    return (folder / path.name.replace("log.sqlite", salvage.aside)).read_bytes()


def outcome(told: Told, truths: list[Told], log: SessionLog) -> str:
    refused = [session for session, state in told.items() if state is None]
    late = [session for session, state in truths[-1].items() if told.get(session) not in (state, None)]
    if log.salvage is None:
        assert refused or told in [{}, *truths]
        if refused:
            return "one session refused"
        return "whole" if not late else "older, and it says so" if log.older else "older, and nothing tells"
    if late:
        assert log.salvage.torn or log.salvage.nameless
        return "salvaged, its end is missing"
    return "salvaged, some refused" if refused else "salvaged whole"


@pytest.mark.parametrize("killed", [False, True])
def test_a_damaged_log_is_salvaged(killed: bool, tmp_path: Path) -> None:
    ended = damage_log(killed, tmp_path, 40, 1)
    assert ended["salvaged whole"] + ended["salvaged, some refused"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_a_thousand_damages_to_a_log(killed: bool, tmp_path: Path) -> None:
    print(damage_log(killed, tmp_path, DAMAGES // 2, 2))


def test_every_kind_of_damage_changes_something(tmp_path: Path) -> None:
    older, folder = tmp_path / "older", tmp_path / "folder"
    for place, texts in ((older, (b"one",)), (folder, (b"one and more", b"two" * 500, b"three" * 500))):
        place.mkdir()
        for number, text in enumerate(texts):
            (place / f"{number}.kv").write_bytes(text)
    before = content_of(folder)
    for kind in KINDS:
        for seed in range(5):
            copy = tmp_path / f"{kind.__name__}-{seed}"
            shutil.copytree(folder, copy)
            kind(random.Random(seed), copy, older)
            assert content_of(copy) != before, kind.__name__
