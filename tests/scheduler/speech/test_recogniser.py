"""Speech to text in the engine: what is written is what the model's own forward over the features says."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from speech_kit import noise, oracle, recogniser_of
from speech_models import SPEAKING, as_float, as_int16, extractor_of, save_speech_model, speech_model, speech_tokenizer

from scheduler.engine_config import EngineConfig
from scheduler.model.loader import LoadFailed
from scheduler.protocol import Export, Exported, Forget, Forgotten, Inspect, Inspected, Refused, Shutdown, Submit
from scheduler.speech.loading import load_recogniser, measure, transcribes
from scheduler.speech.recogniser import Recogniser, likeness
from scheduler.speech.serving import serve
from scheduler.speech.speech_core import FAILED, SpeechCore
from scheduler.speech.spoken_parts import Clock, cut_at_quiet_place, divide
from scheduler.speech_messages import Transcribe, Transcribed

SUPPRESSED = {"whisper": [257, 258, 259]}
FIRST = {"whisper": [256]}  # suppressed as the first token


def window(samples: Any, number: int = 0, **options: Any) -> Transcribe:
    return Transcribe(f"r{number}", as_int16(samples), **options)


def greedy(name: str, samples: Any, begin: list[int], told: list[int]) -> float:
    """Assert that each token is the likeliest that the model may write; returns the mean log-probability."""
    logits = oracle(name, samples, begin, told)
    sums = 0.0
    for step, token in enumerate(told):
        allowed = logits[step].clone()
        allowed[SUPPRESSED.get(name, [])] = -torch.inf
        if step == 0:
            allowed[FIRST.get(name, [])] = -torch.inf
        assert int(allowed.argmax()) == token
        sums += float(allowed.log_softmax(-1)[token])
    return sums / len(told)


@pytest.mark.parametrize("name", SPEAKING)
def test_what_is_written_is_what_a_forward_from_scratch_says(name: str) -> None:
    recogniser = recogniser_of(name)
    samples = as_float(as_int16(noise(1.4, 5)))
    inputs = recogniser.features([samples])
    hints = {"language": ["de"], "task": "transcribe"} if name == "whisper" else {}
    told = recogniser.write(inputs, hints, logits=True)
    count = int(told.counts[0])
    begin, ids = told.sequences[0, : told.begin].tolist(), told.sequences[0, told.begin :][:count].tolist()
    assert begin == ([257, 259, 260, 264] if name == "whisper" else [257])
    assert count > 1
    assert told.logits is not None
    want = oracle(name, samples, begin, ids)
    assert float((told.logits[0, :count] - want).abs().max() / want.abs().max()) < 1e-4
    mean = greedy(name, samples, begin, ids)
    assert abs(mean - float(told.logprobs[0]) / count) < 1e-3


def test_a_window_of_whisper_has_times_and_the_language_that_was_found() -> None:
    recogniser = recogniser_of("whisper")
    (heard,) = recogniser.hear([window(noise(1.2, 1), timestamps=True)])
    assert heard.language in ("de", "en")
    assert heard.parts
    assert all(0 <= part.start <= part.end <= 1.2 + 1e-6 for part in heard.parts)
    assert all(token < 264 for part in heard.parts for token in part.tokens)
    assert heard.used == pytest.approx(1.2)


def test_the_samples_of_a_window_are_those_of_the_sound() -> None:
    samples = as_float(as_int16(noise(1.4, 5)))
    (heard,) = recogniser_of("whisper").hear([window(samples, language="de")])
    (part,) = heard.parts
    assert abs(greedy("whisper", samples, [257, 259, 260, 264], [*part.tokens]) - part.logprob) < 1e-5


def test_windows_in_a_batch_are_heard_as_each_by_itself() -> None:
    recogniser = recogniser_of("whisper")
    asked = [window(noise(0.5 + number / 4, number), number, language=("en", "de")[number % 2]) for number in range(4)]
    together, alone = recogniser.hear(asked), [recogniser.hear([one])[0] for one in asked]
    assert [one.parts[0].tokens for one in together] == [one.parts[0].tokens for one in alone]
    assert len({one.parts[0].tokens for one in together}) > 1
    assert [one.language for one in together] == ["en", "de", "en", "de"]


def test_a_prompt_goes_before_and_a_translation_is_asked_for() -> None:
    recogniser = recogniser_of("whisper")
    samples = as_float(as_int16(noise(1, 2)))
    first = window(samples, prompt="ab", translate=True, language="en")
    told = recogniser.write(recogniser.features([samples]), recogniser._hints([first]))
    start = speech_tokenizer().encode(" ab", add_special_tokens=False)
    assert told.sequences[0, : told.begin].tolist() == [262, *start, 257, 258, 261, 264]


def test_what_is_measured_at_load() -> None:
    batches = {}
    for name in SPEAKING:
        recogniser = Recogniser(speech_model(name), extractor_of(name), speech_tokenizer())
        assert float(measure(recogniser).split()[1].rstrip(";")) < 1e-4
        batches[name] = recogniser.together
    assert batches == {"whisper": 8, "moonshine": 1, "speech_to_text": 1}  # the others hear the padding of a batch


def test_a_model_that_writes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recogniser = Recogniser(speech_model("whisper"), extractor_of("whisper"), speech_tokenizer())
    write = recogniser.write

    def wrong(inputs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        return write({name: value * 0.5 for name, value in inputs.items()}, *rest, **more)

    monkeypatch.setattr(recogniser, "write", wrong)
    with pytest.raises(ValueError, match="not what its own forward says"):
        measure(recogniser)


def test_a_checkpoint_is_loaded_and_told(tmp_path: Any) -> None:
    config = EngineConfig("", str(save_speech_model("whisper", tmp_path)), device="cpu")
    assert transcribes(config)
    told: list[Any] = []
    recogniser, facts = load_recogniser(config, told.append)
    assert facts.speech == recogniser.facts
    assert facts.speech is not None
    assert (facts.speech.rate, facts.speech.window, facts.speech.languages) == (16_000, 2.0, ("de", "en"))
    assert facts.media == ()
    with pytest.raises(LoadFailed, match="--weights is not for models"):
        load_recogniser(EngineConfig("", config.model, device="cpu", weights="int8"), told.append)
    assert not transcribes(EngineConfig("", str(tmp_path / "none")))


@pytest.mark.parametrize("name", ["Bart", "T5", "Llama", "Qwen2Audio", "Voxtral", "SeamlessM4T"])
def test_models_of_text_and_of_chats_are_loaded_as_such(name: str, tmp_path: Any) -> None:
    getattr(transformers, f"{name}Config")().save_pretrained(tmp_path)
    assert not transcribes(EngineConfig("", str(tmp_path)))


@pytest.mark.parametrize("name", ["Canary", "CohereAsr"])
def test_a_model_whose_processor_writes_the_prompt_is_refused(name: str, tmp_path: Any) -> None:
    getattr(transformers, f"{name}Config")().save_pretrained(tmp_path)
    config = EngineConfig("", str(tmp_path), device="cpu")
    assert transcribes(config)
    with pytest.raises(LoadFailed, match="what the decoder begins with"):
        load_recogniser(config, lambda _: None)


CLOCK = Clock(100, 0.1, 98)


@pytest.mark.parametrize(
    ("ids", "more", "spans", "used"),
    [
        ([100, 1, 2, 110, 110, 3, 115], True, [(0.0, 1.0, [1, 2]), (1.0, 1.5, [3])], 2.0),  # silence behind it
        ([100, 1, 110, 110, 3, 115, 115], True, [(0.0, 1.0, [1]), (1.0, 1.5, [3])], 1.5),
        ([100, 1, 110, 112, 3], True, [(0.0, 1.0, [1])], 1.2),  # what has no end is heard again
        ([100, 1, 110, 115, 3], False, [(0.0, 1.0, [1]), (1.5, 2.0, [3])], 2.0),
        ([100, 1, 2], True, [(0.0, 2.0, [1, 2])], 2.0),
        ([], True, [], 2.0),
        ([100, 1, 150], False, [(0.0, 2.0, [1])], 2.0),  # never behind the window
    ],
)
def test_times_divide_what_is_written(ids: list[int], more: bool, spans: list[Any], used: float) -> None:
    found, seconds = divide(ids, CLOCK, 2.0, more)
    assert found == spans
    assert seconds == pytest.approx(used)


def test_without_times_a_window_ends_where_it_is_quiet() -> None:
    sound = np.ones(20_000, np.float32)
    sound[17_000:18_500] = 0
    assert 17_000 <= len(cut_at_quiet_place(sound, 10_000)) <= 18_500
    assert len(cut_at_quiet_place(np.ones(40, np.float32), 10_000)) == 40


def answers(core: SpeechCore, count: int) -> dict[str, Transcribed]:
    found: list[Transcribed] = []
    until = time.monotonic() + 20
    while len(found) < count:
        found += core.take()
        assert time.monotonic() < until
        time.sleep(0.002)
    return {one.request: one for one in found}


def test_windows_that_ask_for_the_same_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    recogniser = recogniser_of("whisper")
    batches: list[list[str]] = []
    hear = recogniser.hear

    def noted(asked: Any) -> Any:
        batches.append([one.request for one in asked])
        return hear(asked)

    monkeypatch.setattr(recogniser, "hear", noted)
    core = SpeechCore(recogniser)
    with core._changed:  # all of them come before the first is heard
        for number in range(3):
            core.ask(window(noise(0.4, number), number, language="en"))
        core.ask(window(noise(0.4, 3), 3, language="en", prompt="x"))
    found = answers(core, 4)
    assert batches == [["r0", "r1", "r2"], ["r3"]]
    assert not any(one.error for one in found.values())
    assert core.stats.windows == 4
    assert likeness(window(noise(0.1, 0), language="en")) == likeness(window(noise(0.1, 1), language="de"))


def test_a_window_that_fails_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    recogniser = recogniser_of("whisper")
    hear = recogniser.hear

    def failing(asked: Any) -> Any:
        if any(one.request == "r1" for one in asked):
            raise RuntimeError("broken")
        return hear(asked)

    monkeypatch.setattr(recogniser, "hear", failing)
    core = SpeechCore(recogniser)
    with core._changed:
        for number in range(3):
            core.ask(window(noise(0.4, number), number))
    found = answers(core, 3)
    assert [found[f"r{number}"].error for number in range(3)] == ["", FAILED, ""]


def test_the_process_answers_what_concerns_sessions() -> None:
    class Script:
        def __init__(self) -> None:
            self.sent: list[Any] = []
            self.batches: list[list[Any]] = [
                [Submit("t", "a", b""), Forget("a", "s", 1), Inspect("i", "a", "s"), Export("e", "a", "s", "/x")],
                [window(noise(0.2, 1))],
            ]

        def send(self, message: Any) -> None:
            self.sent.append(message)

        def receive(self, wait_ms: int) -> list[Any]:
            if self.batches:
                return self.batches.pop(0)
            time.sleep(0.002)
            return [Shutdown()] if any(isinstance(one, Transcribed) for one in self.sent) else []

    channel = Script()
    serve(SpeechCore(recogniser_of("whisper")), cast(Any, channel))
    kinds = {type(one) for one in channel.sent}
    assert {Refused, Forgotten, Inspected, Exported, Transcribed} <= kinds
