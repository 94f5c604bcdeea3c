"""``Verdict``: what the probe found out about a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cache.memory.codec import Codec
from cache.memory.memory_tier import PageShape
from cache.pages.layers import Windows
from scheduler.forward.mode import Mode
from scheduler.model.known_model import MeasuredVerdict
from scheduler.model_facts import KvRounding


@dataclass(frozen=True)
class Verdict:
    """The mode that was chosen and installed, its error, what its layers store in pages, the bytes that a token takes
    in all, a state of some session (``skeleton``), and the measured error of each mode tried. ``crossed`` names the
    thresholds past which it was measured as well, ``unproven`` says where nothing could be measured past some.
    ``windows``: the windowed layers, if the mode is as right when keys that they do not see are gone. ``kv``: what
    ``--kv-dtype`` changed, if it was given. ``measured`` is for the next load.
    """

    mode: Mode
    error: float
    shapes: dict[int, PageShape]
    token_bytes: int
    skeleton: Any
    report: str
    crossed: tuple[str, ...] = ()
    unproven: str = ""
    windows: Windows | None = None
    kv: KvRounding | None = None
    measured: MeasuredVerdict | None = None

    @property
    def codec(self) -> Codec:
        """How keys and values are kept in pages; layers that this does not fit keep them exactly."""
        return Codec.EXACT if self.kv is None or not self.kv.layers else Codec(self.kv.kv_dtype)
