"""Whether a loaded model sees or hears: its processor is read, and how pictures or sounds enter is measured."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from scheduler.forward.rope import LongRope
from scheduler.media.eyes import Eyes
from scheduler.media.processor import NoProcessor
from scheduler.media.processor_reader import read_processor
from scheduler.media.senses import PICTURES, SOUNDS, VIDEOS, Sense
from scheduler.media.sight import Blind
from scheduler.model.measurement import TOLERANCE
from scheduler.model.media_probe import look, look_together
from scheduler.model.verdict import Verdict

log = logging.getLogger("warmturn.engine")


def senses_of(model: Any) -> list[Sense]:
    """What a model was made for beside text, in the order in which it is tried."""
    accepts = inspect.signature(model.forward).parameters
    return [sense for sense in (PICTURES, SOUNDS, VIDEOS) if any(name in accepts for name in sense.inputs)]


def find_eyes(
    model: Any,
    name: str,
    tokenizer: Any,
    verdict: Verdict,
    page_size: int,
    rope: LongRope | None,
    divided: bool,
) -> tuple[Eyes | None, str]:
    """The eyes of a model, and why it has none; neither for a model of text. ``name``: its hub id or folder. Several
    kinds of media are taken in one prompt only if that is exact.
    """
    reasons, found, apart = [], list[Eyes](), False
    tolerance = max(TOLERANCE.get(model.dtype, 6e-2), 2 * verdict.error)
    for sense in senses_of(model):
        try:
            if divided:
                raise Blind(f"{sense.noun}s cannot be used with --tensor-parallel")
            processor = read_processor(name, model.config, sense, tokenizer)
            sight = look(verdict.mode, processor, page_size, rope, tolerance)
            eyes = Eyes(processor, sight)
            if found and (obstacle := look_together(verdict.mode, [*found, eyes], page_size, rope, tolerance)):
                log.info("the model takes media of one kind in a conversation: %s", obstacle)
                apart = True
        except (NoProcessor, Blind) as reason:
            log.info("the model takes no %ss here: %s", sense.noun, reason)
            reasons.append(str(reason))
            continue
        log.info("%ss enter the model %s", sense.noun, sight.way)
        found.append(eyes)
    if not found:
        return None, "; ".join(reasons)
    return Eyes(found[0].processor, found[0].sight, tuple(found[1:]), apart), ""
