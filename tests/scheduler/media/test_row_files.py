"""What encoders have made of pictures is kept on disk, and pictures of several turns are encoded together."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from threading import Event

import pytest
import torch

pytest.importorskip("PIL")

from seeing_kit import Part, SeeingKit
from vision_models import picture

from cache.segments.chain import Owner
from cache.tiers.disk import DiskTier
from scheduler.media.row_files import RowFiles
from scheduler.protocol import Forget

CAT, DOG = picture(64, 48, 1), picture(64, 48, 2)

CHATS: list[list[Part]] = [["A cat: ", CAT, "!"], ["Now a dog: ", DOG, "?"]]  # with no prefix that one waits for


def shown(one: bytes, *more: Part, before: str = "") -> list[Part]:
    return [f"<|im_start|>user\n{before}What is ", one, " there?<|im_end|>\n<|im_start|>assistant\n", *more]


def rows_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/rows/*/*") if path.is_file()]


def without_kv(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        path.unlink()


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_rows_outlive_a_restart_and_their_kv(name: str, tmp_path: Path) -> None:
    kit = SeeingKit(name, tmp_path)
    kit.ask(shown(CAT), "s")
    assert kit.encoded == 1
    kit.leave()
    without_kv(tmp_path)
    kit = SeeingKit(name, tmp_path)
    for parts in (shown(CAT), shown(CAT, before="An edit in front of it. ")):
        kit.ask_checked(parts, "s")
    assert kit.encoded == 0
    kit.leave()


def test_rows_are_gone_with_the_last_session_that_shows_the_picture(tmp_path: Path) -> None:
    kit = SeeingKit("llava", tmp_path)
    parts = shown(CAT)
    kit.ask(parts, "s")
    kit.ask(shown(CAT, "and"), "fork")
    kit.ask(shown(DOG))  # of a session without a name: nothing is kept
    files = kit.media_store.files
    assert files is not None
    files.flush()
    one, other = rows_in(tmp_path)
    assert one.stat().st_ino == other.stat().st_ino
    assert kit.archive.disk.space.beside == files.nbytes > 0
    kit.commands.forget(Forget("a", "s", 1))
    files.flush()
    assert len(rows_in(tmp_path)) == 1
    kit.commands.forget(Forget("a", "fork", 1))
    files.flush()
    assert rows_in(tmp_path) == []
    assert len(files) == files.nbytes == kit.archive.disk.space.beside == 0
    kit.leave()


def test_a_session_is_forgotten_without_waiting_for_its_files(tmp_path: Path) -> None:
    held, told = Event(), list[str]()
    files = RowFiles(tmp_path)
    owner = Owner("a", "s", True)
    files.keep(owner, "cat", [torch.zeros(4)])
    files.flush()
    files._thread.submit(held.wait)
    files.forget(owner, lambda: told.append("gone"))
    files.poll()
    assert files.busy
    assert told == []
    held.set()
    files.flush()
    files.poll()
    assert told == ["gone"]
    assert not files.busy
    files.close()


def test_rows_and_kv_share_the_disk(tmp_path: Path) -> None:
    """KV makes room for rows, and these keep to their part."""
    disk = DiskTier(tmp_path / "kv", "f", 1000)
    files = RowFiles(tmp_path / "rows", budget=400, changed=disk.set_beside)
    for number in range(5):
        files.keep(Owner("a", f"s{number}", True), f"picture {number}", [torch.zeros(50)])
    assert files.nbytes == disk.space.beside == disk.stats.used == 400
    assert disk.space.bytes_to_evict(700, 700, 0) == 100
    files.close()


def test_damaged_rows_are_made_again(tmp_path: Path) -> None:
    kit = SeeingKit("llava", tmp_path)
    kit.ask(shown(CAT), "s")
    kit.leave()
    without_kv(tmp_path)
    (path,) = rows_in(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    kit = SeeingKit("llava", tmp_path)
    kit.ask_checked(shown(CAT), "s")
    assert kit.encoded == 1
    kit.leave()


def test_pictures_of_one_shape_are_encoded_together_while_nothing_is_decoded() -> None:
    kit = SeeingKit("llava")
    pictures = kit.media_store
    assert pictures.sight.together
    turns = [kit.send(kit.ids(parts), parts) for parts in CHATS]
    kit.run()
    for turn, parts in zip(turns, CHATS, strict=True):
        kit.check(kit.ids(parts), parts, kit.outcomes[turn])
    assert (pictures.encoded, pictures.passes) == (2, 1)
    kit.leave()


def test_a_reply_waits_for_one_picture_at_a_time() -> None:
    kit = SeeingKit("llava")
    pictures = kit.media_store
    beside = kit.send(kit.ids(["How far is the moon?"]), [], count=30)
    with torch.no_grad():
        for _ in range(3):
            kit.step()
        for parts in CHATS:
            kit.send(kit.ids(parts), parts)
        seen = []
        for _ in range(6):
            said = len(kit.outcomes[beside].tokens)
            kit.step()
            seen.append(pictures.encoded)
            assert len(kit.outcomes[beside].tokens) == said + 1
    assert pictures.passes == seen[-1] == 2
    assert max(after - before for before, after in pairwise(seen)) == 1
    kit.run()
    kit.leave()
