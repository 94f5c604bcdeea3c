"""A few architectures that see or hear through the whole scenario; ``run.py --kind media`` does it with all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("PIL")

from architectures.media_build import MEDIA_ENTRIES, build
from architectures.media_scenario import MediaOracle, Medium, check_media
from architectures.run import examine_media
from architectures.scenario import Status

pytestmark = pytest.mark.wide

PAGE = Path(__file__).parent.parent.parent / "docs" / "media_architectures.md"
WAYS = {  # of each another one
    "llava": "packed, as outputs of its encoder",
    "cohere_compass": "packed, as outputs of its encoder",  # with rows that are added behind several layers
    "minicpmv4_7": "packed, as outputs of its encoder, each encoded alone",
    "molmo2": "packed, as outputs of its encoder, rows see each other in every layer, one in a conversation",
    "qwen4_exp": "alone, as outputs of its encoder",
}


SLOW = ("minicpmv4_7", "qwen4_exp")
HERE = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in WAYS if name in MEDIA_ENTRIES]


@pytest.mark.parametrize("name", HERE)
def test_chats_with_media_are_right(name: str) -> None:
    ((kind, report),) = examine_media(name)
    assert (kind, report.status, report.reason) == ("image", Status.RIGHT, "")
    assert report.mode == WAYS[name]
    assert [check.name for check in report.checks] == ["chat", "edit, fork", "restart, eviction", "memory"]
    assert not [check.detail for check in report.checks if check.detail]


def test_what_is_refused_is_told() -> None:
    ((kind, report),) = examine_media("blip-2")
    assert (kind, report.status) == ("image", Status.REFUSED)
    assert "missing 1 required positional argument: 'pixel_values'" in report.reason


def test_another_picture_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the checks could not see a stale or foreign picture."""
    show = MediaOracle.show

    def show_another(self: MediaOracle, ids: list[int], data: bytes) -> None:
        show(self, ids, Medium(data[:-1] + bytes([data[-1] ^ 1])).data)

    monkeypatch.setattr(MediaOracle, "show", show_another)
    ((_, report),) = check_media(build("llava"))
    assert report.status is Status.WRONG
    assert {check.status for check in report.checks} == {Status.WRONG}


def test_the_page_has_every_entry() -> None:
    rows = {line.split(" | ")[0].strip("| ") for line in PAGE.read_text(encoding="utf-8").splitlines()}
    assert len(MEDIA_ENTRIES) > 100
    assert set(MEDIA_ENTRIES) <= rows
