"""Sessions that share files in the remote tier: none is lost, hidden or cut short by what happens to another."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from archive_kit import TALK, check_and_settle
from engine_kit import Kit, Outcome, failing
from tiny_models import greedy

from cache.segments.chain import Owner
from cache.tier import Tier
from cache.tiers.segment_folder import folder_of
from scheduler.core.session_commands import SessionCommands
from scheduler.protocol import Forget, Forgotten

FORK = [*TALK[:30], 7]


def check(kit: Kit, prompt: list[int], session: str) -> Outcome:
    """One turn whose tokens must be those of a from-scratch forward, written and copied."""
    return check_and_settle(kit, prompt, session=session)


def fetched(kit: Kit, prompt: list[int], session: str) -> int:
    """How many tokens of the prompt come from the remote tier."""
    return check(kit, prompt, session).receipt.count_reused(Tier.REMOTE)


def names(folder: Path, session: str) -> list[str]:
    return sorted(path.name for path in folder.rglob(f"{folder_of(Owner('a', session, True))}/*.kv"))


def two_sessions(folder: Path, url: str, **options: Any) -> tuple[Kit, list[int]]:
    """A session "s" of two turns and a "fork" of its first; what "s" says next."""
    kit = Kit(folder=folder, remote=url, **options)
    first = check(kit, TALK, "s")
    check(kit, FORK, "fork")
    longer = [*TALK, *first.tokens, 1, 2]
    second = check(kit, longer, "s")
    return kit, [*longer, *second.tokens, 3]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_session_whose_beginning_came_with_a_fork_comes_back_whole(restarted: bool, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'remote'}"
    kit, longest = two_sessions(tmp_path / "one", url)
    kit.leave()
    other = Kit(folder=tmp_path / "two", remote=url)
    assert fetched(other, [*FORK, 8], "fork") >= 30
    assert len(names(tmp_path / "two", "s")) == 1
    if restarted:
        other = other.restarted()
    assert check(other, longest, "s").receipt.cached == len(longest) - 2
    assert other.archive.syncs[0]._asked == {}


def test_a_session_that_was_damaged_here_comes_back_from_its_copy(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'remote'}"
    kit = Kit(folder=tmp_path / "one", remote=url)
    longest = TALK
    for _ in range(2):
        longest = [*longest, *check(kit, longest, "s").tokens, 1, 2]
    kit.leave()
    (newest,) = (tmp_path / "one").rglob(names(tmp_path / "one", "s")[-1])
    newest.write_bytes(newest.read_bytes()[:-1])
    fresh = Kit(folder=tmp_path / "one", remote=url)
    fresh.settle()
    assert not newest.exists()
    assert check(fresh, longest, "s").receipt.cached == len(longest) - 3


def test_what_could_not_be_copied_is_copied_with_the_next_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path / 'remote'}"
    kit = Kit(folder=tmp_path / "one", remote=url)
    longest = [*TALK, *check(kit, TALK, "s").tokens, 1, 2]
    monkeypatch.setattr(kit.archive.syncs[0].lower, "put", failing(OSError("the remote tier does not answer")))
    longest = [*longest, *check(kit, longest, "s").tokens, 1, 2]
    check(kit, [*longest[:-3], 9], "fork")  # of what is on this disk only
    again = kit.restarted()
    longest = [*longest, *check(again, longest, "s").tokens, 1, 2]
    again.leave()
    other = Kit(folder=tmp_path / "two", remote=url)
    assert fetched(other, longest, "s") == len(longest) - 3


def test_a_fork_survives_the_deletion_of_its_trunk(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'remote'}"
    kit, longest = two_sessions(tmp_path / "one", url)
    kit.commands.forget(Forget("a", "s", 7))
    assert kit.answers() == [Forgotten("a", "s", 7)]
    kit.leave()
    assert len(names(tmp_path / "remote", "s")) == 1  # cut to what the fork shares with it
    assert b"".join(path.read_bytes() for path in (tmp_path / "remote").rglob("*.kv")).count(bytes([58, 0, 0, 0])) == 0
    other = Kit(folder=tmp_path / "two", remote=url)
    assert fetched(other, longest, "s") == 0
    third = Kit(folder=tmp_path / "three", remote=url)
    assert fetched(third, [*FORK, 8], "fork") >= 30


def held_back(owner: Any, name: str, patch: pytest.MonkeyPatch) -> Event:
    """That method of ``owner`` waits until the event is set."""
    real: Callable[..., Any] = getattr(owner, name)
    go = Event()

    def waiting(*args: Any) -> Any:
        assert go.wait(30.0)
        return real(*args)

    patch.setattr(owner, name, waiting)
    return go


def pumped(kit: Kit, until: Callable[[], object]) -> None:
    """Wait for something; what is read and written is taken in meanwhile."""
    end = time.monotonic() + 30.0
    while not until():
        kit.archive.poll()
        time.sleep(0.001)
        assert time.monotonic() < end


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("asked", ["s", "fork"])
def test_what_was_asked_for_before_a_deletion_does_not_come_back_after_it(
    asked: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork's files go on from those of the session. ``late``: the answer comes when the files here are gone."""
    url = f"file://{tmp_path / 'remote'}"
    two_sessions(tmp_path / "one", url)[0].leave()
    kit = Kit(folder=tmp_path / "two", remote=url)
    clerk, sync = SessionCommands(kit.store, kit.fingerprint), kit.archive.syncs[0]
    answer = held_back(sync, "_download", monkeypatch)
    unlinked, forget = Event(), sync.forget

    def forgetting(*args: Any) -> None:
        unlinked.set()
        forget(*args)

    monkeypatch.setattr(sync, "forget", forgetting)
    prompt = [*FORK, 8] if asked == "fork" else [*TALK, 8]
    turn = kit.send(prompt, 4, session=asked)
    kit.step()
    assert Owner("a", asked, True) in sync._asked
    kit.engine.end("a", "s")
    clerk.forget(Forget("a", "s", 7))
    if late:
        pumped(kit, unlinked.is_set)
    answer.set()
    while not late and not kit.archive._background._done:
        time.sleep(0.001)
    kit.settle()
    assert clerk.take() == [Forgotten("a", "s", 7)]
    assert kit.archive.disk.head(Owner("a", "s", True)) is None
    assert names(tmp_path / "two", "s") == names(tmp_path / "remote", "s") == []
    kit.run()
    assert kit.outcomes[turn].tokens == (greedy(kit.model, prompt, 4) if asked == "fork" else [])
    kit.leave()
    assert names(tmp_path / "two", "s") == names(tmp_path / "remote", "s") == []
    assert kit.archive.disk.damaged == 0


def test_a_session_that_begins_anew_gets_nothing_of_the_one_that_is_being_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path / 'remote'}"
    two_sessions(tmp_path / "one", url)[0].leave()
    deleted = names(tmp_path / "remote", "s")
    kit = Kit(folder=tmp_path / "two", remote=url)
    unlinking = held_back(kit.archive.disk.segment_folder, "measure", monkeypatch)
    kit.commands.forget(Forget("a", "s", 7))
    outcome = kit.ask([*TALK, 8], 4, session="s")
    unlinking.set()
    assert kit.answers() == [Forgotten("a", "s", 7)]
    assert outcome.tokens == greedy(kit.model, [*TALK, 8], 4, outcome.tokens)
    assert outcome.receipt.cached == 0
    kit.leave()
    assert names(tmp_path / "two", "s") == names(tmp_path / "remote", "s")
    assert set(deleted).isdisjoint(names(tmp_path / "two", "s"))
    assert len(names(tmp_path / "two", "s")) == 1


def test_a_full_remote_tier_keeps_what_a_fork_goes_on_from(tmp_path: Path) -> None:
    url, longer = f"file://{tmp_path / 'remote'}", [*FORK, *range(100, 110)]
    kit = Kit(folder=tmp_path / "one", remote=url, remote_space=1)
    check(kit, TALK, "s")
    check(kit, [9, *TALK], "between")
    assert names(tmp_path / "remote", "s") == []  # over the budget: only what was just copied is left
    check(kit, FORK, "fork")
    assert len(names(tmp_path / "remote", "s")) == len(names(tmp_path / "remote", "fork")) == 1
    check(kit, longer, "fork")
    kit.leave()
    other = Kit(folder=tmp_path / "two", remote=url)
    assert fetched(other, [*longer, 8], "fork") == len(longer)


def test_what_a_full_remote_tier_has_dropped_is_copied_again(tmp_path: Path) -> None:
    url, longer = f"file://{tmp_path / 'remote'}", [*TALK, *range(100, 110)]
    kit = Kit(folder=tmp_path / "one", remote=url, remote_space=1)
    check(kit, TALK, "s")
    check(kit, [9, *TALK], "t")
    assert names(tmp_path / "remote", "s") == []
    check(kit, longer, "s")
    kit.leave()
    assert names(tmp_path / "remote", "s") == names(tmp_path / "one", "s")
    other = Kit(folder=tmp_path / "two", remote=url)
    assert fetched(other, [*longer, 8], "s") == len(longer)


def test_trunks_are_as_recently_used_as_their_forks(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'remote'}"
    kit = Kit(folder=tmp_path / "one", remote=url)
    check(kit, TALK, "s")
    for number in range(3):
        check(kit, [number, *TALK], f"t{number}")
    check(kit, FORK, "fork")
    sync = kit.archive.syncs[0]
    sync.lower.budget = 3 * sum(
        path.stat().st_size for path in (tmp_path / "remote").rglob(f"{folder_of(Owner('a', 's', True))}/*.kv")
    )
    check(kit, [5, *TALK], "last")
    kit.leave()
    assert [len(names(tmp_path / "remote", session)) for session in ("s", "fork", "t0")] == [1, 1, 0]
