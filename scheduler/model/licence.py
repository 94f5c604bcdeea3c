"""The licence of a model, as its card or its file tells it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard
from transformers.utils import cached_file

from scheduler.weights.gguf.header import GgufError, read_metadata

CARDS = ("README.md", "MODEL_CARD.md")
MOST = 100  # characters of a name


def licence_of(source: str) -> str:
    """The name of the licence of a hub id, a folder or a GGUF file; "" if nothing tells it. A card that cannot be read
    tells nothing: a model is served without one, too.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        return _short(_of_file(path))
    for name in CARDS:
        card = path / name if path.is_dir() else _fetch(source, name)
        if card is not None and card.is_file():
            return _short(_of_card(card))
    return ""


def _fetch(source: str, name: str) -> Path | None:
    """A file of a hub id; None if it has none, or cannot be asked."""
    found = cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def _of_card(card: Path) -> object:
    """``license_name`` of a card's front matter, or ``license``."""
    try:
        told = ModelCard(card.read_text(encoding="utf-8", errors="replace"), ignore_metadata_errors=True).data
    except Exception:  # whatever its author has written there: YAML has many errors
        return None
    return told.get("license_name") or told.get("license")


def _of_file(path: Path) -> object:
    """What a GGUF file says of itself."""
    try:
        return read_metadata(path).get("general.license")
    except (OSError, GgufError):
        return None


def _short(told: object) -> str:
    """A name on one line; "" for anything else."""
    return " ".join(told.split())[:MOST] if isinstance(told, str) else ""
