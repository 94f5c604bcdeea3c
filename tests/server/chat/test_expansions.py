"""Pictures in prompts: media ids stand where the template shows a picture, and nowhere else."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import FACTS, SEEING, expansion_of
from transformers import AutoTokenizer

import server
from cache.media_ids import MEDIA, count_media, is_first, media_ids, uncut
from scheduler.model_facts import MediaMarks
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.expansions import Expansion, PromptMedia, expand_with, media_of
from server.chat.prompts import EMPTY_RECORD, Prompt, continuation
from server.chat.template_content import with_own_parts
from server.errors import ApiError
from server.log.logged_message import LoggedMessage
from server.log.timeline import SessionRecord
from server.media.media import Media, place

CAT, DOG = "a" * 64, "b" * 64
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str = TEMPLATE) -> ChatTokenizer:
    """The demo model's tokenizer, with a template that shows pictures."""
    made = AutoTokenizer.from_pretrained(Path(server.__file__).parent / "demo")
    made.chat_template = template
    return ChatTokenizer(made)


def showing(text: str, *digests: str, at: int | None = None, role: Any = "user") -> LoggedMessage:
    """A message with pictures behind its text, or within it."""
    media = [place(Media("image", digest, "png", 4, 4), len(text) if at is None else at) for digest in digests]
    return LoggedMessage(role, text, media=(*media,))


def ids_of(digest: str) -> list[int]:
    ids: array[int] = array("i")
    ids.frombytes(expansion_of(digest).ids)
    return ids.tolist()


MARKS = {marks.kind: marks for marks in SEEING.marks}


def expander(digests: Iterable[str]) -> Mapping[str, Expansion]:
    return {digest: Expansion(expansion_of(digest).text, array("i", ids_of(digest))) for digest in digests}


@pytest.fixture(autouse=True)
def _answering() -> None:
    expand_with(expander)


def prompt_of(tokens: ChatTokenizer, *new: LoggedMessage, record: SessionRecord = EMPTY_RECORD) -> Prompt:
    return continuation(tokens, SEEING, record, [*new])


def text_of(tokens: ChatTokenizer, ids: Sequence[int]) -> str:
    """The text of a timeline; ``#`` for a picture's first row, ``+`` for the others."""
    return "".join("#" if is_first(one) else "+" if one >= MEDIA else tokens.decode([one]) for one in ids)


def test_media_ids_stand_where_the_picture_is_shown() -> None:
    tokens = tokenizer()
    prompt = prompt_of(tokens, showing("What is this?", CAT, DOG, at=8))
    assert text_of(tokens, prompt.ids) == (
        "<|im_start|>user\nWhat is #++++#++++this?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [one for one in prompt.ids if one >= MEDIA] == ids_of(CAT) + ids_of(DOG)
    assert prompt.media == (CAT, DOG)
    assert count_media(prompt.ids) == 10


def test_a_logged_conversation_is_continued_by_its_ids_and_gets_new_pictures() -> None:
    tokens = tokenizer()
    first = prompt_of(tokens, showing("One", CAT))
    said = tokens.encode("Two", special=False)
    fingerprint = tokens.fingerprint(SEEING.vocab_size)
    messages = [*first.messages, LoggedMessage("assistant", "Two")]
    record = SessionRecord("s", [*first.ids, *said], messages, fingerprint, 1, rendered=2)
    second = prompt_of(tokens, showing("Three", DOG), record=record)
    assert second.ids[: len(record.tokens)] == record.tokens
    assert [one for one in second.ids if one >= MEDIA] == ids_of(CAT) + ids_of(DOG)
    assert second.media == (CAT, DOG)


def test_ids_of_another_processor_are_rendered_anew() -> None:
    tokens = tokenizer()
    old = [5, *media_ids("another processor's", 5), 6]
    messages = [showing("One", CAT), LoggedMessage("assistant", "Two")]
    record = SessionRecord("s", old, messages, tokens.fingerprint(SEEING.vocab_size), 1, rendered=2)
    prompt = prompt_of(tokens, LoggedMessage("user", "Three"), record=record)
    assert [one for one in prompt.ids if one >= MEDIA] == ids_of(CAT)
    assert not PromptMedia(MARKS, expander([CAT])).know(old)
    assert PromptMedia(MARKS, expander([CAT])).know(prompt.ids)


@pytest.mark.parametrize("text", ["What is <image> this?", "end <|endoftext|> of text"])
def test_a_text_with_the_models_own_marks_is_refused_where_there_are_pictures(text: str) -> None:
    tokens = tokenizer()
    with pytest.raises(ApiError) as refused:
        prompt_of(tokens, showing(text, CAT))
    assert (refused.value.status_code, refused.value.body.error.param) == (400, "messages")
    assert "image>" in text_of(tokens, prompt_of(tokens, LoggedMessage("user", "<image>")).ids)


def test_a_template_that_hides_a_picture_refuses_it() -> None:
    with pytest.raises(ApiError) as refused:
        prompt_of(tokenizer(TEMPLATE.replace("== 'image'", "== 'none'").replace("part['text']", "1")), showing("", CAT))
    assert refused.value.body.error.code == "invalid_media"


def test_a_typed_mark_does_not_take_the_place_of_a_hidden_picture() -> None:
    hiding = TEMPLATE.replace("<image>{% else %}", "{% else %}")
    with pytest.raises(ApiError) as refused:
        prompt_of(tokenizer(hiding), showing("What is <image> this?", CAT))
    assert refused.value.body.error.code == "invalid_value"


def test_a_model_without_eyes_refuses_a_logged_picture() -> None:
    with pytest.raises(ApiError) as refused:
        media_of(FACTS, [showing("", CAT)])
    assert refused.value.body.error.code == "unsupported_value"
    assert media_of(FACTS, [LoggedMessage("user", "text")]).marks == {}


def test_ids_of_media_depend_on_all_that_they_stand_for() -> None:
    one, other = media_ids("x", 300), media_ids("y", 300)
    assert len({*one} & {*other}) < 3
    assert all(MEDIA <= token < 2**31 for token in one)
    assert [is_first(token) for token in one] == [True] + [False] * 299
    assert media_ids("x", 300) == one


def test_a_prefix_ends_in_no_medium() -> None:
    ids = [1, 2, *media_ids("x", 4), *media_ids("y", 4), 3, *media_ids("z", 4), 4]
    assert [uncut(ids, n) for n in range(len(ids) + 1)] == [0, 1, *[2] * 8, 10, *[11] * 4, 15, 16]


def test_media_of_two_kinds_are_refused_by_a_model_that_takes_them_apart() -> None:
    """What the log has counts too; those of one kind are taken."""
    both = msgspec.structs.replace(
        SEEING, media=("image", "audio"), further_marks=(MediaMarks("<sound>", 7, "", "", "audio"),), media_apart=True
    )
    bell = LoggedMessage("user", "", media=(place(Media("audio", DOG, "wav"), 0),))
    assert media_of(both, [showing("Look: ", CAT)]).expansions is not None
    with pytest.raises(ApiError, match="takes sounds or pictures in one conversation, not both"):
        media_of(both, [showing("Look: ", CAT), bell])
    media_of(msgspec.structs.replace(both, media_apart=False), [showing("Look: ", CAT), bell])


def test_two_pictures_are_refused_by_a_model_that_takes_one() -> None:
    """The same picture twice is two of them."""
    assert SEEING.media_marks is not None
    one = msgspec.structs.replace(SEEING, media_marks=msgspec.structs.replace(SEEING.media_marks, single=True))
    assert media_of(one, [showing("Look: ", CAT), LoggedMessage("user", "And?")]).expansions is not None
    for messages in ([showing("Look: ", CAT, CAT)], [showing("Look: ", CAT), showing("And: ", DOG)]):
        with pytest.raises(ApiError, match="takes one picture in a conversation"):
            media_of(one, messages)


@pytest.mark.parametrize(("type", "named"), [("audio", "audio"), ("input_audio", "input_audio"), ("other", "audio")])
def test_templates_name_media_as_processors_or_as_openai(type: str, named: str) -> None:
    told: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "?"}]},
        {"role": "assistant"},
    ]
    made = with_own_parts(told, f"{{% if part['type'] == '{type}' %}}")
    assert [part["type"] for part in made[0]["content"]] == [named, "text"]
    assert told[0]["content"][0]["type"] == "audio", "what was passed in stays"
