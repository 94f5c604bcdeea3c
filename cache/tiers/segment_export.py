"""Copying the part of the tree of segments that one session needs to files of its own.

A segment may hold tokens that are not in the session's current timeline: those of another session (a fork continues
from the middle of a file) or those that were rewound or edited. An export contains only the tokens of the session's
timeline.
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Iterable
from pathlib import Path

import msgspec

from cache.segments.chain import Extent, Owner
from cache.segments.segment_file import SegmentReader, lengths_of, timeline_hash, write


def export_segments(files: Path, extents: Iterable[Extent], owner: Owner, folder: Path) -> int:
    """Write the timeline of ``extents``, whose files are below ``files``, to the new ``folder`` as 000000.kv,
    000001.kv... Returns the number of files. A file that belongs to ``owner`` as a whole is linked, others are cut.
    Raises CorruptFile or OSError.
    """
    folder.mkdir(mode=0o700)
    ids, mask, count = array("i"), bytearray(), 0
    for segment, first, stop in extents:
        ids += segment.tokens[: stop - first]
        mask += segment.mask[: stop - first]
        source, name = files / segment.folder, f"{count:06d}.kv"
        if segment.owner == owner and segment.stop == stop:
            link(source / segment.name, folder / name)
        else:
            cut(source, segment.name, owner, ids, mask, folder, name)
        count += 1
    return count


def link(source: Path, target: Path) -> None:
    """Create a hard link, or a copy if that is not possible. Raises OSError."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copyfile(source, target, follow_symlinks=False)


def cut(
    source: Path,
    name: str,
    owner: Owner,
    ids: array[int],
    mask: bytearray,
    folder: Path,
    target: str,
    orphan: bool = False,
) -> int:
    """Write the part of a file that belongs to the timeline ``ids``, ``mask``, which ends in that file, as a file of
    ``owner``; it may replace the original. Returns the new file's bytes. Raises CorruptFile or OSError.
    """
    with SegmentReader(source, name) as reader:
        header, stop = reader.header, len(ids)
        size = stop - header.first
        reached = {at for at in lengths_of((*reader.names, *header.facts)) if at <= stop}
        tensors = {
            entry.name: reader.read(entry.name)[:size] if entry.paged else reader.read(entry.name)
            for entry in header.tensors
            if entry.paged or reached.issuperset(lengths_of((entry.name,)))
        }
        header = msgspec.structs.replace(
            header,
            tenant=owner.tenant,
            session=owner.session,
            named=owner.named,
            stop=stop,
            tokens=header.tokens[: 4 * size],
            mask=header.mask[:size],
            after=timeline_hash(ids.tobytes(), bytes(mask)),
            orphan=orphan,
            facts={path: fact for path, fact in header.facts.items() if reached.issuperset(lengths_of((path,)))},
        )
        return write(folder, target, header, tensors).size
