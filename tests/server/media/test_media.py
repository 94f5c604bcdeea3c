"""Media in messages: where they stand, how they are logged, and how chat templates see them."""

from __future__ import annotations

import msgspec
import pytest

from server.chat.dialect import Dialect
from server.chat.rendering import PLAIN
from server.chat.system_places import SystemPlaces
from server.lines.agreement import agreement
from server.log.logged_message import LoggedMessage, of_json, to_json
from server.media.media import Media, PlacedMedia, interleave, move, place, without_media
from server.schemas.sealed_compaction import seal_messages, unseal_messages

CAT = Media("image", "a" * 64, "png", 640, 480)
DOG = Media("image", "b" * 64, "jpeg", 100, 50)
SEEN = LoggedMessage("user", "Look: and this?", media=(place(CAT, 6), place(DOG, 6)))


def test_text_and_media_are_parts_in_their_order() -> None:
    assert interleave(SEEN.content, SEEN.media) == ["Look: ", *SEEN.media, "and this?"]
    assert without_media(SEEN.content, SEEN.media) == "Look: [image][image]and this?"
    assert interleave("", [place(CAT, 0)]) == [place(CAT, 0)]
    assert interleave("Look", [place(CAT, 90)]) == ["Look", place(CAT, 90)]


def test_a_message_with_media_is_logged_and_read_again() -> None:
    assert of_json(to_json([SEEN])) == [SEEN]
    assert '"digest":"' + CAT.digest in to_json([SEEN])


@pytest.mark.parametrize("change", [{"digest": "../x"}, {"digest": "A" * 64}, {"format": "p/n"}, {"at": -1}, {"x": 1}])
def test_media_that_no_log_could_hold_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**msgspec.to_builtins(place(CAT, 0)), **change}, PlacedMedia)


def test_a_template_sees_parts_without_digests() -> None:
    (made,) = Dialect(native=True).to_template_messages([SEEN], PLAIN)
    assert [part["type"] for part in made["content"]] == ["text", "image", "image", "text"]
    assert all("digest" not in part for part in made["content"])


def test_a_result_with_a_picture_is_described_around_it() -> None:
    result = LoggedMessage("tool", "Seen.", tool_call_id="call_1", media=(place(CAT, 5),))
    (made,) = Dialect().to_template_messages([result], PLAIN)
    assert made["content"] == [
        {"type": "text", "text": "<tool_response>\nSeen."},
        {"type": "image"},
        {"type": "text", "text": "\n</tool_response>"},
    ]


def test_media_move_with_the_text_of_joined_messages() -> None:
    alternating = Dialect(native=True, places=SystemPlaces(user_after_user=False))
    (made,) = alternating.to_template_messages([LoggedMessage("user", "Hello."), SEEN], PLAIN)
    assert made["content"][0] == {"type": "text", "text": "Hello.\n\nLook: "}
    assert [part["type"] for part in made["content"]] == ["text", "image", "image", "text"]
    assert move([place(CAT, 1)], 4) == [place(CAT, 5)]


def test_another_picture_is_another_message() -> None:
    other = msgspec.structs.replace(SEEN, media=(place(DOG, 6), place(CAT, 6)))
    assert agreement([SEEN], [SEEN]).messages == 1
    assert agreement([SEEN], [other]).messages == 0


def test_sealed_messages_name_no_pictures() -> None:
    sealed = seal_messages([SEEN, LoggedMessage("assistant", "A cat.")])
    opened = unseal_messages(sealed)
    assert opened is not None
    assert opened[0].content == "Look: [image][image]and this?"
    assert not opened[0].media
