"""A processor for models of which there is no checkpoint: made-up pixels or features in the shape that an encoder
takes, and as many placeholders as it makes rows of them.

Shapes are found by trying, from what arguments are called and what the config says of sizes.
"""

from __future__ import annotations

import hashlib
import inspect
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from architectures.audio_shapes import sounds
from architectures.picture_shapes import pictures

from cache.media_ids import LEAST
from scheduler.media.processor import Processed
from scheduler.media.senses import PICTURES, SOUNDS, Sense

SIZES = 3  # of pictures
_ENCODE = {PICTURES.kind: ("get_image_features",), SOUNDS.kind: ("get_audio_features", "get_speech_features")}
COUNTED = {PICTURES.kind: "num_img_tokens", SOUNDS.kind: "audio_embed_sizes"}
_NAMES = {
    PICTURES.kind: (
        "image_token_id image_token_index media_placeholder_token_id img_token_id image_pad_token_id vision_token_id "
        "im_patch_id image_patch_id"
    ).split(),
    SOUNDS.kind: "audio_token_id audio_token_index image_token_id image_token_index speech_token_id".split(),
}
_AROUND = {
    PICTURES.kind: ("vision_start_token_id", "vision_end_token_id"),
    SOUNDS.kind: ("audio_start_token_id", "audio_end_token_id"),
}


class NothingFits(Exception):
    """No made-up medium is taken by the encoder; the message says what was tried."""


class NoEncoder(NothingFits):
    """The encoder cannot be run by itself, by the product either."""


class MadeUpProcessor:
    """What the product asks of a ``Processor``. The size of a medium is told by its first bytes."""

    mark = "<medium>"
    fingerprint = "made up"
    rate = 8000

    def __init__(self, model: Any, sense: Sense) -> None:
        """Raises NothingFits."""
        self.sense = sense
        self._model = model
        self._encode, self._encode_takes = _encoder(model, sense)
        self.placeholder = _placeholder(model.config, sense)
        self._around = _marks(model.config, sense)
        self._recipes = [self._fitting(size) for size in range(SIZES)]

    @property
    def added(self) -> frozenset[int]:
        return frozenset({self.placeholder})

    def process(self, data: Sequence[bytes]) -> Processed:
        """Inputs, and ids: placeholders between what the model knows the ends of a medium by."""
        made = [self._make(one) for one in data]
        begin, end = self._around
        ids = [token for _, rows in made for token in (*begin, *[self.placeholder] * rows, *end)]
        return Processed("".join(map(str, ids)), ids, join([inputs for inputs, _ in made]))

    def _make(self, data: bytes) -> tuple[dict[str, Any], int]:
        number, rows = self._recipes[size_of(data)]
        return self._inputs(size_of(data), number, data), rows

    def _inputs(self, size: int, number: int, data: bytes) -> dict[str, Any]:
        seed = int.from_bytes(hashlib.sha256(data).digest()[:4], "little")
        generator = torch.Generator().manual_seed(seed)
        shapes = pictures if self.sense is PICTURES else sounds
        for at, inputs in enumerate(shapes(self._model, self._encode_takes, size, generator)):
            if at == number:
                return inputs
        raise NothingFits("no further shape")

    @torch.no_grad()
    def _fitting(self, size: int) -> tuple[int, int]:
        """The number of the first shape that the encoder takes and makes enough rows of, and how many."""
        tried: list[str] = []
        few: tuple[int, int] | None = None
        generator = torch.Generator().manual_seed(0)
        shapes = pictures if self.sense is PICTURES else sounds
        for number, inputs in enumerate(shapes(self._model, self._encode_takes, size, generator)):
            given = {name: value for name, value in inputs.items() if name in self._encode_takes}
            try:
                rows = self._encode(**given)
            except Exception as error:
                tried.append(f"{type(error).__name__}: {' '.join(str(error).split())[:90]}")
                continue
            if rows >= LEAST:
                return number, rows
            few = few or ((number, rows) if rows else None)
        if few is not None:
            return few
        raise NothingFits("; ".join(dict.fromkeys(tried)) or "no shape is known for its arguments")


def medium(size: int, seed: int) -> bytes:
    """Bytes of a made-up medium: ``size`` is 0, 1 or 2."""
    return struct.pack(">BL", size, seed)


def size_of(data: bytes) -> int:
    """The size of a made-up medium, or of a PNG or a WAV that the product itself has made up."""
    if data[:4] == b"\x89PNG":
        return {64: 0, 48: 1}.get(int.from_bytes(data[16:20], "big"), 2)
    if data[:4] == b"RIFF":
        return 0 if len(data) > 15_000 else 1
    return data[0]


def join(made: list[dict[str, Any]]) -> dict[str, Any]:
    """The inputs of several media as one batch, smaller pictures padded."""
    joined: dict[str, Any] = {}
    if "image_token_pooling" in made[0]:  # has numbers of patches, among those of all pictures
        made, patches = [dict(one) for one in made], 0
        for one in made:
            one["image_token_pooling"] = one["image_token_pooling"] + patches
            patches += one["pixel_values"].shape[0] * one["pixel_values"].shape[1]
    if len(made) > 1 and "audio_input_features" in made[0]:  # of one sound there is no mask
        lengths = torch.tensor([one["audio_input_features"].shape[1] for one in made])
        joined["audio_attention_mask"] = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    for name in dict.fromkeys(name for one in made for name in one):
        first, *others = (one[name] for one in made if name in one)
        values = [first, *others]
        if name == "pixel_values" and "target_sizes" in made[0]:
            joined[name] = torch.cat(values, -1)
        elif isinstance(first, torch.Tensor):
            if first.dim() >= 2 and len({value.shape[1:] for value in values}) > 1:
                largest = [max(value.shape[axis] for value in values) for axis in range(1, first.dim())]
                values = [_padded(value, largest) for value in values]
            joined[name] = torch.cat(values)
        else:
            joined[name] = [item for value in values for item in value] if isinstance(first, list) else first
    return joined


def _padded(value: torch.Tensor, largest: list[int]) -> torch.Tensor:
    missing = [size - have for size, have in zip(largest, value.shape[1:], strict=True)]
    return torch.nn.functional.pad(value, [end for size in reversed(missing) for end in (0, size)])


def _placeholder(config: Any, sense: Sense) -> int:
    ear = "vision_config" if sense is PICTURES else "audio_config"
    for part in (config, getattr(config, "thinker_config", config), config.get_text_config(), getattr(config, ear, 0)):
        for name in _NAMES[sense.kind]:
            value = getattr(part, name, None)
            if isinstance(value, int) and value >= 0:
                return value
    words = getattr(config, "vocabulary_map", None) or {}
    if "<image>" in words:
        return int(words["<image>"])
    raise NothingFits(f"its config names no token for {sense.noun}s")


def _marks(config: Any, sense: Sense) -> tuple[list[int], list[int]]:
    begin, end = (getattr(config, name, None) for name in _AROUND[sense.kind])
    if isinstance(begin, int) and isinstance(end, int) and 0 <= begin < 256 > end >= 0:
        return [begin], [end]
    return [], []


def _encoder(model: Any, sense: Sense) -> tuple[Callable[..., int], dict[str, Any]]:
    """A function that counts the rows that the encoder makes, and the names of arguments that it knows."""
    accepts = inspect.signature(model.forward).parameters
    inside = (getattr(model, "model", None), model, getattr(model, "base_model", None), getattr(model, "thinker", None))
    pairs = [(owner, method) for owner in inside for method in _ENCODE[sense.kind] if hasattr(type(owner), method)]
    if pairs:
        encode = getattr(*pairs[0])
        takes = inspect.signature(encode).parameters
        more = {"return_dict": True} if "kwargs" in takes or "return_dict" in takes else {}
        return (lambda **given: sum(len(part) for part in _rows(encode(**given, **more)))), dict(takes)
    tower = next((found for one in inside if (found := getattr(one, "audio_tower", None)) is not None), None)
    if sense is SOUNDS and tower is not None:
        return (lambda **given: _heard(tower, **given)), dict(accepts)
    if "image_pixel_values" in accepts:  # its processors tell how many rows it makes
        return (lambda **given: int(given[COUNTED[sense.kind]][0])), {**accepts, COUNTED[sense.kind]: None}
    raise NoEncoder("its encoder cannot be run by itself")


def _rows(out: Any) -> Iterator[torch.Tensor]:
    rows = next((out[name] for name in ("pooler_output", "last_hidden_state") if out.get(name) is not None), None)
    if rows is None:  # all of it is added behind layers: as many rows behind each
        _, rows = out["deepstack_features"][0]
    for part in [rows] if isinstance(rows, torch.Tensor) else rows:
        yield part.reshape(-1, part.shape[-1])


def _heard(tower: Any, input_features: Any, feature_attention_mask: Any, **_: Any) -> int:
    """Rows of a sound where the forward itself counts them."""
    tower(input_features)
    _, counts = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    return int(counts.sum())
