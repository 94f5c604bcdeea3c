"""``SegmentIndex``: the segments whose files are on disk, by file and by folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, KeysView

from cache.segments.chain import Place, Segment


class SegmentIndex:
    """Living segments with a file, each under its folder and name."""

    def __init__(self) -> None:
        self._by_place: dict[Place, Segment] = {}
        self._by_folder: defaultdict[str, list[Segment]] = defaultdict(list)

    def __contains__(self, place: Place) -> bool:
        return place in self._by_place

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._by_place.values())

    def get(self, place: Place) -> Segment | None:
        return self._by_place.get(place)

    @property
    def folders(self) -> KeysView[str]:
        return self._by_folder.keys()

    def within(self, folders: Collection[str]) -> list[Segment]:
        return [segment for folder in folders for segment in self._by_folder.get(folder, ())]

    def add(self, segment: Segment) -> None:
        self._by_place[segment.folder, segment.name] = segment
        self._by_folder[segment.folder].append(segment)

    def remove(self, segment: Segment) -> None:
        """Its file is obsolete."""
        del self._by_place[segment.folder, segment.name]
        self._by_folder[segment.folder].remove(segment)
        if not self._by_folder[segment.folder]:
            del self._by_folder[segment.folder]

    def check_integrity(self) -> None:
        """Assert that both views have the same segments."""
        for place, segment in self._by_place.items():
            assert place == (segment.folder, segment.name)
            assert segment in self._by_folder[segment.folder]
        assert sum(map(len, self._by_folder.values())) == len(self._by_place)
