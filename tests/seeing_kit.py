"""An engine of a tiny model that sees, in this process; and the oracle: its own forward over everything."""

from __future__ import annotations

import hashlib
import tempfile
import time
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_kit import Eager, Outcome
from hearing_models import PHI
from video_kit import watching
from vision_models import BOTH, HEARD, SHOWN, make_seeing_model, save_processor, seeing_model, tokenizer_of

from cache.media_frames import FRAMES
from cache.media_ids import MEDIA, is_first
from cache.tiers.archive import Archive
from scheduler.core.session_commands import SessionCommands
from scheduler.engine_assembly import build_engine
from scheduler.engine_config import EngineConfig
from scheduler.media.eyes import Eyes
from scheduler.media.media_store import MediaStore
from scheduler.model.eyes_finder import find_eyes
from scheduler.model.loader import PAGE_SIZE, LoadedModel, prepare
from scheduler.protocol import Expand, Expanded, MediaItem, Refused, Submit, pack_ids
from scheduler.sampling_params import Sampling, Stopping

Part = str | bytes | list[int]  # of a prompt: text, a picture, or token ids


@cache
def loaded_of(name: str, watches: bool = False) -> LoadedModel:
    """The model with its eyes; its mode is removed again: a kit installs it for each of its steps. ``watches``: its
    processor takes videos, or whatever else needs torchvision.
    """
    model = make_seeing_model(name) if watches else seeing_model(name)
    with tempfile.TemporaryDirectory() as folder:
        save_processor(name, Path(folder))
        model.config.save_pretrained(folder)
        loaded = prepare(model, tokenizer_of(name))
        with watching() if watches else nullcontext():
            eyes, blind = find_eyes(
                model, folder, tokenizer_of(name), loaded.verdict, PAGE_SIZE, loaded.rope, divided=False
            )
    assert eyes is not None, blind
    loaded.verdict.mode.remove()
    return LoadedModel(**{**vars(loaded), "eyes": eyes})


@cache
def oracle_of(name: str) -> Any:
    """The same weights, in a model that nothing has been done to."""
    return make_seeing_model(name)


def kind_of(data: bytes) -> str:
    """The kind of a medium that a test has made; empty: the one that the model takes."""
    return "video" if data.startswith((FRAMES, b"GIF8")) else "audio" if data.startswith(b"RIFF") else ""


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class SeeingKit:
    """An engine over a small device tier."""

    def __init__(
        self,
        name: str,
        folder: Path | None = None,
        pages: int = 256,
        step_tokens: int | None = None,
        speculate: str = "off",
        watches: bool = False,
    ) -> None:
        """``folder``: of a disk tier. ``watches``: see ``loaded_of``."""
        self.name, self.folder = name, folder
        self.loaded = loaded_of(name, watches)
        config = EngineConfig(
            "",
            "",
            device="cpu",
            kv_memory=pages * PAGE_SIZE * self.loaded.verdict.token_bytes,
            kv_folder=None if folder is None else str(folder),
            max_step_tokens=step_tokens,
            speculate=speculate,
        )
        self.mode = self.loaded.verdict.mode
        self.engine, self.facts = build_engine(config, self.loaded)
        store = self.engine.scheduler.store
        if store.archive is not None:
            store.archive.restore_rates = Eager()
        self.commands = SessionCommands(store, self.facts.fingerprint, None, self.engine.media_store)
        self.outcomes: dict[str, Outcome] = {}
        self._sent = 0

    def expand(self, *pictures: bytes, tenant: str = "a") -> Expanded:
        """What stands for pictures in a prompt."""
        items = tuple(MediaItem(digest_of(one), one, kind_of(one)) for one in pictures)
        self.commands.media.expand(Expand("r", tenant, items))
        while not (found := self.commands.media.take()):
            time.sleep(0.001)
        return found[0]

    def ids(self, parts: Sequence[Part], tenant: str = "a") -> list[int]:
        """The timeline of text and pictures."""
        assert self.facts.media_marks is not None
        made: list[int] = []
        for part in parts:
            if isinstance(part, str):
                made += tokenizer_of(self.name).encode(part, add_special_tokens=False)
                continue
            if isinstance(part, list):
                made += part
                continue
            (medium,) = self.expand(part, tenant=tenant).media
            rows = iter(array("i", medium.ids))
            marks = {one.kind: one for one in self.facts.marks}.get(kind_of(part), self.facts.media_marks)
            frame = HEARD if self.name == BOTH and marks.kind == "audio" else SHOWN[self.name]
            frame = marks.mark if self.name == PHI else frame
            if marks.kind == "video":
                frame = frame.replace(self.facts.media_marks.mark, marks.mark)
            text = tokenizer_of(self.name).encode(frame.replace(marks.mark, medium.text), add_special_tokens=False)
            made += [next(rows) if token == marks.placeholder else token for token in text]
        return made

    def send(
        self,
        ids: list[int],
        parts: Sequence[Part],
        session: str | None = None,
        tenant: str = "a",
        count: int = 6,
        speculate: bool = True,
        prediction: Sequence[int] = (),
    ) -> str:
        """Submit a turn, which generates ``count`` tokens."""
        self._sent += 1
        turn = f"t{self._sent}"
        submit = Submit(
            turn,
            tenant,
            pack_ids(ids),
            session,
            Sampling(temperature=0.0),
            Stopping(max_tokens=count, ignore_eos=True),
            logprobs=0,
            speculate=speculate,
            prediction=pack_ids(list(prediction)),
            media=tuple(digest_of(part) for part in parts if isinstance(part, bytes)),
        )
        refused = self.engine.submit(submit)
        if refused is not None:
            raise Refusal(refused)
        self.outcomes[turn] = Outcome()
        return turn

    def step(self) -> None:
        """One step, its outputs taken in, its invariants checked."""
        self.mode.install()
        try:
            outputs = self.engine.step()
        finally:
            self.mode.remove()
        for delta in outputs.deltas:
            self.outcomes[delta.turn].add(delta)
        self.engine.check_integrity()

    def run(self) -> None:
        """Step until nothing is left."""
        with torch.no_grad():
            while not self.engine.idle:
                self.step()
                if self.engine.stalled:
                    time.sleep(0.001)

    def ask(self, parts: Sequence[Part], session: str | None = None, **options: Any) -> tuple[list[int], Outcome]:
        """One turn; returns its prompt's ids."""
        ids = self.ids(parts)
        turn = self.send(ids, parts, session, **options)
        self.run()
        return ids, self.outcomes[turn]

    def ask_checked(
        self, parts: Sequence[Part], session: str | None = None, **options: Any
    ) -> tuple[list[int], Outcome]:
        """One turn, which says what the oracle says; returns its prompt's ids."""
        ids, outcome = self.ask(parts, session, **options)
        self.check(ids, parts, outcome)
        return ids, outcome

    def check_unlike(self, one: list[Part], other: list[Part]) -> tuple[Outcome, Outcome]:
        """Prompts with unlike media of one size share no token from these on, and each medium is encoded once."""
        start = next(i for i, token in enumerate(self.ids(one)) if token >= MEDIA)
        ids, first = self.ask_checked(one)
        _, second = self.ask_checked(other)
        _, again = self.ask_checked(one)
        assert [outcome.receipt.cached for outcome in (first, second, again)] == [0, start, len(ids) - 1]
        assert self.encoded == 2
        return first, second

    def check_chat(self, first: list[Part], *further: list[Part]) -> None:
        """A chat with media, beside one without: both say what the model says, each turn reuses the whole one before,
        and each medium is encoded once.
        """
        parts = first
        beside: list[Part] = ["<|im_start|>user\nHow far is the moon?<|im_end|>\n<|im_start|>assistant\n"]
        before = 0
        for new in (first, *further):
            if new is not first:
                parts, beside = [*parts, "<|im_end|>\n", *new], [*beside, "<|im_end|>\nmore"]
            ids, others = self.ids(parts), self.ids(beside)
            turn, other = self.send(ids, parts, "s"), self.send(others, beside, "t")
            self.run()
            said, told = self.outcomes[turn], self.outcomes[other]
            self.check(ids, parts, said)
            self.check(others, beside, told)
            assert said.receipt.media == self.encoded == sum(isinstance(part, bytes) for part in parts)
            assert said.receipt.encoded == sum(isinstance(part, bytes) for part in new)
            assert said.receipt.cached >= before
            before = len(ids) + len(said.tokens) - 1
            parts, beside = [*parts, said.tokens], [*beside, told.tokens]

    def leave(self) -> None:
        """End as the engine process does."""
        archive = self.engine.scheduler.store.archive
        if archive is not None:
            archive.flush(60.0)
            archive.close()
        self.commands.media.close()

    def restarted(self, **options: Any) -> SeeingKit:
        """Leave; another engine of the same model over the same folder."""
        self.leave()
        return SeeingKit(self.name, self.folder, **options)

    @property
    def archive(self) -> Archive:
        """The tiers below memory."""
        archive = self.engine.scheduler.store.archive
        assert archive is not None
        return archive

    def lose_memory(self) -> None:
        """Everything is written, and nothing stays in memory."""
        self.archive.flush(60.0)
        for session in [*self.engine.scheduler.store.residency]:
            self.engine.scheduler.store.discard(session)

    @property
    def media_store(self) -> MediaStore:
        """What the encoders have made."""
        assert self.engine.media_store is not None
        return self.engine.media_store

    @property
    def encoded(self) -> int:
        """Encoder passes."""
        return self.media_store.encoded

    def check(self, ids: list[int], parts: Sequence[Part], outcome: Outcome) -> float:
        """Assert that a turn has said what the oracle says, with all pictures; returns the largest difference of a
        log-probability, relative to the largest logit."""
        assert outcome.admitted
        worst = 0.0
        pictures = [part for part in parts if isinstance(part, bytes)]
        said = [told for delta in outcome.deltas for told in delta.logprobs]
        assert [told.token_id for told in said] == outcome.tokens
        # What the model says of a token does not depend on later ones, so that one forward tells of all.
        whole = [*ids, *outcome.tokens[:-1]]
        rows = oracle_logits(self.name, whole, pictures, self.loaded.eyes, len(said)) if said else ()
        for told, logits in zip(said, rows, strict=True):
            assert told.logprob is not None
            assert int(logits.argmax()) == told.token_id
            want = torch.log_softmax(logits, -1)[told.token_id]
            worst = max(worst, abs(float(want) - told.logprob) / float(logits.abs().max()))
        assert worst < 1e-4
        return worst


@torch.no_grad()
def oracle_logits(
    name: str, ids: Sequence[int], pictures: Sequence[bytes], eyes: Eyes | None = None, count: int = 1
) -> torch.Tensor:
    """Logits ``[count, V]`` behind the last tokens of a timeline: a from-scratch forward of the model's own code with
    all pixels.
    """
    model, eyes = oracle_of(name), eyes or loaded_of(name).eyes
    assert eyes is not None
    for module in model.modules():
        if "rope_deltas" in vars(module):
            module.rope_deltas = None  # a forward without pictures would take that of the one before
    tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
    marked = tokens >= MEDIA
    given: dict[str, Any] = {}
    every = {one.kind: one for one in eyes.every}
    seen = [every.get(kind_of(one), eyes) for one in pictures]  # with which eyes each is
    number = np.cumsum([is_first(token) for token in ids]) - 1  # of the medium that a row is of
    for one in dict.fromkeys(seen):
        media = [data for data, eye in zip(pictures, seen, strict=True) if eye is one]
        given |= {n: v for n, v in one.processor.process(media).inputs.items() if n in one.sight.accepts}
        mine = marked & torch.from_numpy(np.isin(number, [n for n, eye in enumerate(seen) if eye is one]))[None]
        for name_of, types in one.sight.types(mine).items():
            given[name_of] = given[name_of] + types if name_of in given else types
        tokens = torch.where(mine, one.sight.placeholder, tokens)
    out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **given)
    logits: torch.Tensor = out.logits[0, -count:]
    return logits


class Refusal(Exception):
    """The engine has refused a turn."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.code = refused.code
