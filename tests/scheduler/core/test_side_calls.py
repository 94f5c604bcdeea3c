"""Side calls that find no room beside the conversation that they belong to."""

from __future__ import annotations

from pathlib import Path

from engine_kit import Kit, await_announced
from tiny_models import greedy

from cache.tier import Tier
from scheduler.protocol import FinishReason
from scheduler.turn_receipt import Miss

LINE = list(range(16))  # tokens: five of eight pages, with the reply
SIDE = list(range(100, 116))


def line_is_warm(kit: Kit) -> bool:
    """Whether the line's KV is on the device, all of it."""
    line = kit.store.find("a", "line")
    return line is not None and line.warm and line.length == 19


def test_without_a_tier_below_it_ends_as_if_its_context_were_full() -> None:
    kit = Kit(pages=8)
    said = kit.ask(LINE, 4, session="line").tokens
    aside = kit.ask(SIDE, 4, side=True, parent="line")
    assert (aside.finish_reason, aside.tokens) == (FinishReason.LENGTH, [])
    assert aside.receipt.miss is Miss.NO_ROOM
    assert line_is_warm(kit)
    again = kit.ask([*LINE, *said, 7], 4, session="line")
    assert again.receipt.cached == 19


def test_its_reply_is_cut_where_the_room_ends() -> None:
    kit = Kit(pages=8)
    kit.ask(LINE, 4, session="line")
    aside = kit.ask(SIDE[:8], 20, side=True, parent="line")
    assert aside.finish_reason is FinishReason.LENGTH
    assert aside.tokens == greedy(kit.model, SIDE[:8], 5)  # the last one is not fed
    assert line_is_warm(kit)


def test_a_ping_is_cut_too_and_a_batch_is_not() -> None:
    kit = Kit(pages=8)
    kit.ask(LINE, 4, session="line")
    assert kit.ask(SIDE, 1, parent="line").admitted
    assert line_is_warm(kit)
    assert len(kit.ask(SIDE, 8, side=True, spare=True, parent="line").tokens) == 8
    assert not line_is_warm(kit)


def test_it_waits_for_a_turn_that_will_end() -> None:
    kit = Kit(pages=12)
    kit.ask(LINE, 4, session="line")
    other = kit.send(list(range(200, 216)), 4)
    kit.step()
    aside = kit.send(SIDE, 4, side=True, parent="line")
    kit.run()
    assert len(kit.outcomes[other].tokens) == len(kit.outcomes[aside].tokens) == 4
    assert line_is_warm(kit)


def test_from_the_host_the_line_comes_back_when_it_has_ended() -> None:
    kit = Kit(pages=8, host_pages=8)
    kit.ask(LINE, 4, session="line")
    kit.ask_checked(SIDE, 4, side=True, parent="line")
    assert not line_is_warm(kit)
    await_announced(kit)
    assert line_is_warm(kit)
    assert kit.engine.stats().warmed == 1


def test_from_disk_too_where_it_is_written_first(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path, pages=8)
    said = kit.ask(LINE, 4, session="line").tokens
    kit.ask_checked(SIDE, 4, side=True, parent="line")
    assert kit.archive.write_behind.saves == 1
    await_announced(kit)
    assert line_is_warm(kit)
    prompt = [*LINE, *said, 7]
    again = kit.ask(prompt, 4, session="line")
    assert again.receipt.count_reused(Tier.DEVICE) == 19
    assert again.tokens == greedy(kit.model, prompt, 4)
    kit.leave()


def test_a_conversation_without_a_name_is_written_for_it(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path, pages=8)
    kit.ask(LINE, 4)
    prompt = [*LINE[:8], *SIDE]
    assert kit.ask(prompt, 4, side=True).tokens == greedy(kit.model, prompt, 4)
    kit.leave()


def test_a_full_disk_loses_no_line(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path, pages=8, disk_space=1)
    kit.ask(LINE, 4, session="line")
    assert kit.ask(SIDE, 4, side=True, parent="line").finish_reason is FinishReason.LENGTH
    assert line_is_warm(kit)
    kit.leave()
