"""A model that hears otherwise in a prompt with a picture takes both, but never in one conversation."""

from __future__ import annotations

import pytest

pytest.importorskip("PIL")
pytest.importorskip("soundfile")

from hearing_models import PHI, sound
from seeing_kit import Part, Refusal, SeeingKit
from vision_models import picture

CAT, DOG, BELL = picture(28, 28, 1), picture(56, 28, 2), sound(1.0, 1)
ASKED: tuple[Part, ...] = ("<|im_start|>user\nWhat is ", "?<|im_end|>\n<|im_start|>assistant\n")


def test_chats_with_pictures_and_chats_with_sounds_in_one_step_say_what_the_model_says() -> None:
    """Two turns of both, in steps of few tokens; the first has two pictures at its end."""
    kit = SeeingKit(PHI, step_tokens=19, watches=True)
    assert kit.facts.media == ("image", "audio")
    assert kit.facts.media_apart
    chats: dict[str, list[Part]] = {"sees": [ASKED[0], CAT, ASKED[1]], "hears": [ASKED[0], BELL, ASKED[1]]}
    for number in range(2):
        ids = {name: kit.ids(parts) for name, parts in chats.items()}
        turns = {name: kit.send(ids[name], parts, name) for name, parts in chats.items()}
        kit.run()
        for name, turn in turns.items():
            outcome = kit.outcomes[turn]
            kit.check(ids[name], chats[name], outcome)
            more: list[Part] = ["Now ", DOG, " too"] if name == "sees" and not number else ["And?"]
            chats[name] = [*chats[name], outcome.tokens, *more]
    assert kit.encoded == 3
    kit.leave()


def test_both_in_one_conversation_are_refused_and_nothing_is_lost() -> None:
    kit = SeeingKit(PHI, watches=True)
    seen: list[Part] = [ASKED[0], CAT, ASKED[1]]
    _, outcome = kit.ask(seen, "s")
    with pytest.raises(Refusal) as refused:
        kit.ask([*seen, outcome.tokens, "And ", BELL, "?"], "s")
    assert refused.value.code == "invalid_prompt"
    assert "of one kind" in str(refused.value)
    longer: list[Part] = [*seen, outcome.tokens, "And?"]
    _, outcome = kit.ask_checked(longer, "s")
    assert kit.encoded == 1
    kit.leave()
