"""Measures at load in which way pictures enter a model: made-up pictures in the timeline of one session, beside a
session of text only, against one forward of the model's own code over all of it, with ``pixel_values``.
"""

from __future__ import annotations

import inspect
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import torch

from cache.error_line import first_line
from cache.media_ids import MEDIA, media_ids
from cache.memory.memory_tier import MemoryTier
from cache.pages.pool import PagePool
from cache.pages.session import SessionCache
from cache.pages.timeline_media import PlacedMedium, TimelineMedia
from cache.store import SessionStore
from scheduler.forward.alone_modes import AloneMode
from scheduler.forward.mode import Mode
from scheduler.forward.modes import PagedMode, language_model
from scheduler.forward.rope import LongRope
from scheduler.media.eyes import Eyes
from scheduler.media.joint_sight import JointSight
from scheduler.media.made_up_media import SIZES, made_up_media, made_up_picture
from scheduler.media.processor import Processed, Processor, to_device
from scheduler.media.senses import PICTURES
from scheduler.media.sight import Blind, EncodedRows, FedPart, Sight
from scheduler.model.measurement import make_session, random_tokens, reference_logits, relative_error
from scheduler.model.runner import ModelRunner

_TEXTS = (6, 5, 6, 3, 4)  # tokens before, between and behind two of them
_BESIDE = 26  # tokens of the session without pictures


_Sighted = PagedMode | AloneMode  # modes that take pictures


def look(mode: Mode, processor: Processor, page_size: int, rope: LongRope | None, tolerance: float) -> Sight:
    """How the model of an installed ``mode`` sees; the mode then takes pictures. Raises Blind with the reason, the
    mode is then as it was.
    """
    if not isinstance(mode, _Sighted):
        raise Blind(f"{processor.sense.noun}s need a mode that keeps KV of tokens, and it runs {mode.name}")
    before = mode.sight
    with _unchanged(mode.model):
        try:
            trial = _SightTrial(mode, processor, page_size, rope)
            mode.sight = trial.sight
            return trial.choose(tolerance)
        except Blind:
            mode.sight = before
            raise
        except Exception as error:  # whatever a model or a processor raises
            mode.sight = before
            raise Blind(
                f"its own forward fails with a made-up {processor.sense.noun}: {first_line(error, 160)}"
            ) from error


def look_together(mode: Mode, eyes: Sequence[Eyes], page_size: int, rope: LongRope | None, tolerance: float) -> str:
    """Let media of all these kinds enter an installed ``mode``. Returns why they may not be in one timeline, empty if
    they may. Raises Blind with the reason if not even steps of several sessions, each with media of one kind, are
    exact; the mode is then as it was with the kinds before the last one.
    """
    assert isinstance(mode, _Sighted)
    before = _joined(eyes[:-1])
    with _unchanged(mode.model):
        try:
            trial = _JointTrial(mode, eyes, page_size, rope)
            mode.sight, obstacle = trial.choose_joint(tolerance)
            return obstacle
        except Blind:
            mode.sight = before
            raise
        except Exception as error:  # whatever a model raises
            mode.sight = before
            nouns = " and ".join(f"{one.processor.sense.noun}s" for one in eyes)
            raise Blind(f"its own forward fails with {nouns} in one prompt: {first_line(error, 160)}") from error


def _joined(eyes: Sequence[Eyes]) -> Sight | JointSight:
    return eyes[0].sight if len(eyes) == 1 else JointSight([one.sight for one in eyes])


class _MadeUp:
    """A made-up medium, processed and encoded alone."""

    stored = True

    def __init__(self, data: bytes, processed: Processed, rows: EncodedRows, sight: Sight) -> None:
        self.data, self.inputs, self.rows, self.ids, self.sight = data, processed.inputs, rows, processed.ids, sight

    def mark(self, identity: str) -> list[int]:
        """Its ids with media ids in place of placeholders."""
        placeholder = self.sight.placeholder
        numbers = iter(media_ids(identity, self.ids.count(placeholder)))
        return [next(numbers) if token == placeholder else token for token in self.ids]


class _Chat(NamedTuple):
    """A made-up timeline, with media or none: ``stops`` are the lengths up to which it is fed in turn, ``expected`` the
    logits of the model's own forward over all of it.
    """

    media: tuple[_MadeUp, ...]
    ids: array[int]
    stops: list[int]
    expected: torch.Tensor


class _SightTrial:
    """A model, made-up pictures, and what its own forward says of them."""

    def __init__(
        self, mode: PagedMode | AloneMode, processor: Processor, page_size: int, rope: LongRope | None
    ) -> None:
        self.mode, self._rope, self._page_size, self._processor = mode, rope, page_size, processor
        self.sight = Sight(mode.model, processor.sense, language_model(mode.model))
        self._made = [self._make(one) for one in made_up_media(processor)]
        self.sight.placeholder = self._placeholder(processor.added)
        self._prepare(mode, processor.added | {self.sight.placeholder})

    def _prepare(self, mode: _Sighted, marks: frozenset[int]) -> None:
        """Texts, and a session of text only; ``marks`` are tokens that may mean media, and are in none."""
        self._texts = [part.tolist() for part in random_tokens(mode.model, _TEXTS, marks)]
        beside = random_tokens(mode.model, (_BESIDE,), marks)[0]
        alone = self._plainly(lambda: reference_logits(mode.model, make_session(beside, None)))
        self._text_chat = _Chat((), beside, [], alone)

    def choose(self, tolerance: float) -> Sight:
        """The first way that is right. Raises Blind."""
        failed = self._try_ways(tolerance, [self._chat(self._made[:2])])
        if failed:
            alone = [self._chat([one]) for one in self._made[:2]]
            # Of two in one forward the model itself may make other rows than of each: then it is given those of each.
            if self._encodes_together_otherwise():
                failed = self._try_ways(tolerance, alone, by_rows=True)
            if failed:
                self.sight.single = not self._try_ways(tolerance, alone)
        if failed and not self.sight.single:
            told = "; ".join(dict.fromkeys(failed))
            raise Blind(f"no way to merge {self.sight.sense.noun}s gives correct results: {told}")
        self.sight.together = self._processor.sense is PICTURES and self._encodes_alike_together()
        return self.sight

    def _try_ways(self, tolerance: float, chats: Sequence[_Chat], by_rows: bool = False) -> list[str]:
        """Set the first way that is right; returns the errors of those that were tried if none is. ``by_rows``: of two
        media too, where the model's own forward gets the rows of each.
        """
        tried = []
        for way in self.sight.ways():
            self.sight.way = way
            try:
                pair = [self._chat(self._made[:2], self._reference_of_rows)] if by_rows else []
                error = max(self._measure(chat) for chat in (*chats, *pair))
                if error <= tolerance:
                    return []
                tried.append(f"{way}: error {error:.1e}")
            except Exception as error:  # whatever a model raises is its verdict on this way
                tried.append(f"{way}: {first_line(error, 100)}")
        return tried

    def _encodes_together_otherwise(self) -> bool:
        pair = self._made[:2]
        try:
            rows = self.sight.encode(self._processor.process([one.data for one in pair])).rows
        except Exception:  # whatever an encoder raises of several at once
            return True
        alone = torch.cat([one.rows.rows for one in pair])
        return rows.shape != alone.shape or not torch.allclose(rows, alone, atol=1e-3, rtol=1e-3)

    def _encodes_alike_together(self) -> bool:
        """Whether two pictures of one size have the same rows together as each alone."""
        pair = [made_up_picture(*SIZES[1], seed) for seed in (1, 2)]
        try:
            rows = self.sight.encode(self._processor.process(pair)).rows
        except Exception:  # whatever a processor or an encoder raises of several at once
            return False
        alone = torch.cat([self.sight.encode(self._processor.process([one])).rows for one in pair])
        return rows.shape == alone.shape and torch.allclose(rows, alone, atol=1e-4, rtol=1e-4)

    def _make(self, data: bytes) -> _MadeUp:
        processed = self._processor.process([data])
        rows, again = (self.sight.encode(processed) for _ in range(2))
        if not torch.allclose(rows.rows, again.rows, atol=1e-3, rtol=1e-3):
            raise Blind(f"its encoder makes other rows of the same {self._processor.sense.noun} each time")
        return _MadeUp(data, processed, rows, self.sight)

    def _placeholder(self, added: frozenset[int]) -> int:
        """The token of which each picture has as many as its encoder makes rows, one that no text spells."""
        found = [
            {token for token, count in Counter(one.ids).items() if count == len(one.rows.rows)} for one in self._made
        ]
        common = set.intersection(*found)
        common = common & added or common
        if len(common) != 1:
            raise Blind("no token stands for the rows of its encoder one by one")
        return common.pop()

    def _chat(
        self,
        media: Sequence[_MadeUp],
        reference: Callable[[array[int], Sequence[_MadeUp]], torch.Tensor] | None = None,
    ) -> _Chat:
        """A timeline with media and texts around them, fed in chunks that end within the media."""
        first, *others = (one.mark(str(n)) for n, one in enumerate(media))
        texts, rest = self._texts, [token for one in others for token in one]
        parts = [texts[0] + first + texts[1], texts[2], texts[3] + rest + texts[4]]
        ids = array("i", [token for part in parts for token in part])
        middles = [int(places[len(places) // 2]) for places in _places(ids, media)]
        stops = sorted({*middles, len(parts[0]), len(parts[0]) + len(parts[1]), len(ids) - 3})
        stops += range(stops[-1] + 1, len(ids) + 1)
        reference = reference or self._reference
        return _Chat(tuple(media), ids, stops, self._plainly(lambda: reference(ids, media)))

    def _inputs(self, media: Sequence[_MadeUp]) -> dict[str, Any]:
        """The arguments of the model's forward with these media."""
        return self._processor.process([one.data for one in media]).inputs

    def _plainly(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a forward of the model as it was before its mode was installed."""
        self.mode.remove()
        try:
            return forward()
        finally:
            self.mode.install()

    @torch.inference_mode()
    def _reference(self, timeline: array[int], media: Sequence[_MadeUp]) -> torch.Tensor:
        model, accepts = self.mode.model, inspect.signature(self.mode.model.forward).parameters
        given = {name: value for name, value in self._inputs(media).items() if name in accepts}
        given = to_device(given, model.device, model.dtype)
        ids = torch.from_numpy(np.asarray(timeline, np.int64))[None].to(model.device)
        for sight in dict.fromkeys(one.sight for one in media):
            marked = torch.zeros_like(ids, dtype=torch.bool)
            for one, places in zip(media, _places(timeline, media), strict=True):
                marked[0, places] |= one.sight is sight
            for name, types in sight.types(marked).items():
                given[name] = given[name] + types if name in given else types
            ids = torch.where(marked, sight.placeholder, ids)
        if "attention_mask" in accepts:
            given["attention_mask"] = torch.ones_like(ids)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, return_dict=True, **given).logits[0]
        return logits

    @torch.inference_mode()
    def _reference_of_rows(self, timeline: array[int], media: Sequence[_MadeUp]) -> torch.Tensor:
        """The same with the rows of each medium, in the way that is tried, in place of pixels."""
        model, sight = self.mode.model, self.sight
        tokens = torch.from_numpy(np.asarray(timeline, np.int64))[None].to(model.device)
        whole = _placed(sight, timeline, media)
        given = {**sight.types(tokens >= MEDIA), **sight.inputs(tokens, [FedPart(whole, 0, len(timeline))])}
        if "attention_mask" in sight.accepts:
            given["attention_mask"] = torch.ones_like(tokens)
        logits: torch.Tensor = model(use_cache=False, return_dict=True, **given).logits[0]
        return logits

    def _measure(self, chat: _Chat, beside: _Chat | None = None) -> float:
        """The worst error of the sessions of two timelines, over chunks of a prompt that end within media, and resumed
        turns. ``beside``: one of text by default.
        """
        beside, size = beside or self._text_chat, self._page_size
        slots = -(-len(chat.ids) // size) + -(-len(beside.ids) // size) + 2
        tier = MemoryTier(slots, size, self.mode.model.device)
        store = SessionStore(
            PagePool(tier, MemoryTier(0, size, torch.device("cpu"))), 0 if self.mode.stateful else None
        )
        runner = ModelRunner(self.mode, tier, self._rope)
        first, second = self._begin(chat, store), self._begin(beside, store)
        found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for stop in chat.stops:
            fed = self._feed(first, stop)
            more = second.length + (7 if stop < len(chat.ids) - 3 else 1)
            other = self._feed(second, min(more, len(beside.ids)))
            work = [(session, count) for session, count in ((first, fed), (second, other)) if count]
            if not work:
                continue
            work = work[:: -1 if stop % 2 else 1]
            logits = runner.run(work, range(sum(count for _, count in work)))
            for (session, count), part in zip(work, torch.split(logits, [count for _, count in work]), strict=True):
                found[session is second].append(part[:count])
        compared = zip(found, (chat, beside), strict=True)
        return max(self._error(torch.cat(parts), one.expected) for parts, one in compared if parts)

    @staticmethod
    def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
        """Of the logits of the first tokens of a timeline."""
        return relative_error(found, expected[: len(found)].float())

    def _begin(self, chat: _Chat, store: SessionStore) -> SessionCache:
        session = make_session(chat.ids, None)
        session.stateful = self.mode.stateful
        session.warm = session.running = True
        store.reserve(session, len(chat.ids))
        if chat.media:
            assert self.mode.sight is not None
            session.media = _placed(self.mode.sight, chat.ids, chat.media)
        return session

    @staticmethod
    def _feed(session: SessionCache, stop: int) -> int:
        """How many tokens the session feeds to be ``stop`` long, or less long: some must be fed together."""
        count = stop - session.length
        return session.media.feedable(session.length, count) if session.media is not None and count > 0 else count


class _JointTrial(_SightTrial):
    """Media of several kinds in one prompt, each of which was right alone."""

    def __init__(self, mode: _Sighted, eyes: Sequence[Eyes], page_size: int, rope: LongRope | None) -> None:
        self.mode, self._rope, self._page_size = mode, rope, page_size
        self._joint = JointSight([one.sight for one in eyes])
        self._media = []
        for one in eyes:
            self.sight, self._processor = one.sight, one.processor
            self._media.append(self._make(made_up_media(one.processor)[0]))
        placeholders = frozenset(one.sight.placeholder for one in eyes)
        self._prepare(mode, placeholders.union(*(one.processor.added for one in eyes)))

    def choose_joint(self, tolerance: float) -> tuple[JointSight, str]:
        """The way of all kinds, and why they may not be in one timeline. Raises Blind if it is not right even so."""
        self.mode.sight = self._joint
        nouns = " and ".join(f"{sight.sense.noun}s" for sight in self._joint.sights)
        try:
            error = max(self._measure(self._chat(order)) for order in (self._media, self._media[::-1]))
            if error <= tolerance:
                return self._joint, ""
            obstacle = f"{nouns} in one prompt give other results: error {error:.1e}"
        except Exception as failure:  # whatever a model raises of several kinds in one prompt
            obstacle = f"its own forward fails with {nouns} in one prompt: {first_line(failure, 160)}"
        chats = [self._chat([one]) for one in self._media]
        error = max(self._measure(*pair) for pair in permutations(chats, 2))
        if error > tolerance:
            raise Blind(f"{obstacle}; in one step: error {error:.1e}")
        return self._joint, obstacle

    def _inputs(self, media: Sequence[_MadeUp]) -> dict[str, Any]:
        return {name: value for one in media for name, value in one.inputs.items()}


def _placed(sight: Sight | JointSight, ids: array[int], media: Sequence[_MadeUp]) -> TimelineMedia:
    """The media of a timeline, as ``sight`` places them."""
    placed = [PlacedMedium(*pair) for pair in zip(media, _places(ids, media), strict=True)]
    return sight.place(ids, placed, [one.sight.position_inputs(one.inputs) for one in media])


def _places(ids: array[int], media: Sequence[_MadeUp]) -> list[np.ndarray[Any, Any]]:
    """The positions of the rows of each of ``media``, which stand in ``ids`` in this order."""
    marked = np.flatnonzero(np.asarray(ids) >= MEDIA)
    return np.split(marked, np.cumsum([len(one.rows.rows) for one in media])[:-1])


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Behind it modules have the tensors as attributes that they had before: forwards with pictures leave some."""
    before = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if value is None or isinstance(value, torch.Tensor)
    ]
    try:
        yield
    finally:
        for module, name, value in before:
            if getattr(module, name, None) is not value:
                setattr(module, name, value)
