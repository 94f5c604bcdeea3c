"""Sounds in chats through the engine, against a from-scratch forward of the model's own code with all features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from wide import widely

pytest.importorskip("soundfile")

from hearing_models import HEARING, OTHERS, PHI, SECONDS, sound
from seeing_kit import Part, SeeingKit, loaded_of

from cache.media_ids import MEDIA
from scheduler.media.senses import SOUNDS, decode_sound

BELL, HORN = sound(1.0, 1), sound(1.5, 2)


def turn_one(first: bytes = BELL) -> list[Part]:
    return ["<|im_start|>user\nWhat is ", first, " there?<|im_end|>\n<|im_start|>assistant\n"]


@pytest.mark.parametrize("name", HEARING)
def test_a_chat_with_sounds_beside_one_without_says_what_the_model_says(name: str) -> None:
    """Three turns, the third with a second sound, in steps of few tokens; each sound is encoded once."""
    kit = SeeingKit(name, step_tokens=19)
    assert kit.facts.media == ("audio",)
    kit.check_chat(turn_one(), ["And?"], ["Now ", HORN, " too"])
    kit.leave()


@pytest.mark.parametrize("name", HEARING)
def test_two_sounds_of_one_length_share_no_prefix_and_are_not_heard_alike(name: str) -> None:
    kit = SeeingKit(name)
    outcomes = kit.check_unlike(turn_one(sound(1.0, 5)), turn_one(sound(1.0, 6)))
    told = [next(d.logprobs[0].logprob for d in outcome.deltas if d.logprobs) for outcome in outcomes]
    assert told[0] != told[1]
    kit.leave()


@pytest.mark.wide
@pytest.mark.parametrize("name", OTHERS)
def test_further_models_hear_a_sound_in_two_turns(name: str) -> None:
    kit = SeeingKit(name, step_tokens=19)
    parts = turn_one()
    _, outcome = kit.ask_checked(parts, "s", count=3)
    longer = [*parts, outcome.tokens, "And?"]
    _, outcome = kit.ask_checked(longer, "s", count=3)
    assert kit.encoded == 1
    kit.leave()


@pytest.mark.parametrize("name", widely([*HEARING, *OTHERS], f"qwen2_audio {PHI}"))
def test_an_edit_a_fork_a_restart_and_an_eviction_encode_nothing(name: str, tmp_path: Path) -> None:
    kit = SeeingKit(name, tmp_path)
    parts = turn_one()
    kit.ask(parts, "s")
    edited: list[Part] = [*parts[:2], "Another question?"]
    ids, outcome = kit.ask_checked(edited, "s")
    forked: list[Part] = [*edited, " in a fork"]
    ids, outcome = kit.ask_checked(forked, "fork")
    assert kit.encoded == 1
    kit = kit.restarted()
    longer = [*forked, outcome.tokens, "Which?"]
    ids, outcome = kit.ask_checked(longer, "fork")
    assert outcome.receipt.cached >= len(kit.ids(forked))
    kit.lose_memory()
    again = [*longer, outcome.tokens, "Sure?"]
    before = len(ids)
    ids, outcome = kit.ask_checked(again, "fork")
    assert outcome.receipt.cached >= before
    assert kit.encoded == 0
    kit.leave()


def test_a_sound_that_a_model_would_cut_off_is_refused() -> None:
    """One of them hears longer sounds in pieces, which is right."""
    long = sound(SECONDS + 0.5, 3)
    kit = SeeingKit("qwen2_audio")
    (refused,) = kit.expand(long).media
    assert refused.error == "The sound is longer than the 2 seconds that the model hears."
    kit.leave()
    kit = SeeingKit("audioflamingo3")
    parts: list[Part] = ["Hear ", long, "?"]
    ids, _ = kit.ask_checked(parts, count=3)
    assert sum(token >= MEDIA for token in ids) > 50
    kit.leave()


def test_what_is_no_sound_or_too_short_is_told() -> None:
    kit = SeeingKit("qwen2_audio")
    errors = [kit.expand(data).media[0].error for data in (b"RIFFnothing", sound(0.1, 1))]
    assert errors[0].startswith("The sound cannot be decoded")
    assert errors[1] == "The sound is too short for this model."
    kit.leave()


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_files_are_decoded_to_the_models_rate(format: str) -> None:
    samples = decode_sound(sound(1.0, 1, format, rate=44_100), 16_000)
    assert samples.dtype == np.float32
    assert abs(len(samples) - 16_000) < 1200


def test_the_processor_is_that_of_sounds() -> None:
    eyes = loaded_of("qwen2_audio").eyes
    assert eyes is not None
    assert eyes.processor.sense is SOUNDS
    assert str(eyes.sight.way) == "as embeddings"
