"""Windowed layers keep only what is seen: every reply equals a from-scratch forward, whatever has made room."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import PAGE, Kit, crowded_rounds, ids
from tiny_models import WINDOW, greedy
from wide import widely

from cache.media_ids import media_ids
from cache.memory.frames import Frames, division
from cache.memory.memory_tier import MemoryTier, PageShape
from cache.memory.memory_tier import divide as divided_as
from cache.pages.layers import AttentionLayer, Reach, Windows, windows_of
from cache.pages.near_ends import holds_unseen
from cache.pages.pool import PagePool
from cache.pages.session import SessionCache
from cache.store import SessionStore
from cache.tier import Tier
from cache.tiers import write_behind
from scheduler.turn_receipt import Miss

NAMES = widely(("gemma3", "gemma4", "gpt_oss", "llama4", "mistral"), "gemma3 llama4 mistral")
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"host_pages": 64},
    "disk": {"folder": True},
    "preempted": {"pages": 24, "step_tokens": 16},
}


def settled(kit: Kit) -> None:
    """Whatever can be written is on disk."""
    if kit.store.archive is not None:
        kit.settle()


def written(kit: Kit) -> None:
    """What has begun to be written is on disk."""
    while kit.archive.write_behind.holds:
        kit.archive.poll()


def crowd(kit: Kit) -> None:
    """More is asked for than there is: whatever no next token sees makes room, and nobody is evicted."""
    assert not kit.store.residency.make_room(1 << 20)
    assert not any(holds_unseen(kit.pool, session) for session in kit.store.residency)


def crowd_idle(kit: Kit, session: SessionCache) -> None:
    """As ``crowd``, of one idle session."""
    kit.store.residency._release_near(session, all_unseen=True)
    kit.store.residency.count(session)


def of(kit: Kit, tenant: str) -> list[SessionCache]:
    return [session for session in kit.store.residency if session.tenant == tenant]


def kit_of(name: str, tmp_path: Path, **options: Any) -> Kit:
    folder: dict[str, Any] = {"folder": tmp_path} if options.pop("folder", False) else {}
    return Kit(name, divided=True, **{"pages": 48, **options}, **folder)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", NAMES)
def test_chats_that_share_memory(name: str, tier: str, tmp_path: Path) -> None:
    kit = kit_of(name, tmp_path, **TIERS[tier])
    released = 0
    for _ in crowded_rounds(kit, 5, 4, lambda prompt, said: greedy(kit.model, prompt, 3, said)):
        settled(kit)
        released += sum(session.released for session in kit.store.residency)
    assert released


@pytest.mark.parametrize("name", NAMES)
def test_a_rewind_behind_the_window_is_computed_again_and_told(name: str, tmp_path: Path) -> None:
    kit = kit_of(name, tmp_path)
    kit.ask_checked(ids(80), 4, session="s")
    crowd(kit)
    back = [*ids(80)[:42], 9]  # 42 is in no chunk's beginning
    outcome = kit.ask_checked(back, 4, session="s")
    assert (outcome.receipt.cached < 42, outcome.receipt.miss) == (True, Miss.WINDOW)


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_goes_on_from_its_end_without_what_it_does_not_see(name: str, tmp_path: Path) -> None:
    kit = kit_of(name, tmp_path)
    said = kit.ask(ids(80), 4, session="s")
    crowd(kit)
    more = [*ids(80), *said.tokens, 5, 6]
    outcome = kit.ask_checked(more, 4, session="s")
    assert outcome.receipt.cached == 83


@pytest.mark.parametrize("name", NAMES)
def test_a_rewind_behind_the_window_is_loaded_from_disk(name: str, tmp_path: Path) -> None:
    kit = kit_of(name, tmp_path, folder=True)
    kit.ask(ids(80), 4, session="s")
    settled(kit)
    crowd(kit)
    back = [*ids(80)[:42], 9]
    outcome = kit.ask_checked(back, 4, session="s")
    assert outcome.receipt.cached == 42
    assert outcome.receipt.count_reused(Tier.DISK) > 0  # llama4's last token of memory is at the beginning of a chunk
    settled(kit)
    kit.archive.close()
    anew = Kit(name, divided=True, folder=tmp_path)  # a restart
    again = anew.ask([*back, *outcome.tokens, 3], 4, session="s")
    assert again.tokens == greedy(kit.model, [*back, *outcome.tokens, 3], 4, again.tokens)
    assert again.receipt.count_reused(Tier.DISK) == 46


@pytest.mark.parametrize("divided", [False, True])
def test_files_are_the_same_whether_pages_are_divided_or_not(divided: bool, tmp_path: Path) -> None:
    kit = Kit("gemma3", divided=divided, folder=tmp_path)
    said = kit.ask(ids(60), 4, session="s")
    settled(kit)
    kit.archive.close()
    other = Kit("gemma3", divided=not divided, folder=tmp_path)
    more = [*ids(60), *said.tokens, 7]
    outcome = other.ask(more, 4, session="s")
    assert outcome.tokens == greedy(kit.model, more, 4, outcome.tokens)
    assert outcome.receipt.count_reused(Tier.DISK) == 63


@pytest.mark.parametrize("name", NAMES)
def test_forks_share_what_they_see(name: str, tmp_path: Path) -> None:
    """The trunk has released what lies before a fork; the fork goes on from what another fork still holds."""
    kit = kit_of(name, tmp_path, pages=64)
    trunk = ids(42)
    kit.ask(trunk, 1)
    for seed in (1, 2, 3):
        prompt = [*trunk[:41], *ids(30, seed)]
        kit.ask_checked(prompt, 3)
    crowd(kit)
    again = [kit.ask_checked([*trunk[:41], *ids(30, seed)], 3) for seed in (4, 5)]
    assert [outcome.receipt.cached for outcome in again] == [40, 41]  # the first goes on from a page that is whole


@pytest.mark.parametrize("name", NAMES)
def test_a_rewind_to_what_another_session_still_holds(name: str, tmp_path: Path) -> None:
    kit = kit_of(name, tmp_path)
    kit.ask(ids(80), 4, session="s")
    kit.ask([*ids(80)[:40], 3], 1)
    crowd(kit)
    back = [*ids(80)[:40], 9]
    outcome = kit.ask_checked(back, 4, session="s")
    assert outcome.receipt.cached == 40
    crowd(kit)
    more = [*back, *outcome.tokens, 5]
    kit.ask_checked(more, 4, session="s")


@pytest.mark.parametrize("name", NAMES)
def test_near_parts_go_to_the_host_and_back(name: str, tmp_path: Path) -> None:
    kit = kit_of(name, tmp_path, pages=24, host_pages=128)
    said = {seed: kit.ask(ids(50, seed), 4, session=f"s{seed}").tokens for seed in range(6)}
    restored = 0
    for seed, tokens in said.items():
        more = [*ids(50, seed), *tokens, 5]
        outcome = kit.ask_checked(more, 4, session=f"s{seed}")
        assert outcome.receipt.cached == 53
        restored += outcome.receipt.count_reused(Tier.HOST)
    assert restored


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_stored_is_not_released(name: str, tmp_path: Path) -> None:
    kit = kit_of(name, tmp_path, folder=True)
    turn = kit.send(ids(60), 4, session="s")
    while not kit.outcomes[turn].tokens:
        kit.step()
    session = kit.find("s")
    crowd_idle(kit, session)
    assert session.released == 0
    kit.run()
    settled(kit)
    assert session.saved_length == session.length


@pytest.mark.parametrize("name", NAMES)
def test_a_running_turn_s_prompt_is_stored_to_make_room(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "_PART", 8)
    kit = kit_of(name, tmp_path, folder=True)
    prompt = ids(60)
    turn = kit.send(prompt, 8, session="s")
    while not kit.outcomes[turn].tokens:
        kit.step()
    session = kit.find("s")
    assert not kit.store.residency.make_room(1 << 20)  # nothing is stored yet
    assert session.released == 0
    written(kit)
    used = kit.pool.device.used
    assert not kit.store.residency.make_room(1 << 20)
    assert session.running
    assert session.released > 8
    assert kit.pool.device.used < used
    kit.run()
    assert kit.outcomes[turn].tokens == greedy(kit.model, prompt, 8, kit.outcomes[turn].tokens)
    settled(kit)
    assert session.saved_length == session.length == 67
    kit.archive.close()
    anew = Kit(name, divided=True, folder=tmp_path)  # a restart
    more = [*prompt, *kit.outcomes[turn].tokens, 3]
    outcome = anew.ask(more, 4, session="s")
    assert outcome.tokens == greedy(kit.model, more, 4, outcome.tokens)
    assert outcome.receipt.count_reused(Tier.DISK) == 67


def test_turns_wait_for_what_running_ones_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for one and a half of the prompts, and for both once the first has released what it does not see."""
    monkeypatch.setattr(write_behind, "_PART", 16)
    kit = kit_of("gemma3", tmp_path, folder=True, pages=58)
    prompts = [ids(140), ids(140, 1)]
    first = kit.send(prompts[0], 60, session="a")
    while not kit.outcomes[first].tokens:
        kit.step()
    second = kit.send(prompts[1], 8, session="b")
    while not kit.outcomes[second].tokens:
        kit.step()
        written(kit)  # however slow the disk is
    assert kit.outcomes[first].finish_reason is None  # both run
    while not kit.engine.idle:
        kit.step()
        written(kit)
    assert kit.engine.stats().preemptions == 0
    for turn, prompt, count in ((first, prompts[0], 60), (second, prompts[1], 8)):
        assert kit.outcomes[turn].tokens == greedy(kit.model, prompt, count, kit.outcomes[turn].tokens)


def test_a_session_with_parts_gone_is_not_written_again(tmp_path: Path) -> None:
    kit = kit_of("gemma3", tmp_path, folder=True)
    said = kit.ask(ids(60), 4, session="s")
    settled(kit)
    crowd(kit)
    session = kit.find("s")
    session.saved, session.saved_length = None, 0  # its files were evicted
    kit.archive.write_behind.write_now(session)
    settled(kit)
    assert (session.saved_length, kit.archive.errors) == (0, 0)
    more = [*ids(60), *said.tokens, 7]
    kit.ask_checked(more, 4, session="s")


def test_more_sessions_fit(tmp_path: Path) -> None:
    """Of 24 tokens a session keeps a window of the windowed layers: memory for four sessions has room for more."""
    held = {}
    for divided in (False, True):
        kit = Kit("gemma3", divided=divided, pages=4 * 32)
        for seed in range(8):
            kit.ask(ids(120, seed), 2, tenant="a")
        held[divided] = len(of(kit, "a"))
    assert held == {False: 4, True: 8}


@pytest.mark.parametrize("name", NAMES)
def test_a_fork_is_stored_although_its_trunk_has_released_what_it_does_not_see(name: str, tmp_path: Path) -> None:
    kit = kit_of(name, tmp_path, folder=True)
    trunk = ids(60)
    first = kit.send(trunk, 4, session="trunk")
    while not kit.outcomes[first].tokens:
        kit.step()
    prompt = [*trunk[:50], *ids(8, 1)]
    second = kit.send(prompt, 40, session="fork")
    while kit.outcomes[first].finish_reason is None:
        kit.step()
    found = kit.find("trunk")
    while found.saved_length < found.length or kit.archive.write_behind.holds:
        kit.archive.poll()
    crowd_idle(kit, found)
    kit.run()
    settled(kit)
    said = kit.outcomes[second].tokens
    assert said == greedy(kit.model, prompt, 40, said)
    branch = kit.find("fork")
    assert branch.saved_length == branch.length


@pytest.mark.parametrize(("near", "whole", "slots", "pages", "sessions"), [(3, 2, 30, 22, 3), (5, 2, 60, 34, 6)])
def test_a_turn_alone_fits_however_its_pages_are_scattered(
    near: int, whole: int, slots: int, pages: int, sessions: int
) -> None:
    """Sessions that grew side by side share frames: what one leaves of them is of use for one part only."""
    shapes = dict.fromkeys(range(near + whole), PageShape(1, 4, 1, 4, torch.float32))
    windows = Windows(frozenset(range(near)), (AttentionLayer(Reach.SLIDING, WINDOW, True),))
    cpu, split = torch.device("cpu"), divided_as(shapes, windows.layers, PAGE)
    pool = PagePool(MemoryTier(slots, PAGE, cpu, shapes, division=split), MemoryTier(0, PAGE, cpu), windows)
    store = SessionStore(pool)
    grown = [store.acquire("a", f"s{n}", array("i", [n])) for n in range(sessions)]
    for step in range(pages + 1):
        for acquired in grown:
            assert acquired is not None
            session = acquired.session
            session.token_ids.extend([0] * PAGE if step else [])
            assert store.reserve(session, len(session.token_ids))
            session.on_fed(PAGE if step else 1)
    for acquired in grown:
        assert acquired is not None
        store.release(acquired.session)
    assert store.acquire("a", "s0", array("i", [0] * pool.room)) is not None
    store.residency.check_integrity()


def test_a_reply_that_is_written_differently_finds_what_it_sees() -> None:
    windows = Windows(frozenset({0}), (AttentionLayer(Reach.SLIDING, 1024, True),))
    assert windows.first_key(3000) == 1977
    assert windows.first_kept(3000) == windows.first_key(3000 - 63)
    chunks = Windows(frozenset({0}), (AttentionLayer(Reach.CHUNKED, 1024, True),))
    assert chunks.first_kept(3000) == chunks.first_key(3000) == 2048
    assert windows.first_kept(900) == 0


def test_a_rewind_to_what_is_there_ends_in_no_picture() -> None:
    shapes = dict.fromkeys(range(2), PageShape(1, 4, 1, 4, torch.float32))
    windows = Windows(frozenset({0}), (AttentionLayer(Reach.SLIDING, WINDOW, True),))
    cpu, split = torch.device("cpu"), divided_as(shapes, windows.layers, PAGE)
    pool = PagePool(MemoryTier(40, PAGE, cpu, shapes, division=split), MemoryTier(0, PAGE, cpu), windows)
    store = SessionStore(pool)
    picture = media_ids("a picture", 20)
    acquired = store.acquire("a", "s", array("i", [*range(10), *picture, *range(30)]))
    assert acquired is not None
    session = acquired.session
    session.on_fed(60)
    for page in session.pages[6:9]:  # whose turn it was has released them
        pool.drop_near([page])
    session.released = 0
    assert session.seen_reach(40, windows, PAGE) == 24
    assert store._reach(session, 40) == 10
    assert store._reach(session, 60) == 60


def test_frames_are_shared_by_both_parts() -> None:
    parts = division({0, 1, 2}, dict.fromkeys(range(4), (64, 64)))
    assert parts.near == {0, 1, 2}
    assert (parts.nbytes, parts.each) == (384, (3, 1))
    frames = Frames(4, parts.each, parts.stride)
    whole = [frames.alloc(0) for _ in range(4)]
    assert (whole, frames.free) == ([0, 1, 2, 6], 2)
    assert frames.alloc(1) == 12
    assert frames.fits(2, 1)
    assert not frames.fits(3, 1)
    assert frames.fits_beside(({0}, set()), 2, 3)
    for slot in whole:
        frames.release(0, slot)
    assert frames.free == 3


def test_layers_of_different_sizes_are_not_divided() -> None:
    assert not division({0, 1}, {0: (64, 64), 1: (64, 32), 2: (64, 64)}).near


def test_pages_with_indexer_keys_are_not_divided() -> None:
    plain = PageShape(1, 16, 1, 16, torch.float32)
    assert divided_as({0: plain, 1: plain}, {0}, PAGE).near
    assert not divided_as({0: plain, 1: plain._replace(index_dim=16)}, {0}, PAGE).near


def test_layers_that_read_keys_of_another_kind_leave_pages_undivided() -> None:
    layers = [AttentionLayer(Reach.SLIDING, 8, True), AttentionLayer(Reach.FULL, None, True)]
    found = windows_of(layers, {0: 0, 1: 1})
    assert found is not None
    assert found.layers == {0}
    assert windows_of([*layers, AttentionLayer(Reach.FULL, None, False)], {0: 0, 1: 1, 2: 0}) is None
    assert windows_of(layers, {0: None, 1: 1}) is None
    assert windows_of(layers[1:], {0: 0}) is None


assert PAGE < WINDOW
