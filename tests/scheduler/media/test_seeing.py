"""Pictures through the engine, against a from-scratch forward of the model's own code with all pixels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from wide import widely

pytest.importorskip("PIL")

from seeing_kit import Part, Refusal, SeeingKit
from speculation_kit import feed_all_drafts
from vision_models import SEEING, picture

from cache.media_ids import MEDIA
from cache.tiers.restore_rates import RestoreRates
from scheduler.core.speculator import spoken_part
from scheduler.protocol import DraftSource

CAT, DOG = picture(64, 48, 1), picture(48, 90, 2)


def turn_one(first: bytes = CAT) -> list[Part]:
    return ["<|im_start|>user\nWhat is ", first, " there?<|im_end|>\n<|im_start|>assistant\n"]


@pytest.mark.parametrize("name", widely(SEEING, "llava qwen2_5_vl gemma3"))
def test_a_chat_with_pictures_beside_one_without_says_what_the_model_says(name: str) -> None:
    kit = SeeingKit(name)
    kit.check_chat(turn_one(), ["And?"], ["Now ", DOG, " too"], ["Why so?"])
    kit.leave()


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("step_tokens", [7, 19])
def test_chunks_of_a_prompt_may_end_anywhere(name: str, step_tokens: int) -> None:
    kit = SeeingKit(name, step_tokens=step_tokens)
    parts = [*turn_one(), "more", DOG, CAT, "end"]
    ids = kit.ids(parts)
    others = kit.ids(["How far is the moon? " * 3])
    turn, other = kit.send(ids, parts), kit.send(others, [])
    kit.run()
    kit.check(ids, parts, kit.outcomes[turn])
    kit.check(others, [], kit.outcomes[other])
    assert kit.encoded == 2, "the same picture twice is encoded once"
    kit.leave()


def test_a_turn_is_told_how_long_the_encoder_took_for_it() -> None:
    """With its last delta only; a turn that finds the rows has waited for nothing."""
    kit = SeeingKit("llava")
    for waited in (True, False):
        _, outcome = kit.ask(turn_one())
        *before, last = outcome.deltas
        assert (last.encoding > 0) is waited
        assert not any(delta.encoding for delta in before)
    assert kit.media_store.passes == 1
    kit.leave()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_what_a_forward_with_pictures_leaves_on_the_model_is_in_no_other_session(name: str) -> None:
    """``rope_deltas`` of one picture, or of nobody's, beside sessions with others: all positions are explicit."""
    kit = SeeingKit(name)
    holder = kit.loaded.model.model
    before = holder.rope_deltas
    chats: list[list[Part]] = [turn_one(), ["How far is the moon?"], [*turn_one(DOG), "and ", CAT]]
    try:
        for number, parts in enumerate(chats):
            holder.rope_deltas = torch.tensor([[37 * number - 20]])
            _, outcome = kit.ask_checked(parts, f"{number}")
            chats[number] = [*parts, outcome.tokens, "And?"]
        holder.rope_deltas = torch.tensor([[11]])
        turns = {kit.send(kit.ids(parts), parts, f"{number}"): parts for number, parts in enumerate(chats)}
        kit.run()
        for turn, parts in turns.items():
            kit.check(kit.ids(parts), parts, kit.outcomes[turn])
        assert kit.encoded == 2
    finally:
        holder.rope_deltas = before
    kit.leave()


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_two_pictures_of_one_size_share_no_prefix(name: str) -> None:
    kit = SeeingKit(name)
    kit.check_unlike(turn_one(picture(64, 48, 5)), turn_one(picture(64, 48, 6)))
    kit.leave()


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3", "idefics3"])
def test_an_edit_behind_a_picture_and_a_fork_encode_nothing(name: str) -> None:
    kit = SeeingKit(name)
    parts = turn_one()
    kit.ask(parts, "s")
    for text in ("Another question?", "A third one"):
        edited: list[Part] = [*parts[:2], text]
        _, outcome = kit.ask_checked(edited, "s")
        forked: list[Part] = [*edited, " in a fork"]
        _, outcome = kit.ask_checked(forked, f"fork {text}")
        assert outcome.receipt.encoded == 0
        assert outcome.receipt.cached >= len(kit.ids(edited)) - 1
    assert kit.encoded == 1
    kit.leave()


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_after_a_restart_and_an_eviction_kv_is_loaded_and_nothing_encoded(name: str, tmp_path: Path) -> None:
    kit = SeeingKit(name, tmp_path)
    parts: list[Part] = [*turn_one(), "and", DOG, "."]
    _, outcome = kit.ask(parts, "s")
    longer = [*parts, outcome.tokens, "Which?"]
    kit = kit.restarted(pages=20)
    ids, outcome = kit.ask_checked(longer, "s")
    assert outcome.receipt.cached >= len(kit.ids(parts))
    for number in range(12):
        kit.ask([f"{number} and a long text to evict the other. " * 6], f"other {number}")
    kit.lose_memory()  # with whoever is worth most by what the retention has learned of the tenant
    again = [*longer, outcome.tokens, "Sure?"]
    before = len(ids)
    ids, outcome = kit.ask_checked(again, "s")
    assert outcome.receipt.cached >= before
    assert outcome.receipt.loaded
    assert kit.encoded == 0
    kit.leave()


def test_tenants_share_no_picture_and_unknown_ones_are_refused() -> None:
    kit = SeeingKit("llava")
    ids = kit.ids(turn_one())
    with pytest.raises(Refusal) as refused:
        kit.send(ids, turn_one(), tenant="b")
    assert refused.value.code == "unknown_media"
    with pytest.raises(Refusal) as refused:
        kit.send(ids, [])
    assert refused.value.code == "unknown_media"
    at = next(i for i, token in enumerate(ids) if token >= MEDIA)
    with pytest.raises(Refusal):
        kit.send([*ids[: at + 1], *ids[at + 2 :]], turn_one())
    kit.leave()


def test_of_what_is_no_picture_the_answer_says_so() -> None:
    kit = SeeingKit("llava")
    (told,) = kit.expand(b"PNG and nothing else").media
    assert told.error.startswith("The picture cannot be decoded")
    assert told.ids == b""
    kit.leave()


class Lazy(RestoreRates):
    """Computing always seems quicker."""

    def prefers_loading(self, nbytes: int, tokens: int) -> bool:
        return False


def test_kv_with_pictures_is_loaded_even_where_computing_seems_quicker(tmp_path: Path) -> None:
    text: list[Part] = ["How far is the moon? " * 3]
    for parts, cached in ((turn_one(), True), (text, False)):
        kit = SeeingKit("llava", tmp_path / str(cached))
        kit.ask(parts, "s")
        kit = kit.restarted()
        kit.archive.restore_rates = Lazy()
        _, outcome = kit.ask_checked(parts, "s")
        assert bool(outcome.receipt.cached) is cached
        assert kit.encoded == 0
        kit.leave()


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_text_behind_pictures_is_drafted_and_says_what_the_model_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed_all_drafts(monkeypatch)
    kit = SeeingKit(name, speculate="auto")
    parts: list[Part] = [*turn_one(), "And ", DOG, "?"]
    ids = kit.ids(parts)
    plain = kit.ask(parts, count=16, speculate=False)[1].tokens
    guesses = [plain, [*plain[:5], 9, *plain[6:]]]
    turns = [kit.send(ids, parts, count=16, prediction=guess) for guess in guesses]
    kit.run()
    for turn in turns:
        kit.check(ids, parts, kit.outcomes[turn])
    drafted = [kit.outcomes[turn].deltas[-1].drafts[DraftSource.PREDICTION] for turn in turns]
    assert drafted[0][1] == drafted[0][0] >= 13
    assert drafted[1][0] > drafted[1][1] >= 4
    kit.leave()


def test_a_picture_is_never_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(spoken_part([5, 6, MEDIA + 7, 8])) == [5, 6]
    assert list(spoken_part([MEDIA, 8])) == []
    feed_all_drafts(monkeypatch)
    kit = SeeingKit("llava", speculate="auto")
    ids = kit.ids(turn_one())
    at = next(i for i, token in enumerate(ids) if token >= MEDIA)
    parts: list[Part] = [*turn_one(), ids[:at]]  # what has stood in front of the picture: the picture is next
    ids, _ = kit.ask_checked(parts, count=4)
    kit.leave()
