"""Whose decode steps can be captured: a few architectures anew, each of another kind, against the page of all."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures.capture import look

PAGE = (Path(__file__).parent.parent.parent / "docs" / "captured.md").read_text(encoding="utf-8")
CAPTURED = next(line for line in PAGE.splitlines() if line.startswith("| captured |")).strip("| ").partition("| ")[2]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3_text", "mixtral", "qwen3_next", "mamba2", "lfm2"])
def test_a_decode_step_can_be_captured(name: str) -> None:
    found = look(name)
    assert (found.captured, found.reason) == (True, "")
    assert found.operations > 100
    assert name in CAPTURED.split(", ")


@pytest.mark.parametrize(
    ("name", "reason"), [("deepseek_v3", "in place"), ("bloom", "not packed"), ("dbrx", "nonzero"), ("phimoe", "copy")]
)
def test_what_is_in_the_way_is_said(name: str, reason: str) -> None:
    assert reason in look(name).reason
    assert name not in CAPTURED.split(", ")
