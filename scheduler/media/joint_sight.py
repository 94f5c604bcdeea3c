"""``JointSight``: how media of several kinds enter a step together, each in the way of its own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cache.media_ids import MEDIA
from cache.memory.stream import put
from cache.pages.timeline_media import BothWays, FedRows, PlacedMedium, TimelineMedia
from scheduler.media.overlay import Overlay, laid_rows
from scheduler.media.sight import (
    OUTPUTS,
    Blind,
    FedPart,
    Sight,
    join_rows,
    positions_of,
    rows_of,
)


class JointSight:
    """Of ``sights``, one for each kind. Media have the ``sight`` of their kind."""

    def __init__(self, sights: Sequence[Sight]) -> None:
        """Raises Blind if these cannot be told from each other, or see their rows in different ways."""
        self.sights = tuple(sights)
        rules = {sight.way.rule for sight in sights} - {BothWays.NEVER}
        if len({sight.placeholder for sight in sights}) < len(sights):
            raise Blind("one token stands for rows of several kinds of media")
        if len(rules) > 1:
            raise Blind("media of several kinds see their rows in different ways")
        self._rule = rules.pop() if rules else BothWays.NEVER
        self._overlay = Overlay()

    # -- a timeline -------------------------------------------------------------------------------------------------

    def place(self, ids: array[int], media: Sequence[PlacedMedium], kept: Sequence[dict[str, Any]]) -> TimelineMedia:
        numbers = np.asarray(ids, np.int64)
        codes = np.zeros(len(ids), np.int64)
        for placed in media:
            codes[placed.places] = 1 + self._number(placed.medium)
        seen = np.isin(codes, [1 + n for n, sight in enumerate(self.sights) if sight.way.rule is not BothWays.NEVER])
        positions = self._positions(numbers, codes, kept)
        return TimelineMedia(np.where((numbers >= MEDIA) & ~seen, 0, numbers).tolist(), media, positions, self._rule)

    def _positions(
        self, ids: np.ndarray[Any, Any], codes: np.ndarray[Any, Any], kept: Sequence[dict[str, Any]]
    ) -> np.ndarray[Any, Any] | None:
        tokens, marks = torch.from_numpy(ids)[None], torch.from_numpy(codes)[None]
        return positions_of(
            self.sights[0].model,
            self.placeholders(tokens, marks),
            lambda accepts: self.types(marks, self.sights, accepts),
            kept,
        )

    def placeholders(self, tokens: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """``tokens`` with the placeholder of its kind at each row. ``codes``: 0 for text, else 1 + that of a sight."""
        for number, sight in enumerate(self.sights):
            tokens = torch.where(codes == 1 + number, sight.placeholder, tokens)
        return tokens

    def types(self, codes: torch.Tensor, sights: Sequence[Sight], accepts: Any = None) -> dict[str, torch.Tensor]:
        """See ``Sight.types``; of the rows of ``sights`` only."""
        found: dict[str, torch.Tensor] = {}
        for sight in sights:
            for name, value in sight.types(codes == 1 + self.sights.index(sight), accepts).items():
                found[name] = found[name] + value if name in found else value
        return found

    def _number(self, medium: Any) -> int:
        return self.sights.index(medium.sight)

    # -- a step -----------------------------------------------------------------------------------------------------

    def inputs(self, tokens: torch.Tensor, parts: Sequence[FedPart]) -> dict[str, Any]:
        self._overlay.forget()
        rows = [rows for part in parts if part.media is not None for rows in part.media.rows(part.start, part.stop)]
        codes = self._codes(parts, tokens)
        found: dict[str, Any] = {"input_ids": tokens}
        if any(part.media is not None and part.media.axes for part in parts):
            found["position_ids"] = Sight.step_positions(parts, tokens.device)
        if typed := [sight for sight in self.sights if sight.way.typed]:
            found |= self.types(codes, typed)
        return found | self._merge(tokens, codes, rows) if rows else found

    def _codes(self, parts: Sequence[FedPart], tokens: torch.Tensor) -> torch.Tensor:
        codes, begin = np.zeros(tokens.shape[1], np.int64), 0
        for part in parts:
            for placed in part.media.media if part.media is not None else ():
                here = placed.places[(placed.places >= part.start) & (placed.places < part.stop)]
                codes[begin + here - part.start] = 1 + self._number(placed.medium)
            begin += part.stop - part.start
        return put(codes[None], tokens.device)

    def _merge(self, tokens: torch.Tensor, codes: torch.Tensor, rows: Sequence[FedRows]) -> dict[str, Any]:
        """The arguments with the rows: what can be given as outputs of encoders is; the rest is written over what the
        model embeds.
        """
        whole: dict[str, Any] = {}
        laid: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, sight in enumerate(self.sights):
            mine, marked = [one for one in rows if one.medium.sight is sight], codes == 1 + number
            if not mine:
                continue
            if sight.way.whole:
                given = sight.give_whole(tokens, marked, mine)
                tokens, whole = given["input_ids"], whole | given[OUTPUTS]
            else:
                tokens = torch.where(marked, sight.placeholder, tokens)
                laid.append((marked, join_rows([rows_of(one) for one in mine])))
        embed = self.sights[0].model.get_input_embeddings()
        if not whole and not any(sight.way.laid for sight in self.sights):
            return {"input_ids": None, "inputs_embeds": laid_rows(embed(torch.where(codes > 0, 0, tokens)), laid)}
        if laid:
            self._overlay.over(embed, laid)
        return {"input_ids": tokens, **({OUTPUTS: whole} if whole else {})}
