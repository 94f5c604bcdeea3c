"""``Sight``: how media of one kind enter a model. Its encoder is run once per medium; each step gets the rows of the
media that it feeds, and explicit positions, so that steps of several sessions can be packed.

What holds for a model is measured at load (``scheduler.model.media_probe``), not looked up.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cache.media_ids import MEDIA
from cache.memory.stream import put
from cache.pages.timeline_media import BothWays, FedRows, PlacedMedium, TimelineMedia
from scheduler.media.caught_rows import NotCaught, caught_rows
from scheduler.media.overlay import Overlay, laid_rows
from scheduler.media.processor import Processed, to_device
from scheduler.media.senses import SOUNDS, Sense

_POSITIONS = "get_rope_index"  # transformers' name for what tells positions of several axes
_LENGTHS = "audio_seqlens"  # its argument with the frames of each sound
_ROWS = ("pooler_output", "last_hidden_state")  # of an encoder's output: the rows, under the first that it has
_LEVELS = "deepstack_features"  # of an encoder's output: rows that are added behind several layers
OUTPUTS = "mm_encoder_outputs"  # the argument that takes what the encoder made
_MODALITIES = "mm_token_type_ids"  # has a number for each kind of media
TYPES = ("token_type_ids", _MODALITIES, "moe_mm_token_type_ids")  # arguments that say which tokens are pictures


class Blind(Exception):
    """The model does not take pictures, or not in a way that can be used; the message says why."""


@dataclass(frozen=True)
class EncodedRows:
    """What an encoder made of one picture: ``rows [rows, width]``; ``levels``: for models that add rows behind several
    layers, of the same length; ``like``: the output, for its class and the shape of its fields.
    """

    rows: torch.Tensor
    levels: tuple[torch.Tensor, ...]
    like: Any

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.rows, *self.levels))

    def split(self, counts: list[int]) -> list[EncodedRows]:
        """Those of pictures that were encoded together, with so many rows each."""
        if len(counts) == 1:
            return [self]
        parts = [[one.clone() for one in torch.split(part, counts)] for part in (self.rows, *self.levels)]
        return [EncodedRows(first, tuple(levels), self.like) for first, *levels in zip(*parts, strict=True)]


class FedPart(NamedTuple):
    """Tokens ``start .. stop`` of a session that has ``media``, or none."""

    media: TimelineMedia | None
    start: int
    stop: int


@dataclass(frozen=True)
class Way:
    """``whole``: the model is given token ids and what its encoder made, and merges them itself; else it is given
    embeddings, or with ``laid`` token ids, and rows are written over what it embeds. ``typed``: it is told which tokens
    are pictures. ``rule``: what rows of a picture see.
    """

    whole: bool
    typed: bool
    rule: BothWays
    laid: bool = False

    def __str__(self) -> str:
        way = "as outputs of its encoder" if self.whole else f"{'over' if self.laid else 'as'} embeddings"
        seen = "" if self.rule is BothWays.NEVER else f", rows see each other {self.rule}"
        return f"{way}{', with token types' if self.typed else ''}{seen}"


class Sight:
    """A model's encoder and the way in which its rows are merged. ``placeholder``: the token that stands for a row."""

    def __init__(self, model: Any, sense: Sense, decoder: Any) -> None:
        """``decoder``: the module that takes ``inputs_embeds``. Raises Blind."""
        self.model, self.sense, self._decoder = model, sense, decoder
        self.accepts = inspect.signature(model.forward).parameters
        if not any(name in self.accepts for name in self.sense.inputs):
            raise Blind(f"its forward takes no {' or '.join(self.sense.inputs)}")
        self._positions_owner = _owner(model, _POSITIONS)
        self._overlay = Overlay()
        self.placeholder = -1
        self.single = False  # one in a timeline: further ones would change what the first ones are
        self.together = False  # several pictures of one shape in one pass of the encoder change nothing
        self.like: EncodedRows | None = None  # the last ones: all have one shape but for their number
        self._takes_outputs = OUTPUTS in self.accepts and bool(self.sense.output)  # it leaves sounds out, silently
        self.way = Way(self._takes_outputs, False, BothWays.NEVER)

    def ways(self) -> Iterator[Way]:
        """Those that may be right, in the order in which they are tried."""
        for whole, laid in ((True, False), (False, False), (False, True))[not self._takes_outputs :]:
            for rule in BothWays:
                for typed in (False, True) if any(name in self.accepts for name in TYPES) else (False,):
                    yield Way(whole, typed, rule, laid)

    # -- a picture --------------------------------------------------------------------------------------------------

    def encode(self, processed: Processed) -> EncodedRows:
        """What the encoder makes of a picture. Raises what the model does, and Blind."""
        self.like = self._encode(processed)
        return self.like

    @torch.inference_mode()
    def _encode(self, processed: Processed) -> EncodedRows:
        """Run the encoder on one picture. Raises what the model does, and Blind."""
        owner = _owner(self.model, self.sense.encode) if self.sense.encode else None
        if owner is None:
            return EncodedRows(self._caught(processed), (), None)
        encode = getattr(owner, self.sense.encode)
        arguments = inspect.signature(encode).parameters
        taken = {name: value for name, value in processed.inputs.items() if name in arguments}
        taken = to_device(taken, self.model.device, self.model.dtype)
        if "kwargs" in arguments or "return_dict" in arguments:
            taken["return_dict"] = True
        out = encode(**taken)
        rows = next((out[name] for name in _ROWS if out.get(name) is not None), None)
        levels = [_LayerRows.of(level) for level in out.get(_LEVELS) or ()]
        parts = tuple(_flat(level.part(made)) for level, made in zip(levels, out.get(_LEVELS) or (), strict=True))
        if rows is None and not parts:
            raise Blind("its encoder gives its rows under no name that is known")
        whole = _flat(rows) if rows is not None else parts[0]  # some are only added behind layers
        return EncodedRows(whole, parts, _Shape.of(out, rows, tuple(levels)))

    def _caught(self, processed: Processed) -> torch.Tensor:
        """The rows of one medium, of a model that makes them within its forward only."""
        ids = torch.tensor([processed.ids], device=self.model.device)
        taken = {name: value for name, value in processed.inputs.items() if name in self.accepts}
        taken = to_device(taken, self.model.device, self.model.dtype)
        if "attention_mask" in self.accepts:
            taken["attention_mask"] = torch.ones_like(ids)
        try:
            return caught_rows(self.model, self._decoder, ids, taken)
        except NotCaught as reason:
            raise Blind(str(reason)) from None

    def position_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Of a medium's inputs those that its positions depend on; of a sound, how many frames it has, too."""
        if self._positions_owner is None:
            return {}
        wanted = inspect.signature(getattr(self._positions_owner, _POSITIONS)).parameters
        found = {name: value for name, value in inputs.items() if name in wanted}
        mask = next((value for name, value in inputs.items() if name.endswith("attention_mask")), None)
        if self.sense is SOUNDS and mask is not None and _LENGTHS in wanted:
            found[_LENGTHS] = mask.sum(-1)
        return found

    # -- a timeline -------------------------------------------------------------------------------------------------

    def place(self, ids: array[int], media: Sequence[PlacedMedium], kept: Sequence[dict[str, Any]]) -> TimelineMedia:
        """The media of a timeline, in order; ``kept`` of each of them. Raises what the model does."""
        positions = self.positions(ids, kept) if self._positions_owner is not None else None
        return TimelineMedia(ids, media, positions, self.way.rule)

    def positions(self, ids: Sequence[int], kept: Sequence[dict[str, Any]]) -> np.ndarray[Any, Any] | None:
        """The positions ``[axes, len(ids)]`` of a timeline with media ids; None: they are indices."""
        tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
        marked = tokens >= MEDIA
        tokens = torch.where(marked, self.placeholder, tokens)
        return positions_of(self.model, tokens, lambda accepts: self.types(marked, accepts), kept)

    def types(self, marked: torch.Tensor, accepts: Any = None) -> dict[str, torch.Tensor]:
        """The arguments that say which tokens are rows of media, of those that a function ``accepts``: the forward,
        without one. ``marked``: bool.
        """
        code = {_MODALITIES: self.sense.modality}
        names = [name for name in TYPES if name in (self.accepts if accepts is None else accepts)]
        return {name: marked.long() * code.get(name, 1) for name in names}

    # -- a step -----------------------------------------------------------------------------------------------------

    def inputs(self, tokens: torch.Tensor, parts: Sequence[FedPart]) -> dict[str, Any]:
        """Arguments of the model's forward for ``tokens [1, T]`` of sessions of which some have media, side by side;
        they replace those of text.
        """
        marked = tokens >= MEDIA
        found: dict[str, Any] = {"input_ids": tokens}
        if any(part.media is not None and part.media.axes for part in parts):
            found["position_ids"] = self.step_positions(parts, tokens.device)
        if self.way.typed:
            found |= self.types(marked)
        rows = [rows for part in parts if part.media is not None for rows in part.media.rows(part.start, part.stop)]
        if not rows:
            return found
        return found | (self.give_whole(tokens, marked, rows) if self.way.whole else self._embed(tokens, marked, rows))

    def _embed(self, tokens: torch.Tensor, marked: torch.Tensor, rows: list[FedRows]) -> dict[str, Any]:
        made, embed = [(marked, join_rows([rows_of(one) for one in rows]))], self.model.get_input_embeddings()
        if self.way.laid:
            self._overlay.over(embed, made)
            return {"input_ids": torch.where(marked, self.placeholder, tokens)}
        return {"input_ids": None, "inputs_embeds": laid_rows(embed(torch.where(marked, 0, tokens)), made)}

    def give_whole(self, tokens: torch.Tensor, marked: torch.Tensor, rows: list[FedRows]) -> dict[str, Any]:
        """The arguments of a forward with what the encoder made, which the model merges at the tokens that are
        ``marked``, bool ``[1, T]``.
        """
        ids = torch.where(marked, self.placeholder, tokens)
        parts = [rows_of(one) for one in rows]
        levels = [
            join_rows([one.medium.rows.levels[n][one.first : one.stop] for one in rows])
            for n in range(len(rows[0].medium.rows.levels))
        ]
        made, taken = join_rows(parts), marked[ids == self.placeholder]
        if not bool(taken.all()):  # a placeholder that the model itself has said: it is what its embedding says
            own = self.model.get_input_embeddings()(tokens[(ids == self.placeholder) & ~marked]).to(made)
            made = _spread(made, taken, own)
            levels = [_spread(level, taken, torch.zeros_like(level[:1])) for level in levels]
        shape = rows[0].medium.rows.like
        return {"input_ids": ids, OUTPUTS: {self.sense.output: shape.output(made, levels)}}

    @staticmethod
    def step_positions(parts: Sequence[FedPart], device: torch.device) -> torch.Tensor:
        """The positions of several axes of tokens of sessions side by side, ``[axes, 1, T]``."""
        axes = max(part.media.axes for part in parts if part.media is not None)
        found = []
        for part in parts:
            if part.media is not None and part.media.axes:
                found.append(part.media.positions(part.start, part.stop))
            else:
                found.append(np.tile(np.arange(part.start, part.stop), (axes, 1)))
        return put(np.concatenate(found, 1)[:, None], device)


class _LayerRows(NamedTuple):
    """Rows that are added behind a layer, as models write them: one tensor, or one per picture (``listed``); beside the
    number of the ``layer``, if they tell it.
    """

    listed: bool
    layer: int | None

    @classmethod
    def of(cls, made: Any) -> _LayerRows:
        told = isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], int)
        return cls(not isinstance(made[1] if told else made, torch.Tensor), made[0] if told else None)

    def part(self, made: Any) -> Any:
        """The tensor or tensors of what a model has made."""
        return made if self.layer is None else made[1]

    def output(self, rows: torch.Tensor) -> Any:
        """The same with other rows ``[n, hidden]``."""
        part = [rows] if self.listed else rows
        return part if self.layer is None else (self.layer, part)


@dataclass(frozen=True)
class _Shape:
    """The class of an encoder's output, and whether its rows are one tensor or one per picture, in which ``field``;
    empty: in none. ``levels``: of the rows that are added later.
    """

    kind: Any
    field: str
    listed: bool
    levels: tuple[_LayerRows, ...]

    @classmethod
    def of(cls, out: Any, rows: Any, levels: tuple[_LayerRows, ...]) -> _Shape:
        field = next((name for name in _ROWS if out.get(name) is not None), "")
        return cls(type(out), field, not isinstance(rows, torch.Tensor), levels)

    def output(self, rows: torch.Tensor, levels: Sequence[torch.Tensor]) -> Any:
        """An output with these rows ``[n, hidden]``; each of ``levels`` has as many."""
        made = self.kind()
        if self.field:
            made[self.field] = [rows] if self.listed else rows[None]
        if levels:
            made[_LEVELS] = [level.output(part) for level, part in zip(self.levels, levels, strict=True)]
        return made


def _owner(model: Any, method: str) -> Any:
    """What has a method of that name: the model inside, or the whole."""
    inside = (getattr(model, "model", None), model, getattr(model, "base_model", None))
    return next((one for one in inside if one is not None and hasattr(type(one), method)), None)


def _flat(value: Any) -> torch.Tensor:
    """``[rows, width]`` of a tensor, or of one per picture."""
    parts = [value] if isinstance(value, torch.Tensor) else list(value)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def positions_of(
    model: Any,
    tokens: torch.Tensor,
    types: Callable[[Any], dict[str, torch.Tensor]],
    kept: Sequence[dict[str, Any]],
) -> np.ndarray[Any, Any] | None:
    """The positions ``[axes, T]`` that a model gives to ``tokens [1, T]`` with placeholders; None: they are indices.
    ``types``: of the arguments that it is called with, those that say which tokens are media; ``kept`` of the media.
    """
    owner = _owner(model, _POSITIONS)
    if owner is None:
        return None
    function = getattr(owner, _POSITIONS)
    names = dict.fromkeys(name for one in kept for name in one)
    joined = {name: torch.cat([torch.as_tensor(one[name]) for one in kept if name in one]) for name in names}
    given = types(inspect.signature(function).parameters)
    found, _ = function(input_ids=tokens, attention_mask=torch.ones_like(tokens), **given, **joined)
    return np.asarray(found[:, 0].cpu(), np.int64)


def rows_of(rows: FedRows) -> torch.Tensor:
    """Rows of a medium, ``[n, width]``."""
    part: torch.Tensor = rows.medium.rows.rows[rows.first : rows.stop]
    return part


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows one below the other, ``[n, width]``."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _spread(rows: torch.Tensor, taken: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """``rows`` where ``taken`` is true, in order, and ``others`` elsewhere."""
    made = rows.new_empty(len(taken), rows.shape[-1])
    made[taken], made[~taken] = rows, others
    return made
