"""Whose decode steps can be captured: a few architectures anew, each of another kind, against the page of all."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures.capture import look

pytestmark = pytest.mark.wide

PAGE = (Path(__file__).parent.parent.parent / "docs" / "captured.md").read_text(encoding="utf-8")
CAPTURED = [
    name
    for line in PAGE.splitlines()
    if line.startswith("| captured")
    for name in line.strip("| ").partition("| ")[2].split(", ")
]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("llama", "packed"), ("gpt_oss", "packed"), ("qwen3_next", "packed"), ("mamba2", "packed")),
        *(("bart", "packed"), ("deepseek_v3", "packed"), ("glm_moe_dsa", "rows")),
        *((name, "packed") for name in ("mixtral", "minimax", "phimoe")),
    ],
)
def test_a_decode_step_can_be_captured(name: str, mode: str) -> None:
    found = look(name)
    assert (found.captured, found.reason, found.mode) == (True, "", mode)
    assert found.operations > 100
    assert name in CAPTURED


@pytest.mark.parametrize(("name", "reason"), [("bloom", "runs alone"), ("dbrx", "nonzero"), ("jetmoe", "no data")])
def test_what_is_in_the_way_is_said(name: str, reason: str) -> None:
    assert reason in look(name).reason
    assert name not in CAPTURED
