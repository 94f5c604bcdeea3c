"""Pictures and sounds in one chat through the engine, against a from-scratch forward of the model's own code."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("PIL")
pytest.importorskip("soundfile")

from hearing_models import sound
from seeing_kit import Part, SeeingKit
from vision_models import BOTH, picture

CAT, BELL, DOG = picture(64, 48, 1), sound(1.0, 1), picture(48, 64, 2)


def test_a_chat_with_pictures_and_sounds_says_what_the_model_says() -> None:
    """Both in the first turn, one more in the third, in steps of few tokens; each is encoded once."""
    kit = SeeingKit(BOTH, step_tokens=19)
    assert kit.facts.media == ("image", "audio")
    first: list[Part] = ["<|im_start|>user\nWhat is ", CAT, " and ", BELL, "?<|im_end|>\n<|im_start|>assistant\n"]
    kit.check_chat(first, ["And?"], ["Now ", DOG, " too"])
    kit.leave()


def test_both_outlive_a_restart_and_the_loss_of_their_kv(tmp_path: Path) -> None:
    parts: list[Part] = ["First ", BELL, ", then ", CAT, "."]
    kit = SeeingKit(BOTH, tmp_path)
    kit.ask(parts, "s")
    assert kit.encoded == 2
    kit.leave()
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    kit = SeeingKit(BOTH, tmp_path)
    edited: list[Part] = ["Before it. ", *parts]
    kit.ask_checked(edited, "s")
    assert kit.encoded == 0
    kit.leave()


def test_a_picture_is_no_sound() -> None:
    """The kind that a request tells decides what processes it."""
    kit = SeeingKit(BOTH)
    (told,) = kit.expand(b"RIFF" + CAT).media
    assert "sound cannot be decoded" in told.error
    kit.leave()
