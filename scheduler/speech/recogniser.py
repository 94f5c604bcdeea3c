"""``Recogniser``: writes down what is said in windows of sound, several in one batch, with the model's own
``generate``.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from scheduler.media.processor import to_device
from scheduler.speech.spoken_parts import Clock, cut_at_quiet_place, divide
from scheduler.speech_messages import SpeechFacts, SpokenPart, Transcribe, Transcribed

TOGETHER = 8  # windows in a batch
_WINDOW = 30.0  # seconds, of a model that names none
_LONGEST = 448  # tokens of a window, of a model that names none
_LIMITS = ("max_target_positions", "max_position_embeddings", "max_length")  # where a config names its longest text


@dataclass(frozen=True)
class Told:
    """What a model has written for a batch. ``sequences [windows, tokens]`` with what the decoder began with, which are
    ``begin`` tokens; ``logprobs [windows]``: the sums over what it wrote; ``counts``: of how many tokens. ``logits
    [windows, steps, vocabulary]``, where they were asked for.
    """

    sequences: torch.Tensor
    begin: int
    logprobs: torch.Tensor
    counts: torch.Tensor
    logits: torch.Tensor | None = None


class Recogniser:
    """A model with its feature extractor and tokenizer. What it takes is read from its generation config and from the
    arguments of its ``generate``.
    """

    def __init__(self, model: Any, extractor: Any, tokenizer: Any) -> None:
        self.model = model
        self.extractor = extractor
        self.tokenizer = tokenizer
        self.together = TOGETHER
        settings = model.generation_config
        self._takes = inspect.signature(type(model).generate).parameters
        self._accepts = inspect.signature(model.forward).parameters
        self._languages = self._codes(settings) if "language" in self._takes else {}
        self.limit = next((n for name in _LIMITS if isinstance(n := getattr(model.config, name, None), int)), _LONGEST)
        self._window = float(getattr(extractor, "chunk_length", None) or _WINDOW)
        self._padding = "max_length" if hasattr(extractor, "n_samples") else "longest"
        self._ends = self._end_ids(settings)
        self.clock = self._read_clock(settings) if "return_timestamps" in self._takes else None

    @property
    def facts(self) -> SpeechFacts:
        tasks = getattr(self.model.generation_config, "task_to_id", None) or {}
        return SpeechFacts(
            rate=int(self.extractor.sampling_rate),
            window=self._window,
            languages=tuple(sorted(self._languages.values())),
            translates=bool(self._languages) and "task" in self._takes and "translate" in tasks,
            timestamps=self.clock is not None,
            prompts="prompt_ids" in self._takes and self._before() is not None,
            together=self.together,
        )

    def hear(self, asked: Sequence[Transcribe]) -> list[Transcribed]:
        """The answers for windows that ask for the same things (``likeness``). Raises what the model does."""
        first = asked[0]
        sounds = [np.frombuffer(one.samples, np.int16).astype(np.float32) / 32768 for one in asked]
        if not first.timestamps:  # where a window ends that goes on is found here, else by what the model says
            rate = self.extractor.sampling_rate
            sounds = [cut_at_quiet_place(s, rate) if one.more else s for s, one in zip(sounds, asked, strict=True)]
        inputs = self.features(sounds)
        told = self.write(inputs, self._hints(asked))
        silent = self._silence(inputs, told)
        return [
            self._answer(one, len(sound) / self.extractor.sampling_rate, told, row, silent[row])
            for row, (one, sound) in enumerate(zip(asked, sounds, strict=True))
        ]

    def features(self, sounds: Sequence[Any]) -> dict[str, Any]:
        """The arguments of the model's forward for sounds, float32 ``[samples]`` each."""
        made = self.extractor(
            [*sounds],
            sampling_rate=self.extractor.sampling_rate,
            padding=self._padding,
            return_tensors="pt",
            return_attention_mask=True,
        )
        inputs = {name: value for name, value in made.items() if name in self._accepts}
        return to_device(inputs, self.model.device, self.model.dtype)

    @torch.inference_mode()
    def write(self, inputs: dict[str, Any], hints: dict[str, Any], logits: bool = False, most: int = 0) -> Told:
        """What the model writes; ``logits``: keep them; ``most``: tokens, 0: as many as it can."""
        watch = _Watch()
        options: dict[str, Any] = {"max_new_tokens": most} if most else {"max_length": self.limit}
        if "force_unique_generate_call" in self._takes:
            options["force_unique_generate_call"] = True  # it would go on behind its last timestamp by itself
        out = self.model.generate(
            **inputs,
            **hints,
            **options,
            num_beams=1,
            logits_processor=[watch],
            return_dict_in_generate=True,
            output_logits=logits,
        )
        counts, sums = watch.sum_up(out.sequences, self._ends)
        kept = torch.stack(out.logits, 1) if logits else None
        return Told(out.sequences, watch.begin, sums, counts, kept)

    def _answer(self, asked: Transcribe, seconds: float, told: Told, row: int, silent: float) -> Transcribed:
        count = int(told.counts[row])
        before = told.sequences[row, : told.begin].tolist()
        ids = [token for token in told.sequences[row, told.begin :][:count].tolist() if token not in self._ends]
        logprob = float(told.logprobs[row]) / max(1, count)
        clock = self.clock if asked.timestamps else None
        spans, used = divide(ids, clock, seconds, asked.more)
        if asked.more and used < 0.5:
            used = seconds  # a model that says nothing of use would be asked for ever
        parts = [
            SpokenPart(start, end, self._text(tokens), tuple(tokens), logprob, silent) for start, end, tokens in spans
        ]
        found = next((self._languages[token] for token in before if token in self._languages), asked.language)
        return Transcribed(asked.request, tuple(parts), used, found)

    def _text(self, tokens: Sequence[int]) -> str:
        said = [token for token in tokens if self.clock is None or token < self.clock.first]
        text: str = self.tokenizer.decode(said, skip_special_tokens=True)
        return text

    def _hints(self, asked: Sequence[Transcribe]) -> dict[str, Any]:
        """What ``generate`` is told."""
        first = asked[0]
        hints: dict[str, Any] = {"do_sample": first.temperature > 0}
        if first.temperature > 0:
            hints["temperature"] = first.temperature
        if self.clock is not None:
            hints["return_timestamps"] = first.timestamps
        if self._languages:
            hints["task"] = "translate" if first.translate else "transcribe"
            if first.language:
                hints["language"] = [one.language for one in asked]
        if first.prompt:
            hints["prompt_ids"] = self._prompt(first.prompt)
        return hints

    def _prompt(self, text: str) -> torch.Tensor:
        before = self._before()
        assert before is not None
        ids = self.tokenizer.encode(f" {text.strip()}", add_special_tokens=False)
        return torch.tensor([before, *ids[-(self.limit // 2 - 2) :]], device=self.model.device)

    def _before(self) -> int | None:
        """The token in front of a text that goes before."""
        found: int | None = getattr(self.model.generation_config, "prev_sot_token_id", None)
        return found

    @torch.inference_mode()
    def _silence(self, inputs: dict[str, Any], told: Told) -> list[float]:
        """The probability of each window that nobody speaks in it."""
        if self.clock is None:
            return [0.0] * len(told.sequences)
        start = self.model.generation_config.decoder_start_token_id
        places = (told.sequences[0, : told.begin] == start).nonzero()
        if not len(places):
            return [0.0] * len(told.sequences)
        ids = told.sequences[:, : int(places[0]) + 1]
        logits = self.model(**inputs, decoder_input_ids=ids, use_cache=False).logits[:, -1].float()
        found: list[float] = logits.softmax(-1)[:, self.clock.silence].tolist()
        return found

    def _codes(self, settings: Any) -> dict[int, str]:
        """The languages that the model can be told, by their tokens."""
        named = getattr(settings, "lang_to_id", None) if getattr(settings, "is_multilingual", False) else None
        return {token: name.strip("<|>") for name, token in (named or {}).items()}

    def _read_clock(self, settings: Any) -> Clock | None:
        last = getattr(settings, "no_timestamps_token_id", None)
        positions = getattr(self.model.config, "max_source_positions", None)
        return None if last is None or not positions else Clock(last + 1, self._window / positions, last - 1)

    def _end_ids(self, settings: Any) -> frozenset[int]:
        ends = settings.eos_token_id
        return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def likeness(asked: Transcribe) -> tuple[object, ...]:
    """Windows of which this is equal can be heard in one batch."""
    return bool(asked.language), asked.translate, asked.prompt, asked.temperature, asked.timestamps


class _Watch(LogitsProcessor):  # type: ignore[misc]
    """Sees the scores of each step behind all other processors: sums the log-probabilities of what was drawn."""

    def __init__(self) -> None:
        self.begin = 0
        self._scores: torch.Tensor | None = None
        self._told: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._scores is None:
            self.begin = input_ids.shape[1]
        else:
            self._note(input_ids[:, -1])
        self._scores = scores.float().log_softmax(-1)
        return scores

    def sum_up(self, sequences: torch.Tensor, ends: frozenset[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """How many tokens of each row were written, the one that ended it included, and the sum of their
        log-probabilities; both ``[rows]``.
        """
        assert self._scores is not None
        written = sequences[:, self.begin :]
        self._note(written[:, len(self._told)])
        over = torch.isin(written, torch.tensor(sorted(ends), device=written.device, dtype=written.dtype))
        lengths = torch.where(over.any(1), over.int().argmax(1) + 1, written.shape[1])
        told = torch.stack(self._told, 1)
        steps = torch.arange(told.shape[1], device=told.device)
        return lengths, torch.where(steps < lengths[:, None], told, 0).sum(1)

    def _note(self, drawn: torch.Tensor) -> None:
        assert self._scores is not None
        self._told.append(self._scores.gather(1, drawn[:, None])[:, 0])
