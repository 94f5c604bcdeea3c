"""What every architecture that sees or hears must get right: chats with media, each turn against from-scratch forwards
of the model's own code with all pixels or features.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from architectures.build import family_of
from architectures.driver import TENANT, Driver, TurnFailed, smallest
from architectures.made_up import SIZES, MadeUpProcessor, NoEncoder, NothingFits, medium
from architectures.media_build import CONTEXT
from architectures.oracle import Oracle
from architectures.scenario import _WORSE, FAST_FOLDER, STRICT, Mismatch, Report, Scenario, Status, _brief
from tiny_models import make_tokenizer

from cache.media_ids import MEDIA, is_first
from scheduler.media.eyes import Eyes
from scheduler.media.senses import PICTURES, VIDEOS, Sense
from scheduler.media.sight import Blind
from scheduler.model.eyes_finder import senses_of
from scheduler.model.loader import PAGE_SIZE, LoadedModel, LoadFailed, prepare
from scheduler.model.media_probe import look


def check_media(model: Any, tolerance: float = STRICT) -> Iterator[tuple[str, Report]]:
    """A report for each kind of media that a model takes: "image", "audio". Never raises for what a model or
    the product does.
    """
    family = family_of(model)
    senses = [sense for sense in senses_of(model) if sense is not VIDEOS]  # none are made up here
    untouched = copy.deepcopy(model)  # the product may change the one it is given
    try:
        tokenizer = make_tokenizer()
        tokenizer.model_max_length = CONTEXT
        loaded = prepare(model, tokenizer)
    except LoadFailed as error:
        for sense in senses:
            yield sense.kind, Report(Status.REFUSED, family, reason=f"not served: {error}")
        return
    except Exception as error:
        for sense in senses:
            yield sense.kind, Report(Status.FAILED, family, reason=f"at load: {_brief(error)}")
        return
    for sense in senses:
        yield sense.kind, _examine(loaded, untouched, sense, family, tolerance)


def _examine(loaded: LoadedModel, untouched: Any, sense: Sense, family: str, tolerance: float) -> Report:
    mode, unprepared = loaded.verdict.mode, ""
    processor: Any
    try:
        processor = MadeUpProcessor(copy.deepcopy(untouched), sense)
    except NoEncoder as error:
        return Report(Status.REFUSED, family, mode.name, str(error))
    except NothingFits as error:
        processor = _Unprepared(sense)  # what is refused whatever a picture is like needs none
        unprepared = f"no made-up {sense.noun} fits: {error}"
    try:
        sight = look(mode, processor, PAGE_SIZE, loaded.rope, max(STRICT, 2 * loaded.verdict.error))
    except Blind as error:
        if "its own forward fails" in str(error):  # for what is made up here; no processor of its own would do that
            return Report(Status.SKIPPED, family, mode.name, unprepared or str(error))
        return Report(Status.REFUSED, family, mode.name, str(error))
    eyes = Eyes(processor, sight)
    oracle = MediaOracle(untouched, eyes)
    scenario = MediaScenario(replace(loaded, eyes=eyes), oracle, tolerance, encodes=False)
    checks = tuple(scenario.checks())
    worst = max(checks, key=lambda c: _WORSE.index(c.status))
    reason = f"{worst.name}: {worst.detail}" if worst.status is not Status.RIGHT else ""
    way = f"{mode.name}, {sight.way}{'' if oracle.together else ', each encoded alone'}"
    way += ", one in a conversation" * sight.single
    return Report(worst.status, family, way, reason, checks)


class _Unprepared:
    """In the place of a processor where no made-up medium fits."""

    def __init__(self, sense: Sense) -> None:
        self.sense = sense


@dataclass
class Medium:
    """Bytes of a made-up medium and their digest."""

    data: bytes
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        self.digest = hashlib.sha256(self.data).hexdigest()


class MediaOracle(Oracle):
    """From-scratch forwards over timelines with media ids, whose media it has been shown."""

    def __init__(self, model: Any, eyes: Eyes) -> None:
        self._eyes = eyes
        self._by_first: dict[int, bytes] = {}
        self._extension = getattr(getattr(model, "model", None), "embed_tokens_extend", None)
        known = eyes.sight.sense is not PICTURES and self._extension is None
        self.together = known or _encodes_together(eyes)
        super().__init__(model)

    def show(self, ids: Sequence[int], data: bytes) -> None:
        """``ids``: the media ids of a medium."""
        self._by_first[ids[0]] = data

    @torch.no_grad()
    def _forward(self, ids: list[int], decoder_ids: list[int] | None = None) -> torch.Tensor:
        model, eyes = self._model, self._eyes
        for module in model.modules():
            if "rope_deltas" in vars(module):
                module.rope_deltas = None  # a forward without media would take that of the one before
        media = [self._by_first[token] for token in ids if is_first(token)]
        accepts = inspect.signature(model.forward).parameters
        tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
        marked = tokens >= MEDIA
        given: dict[str, Any] = {}
        if media:
            given = {n: v for n, v in eyes.processor.process(media).inputs.items() if n in accepts}
        if media:
            given |= eyes.sight.types(marked)
        tokens = torch.where(marked, eyes.sight.placeholder, tokens)
        with self._encoding(media) if len(media) > 1 and not self.together else nullcontext():
            out = model(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, return_dict=True, **given
            )
        logits: torch.Tensor = out.logits[0].float()
        return logits

    @contextmanager
    def _encoding(self, media: Sequence[bytes]) -> Iterator[None]:
        """The model's encoder gets each medium in a call of its own: of several in one it makes other rows."""
        if self._extension is not None:
            with mock.patch.object(self._extension, "forward", partial(self._extended, media, self._extension.forward)):
                yield
            return
        inside = (getattr(self._model, "model", None), self._model)
        owner: Any = next(one for one in inside if hasattr(type(one), "get_image_features"))
        encode = owner.get_image_features
        takes = inspect.signature(encode).parameters

        def each(*_: Any, **__: Any) -> Any:
            made = []
            for one in media:
                inputs = self._eyes.processor.process([one]).inputs
                made.append(encode(**{n: v for n, v in inputs.items() if n in takes}, return_dict=True))
            rows = [out["pooler_output"] for out in made]
            listed = not isinstance(rows[0], torch.Tensor)
            made[0]["pooler_output"] = [part for out in rows for part in out] if listed else torch.cat(rows)
            return made[0]

        owner.get_image_features = each
        try:
            yield
        finally:
            del owner.get_image_features

    def _extended(self, media: Sequence[bytes], merge: Any, ids: torch.Tensor, embeds: torch.Tensor, **_: Any) -> Any:
        """What stands in place of embeddings, medium after medium: each is merged where only its rows are marked."""
        eyes, places = self._eyes, (ids[0] == self._eyes.sight.placeholder).nonzero()[:, 0]
        for one in media:
            made = eyes.processor.process([one])
            mine, places = torch.split(places, [n := made.ids.count(eyes.sight.placeholder), len(places) - n])
            only = torch.zeros_like(ids)
            only[0, mine] = eyes.sight.placeholder
            takes = inspect.signature(merge).parameters
            embeds = merge(only, embeds, **{name: value for name, value in made.inputs.items() if name in takes})
        return embeds


def _encodes_together(eyes: Eyes) -> bool:
    """Whether pictures of all sizes in one call of the encoder make the rows of each in a call of its own."""
    media = [medium(size, size) for size in range(SIZES)]
    alone = torch.cat([eyes.sight.encode(eyes.processor.process([one])).rows for one in media])
    try:
        rows = eyes.sight.encode(eyes.processor.process(media)).rows
    except Exception:  # whatever an encoder raises of several at once
        return False
    return rows.shape == alone.shape and torch.allclose(rows, alone, atol=1e-3, rtol=1e-3)


class MediaScenario(Scenario):
    """The checks over one loaded model with eyes."""

    _oracle: MediaOracle

    def _named(self) -> dict[str, Callable[[], str]]:
        return {"chat": self.chat, "edit, fork": self.edit, "restart, eviction": self.restart, "memory": self.memory}

    def chat(self) -> str:
        """Four turns, a medium in the first and two of other sizes in the third, if it takes several, beside a chat of
        text, in steps of few tokens; each is encoded once.
        """
        driver = self._driver(step_tokens=19)
        assert self._loaded.eyes is not None
        several = not self._loaded.eyes.sight.single
        media = [Medium(medium(size, 7)) for size in range(SIZES)]
        timeline = [*self._text(6), *self._shown(driver, media[0]), *self._text(5)]
        beside = self._text(8)
        cached = 0
        third = self._twice(driver, media[1:]) if several else self._text(9)
        for number, new in enumerate(([], self._text(4), third, self._text(5))):
            timeline = [*timeline, *new]
            digests = tuple(one.digest for one in media[: 1 if number < 2 or not several else 3])
            turn = driver.send(timeline, 4, "s", media=digests)
            other = driver.send(beside, 4, "t")
            driver.run()
            reply, told = driver.reply(turn), driver.reply(other)
            self._compare(reply)
            self._compare(told)
            self._count_reuse(reply, cached)
            cached = len(timeline) + len(reply.tokens) - 1
            timeline = [*timeline, *reply.tokens]
            beside = [*beside, *told.tokens, *self._text(3)]
        self._encoded(driver, 3 if several else 1)
        if not several:
            both = [*self._text(3), *self._shown(driver, media[0]), *self._shown(driver, media[1])]
            try:
                driver.ask(both, 3, media=(media[0].digest, media[1].digest))
            except TurnFailed:
                return ""
            raise Mismatch("a second medium in a conversation was taken")
        return ""

    def edit(self) -> str:
        """The text behind a medium changes twice, and a fork goes on from there; another medium of the same size shares
        nothing with it.
        """
        driver = self._driver()
        one, other = Medium(medium(1, 1)), Medium(medium(1, 2))
        trunk = [*self._text(6), *self._shown(driver, one)]
        for _ in range(2):
            timeline = [*trunk, *self._text(7)]
            reply = driver.ask(timeline, 3, "e", media=(one.digest,))
            self._compare(reply)
            forked = [*timeline, *self._text(4)]
            fork = driver.ask(forked, 3, f"fork {len(self._reused)}", media=(one.digest,))
            self._compare(fork)
            self._count_reuse(fork, len(timeline) - 1)
        self._encoded(driver, 1)
        self._compare(
            driver.ask([*timeline[:6], *self._shown(driver, other), *timeline[-7:]], 3, media=(other.digest,))
        )
        self._encoded(driver, 2)
        return ""

    def restart(self) -> str:
        """A chat that one engine has written to disk goes on in another one, is evicted there, and goes on again: the
        second engine encodes nothing.
        """
        with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as folder:
            driver = self._driver(folder=folder)
            one = Medium(medium(2, 3))
            timeline = [*self._text(5), *self._shown(driver, one), *self._text(9)]
            reply = driver.ask(timeline, 3, "s", media=(one.digest,))
            if not driver.leave():
                return "nothing is kept between turns"
            driver = self._driver(folder=folder)
            self._shown(driver, one)
            for _ in range(2):
                cached = len(timeline) + len(reply.tokens) - 1
                timeline = [*timeline, *reply.tokens, *self._text(4)]
                reply = driver.ask(timeline, 3, "s", media=(one.digest,))
                self._compare(reply)
                self._count_reuse(reply, cached)
                store, archive = driver.engine.scheduler.store, driver.engine.scheduler.store.archive
                assert archive is not None
                archive.flush(60.0)
                for session in [*store.residency]:
                    store.discard(session)
            self._encoded(driver, 0)
            driver.leave()
        return ""

    def memory(self) -> str:
        """Chats of which not even two fit: KV is dropped and computed again, from rows that are kept."""
        one, other = Medium(medium(0, 5)), Medium(medium(0, 6))
        rows = len(self._shown(self._driver(), one))
        driver = smallest(self._loaded, self._banned, rows + 40)
        if driver is None:
            return "no small enough memory"
        chats = {
            name: ([*self._text(5), *self._shown(driver, which), *self._text(6)], (which.digest,))
            for name, which in (("x", one), ("y", other))
        }
        for _ in range(2):
            for name, (timeline, media) in chats.items():
                reply = driver.ask(timeline, 3, name, media=media)
                self._compare(reply)
                chats[name] = [*timeline, *reply.tokens, *self._text(3)], media
        self._encoded(driver, 2)
        return ""

    def _twice(self, driver: Driver, media: Sequence[Medium]) -> list[int]:
        return [token for one in media for token in (*self._shown(driver, one), *self._text(3))]

    def _shown(self, driver: Driver, one: Medium) -> list[int]:
        """What stands for a medium in a timeline; the engine and the oracle know it from now on."""
        pictures, eyes = driver.engine.media_store, self._loaded.eyes
        assert pictures is not None
        assert eyes is not None
        picture = pictures.add(TENANT, one.digest, pictures.make(one.digest, one.data))
        self._oracle.show(picture.ids, one.data)
        numbers = iter(picture.ids)
        ids = eyes.processor.process([one.data]).ids
        return [next(numbers) if token == eyes.sight.placeholder else token for token in ids]

    def _encoded(self, driver: Driver, wanted: int) -> None:
        assert driver.engine.media_store is not None
        if driver.engine.media_store.encoded != wanted:
            raise Mismatch(f"{driver.engine.media_store.encoded} encoder passes, not {wanted}")
