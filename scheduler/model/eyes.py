"""Whether a loaded model sees or hears: its processor is read, and how pictures or sounds enter is measured."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

from scheduler.forward.rope import LongRope
from scheduler.media.processor import NoProcessor, Processor, read_processor
from scheduler.media.senses import PICTURES, SOUNDS, Sense
from scheduler.media.sight import Blind, Sight
from scheduler.model.measurement import TOLERANCE
from scheduler.model.media_probe import look
from scheduler.model.probe import Verdict

log = logging.getLogger("warmturn.engine")


@dataclass(frozen=True)
class Eyes:
    """The processor of a model that takes pictures, or sounds, and the way in which these enter it."""

    processor: Processor
    sight: Sight


def senses_of(model: Any) -> list[Sense]:
    """What a model was made for beside text, in the order in which it is tried; of several, one is used."""
    accepts = inspect.signature(model.forward).parameters
    return [sense for sense in (PICTURES, SOUNDS) if any(name in accepts for name in sense.inputs)]


def find_eyes(
    model: Any, name: str, verdict: Verdict, page_size: int, rope: LongRope | None, divided: bool
) -> tuple[Eyes | None, str]:
    """The eyes of a model, and why it has none; neither for a model of text. ``name``: its hub id or folder."""
    reasons = []
    for sense in senses_of(model):
        try:
            if divided:
                raise Blind(f"{sense.noun}s cannot be used with --tensor-parallel")
            processor = read_processor(name, model.config, sense)
            tolerance = max(TOLERANCE.get(model.dtype, 6e-2), 2 * verdict.error)
            sight = look(verdict.mode, processor, page_size, rope, tolerance)
        except (NoProcessor, Blind) as reason:
            log.info("the model takes no %ss here: %s", sense.noun, reason)
            reasons.append(str(reason))
            continue
        log.info("%ss enter the model %s", sense.noun, sight.way)
        return Eyes(processor, sight), ""
    return None, "; ".join(reasons)
