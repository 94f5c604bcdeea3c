"""The tiers below memory, with a real engine above them: right or absent, whatever happens to the files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from archive_kit import TALK, check, check_and_settle, files_of, held, reused, size_of_one
from engine_kit import Kit, failing
from tiny_models import greedy

from cache.memory.codec import Codec
from cache.memory.memory_tier import MemoryTier
from cache.segments.chain import Owner
from cache.segments.segment_file import read_header
from cache.tier import Tier, TierHolding
from cache.tiers import segment_loader
from cache.tiers import write_behind as saver_module
from scheduler.core.session_commands import SessionCommands
from scheduler.protocol import (
    Export,
    Exported,
    Forget,
    Forgotten,
    Import,
    Imported,
    Inspect,
    Inspected,
    pack_ids,
    unpack_ids,
)
from scheduler.turn_receipt import Miss

# -- what is written ---------------------------------------------------------------------------------------------------


def test_a_turn_writes_its_new_tokens_only(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    prompt = TALK
    sizes = []
    for _ in range(4):
        before = kit.archive.write_behind.written
        outcome = kit.ask_and_settle(prompt, 8, session="s")
        sizes.append(kit.archive.write_behind.written - before)
        prompt = [*prompt, *outcome.tokens, *range(100, 108)]
    assert len(files_of(tmp_path)) == 4
    tokens = [kit.archive.disk.head(Owner("a", "s", True)).tip.stop]  # type: ignore[union-attr]
    assert tokens == [len(prompt) - 9]
    # 47 tokens first, then 16 a turn; a header is a small constant
    assert max(sizes[1:]) < sizes[0] * 0.6
    assert len(set(sizes[1:])) <= 2


def test_nothing_is_written_twice_while_nothing_is_new(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    kit.ask_and_settle(TALK, 1, session="s")
    written = kit.archive.write_behind.written
    kit.ask_and_settle(TALK, 1, session="s")  # regenerates the same token
    assert kit.archive.write_behind.written - written < 3000  # the last prompt token again, at most


def test_an_edit_goes_on_from_an_older_file_and_the_newer_one_is_removed(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    first = kit.ask_and_settle(TALK, 8, session="s")
    longer = [*TALK, *first.tokens, 1, 2, 3]
    kit.ask_and_settle(longer, 8, session="s")
    old = files_of(tmp_path)
    edited = [*longer[:-2], 9, 9]
    check_and_settle(kit, edited, 6, session="s")
    assert old[0] in files_of(tmp_path)
    assert old[1] in files_of(tmp_path)  # its first token is kept: the new file goes on from there
    kit.ask_and_settle([*TALK, 5, 5], 2, session="s")
    assert old[1] not in files_of(tmp_path)
    fresh = kit.restarted()
    assert reused(check(fresh, [*TALK, 5, 5], 2, session="s"))[1] >= len(TALK)


def test_forks_share_their_trunk_on_disk(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    trunk = list(range(150))
    kit.ask_and_settle(trunk, 1, session="trunk")
    alone = kit.archive.disk.space.used
    for branch in range(5):
        kit.ask([*trunk, branch, 7], 2, session=f"b{branch}")
    kit.settle()
    assert kit.archive.disk.space.used < alone * 1.6
    fresh = kit.restarted()
    for branch in range(5):
        outcome = check(fresh, [*trunk, branch, 7, 8], 3, session=f"b{branch}")
        assert reused(outcome)[0] >= len(trunk) + 1
    fresh.store.forget("a", "trunk")
    fresh.archive.forget(Owner("a", "trunk", True), lambda: None)
    fresh.settle()
    assert reused(check(fresh, [*trunk, 3, 7, 8, 9], 3, session="b3"))[0] >= len(trunk)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pages_that_are_being_written_are_not_touched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(name, pages=40, folder=tmp_path)
    with held(monkeypatch, MemoryTier, "gather") as go:
        first = kit.ask(TALK, 6, session="s")
        kit.step()  # its write begins, and waits
        assert kit.archive.held
        edited = [*TALK[:-3], 3, 4, 5]
        check(kit, edited, 6, session="s")  # over the very page that waits to be read
        check(kit, list(range(100, 180)), 4)  # would like to have the pages
        go.set()
    fresh = kit.restarted()
    assert reused(check(fresh, [*edited, 1, 2], session="s"))[0] >= len(edited)
    check(fresh, [*TALK, *first.tokens, 8], session="t")


def test_admission_waits_for_pages_that_are_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(pages=24, folder=tmp_path)
    with held(monkeypatch, MemoryTier, "gather") as go:
        kit.ask(list(range(80)), 2, session="s")
        kit.step()
        turn = kit.send(list(range(100, 170)), 3)
        kit.step(20)
        assert not kit.outcomes[turn].admitted
        go.set()
        kit.run()
    assert kit.outcomes[turn].tokens == greedy(kit.model, list(range(100, 170)), 3, kit.outcomes[turn].tokens)


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_a_plain_client_that_sends_its_history_again_is_recognised(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    first = kit.ask(TALK, 6)
    fresh = kit.restarted()
    longer = [*TALK, *first.tokens, 1, 2]
    outcome = check(fresh, longer)
    assert reused(outcome) == (len(longer) - 3, len(longer) - 3)


def test_other_tenants_see_nothing(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    kit.ask(TALK, 6, session="s")
    fresh = kit.restarted()
    assert reused(fresh.ask([*TALK, 1], tenant="b", session="s")) == (0, 0)
    assert reused(fresh.ask([*TALK, 1], tenant="a", session="s")) != (0, 0)


def test_two_turns_that_want_the_same_files_read_them_once(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    kit.ask(TALK, 6)
    fresh = kit.restarted()
    turns = [fresh.send([*TALK, i], 3) for i in range(4)]
    fresh.run()
    for i, turn in enumerate(turns):
        assert fresh.outcomes[turn].tokens == greedy(fresh.model, [*TALK, i], 3, fresh.outcomes[turn].tokens)
        assert reused(fresh.outcomes[turn])[0] == len(TALK)
    once = fresh.archive.loader.read
    assert once == (len(TALK) + 5) * fresh.pool.page_bytes // fresh.pool.page_size


def test_what_memory_has_is_not_read_again(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    trunk = list(range(60))
    kit.ask(trunk, 1)
    kit.ask([*trunk, *range(100, 140)], 2, session="s")
    fresh = kit.restarted()
    fresh.ask([*trunk, 7], 1)
    before = fresh.archive.loader.read
    outcome = check(fresh, [*trunk, *range(100, 140), 9], session="s")
    assert outcome.receipt.cached == 100
    assert outcome.receipt.count_reused(Tier.DISK) == 40
    assert fresh.archive.loader.read - before < 70 * fresh.pool.page_bytes // fresh.pool.page_size + 60 * 0 + 10**6


def test_both_sides_of_a_threshold_are_stored_apart(tmp_path: Path) -> None:
    kit = Kit("longrope", folder=tmp_path)
    check(kit, TALK[:30], session="s")  # beyond the threshold: turned by other frequencies from its first token on
    fresh = kit.restarted()
    assert reused(check(fresh, [*TALK[:15], *range(100, 115)], session="t")) == (15, 15)
    assert reused(check(fresh, [*TALK[:15], 7], session="u"))[0] == 0
    again = fresh.restarted()
    assert reused(check(again, [*TALK[:15], 7, 8], session="u")) == (16, 16)


def test_computing_is_preferred_where_it_is_sooner(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    kit.ask(TALK, 6, session="s")
    fresh = kit.restarted()
    fresh.archive.restore_rates = slow = type(fresh.archive.restore_rates).__base__()  # type: ignore[misc]
    slow.record_load(1, 1000.0)
    slow.record_compute(1000, 0.001)
    outcome = check(fresh, [*TALK, 1], session="s")
    assert (outcome.receipt.cached, outcome.receipt.miss) == (0, Miss.CHEAPER)
    assert fresh.engine.stats().misses == {"recompute_cheaper": 1}


def test_many_sessions_on_a_device_that_holds_a_few(tmp_path: Path) -> None:
    kit = Kit(pages=64, folder=tmp_path, step_tokens=64)
    talks = {f"s{i}": [i % 200, (i * 7) % 200, *range(30, 60)] for i in range(40)}
    for session, talk in talks.items():
        kit.ask(talk, 1, session=session)
    kit.settle()
    for session, talk in talks.items():
        assert reused(check(kit, [*talk, 9], 2, session=session))[0] == len(talk)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_sessions_go_on_from_kv_that_was_rounded_at_rest(codec: Any, tmp_path: Path) -> None:
    exact = Kit(folder=tmp_path / "exact")
    kit = Kit(folder=tmp_path / codec, codec=Codec(codec))
    for each in (exact, kit):
        each.ask(list(range(120)), 1, session="s")
        each.leave()
    assert kit.archive.write_behind.written < exact.archive.write_behind.written * 0.6
    fresh = Kit(folder=tmp_path / codec)
    outcome = fresh.ask([*range(120), 1], 4, session="s")
    assert reused(outcome) == (120, 120)
    assert len(outcome.tokens) == 4


# -- budgets -----------------------------------------------------------------------------------------------------------


def test_the_budget_is_kept_and_the_least_recently_used_session_leaves(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path / "kv", disk_space=int(size_of_one(tmp_path / "probe") * 3.5))
    for number in range(5):
        kit.ask_and_settle([number, *TALK[1:]], 1, session=f"s{number}")
        assert kit.archive.disk.space.used <= kit.archive.disk.space.budget
    assert [owner.session for owner in kit.archive.disk.heads] == ["s2", "s3", "s4"]
    kit.store.pin("a", "s2", 1e12)
    for number in range(5, 8):
        kit.ask_and_settle([number, *TALK[1:]], 1, session=f"s{number}")
    assert [owner.session for owner in kit.archive.disk.heads] == ["s2", "s6", "s7"]
    for session in ("s2", "s6", "s7"):
        kit.store.pin("a", session, 1e12)
    kit.ask_and_settle([99, *TALK[1:]], 1, session="s99")  # pins never keep a tier from making room
    assert [owner.session for owner in kit.archive.disk.heads] == ["s6", "s7", "s99"]
    assert len(files_of(tmp_path / "kv")) == 3


def test_a_tenant_beyond_its_share_leaves_before_others(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path / "kv", disk_space=int(size_of_one(tmp_path / "probe") * 4.5), share=0.5)
    kit.ask_and_settle(TALK, 1, session="b", tenant="b")
    for number in range(6):
        kit.ask_and_settle([number, *TALK[1:]], 1, session=f"s{number}")
    assert Owner("b", "b", True) in kit.archive.disk.heads
    assert len(kit.archive.disk.heads) == 4


def told_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the engine has said of the disk."""
    return [record.getMessage() for record in caplog.records if "to disk" in record.getMessage()]


def test_a_disk_that_is_nearly_full_is_left_alone_and_that_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kit = Kit(folder=tmp_path)
    kit.ask_and_settle(TALK, 1, session="s")
    before = files_of(tmp_path)
    kit.archive.disk.space.floor = 1 << 62
    check(kit, [*TALK, 1], session="s")
    check_and_settle(kit, [*TALK, 2], session="t")
    assert files_of(tmp_path) == before
    assert (kit.engine.stats().disk_errors, kit.engine.stats().disk_failing) == (2, 1)
    refused = "KV is not written to disk: the disk is full, or all but --disk-floor of it; turns still run, "
    assert told_of(caplog) == [refused + "and KV that is evicted from memory is computed again"]
    kit.archive.disk.space.floor = 0
    kit.archive.write_behind._check_at = 0.0  # five seconds later
    kit.archive.poll()
    kit.settle()
    assert kit.engine.stats().disk_failing == 0  # without any turn
    assert told_of(caplog)[1:] == ["KV is written to disk again"]
    check_and_settle(kit, [*TALK, 3], session="t")
    assert len(files_of(tmp_path)) == len(before) + 1


def test_other_models_files_are_the_first_to_go(tmp_path: Path) -> None:
    old = Kit("qwen3", folder=tmp_path)
    old.ask(TALK, 1, session="s")
    old.leave()
    size = old.archive.disk.space.used
    kit = Kit(folder=tmp_path, disk_space=3 * size)
    kit.ask_and_settle(TALK, 1, session="s")
    assert (tmp_path / old.fingerprint).exists()
    for number in range(3):
        kit.ask_and_settle([number, *TALK[1:]], 1, session=f"s{number}")
    assert not (tmp_path / old.fingerprint).exists()


@pytest.mark.parametrize("lives", [False, True])
def test_files_of_a_model_with_an_engine_of_its_own_stay(lives: bool, tmp_path: Path) -> None:
    """The engine is told so, or the other one runs at the same time."""
    other = Kit("qwen3", folder=tmp_path)
    other.ask(TALK, 1, session="s")
    if lives:
        other.settle()
    else:
        other.leave()
    size = other.archive.disk.space.used
    kept = () if lives else (other.fingerprint,)
    kit = Kit(folder=tmp_path, disk_space=3 * size, kept=kept)
    for number in range(4):
        kit.ask_and_settle([number, *TALK[1:]], 1, session=f"s{number}")
    assert len(files_of(tmp_path / other.fingerprint)) == 1


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_turns_go_on_without_the_disk_and_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kit = Kit(folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(saver_module, "write", failing(OSError(28, "No space left on device")))
        first = check_and_settle(kit, TALK, session="s")
    assert (kit.engine.stats().disk_errors, kit.engine.stats().disk_failing) == (1, 1)
    (told,) = told_of(caplog)
    assert told.startswith("KV is not written to disk: No space left on device; ")
    assert files_of(tmp_path) == []
    second = check(kit, [*TALK, *first.tokens, 3], session="s")
    assert reused(second)[0] == len(TALK) + 3
    kit.archive.write_behind._paused_until = 0.0  # five seconds later
    kit.step()
    kit.settle()
    fresh = kit.restarted()
    assert reused(check(fresh, [*TALK, *first.tokens, 3, 4], session="s"))[0] >= len(TALK) + 4


def test_a_forgotten_session_never_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(folder=tmp_path)
    kit.ask_and_settle(TALK, 6, session="s")
    with held(monkeypatch, MemoryTier, "gather") as go:
        kit.ask([*TALK, 1, 2, 3], 6, session="s")
        kit.step()  # a write is under way
        kit.commands.forget(Forget("a", "s"))
        assert kit.commands.take() == []
        go.set()
        kit.settle()
    assert kit.commands.take() == [Forgotten("a", "s")]
    assert files_of(tmp_path) == []
    fresh = kit.restarted()
    assert reused(fresh.ask([*TALK, 1], session="s")) == (0, 0)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_what_others_share_with_a_forgotten_session_is_all_that_stays(name: str, tmp_path: Path) -> None:
    kit = Kit(name, folder=tmp_path)
    shared, secret = list(range(20, 40)), list(range(150, 180))
    kit.ask(shared, 1, session="root")  # states can be gone back to where a turn begins
    kit.ask_and_settle([*shared, 1, *secret], 4, session="alice")
    bob = [*shared, 1, 2, 3]
    kit.ask_and_settle(bob, 4, session="bob")
    for session in ("alice", "root"):
        kit.commands.forget(Forget("a", session))
        kit.settle()
        kit.step()
        assert kit.commands.take() == [Forgotten("a", session)]
    for path in files_of(tmp_path):
        header = read_header(path.parent, path.name)
        assert pack_ids(secret[:2]) not in header.tokens
        assert not any(tensor.paged and tensor.shape[0] > len(bob) + 4 for tensor in header.tensors)
    check(kit, [*bob, 5], session="bob")
    fresh = kit.restarted()
    assert {owner.session for owner in fresh.archive.disk.heads} == {"bob"}
    assert fresh.archive.disk.damaged == 0
    outcome = check(fresh, [*bob, 5, 6], session="bob")
    assert reused(outcome)[0] >= len(shared)
    assert reused(fresh.ask([*shared, 1, *secret, 7], 1, session="alice"))[0] <= len(shared) + 1
    for session in ("bob", "alice"):
        fresh.commands.forget(Forget("a", session))
    fresh.settle()
    assert files_of(tmp_path) == []


def test_a_session_that_is_forgotten_while_it_is_read_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(folder=tmp_path)
    kit.ask(TALK, 6, session="s")
    fresh = kit.restarted()
    turn = fresh.send([*TALK, 1], 3, session="s")
    fresh.step()  # the read is under way
    fresh.engine.end("a", "s")
    fresh.commands.forget(Forget("a", "s"))
    fresh.settle()
    fresh.step()
    assert str(fresh.outcomes[turn].finish_reason) == "cancelled"
    assert len(fresh.store.residency) == 0
    assert files_of(tmp_path) == []
    assert reused(fresh.ask([*TALK, 1], session="s")) == (0, 0)


@pytest.mark.parametrize("name", ["llama", "rwkv", "qwen3_next"])
def test_a_damaged_file_is_a_miss_and_what_comes_before_it_is_used(name: str, tmp_path: Path) -> None:
    kit = Kit(name, folder=tmp_path)
    first = kit.ask_and_settle(TALK, 6, session="s")
    longer = [*TALK, *first.tokens, 1, 2]
    second = kit.ask(longer, 6, session="s")
    kit.leave()
    newest = max(files_of(tmp_path), key=lambda path: path.name)
    data = bytearray(newest.read_bytes())
    data[-200] ^= 1
    newest.write_bytes(data)
    fresh = Kit(name, folder=tmp_path)
    longer = [*longer, *second.tokens, 3]
    outcome = check(fresh, longer, session="s")
    assert outcome.receipt.miss is Miss.DAMAGED
    assert len(TALK) + 5 <= outcome.receipt.cached < len(longer) - 7
    assert fresh.archive.disk.damaged == 1
    fresh.settle()
    assert not newest.exists()
    again = fresh.restarted()
    assert reused(check(again, [*longer, 7], session="s"))[0] >= len(longer) - 1


def test_files_that_are_swapped_while_the_engine_runs_are_noticed(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    talks = {"s": TALK, "t": [99, *TALK[1:]]}  # of one length and shape
    for session, talk in talks.items():
        kit.ask(talk, 1, session=session)
    fresh = kit.restarted()
    one, other = files_of(tmp_path)
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    for session, talk in talks.items():
        check(fresh, [*talk, 1, 2], session=session)
    assert fresh.engine.stats().disk_damaged == 2


# -- questions ---------------------------------------------------------------------------------------------------------


def tiers_of(kit: Kit) -> dict[Tier, TierHolding]:
    """Where "s" lies, which has no turn running."""
    kit.commands.inspect(Inspect("r", "a", "s"))
    (answer,) = kit.commands.take()
    assert isinstance(answer, Inspected)
    assert answer.request == "r"
    assert not answer.running
    return answer.tiers


def tokens_of(kit: Kit) -> dict[Tier, int]:
    return {tier: holding.tokens for tier, holding in tiers_of(kit).items()}


def test_inspect_tells_where_a_session_lies(tmp_path: Path) -> None:
    kit = Kit(pages=32, host_pages=32, folder=tmp_path)
    assert tiers_of(kit) == {}
    kit.ask_and_settle(TALK, 1, session="s")
    assert tokens_of(kit) == {"device": 40, "disk": 40}
    assert tiers_of(kit)[Tier.DEVICE].bytes == 10 * kit.pool.page_bytes
    assert tiers_of(kit)[Tier.DISK].bytes == sum(path.stat().st_size for path in files_of(tmp_path))
    kit.ask(list(range(100, 200)), 1)
    assert tokens_of(kit) == {"host": 40, "disk": 40}
    kit.store.discard(kit.find("s"))
    assert set(tiers_of(kit)) == {"disk"}


def test_inspect_counts_what_lies_below_of_the_present_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(folder=tmp_path / "kv", remote=f"file://{tmp_path / 'remote'}")
    kit.ask_and_settle(TALK, 1, session="s")
    assert tokens_of(kit) == {"device": 40, "disk": 40, "remote": 40}
    with held(monkeypatch, MemoryTier, "gather"):
        kit.ask([*TALK[:30], 5, 6, 7], 1, session="s")
        kit.step()
        assert tokens_of(kit) == {"device": 33, "disk": 30, "remote": 30}
        kit.ask([5, 6], 1, session="s")
        kit.step()
        assert tokens_of(kit) == {"device": 2}
    kit.settle()
    assert tokens_of(kit) == {"device": 2, "disk": 2, "remote": 2}


@pytest.mark.parametrize("name", ["llama", "rwkv", "qwen3_next"])
def test_a_session_moves_to_another_server(name: str, tmp_path: Path) -> None:
    kit = Kit(name, folder=tmp_path / "here")
    first = kit.ask_and_settle(TALK, 6, session="s")
    longer = [*TALK, *first.tokens, 1, 2]
    second = kit.ask(longer, 6, session="s")  # not settled: what is not on disk yet is written for the export
    kit.commands.export(Export("r", "a", "s", str(tmp_path / "capsule")))
    length = len(longer) + 5
    assert kit.answers() == [Exported("r", 2, length)]

    other = Kit(name, folder=tmp_path / "there")
    other.commands.take_in(Import("q", "b", "moved", str(tmp_path / "capsule")))
    assert other.answers() == [Imported("q", length)]
    longest = [*longer, *second.tokens, 5]
    outcome = check(other, longest, tenant="b", session="moved")
    assert reused(outcome)[0] == length
    assert reused(other.ask(longest, 1, tenant="b", session="another"))[0] == 0  # a client's KV serves its session only
    other.commands.forget(Forget("b", "another"))  # what was computed here may be shared
    again = other.restarted()
    assert reused(check(again, [*longest, 1], tenant="b", session="moved"))[0] >= length
    assert again.archive.disk.heads[Owner("b", "moved", True)].tip.private
    assert reused(again.ask([*longest, 1], 1, tenant="b", session="third"))[0] == 0


def test_a_session_that_is_deleted_while_its_capsule_is_looked_at_stays_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(folder=tmp_path / "here")
    kit.ask(TALK, 6, session="s")
    kit.commands.export(Export("r", "a", "s", str(tmp_path / "capsule")))
    kit.answers()
    deleted = threading.Event()
    real = segment_loader.read_chain
    monkeypatch.setattr(segment_loader, "read_chain", lambda *args: deleted.wait(30.0) and real(*args))
    kit.commands.take_in(Import("q", "b", "moved", str(tmp_path / "capsule")))
    kit.commands.forget(Forget("b", "moved", 7))
    deleted.set()
    assert sorted(kit.answers(), key=str) == [Forgotten("b", "moved", 7), Imported("q", 0)]
    assert kit.store.find("b", "moved") is None
    kit.leave()
    assert kit.archive.disk.head(Owner("b", "moved", True)) is None


@pytest.mark.parametrize("name", ["llama", "rwkv", "qwen3_next"])
def test_a_capsule_holds_the_timeline_of_its_session_and_nothing_else(name: str, tmp_path: Path) -> None:
    kit = Kit(name, folder=tmp_path / "here")
    kit.ask_and_settle(TALK, 6, session="s")
    branch = [*TALK[:-1], 7, 8, 9]  # goes on from within the file of "s"
    second = kit.ask_and_settle(branch, 6, session="branch")
    check(kit, [*branch, *second.tokens, 96, 95], 6, session="branch")  # rewound below
    timeline = [*branch, *second.tokens]
    kit.commands.export(Export("r", "a", "branch", str(tmp_path / "capsule"), pack_ids(timeline)))
    (told,) = kit.answers()
    assert isinstance(told, Exported)
    files = files_of(tmp_path / "capsule")
    headers = [read_header(file.parent, file.name) for file in files]
    assert [(header.tenant, header.session) for header in headers] == [("a", "branch")] * told.files
    held = [list(unpack_ids(header.tokens)) for header in headers]
    assert [token for ids in held for token in ids] == timeline[: told.tokens]
    assert told.tokens >= len(branch) - 1

    other = Kit(name, folder=tmp_path / "there")
    other.commands.take_in(Import("q", "b", "moved", str(tmp_path / "capsule")))
    assert other.answers() == [Imported("q", told.tokens)]
    assert reused(check(other, [*timeline, 5], tenant="b", session="moved"))[0] == told.tokens


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_capsule_of_a_fork_before_its_first_turn_holds_what_it_shares(name: str, where: str, tmp_path: Path) -> None:
    kit = Kit(name, folder=tmp_path / "here")
    first = kit.ask(TALK, 6, session="s")
    kit.ask([*TALK, *first.tokens, 5, 6], 6, session="s")  # the fork is at the turn before
    if where == "disk":
        kit.settle()
        kit = kit.restarted()
    fork = [*TALK, *first.tokens]
    kit.commands.export(Export("foreign", "b", "fork", str(tmp_path / "foreign"), pack_ids(fork)))
    kit.commands.export(Export("r", "a", "fork", str(tmp_path / "capsule"), pack_ids(fork)))
    foreign, told = kit.answers()
    assert foreign == Exported("foreign", 0, 0)
    assert isinstance(told, Exported)
    headers = [read_header(file.parent, file.name) for file in files_of(tmp_path / "capsule")]
    assert [(header.tenant, header.session) for header in headers] == [("a", "fork")] * told.files
    held = [token for header in headers for token in unpack_ids(header.tokens)]
    assert held == fork[: told.tokens]
    assert told.tokens >= (len(fork) - 1 if name == "llama" else len(TALK) - 1)

    other = Kit(name, folder=tmp_path / "there")
    other.commands.take_in(Import("q", "b", "moved", str(tmp_path / "capsule")))
    assert other.answers() == [Imported("q", told.tokens)]
    assert reused(check(other, [*fork, 5], tenant="b", session="moved"))[0] == told.tokens


def test_a_capsule_of_a_session_that_begins_otherwise_now_holds_no_cache(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    kit.ask(TALK, 6, session="s")
    for timeline in ([], [1, *TALK]):
        kit.commands.export(Export("r", "a", "s", str(tmp_path / "capsule"), pack_ids(timeline)))
        assert kit.answers() == [Exported("r", 0, 0)]


def test_a_capsule_of_another_model_or_with_damage_is_refused(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path / "here")
    kit.ask(TALK, 6, session="s")
    kit.commands.export(Export("r", "a", "s", str(tmp_path / "capsule")))
    assert kit.answers() == [Exported("r", 1, len(TALK) + 5)]
    (file,) = files_of(tmp_path / "capsule")
    other = Kit("deepseek_v3", folder=tmp_path / "there")
    for fingerprint, reason in ((other.fingerprint, "another fingerprint"), (kit.fingerprint, "damaged")):
        clerk = SessionCommands(other.store, fingerprint)
        clerk.take_in(Import("q", "b", "s", str(tmp_path / "capsule")))
        other.settle()
        assert clerk.take() == [Imported("q", 0, reason)]  # the second one lies about its model: its layers tell
    data = bytearray(file.read_bytes())
    data[-70] ^= 1
    file.unlink()
    file.write_bytes(data)
    kit.commands.take_in(Import("q", "b", "s", str(tmp_path / "capsule")))
    assert kit.answers() == [Imported("q", 0, "damaged")]
    assert reused(kit.ask([*TALK, 1], tenant="b", session="s")) == (0, 0)


# -- the remote tier ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "rwkv"])
def test_a_named_session_comes_back_from_the_remote_tier(name: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'remote'}"
    kit = Kit(name, folder=tmp_path / "one", remote=url)
    first = kit.ask_and_settle(TALK, 6, session="s")
    longer = [*TALK, *first.tokens, 1, 2]
    kit.ask([*longer[:30], 7], 2, session="branch")  # its files go on from those of "s"
    second = kit.ask_and_settle(longer, 6, session="s")
    kit.leave()
    other = Kit(name, folder=tmp_path / "two", remote=url)
    assert not other.archive.disk.heads
    longest = [*longer, *second.tokens, 3]
    outcome = check(other, longest, session="s")
    assert outcome.receipt.cached == outcome.receipt.count_reused(Tier.REMOTE) == len(longest) - 2
    assert check(other, [*longer[:30], 7, 8], session="branch").receipt.cached >= 30
    other.commands.forget(Forget("a", "s"))
    other.commands.forget(Forget("a", "branch"))
    assert len(other.answers()) == 2
    third = Kit(name, folder=tmp_path / "three", remote=url)
    assert reused(third.ask(longest, 1, session="s"))[0] == 0


def test_a_remote_tier_that_is_away_costs_no_turn(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path / "kv", remote=f"file://{tmp_path / 'remote'}")
    sync = kit.archive.syncs[0]
    for method in ("put", "names", "get", "remove"):
        setattr(sync.lower, method, failing(OSError("the remote tier does not answer")))
    check(kit, TALK, session="s")
    check_and_settle(kit, [*TALK, 1], session="s")
    assert sync.errors > 0
    assert len(files_of(tmp_path / "kv")) >= 1
