"""docs/gguf.md lists what is read of GGUF files, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from scheduler.weights.gguf.architectures import ARCHITECTURES, VARIANTS
from scheduler.weights.gguf.types import TYPES

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "gguf.md").read_text(encoding="utf-8")


def test_architectures_are_listed_with_their_models() -> None:
    same = re.search(r"By the same name in transformers: ([^.]*)\.", PAGE)
    assert same is not None
    listed = {name: {ARCHITECTURES[name]} for name in re.split(r",\s+", same[1])}
    for name, kinds in re.findall(r"^\| (\S+) \| ([a-z0-9_]+(?: or [a-z0-9_]+)*) \|$", PAGE, re.MULTILINE):
        listed[name] = set(kinds.split(" or "))
    known = {name: {kind} for name, kind in ARCHITECTURES.items()}
    for _, others in VARIANTS:
        for name, kind in others.items():
            known[name].add(kind)
    assert listed == known
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Files of {len(ARCHITECTURES)} architectures are read" in readme


def test_types_are_listed() -> None:
    names = {kind.name for kind in TYPES.values()}
    said = re.search(r"Types:\s([^.]*)\.", PAGE)
    assert said is not None
    listed = set(re.split(r",\s+", said[1].replace("Q2_K to Q6_K", "Q2_K, Q3_K, Q4_K, Q5_K, Q6_K")))
    assert listed == {name for name in names if not re.fullmatch(r"I\d+", name)}
