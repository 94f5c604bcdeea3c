"""``Eyes``: with what a model takes one kind of media: its processor, and the way in which these enter it."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.media.processor import Processor
from scheduler.media.sight import Sight


@dataclass(frozen=True)
class Eyes:
    """``others``: for further kinds of media, in the same prompts; or if ``apart``, in prompts of their own."""

    processor: Processor
    sight: Sight
    others: tuple[Eyes, ...] = ()
    apart: bool = False

    @property
    def every(self) -> tuple[Eyes, ...]:
        return (self, *self.others)

    @property
    def kind(self) -> str:
        return self.processor.sense.kind
