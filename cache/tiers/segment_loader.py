"""``SegmentLoader``: reads segment files into device pages on background threads, while other turns run."""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from cache.pages import state as states
from cache.pages.pool import PagePool
from cache.pages.session import CHECKPOINTS, SessionCache
from cache.segments.chain import Segment, read_segment
from cache.segments.segment_file import SegmentReader, check, lengths_of, read_header
from cache.tiers import transfer
from cache.tiers.io_threads import WorkQueue
from cache.whole_files import CorruptFile

log = logging.getLogger("warmturn.engine")


class SegmentRange(NamedTuple):
    """Tokens ``[first, stop)`` of a timeline in a file whose own tokens begin at ``begin`` and whose timeline has the
    hash ``after``.
    """

    folder: Path
    name: str
    begin: int
    first: int
    stop: int
    after: bytes


@dataclass(eq=False)
class SegmentLoad:
    """A timeline being loaded: tokens ``[have, length)`` into the pages of ``session``, on which no turn runs
    meanwhile.

    When ``done``, ``tokens`` of them are loaded. If that is not all, ``broken`` is the index of the piece that could
    not be read, and ``is_damaged`` whether its file is corrupt (else the system refused to read it). ``touched``: when
    something was last read, by ``time.monotonic``.
    """

    session: SessionCache
    pieces: Sequence[SegmentRange]
    have: int
    length: int
    skeleton: Any = None  # any state of this model; None where sessions have none
    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    touched: float = field(default_factory=time.monotonic)
    broken: int | None = None
    is_damaged: bool = False
    done: bool = False
    states: dict[int, Any] = field(default_factory=dict)


class SegmentLoader:
    """Reads segment files on background threads; the callback of ``start`` then runs on the thread that owns the
    cache.
    """

    def __init__(self, pool: PagePool, queue: WorkQueue) -> None:
        self.read = 0  # bytes
        self.errors = 0
        self._pool = pool
        self._queue = queue

    def start(self, load: SegmentLoad, then: Callable[[SegmentLoad], None]) -> None:
        """Begin to read ``load``; ``then`` is called at a later poll."""
        pages, size = load.session.pages, self._pool.page_size
        parts = (False, True) if self._pool.windows is not None else (False,)
        rows = tuple(transfer.rows_of(pages, size, load.have, load.length, near) for near in parts)

        def finish(outcome: Exception | None) -> None:
            load.done = True
            self.read += load.nbytes
            self.errors += load.broken is not None and not load.is_damaged
            assert outcome is None  # whatever happens to a piece is caught
            then(load)

        self._queue.submit(lambda: self._read(load, rows), finish)

    def _read(self, load: SegmentLoad, rows: tuple[torch.Tensor, ...]) -> None:
        started = time.perf_counter()
        reached = load.have
        for number, piece in enumerate(load.pieces):
            try:
                self._piece(load, piece, rows)
            except Exception as error:
                load.broken, load.is_damaged = number, isinstance(error, CorruptFile)
                if not isinstance(error, (CorruptFile, OSError)):
                    log.exception("a session could not be read")
                break
            reached = max(reached, piece.stop)
        if load.skeleton is not None:
            reached = max((n for n in load.states if n <= reached), default=load.have)
        load.tokens = max(reached - load.have, 0)
        load.seconds = time.perf_counter() - started

    def _piece(self, load: SegmentLoad, piece: SegmentRange, rows: tuple[torch.Tensor, ...]) -> None:
        """Verify one file against the expected timeline and copy its tokens to the pages. Raises CorruptFile or
        OSError.
        """
        with SegmentReader(piece.folder, piece.name) as reader:
            if reader.header.after != piece.after or reader.header.first != piece.begin:
                raise CorruptFile("another timeline")
            device = self._pool.device
            paged = {entry.name: (entry.shape[1:], entry.dtype) for entry in reader.header.tensors if entry.paged}
            if paged != device.token_shapes:
                raise CorruptFile("another model's layers")
            first = max(piece.first, load.have)
            if first < piece.stop:
                targets = [part[first - load.have : piece.stop - load.have] for part in rows]
                for name in paged:
                    tokens = reader.read(name)
                    load.nbytes += tokens.numel() * tokens.itemsize
                    load.touched = time.monotonic()
                    device.scatter(
                        targets[device.is_near(name)], name, tokens[first - piece.begin : piece.stop - piece.begin]
                    )
            if load.skeleton is not None:
                self._states(load, piece, reader)

    def _states(self, load: SegmentLoad, piece: SegmentRange, reader: SegmentReader) -> None:
        """Load the checkpoints in the file's range; only the newest ``CHECKPOINTS`` are kept."""
        facts = reader.header.facts
        for length in lengths_of((*reader.names, *facts)):
            if not piece.begin < length <= piece.stop:
                continue
            path = f"checkpoint.{length}."
            names = [name for name in reader.names if name.startswith(path)]
            found = {name for name in (*names, *facts) if name.startswith(path)}
            tensors = {name: reader.read(name) for name in names}
            kinds = transfer.kinds_of({n.removeprefix(path): v for n, v in (tensors | facts).items() if n in found})
            if kinds != transfer.kinds_of(transfer.parts_of(load.skeleton)):
                raise CorruptFile("another model's state")
            load.nbytes += sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
            load.touched = time.monotonic()
            load.states[length] = transfer.unpack_state(load.skeleton, length, tensors, facts)
        for length in sorted(load.states)[:-CHECKPOINTS]:
            del load.states[length]


def read_chain(folder: Path, fingerprint: str) -> Segment:
    """The timeline in the files 000000.kv, 000001.kv... of a folder, as its last segment. Raises CorruptFile or
    OSError.
    """
    tip: Segment | None = None
    for number in itertools.count():
        place = (folder.name, f"{number:06d}.kv")
        if not (folder / place[1]).exists():
            break
        header = read_header(folder, place[1])
        check(header, fingerprint=fingerprint)
        piece = read_segment(msgspec.structs.replace(header, parent=None if tip is None else header.parent), place)
        if not piece.joins(tip):
            raise CorruptFile("another timeline")
        tip = piece.segment
    if tip is None:
        raise CorruptFile("nothing in it")
    return tip


def apply_load(load: SegmentLoad, ids: array[int], mask: bytearray) -> None:
    """Set the session of a finished load to what was read; ``ids`` and ``mask`` are those of the whole timeline."""
    session, length = load.session, load.have + load.tokens
    if not load.tokens:
        return
    session.token_ids = ids[:length]
    session.mask = mask[:length]
    session.hidden = session.mask.count(0)
    if session.stateful:
        session.checkpoints |= load.states
        session.checkpoints = {n: state for n, state in sorted(session.checkpoints.items()) if n <= length}
        session.state = states.clone(session.checkpoints[length])
