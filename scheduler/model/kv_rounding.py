"""``--kv-dtype``: which layers keep KV at a byte a number, and what that changes, measured at load."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from cache.error_line import first_line
from cache.memory.codec import Codec
from cache.memory.memory_tier import PageShape
from scheduler.forward.mode import Mode
from scheduler.model.measurement import Measurement
from scheduler.model_facts import KvRounding

log = logging.getLogger("warmturn.engine")


def rounded_shapes(mode: Mode, shapes: Mapping[int, PageShape], codec: Codec) -> dict[int, PageShape]:
    """``shapes`` with ``codec`` for the layers that it fits: those whose pages attention reads in place. What other
    layers compute from what they store (latents, indexes) is stored exactly, and so is what ``codec`` would not make
    smaller.
    """
    found = dict(shapes)
    for at in mode.in_place & shapes.keys():
        rounded = shapes[at]._replace(codec=codec)
        if shapes[at].dtype.is_floating_point and not shapes[at].index_dim and rounded.nbytes < shapes[at].nbytes:
            found[at] = rounded
    return found


def round_kv(
    measurement: Measurement, mode: Mode, shapes: Mapping[int, PageShape], codec: Codec
) -> tuple[dict[int, PageShape], KvRounding]:
    """What the layers of a model that runs in ``mode`` store with ``--kv-dtype``, and what that changes. Where it
    cannot be used they store what they did.
    """
    rounded = rounded_shapes(mode, shapes, codec)
    layers = sum(shape.codec is codec for shape in rounded.values())
    if not layers:
        why = "none of its layers has keys and values that attention reads from pages unchanged"
        return _told(dict(shapes), KvRounding(str(codec), 0, len(shapes), None, None, why))
    try:
        error, same = measurement.compare(mode, dict(shapes), rounded)
        why = "" if error < float("inf") else "the results are not numbers"
    except Exception as problem:  # whatever a mode raises
        error, same, why = float("inf"), 0.0, first_line(problem, 160)
    if why:
        return _told(dict(shapes), KvRounding(str(codec), 0, len(shapes), None, None, why))
    return _told(rounded, KvRounding(str(codec), layers, len(shapes), error, same))


def _told(shapes: dict[int, PageShape], found: KvRounding) -> tuple[dict[int, PageShape], KvRounding]:
    log.log(logging.INFO if found.layers else logging.WARNING, "%s", found.line)
    return shapes, found
