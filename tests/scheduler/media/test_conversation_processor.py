"""Processors that take sounds in conversations only. With mistral-common installed also Voxtral's own one."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("soundfile")

import soundfile
from hearing_models import sound
from tekken_kit import AUDIO, BEGIN, save_tekken, save_voxtral
from tiny_models import SHAPE

from scheduler.engine_config import EngineConfig
from scheduler.media.conversation_processor import ConversationProcessor, speaks_only
from scheduler.media.processor import NoProcessor
from scheduler.media.senses import SOUNDS
from scheduler.model.loader import load
from scheduler.weights.tekken_tokenizer import read_usual


class Conversing:
    """A processor that puts one token for each tenth of a second into a conversation, behind one that begins them."""

    audio_token = "[AUDIO]"

    class feature_extractor:
        sampling_rate = 16_000

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.heard: list[Any] = []

    def __call__(self, text: str) -> Any:
        raise AssertionError("it takes no sounds")

    def apply_chat_template(self, conversation: Any, **options: Any) -> dict[str, Any]:
        ids = [1, 3]
        for part in conversation[0]["content"]:
            if part["type"] == "audio":
                samples, _ = soundfile.read(io.BytesIO(base64.b64decode(part["base64"])), dtype="float32")
                self.heard.append(samples)
                ids += [BEGIN, *[AUDIO] * (len(samples) // 1600)]
            else:
                ids += self.tokenizer.encode(part["text"], add_special_tokens=False)
        features = {"input_features": torch.ones(1, 2, 3)} if BEGIN in ids else {}
        return {"input_ids": torch.tensor([[*ids, 4]]), **features}


@pytest.fixture
def conversing(tmp_path: Path) -> Conversing:
    save_tekken(tmp_path)
    return Conversing(read_usual(str(tmp_path)))


def test_what_stands_for_a_sound_is_what_a_conversation_has_more(conversing: Conversing) -> None:
    assert speaks_only(conversing, SOUNDS)
    processor = ConversationProcessor(conversing, SOUNDS, conversing.tokenizer)
    bell = sound(1.5, 1)
    made = processor.process([bell])
    assert made.ids == [BEGIN, *[AUDIO] * 15]
    assert made.text == "[BEGIN_AUDIO]" + "[AUDIO]" * 15
    assert [*made.inputs] == ["input_features"]
    samples, _ = soundfile.read(io.BytesIO(bell), dtype="float32")
    assert np.array_equal(conversing.heard[-1], samples)
    assert len(processor.process([bell, sound(1.0, 2)]).inputs["input_features"]) == 2


def test_without_its_library_the_reason_names_it(conversing: Conversing, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise AttributeError("of foreign code")

    monkeypatch.setattr(Conversing, "apply_chat_template", fails)
    with pytest.raises(NoProcessor, match=r"\[mistral\]"):
        ConversationProcessor(conversing, SOUNDS, conversing.tokenizer)


def test_voxtral_hears_with_the_files_that_mistral_publishes(tmp_path: Path) -> None:
    """What its own processor makes of a conversation, and a forward of its own code."""
    pytest.importorskip("mistral_common")
    model = save_voxtral(tmp_path, {**SHAPE, "max_position_embeddings": 1024})
    loaded = load(EngineConfig("", str(tmp_path), device="cpu"), lambda message: None)
    loaded.verdict.mode.remove()
    assert loaded.eyes is not None, loaded.blind
    made = loaded.eyes.processor.process([sound(2.0, 1)])
    assert made.ids == [BEGIN, *[AUDIO] * 375]
    rows = loaded.eyes.sight.encode(made).rows
    want = model.get_audio_features(made.inputs["input_features"]).pooler_output
    assert torch.allclose(rows, want.reshape(rows.shape), atol=1e-5)
