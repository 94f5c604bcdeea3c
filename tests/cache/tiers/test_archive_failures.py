"""What the tiers below memory do when things go wrong, or happen at once. Each of these has gone wrong before."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from archive_kit import TALK, check, check_and_settle, files_of, held, reused, size_of_one
from engine_kit import Kit, failing

from cache import whole_files
from cache.memory.memory_tier import MemoryTier
from cache.segments import segment_file as segment_module
from cache.segments.chain import Owner
from cache.segments.segment_file import SegmentReader, write
from cache.tier import Tier
from cache.tiers import archive as archive_module
from cache.tiers import write_behind as saver_module
from cache.tiers.segment_folder import folder_of
from scheduler.protocol import Export, Exported, Forget, Forgotten, Import, Imported
from scheduler.turn_receipt import Miss


def owners(kit: Kit) -> list[str]:
    return sorted(owner.session for owner in kit.archive.disk.heads)


# -- what fails --------------------------------------------------------------------------------------------------------


def test_an_unexpected_error_of_a_write_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "_PAUSE", 0.0)
    kit = Kit(folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(saver_module, "write", failing(ValueError("nobody would believe this file")))
        check_and_settle(kit, TALK, session="s")
    assert kit.archive.write_behind.errors == 1  # not tried again and again
    check_and_settle(kit, [*TALK, 1], session="t")
    assert owners(kit) == ["t"]


@pytest.mark.parametrize("name", ["llama", "rwkv"])
def test_an_unexpected_error_of_a_read_ends_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(name, folder=tmp_path)
    kit.ask(TALK, 4, session="s")
    fresh = kit.restarted()
    with monkeypatch.context() as patch:
        patch.setattr(SegmentReader, "read", failing(RuntimeError("cannot allocate memory")))
        assert reused(check(fresh, [*TALK, 1], session="s")) == (0, 0)
    assert fresh.archive.disk.damaged == 0  # the file is not to blame
    assert len(files_of(tmp_path)) == 1


def test_a_folder_that_vanishes_costs_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(folder=tmp_path)
    kit.ask_and_settle(TALK, 1, session="s")
    for path in files_of(tmp_path):
        path.unlink()
        path.parent.rmdir()
    shutil.rmtree(kit.archive.disk.folder)  # with its lock
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", failing(FileNotFoundError(2, "No such file or directory")))
        check_and_settle(kit, [*TALK, 1], session="t")
    check(kit, [*TALK, 2], session="s")
    kit.leave()
    assert len(files_of(tmp_path)) == 2


def test_a_read_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(folder=tmp_path)
    for number in range(5):
        kit.ask([number, *TALK], 4, session=f"s{number}")
    kit.leave()
    monkeypatch.setattr(archive_module, "_STUCK", 0.01)
    fresh = Kit(folder=tmp_path)
    with held(monkeypatch, SegmentReader, "read"):
        for number in range(5):  # more than are read at once
            outcome = check(fresh, [number, *TALK, 1], session=f"s{number}")
            assert reused(outcome) == (0, 0)
            assert outcome.receipt.miss is Miss.CHEAPER
    fresh.settle()
    fresh.step()


def test_files_that_cannot_be_unlinked_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(folder=tmp_path)
    for session in ("s", "t"):
        kit.ask(TALK if session == "s" else [1, *TALK], 4, session=session)
    kit.settle()
    remove = whole_files.remove

    def stubborn(folder: Path, names: list[str]) -> None:
        if folder.name == folder_of(Owner("a", "s", True)):
            raise PermissionError(1, "Operation not permitted")
        remove(folder, names)

    with monkeypatch.context() as patch:
        patch.setattr(whole_files, "remove", stubborn)
        for _ in range(2):  # asking again does not make it true
            for session in ("s", "t"):
                kit.commands.forget(Forget("a", session))
            assert set(kit.answers()) == {Forgotten("a", "t")}
            assert len(files_of(tmp_path)) == 1
    kit.archive.remover._paused_until = 0.0  # five seconds later
    kit.step()
    kit.settle()
    assert files_of(tmp_path) == []
    kit.commands.forget(Forget("a", "s"))
    assert kit.answers() == [Forgotten("a", "s")]


def test_damage_that_is_found_at_the_start_is_told_once(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    first = kit.ask_and_settle(TALK, 6, session="s")
    longer = [*TALK, *first.tokens, 1, 2]
    second = kit.ask(longer, 6, session="s")
    kit.ask([9, *TALK], 6, session="t")
    kit.ask([8, *TALK], 6, session="u")
    kit.leave()
    for session, which in (("s", -1), ("t", 0)):  # what "s" has of its first turn is sound
        path = sorted(tmp_path.rglob(f"{folder_of(Owner('a', session, True))}/*.kv"))[which]
        path.write_bytes(path.read_bytes()[:-1])
    fresh = Kit(folder=tmp_path)
    assert fresh.archive.disk.damaged == 2
    misses = []
    for turn in range(2):
        for session, prompt in (("s", [*longer, *second.tokens]), ("t", [9, *TALK, 1]), ("u", [8, *TALK, 1])):
            receipt = check(fresh, [*prompt, *[3] * (turn + 1)], session=session).receipt
            misses.append((session, receipt.miss))
            assert receipt.cached >= (len(TALK) if (session, turn) != ("t", 0) else 0)
        fresh.settle()
        for session in "stu":
            fresh.store.forget("a", session)  # from memory only
    assert [session for session, miss in misses if miss is Miss.DAMAGED] == ["s", "t"]
    fresh.leave()


def test_a_file_that_cannot_be_read_at_the_start_is_there_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(folder=tmp_path)
    first = kit.ask_and_settle(TALK, 6, session="s")
    longer = [*TALK, *first.tokens, 1, 2]
    kit.ask(longer, 1, session="s")
    kit.leave()
    root, tip = sorted(files_of(tmp_path), key=lambda path: path.name)
    opened = whole_files.open_file

    def tired(folder: Path, name: str) -> int:
        if name == root.name:
            raise OSError(24, "Too many open files")
        return opened(folder, name)

    with monkeypatch.context() as patch:
        patch.setattr(segment_module, "open_file", tired)
        tried = Kit(folder=tmp_path)
        assert (tried.archive.disk.heads, tried.archive.disk.damaged) == ({}, 0)
        tried.leave()
    assert files_of(tmp_path) == sorted([root, tip])
    fresh = Kit(folder=tmp_path)
    assert reused(check(fresh, [*longer, 3], session="s")) == (len(longer), len(longer))


# -- what happens at once ----------------------------------------------------------------------------------------------


def test_a_session_on_the_host_is_exported_while_it_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(pages=32, host_pages=24, folder=tmp_path / "here")
    kit.archive.write_behind._paused_until = 1e18
    first = kit.ask(TALK, 6, session="s")
    kit.ask(list(range(100, 200)), 1, session="large")  # "s" goes to the host, unwritten
    session = kit.find("s")
    assert not session.warm
    kit.archive.write_behind._paused_until = 0.0
    with held(monkeypatch, MemoryTier, "gather") as go:
        threading.Timer(0.05, go.set).start()
        kit.commands.export(Export("r", "a", "s", str(tmp_path / "capsule")))
        kit.engine.check_integrity()
        check(kit, [*TALK, *first.tokens, 1], session="s")  # it comes up again, others take its place on the host
        check(kit, list(range(60, 160)), 1)
    assert kit.answers() == [Exported("r", 1, len(TALK) + 5)]
    other = Kit(folder=tmp_path / "there")
    other.commands.take_in(Import("q", "b", "s", str(tmp_path / "capsule")))
    assert other.answers() == [Imported("q", len(TALK) + 5)]
    check(other, [*TALK, *first.tokens, 2], tenant="b", session="s")


def test_forgotten_is_told_when_nobody_reads_the_files_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(folder=tmp_path)
    kit.ask(TALK, 6, session="s")
    fresh = kit.restarted()
    with held(monkeypatch, SegmentReader, "read"):
        fresh.send([*TALK, 1], 3, session="s")
        fresh.step()
        fresh.engine.end("a", "s")
        fresh.commands.forget(Forget("a", "s"))
        for _ in range(20):
            fresh.step()
            time.sleep(0.001)
        assert fresh.commands.take() == []
        assert len(files_of(tmp_path)) == 1
    assert fresh.answers() == [Forgotten("a", "s")]
    assert files_of(tmp_path) == []


def test_an_import_that_is_deleted_while_it_is_read_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(folder=tmp_path / "kv")
    kit.ask(TALK, 6, session="s")
    kit.commands.export(Export("r", "a", "s", str(tmp_path / "capsule")))
    kit.answers()
    with held(monkeypatch, SegmentReader, "read"):
        kit.commands.take_in(Import("q", "b", "s", str(tmp_path / "capsule")))
        while not kit.archive._arriving:
            kit.step()
        kit.commands.forget(Forget("b", "s"))
    kit.settle()
    assert kit.store.find("b", "s") is None
    assert reused(kit.ask([*TALK, 1], tenant="b", session="s")) == (0, 0)


def test_a_turn_that_wants_more_of_a_session_than_is_being_read_gets_it(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    first = kit.ask(TALK, 6, session="s")
    fresh = kit.restarted()
    little = fresh.send([*TALK[:6], 1], 2, session="t")
    all_of_it = fresh.send([*TALK, *first.tokens, 1], 2, session="s")
    fresh.run()
    assert reused(fresh.outcomes[little])[0] == 6
    assert reused(fresh.outcomes[all_of_it])[0] == len(TALK) + 5


def test_what_waited_while_its_beginning_was_evicted_is_written_whole(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    first = kit.ask_and_settle(TALK, 6, session="s")
    kit.archive.write_behind._paused_until = 1e18
    second = check(kit, [*TALK, *first.tokens, 1], 6, session="s")
    head = kit.archive.disk.head(Owner("a", "s", True))
    assert head is not None
    kit.archive.disk._drop(head)
    kit.archive.write_behind._paused_until = 0.0
    fresh = kit.restarted()
    longest = [*TALK, *first.tokens, 1, *second.tokens, 2]
    assert reused(check(fresh, longest, session="s"))[0] == len(longest) - 2


def test_files_are_in_order_though_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(folder=tmp_path)
    prompt = TALK
    with held(monkeypatch, MemoryTier, "gather"):
        for moment in (2e9, 1e9, 0.5e9):
            monkeypatch.setattr(time, "time", lambda moment=moment: moment)
            outcome = kit.ask(prompt, 3, session="s")
            kit.step()
            prompt = [*prompt, *outcome.tokens, 1]
    kit.leave()
    assert kit.archive.disk.head(Owner("a", "s", True)).tip.stop == len(prompt) - 2  # type: ignore[union-attr]
    fresh = Kit(folder=tmp_path)
    assert reused(check(fresh, prompt, session="s"))[0] == len(prompt) - 2


def test_a_pin_reaches_the_files_that_are_written_after_it(tmp_path: Path) -> None:
    one = size_of_one(tmp_path / "probe")
    kit = Kit(folder=tmp_path / "kv", disk_space=int(one * 2.5))
    with pytest.MonkeyPatch.context() as patch, held(patch, MemoryTier, "gather"):
        kit.ask(TALK, 1, session="s")
        kit.store.pin("a", "s", 1e12)
    for number in range(4):
        kit.ask_and_settle([number, *TALK[1:]], 1, session=f"s{number}")
    assert owners(kit) == ["s", "s3"]


# -- room --------------------------------------------------------------------------------------------------------------


def test_a_session_beyond_the_budget_drives_nobody_out(tmp_path: Path) -> None:
    one = size_of_one(tmp_path / "probe")
    kit = Kit(folder=tmp_path / "kv", disk_space=int(one * 3.5))
    kit.ask(TALK, 1, session="s")
    kit.ask_and_settle([1, *TALK[1:]], 1, session="t")
    large = list(range(60, 140))
    first = kit.ask_and_settle(large, 1, session="large")
    assert owners(kit) == ["large", "t"]
    second = kit.ask_and_settle([*large, *first.tokens, *range(30)], 1, session="large")
    assert owners(kit) == ["large"]
    kit.ask_and_settle(
        [*large, *first.tokens, *range(30), *second.tokens, *range(90)], 1, session="large"
    )  # cannot fit
    assert owners(kit) == ["large"]
    kit.ask_and_settle([7, *TALK], 1, session="s")
    assert owners(kit) == ["s"]


def test_the_floor_counts_what_is_about_to_be_unlinked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(folder=tmp_path)
    for number in range(10):
        kit.ask([number, *TALK[1:]], 1, session=f"s{number}")
    kit.settle()
    disk = kit.archive.disk
    one, room = disk.space.used // 10, 1 << 40
    monkeypatch.setattr(
        disk.segment_folder, "measure", lambda: room - sum(path.stat().st_size for path in files_of(tmp_path))
    )
    disk.space.set_free(disk.segment_folder.measure())
    disk.space.floor = room - int(10.5 * one)  # there is room for ten
    with held(monkeypatch, whole_files, "remove"):
        for number in range(3):
            kit.ask([100 + number, *TALK[1:]], 1, session=f"t{number}")
            kit.step(5)
    kit.settle()
    assert len(disk.heads) == 10
    assert disk.space.obsolete_bytes == 0


# -- the remote tier ---------------------------------------------------------------------------------------------------


def test_a_full_disk_makes_room_for_a_session_that_is_recalled(tmp_path: Path) -> None:
    url, one = f"file://{tmp_path / 'remote'}", size_of_one(tmp_path / "probe")
    kit = Kit(folder=tmp_path / "kv", remote=url, disk_space=int(one * 2.5))
    for number in range(4):
        kit.ask_and_settle([number, *TALK[1:]], 1, session=f"s{number}")
    assert owners(kit) == ["s2", "s3"]
    kit.leave()
    fresh = Kit(folder=tmp_path / "kv", remote=url, disk_space=int(one * 2.5))
    outcome = check(fresh, [0, *TALK[1:], 9], session="s0")
    assert outcome.receipt.count_reused(Tier.REMOTE) == len(TALK)


def test_a_session_that_is_deleted_while_it_is_recalled_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path / 'remote'}"
    kit = Kit(folder=tmp_path / "one", remote=url)
    kit.ask_and_settle(TALK, 6, session="s")
    kit.leave()
    other = Kit(folder=tmp_path / "two", remote=url)
    sync = other.archive.syncs[0]
    with held(monkeypatch, sync.lower, "get"):
        other.send([*TALK, 1], 3, session="s")
        other.step()
        other.engine.end("a", "s")
        other.commands.forget(Forget("a", "s"))
        other.step()
    assert other.answers() == [Forgotten("a", "s")]
    assert files_of(tmp_path / "two") == files_of(tmp_path / "remote") == []
    assert sync._asked == {}
    assert reused(other.ask([*TALK, 1], session="s")) == (0, 0)


def test_a_remote_file_that_names_an_odd_parent_is_refused(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'remote'}"
    kit = Kit(folder=tmp_path / "one", remote=url)
    kit.ask_and_settle(TALK, 6, session="s")
    kit.leave()
    (path,) = files_of(tmp_path / "remote")
    with SegmentReader(path.parent, path.name) as reader:
        tensors = {name: reader.read(name) for name in reader.names}
        header = msgspec.structs.replace(reader.header, parent="somewhere/else")
    path.unlink()
    write(path.parent, path.name, header, tensors)
    other = Kit(folder=tmp_path / "two", remote=url)
    assert reused(check(other, [*TALK, 1], session="s")) == (0, 0)
    assert other.archive.syncs[0].errors == 1
    other.settle()
    assert len(files_of(tmp_path / "two")) == 1  # that of the turn, not the other one


def test_a_file_of_a_failed_download_that_could_not_be_unlinked_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path / 'remote'}"
    kit = Kit(folder=tmp_path / "one", remote=url)
    kit.ask_and_settle(TALK, 6, session="s")
    kit.leave()
    (path,) = files_of(tmp_path / "remote")
    path.write_bytes(b"damaged")
    other = Kit(folder=tmp_path / "two", remote=url)
    remove = whole_files.remove
    left: list[Path] = []

    def fail_once(folder: Path, names: list[str]) -> None:
        if left:
            return remove(folder, names)
        left.extend(folder / name for name in names)
        raise OSError("read-only for now")

    monkeypatch.setattr(whole_files, "remove", fail_once)
    assert reused(check(other, [*TALK, 1], session="s")) == (0, 0)
    other.settle()
    assert left
    assert not any(path.exists() for path in left)


def test_a_question_to_the_remote_tier_waits_for_one_upload_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(folder=tmp_path / "kv", remote=f"file://{tmp_path / 'remote'}")
    sync = kit.archive.syncs[0]
    calls: list[str] = []
    for name in ("put", "names"):
        real = getattr(sync.lower, name)

        def noted(*args: Any, name: str = name, real: Callable[..., Any] = real) -> Any:
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(sync.lower, name, noted)
    for number in range(4):  # four questions, nothing written yet
        kit.ask([number, *TALK], 1, session=f"s{number}")
    kit.settle()
    calls.clear()
    with held(monkeypatch, sync.lower, "put"):
        for number in range(4):
            kit.ask([number, *TALK, 1], 1, session=f"s{number}")
        while kit.archive.write_behind.pending:
            kit.step()
        turn = kit.send([9, *TALK], 1, session="new")
        kit.step()
    kit.run()
    kit.settle()
    assert kit.outcomes[turn].tokens
    assert calls == ["put", "names", "put", "put", "put", "put"]
