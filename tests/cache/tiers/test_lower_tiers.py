"""More than one tier below the disk: each gets the copies, the nearest is asked first, and all forget."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from archive_kit import TALK
from engine_kit import Kit

from cache.inventory import session_holdings
from cache.segments.chain import Owner
from cache.tier import Tier
from cache.tiers.remote import RemoteTier
from cache.tiers.segment_folder import folder_of
from scheduler.protocol import Forget, Forgotten

NEARER = Tier.HOST  # a name that no other tier of these tests has


def nearer(folder: Path) -> Callable[[str], RemoteTier]:
    """Makes a tier of that folder, between the disk and the remote tier."""

    def make(fingerprint: str) -> RemoteTier:
        made = RemoteTier(f"file://{folder / 'nearer'}", fingerprint, None)
        made.tier = NEARER
        return made

    return make


def kit_of(folder: Path, name: str) -> Kit:
    """An engine with three tiers below memory, of which only the disk is its own."""
    return Kit(folder=folder / name, remote=f"file://{folder / 'remote'}", nearer=nearer(folder))


def files_of(folder: Path) -> list[str]:
    """Names of all segment files below a folder."""
    return sorted(path.name for path in folder.rglob("*.kv"))


def test_every_tier_has_a_copy_and_tells_so(tmp_path: Path) -> None:
    kit = kit_of(tmp_path, "one")
    kit.ask_and_settle(TALK, 1, session="s")
    files = files_of(tmp_path / "one")
    assert files == files_of(tmp_path / "nearer") == files_of(tmp_path / "remote") != []
    holdings = session_holdings(kit.store, "a", "s")
    assert list(holdings) == [Tier.DEVICE, Tier.DISK, NEARER, Tier.REMOTE]
    assert holdings[NEARER] == holdings[Tier.REMOTE] == holdings[Tier.DISK]
    stats = kit.engine.stats()
    assert stats.tier(NEARER).used == stats.tier(Tier.REMOTE).used == stats.tier(Tier.DISK).used > 0


@pytest.mark.parametrize(("lost", "source"), [("remote", NEARER), ("nearer", Tier.REMOTE)])
def test_the_nearest_tier_that_has_it_gives_it(lost: str, source: Tier, tmp_path: Path) -> None:
    kit = kit_of(tmp_path, "one")
    kit.ask_and_settle(TALK, 1, session="s")
    kit.leave()
    shutil.rmtree(tmp_path / lost)
    other = kit_of(tmp_path, "two")
    outcome = other.ask([*TALK, 1], 1, session="s")
    assert outcome.receipt.loaded == {source: len(TALK)}
    other.settle()
    assert len(files_of(tmp_path / lost)) == 2  # what was lost is copied again with the turn


def test_a_deleted_session_leaves_every_tier_before_that_is_told(tmp_path: Path) -> None:
    kit = kit_of(tmp_path, "one")
    kit.ask_and_settle(TALK, 1, session="s")
    kit.commands.forget(Forget("a", "s"))
    assert kit.answers() == [Forgotten("a", "s")]
    assert files_of(tmp_path) == []


@pytest.mark.parametrize("restarted", [False, True])
def test_a_farther_tier_is_asked_where_the_nearer_one_has_nothing_more(restarted: bool, tmp_path: Path) -> None:
    kit = kit_of(tmp_path, "one")
    first = kit.ask_and_settle(TALK, 4, session="s")
    fork = [*TALK[:30], 7]
    kit.ask(fork, 4, session="fork")
    longer = [*TALK, *first.tokens, 1, 2]
    second = kit.ask_and_settle(longer, 4, session="s")
    kit.leave()
    newest = max((tmp_path / "nearer").rglob(f"{folder_of(Owner('a', 's', True))}/*.kv"), key=lambda path: path.name)
    newest.unlink()  # the nearer tier has the beginning only
    other = kit_of(tmp_path, "two")
    other.ask_and_settle([*fork, 3], 1, session="fork")  # whose files begin in one of "s"
    if restarted:
        other.leave()
        other = kit_of(tmp_path, "two")
    outcome = other.ask([*longer, *second.tokens, 3], 1, session="s")
    assert outcome.receipt.cached == len(longer) + 3
    assert all(sync._asked == {} for sync in other.archive.syncs)
