"""Shapes in which encoders take pictures, by the names of their arguments; the first that an encoder takes is used."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

_GRIDS = ((4, 4), (4, 8), (8, 8))  # patches of a picture of each size

Inputs = dict[str, Any]


def pictures(model: Any, takes: Any, size: int, generator: torch.Generator) -> Iterator[Inputs]:
    """Candidates for a picture of a size (0, 1, 2), most particular first. ``takes``: the encoder's arguments."""
    names = {*takes, *inspect.signature(model.forward).parameters}
    shape = _Shape(model.config, generator)
    if "image_pixel_values" in names:
        yield _crops(shape, size)
        return
    if "image_grid_thw" in names or "image_grid_hw" in names:
        yield from _patches(shape, names, size)
    if "spatial_shapes" in names:
        yield _padded_patches(shape, size)
    if "target_sizes" in names:
        yield from _strips(shape, size)
    if "image_position_ids" in names:
        yield from _placed_patches(shape)
    if "image_token_pooling" in names:
        yield from _pooled(shape)
    if "high_res_pixel_values" in names:
        yield {"pixel_values": shape.noise(1, 3, shape.size, shape.size), "high_res_pixel_values": shape.fine()}
    if "num_local_patches" in names:
        yield from _tiles(shape, size)
    if "image_sizes" in takes:
        yield from _sized(shape, size)
    if "pixel_attention_mask" in names:
        yield from _masked(shape)
    if "qformer_input_ids" in names:
        yield {
            "pixel_values": shape.noise(1, 3, shape.size, shape.size),
            "qformer_input_ids": torch.tensor([[5, 6, 7]]),
            "qformer_attention_mask": torch.ones(1, 3, dtype=torch.long),
        }
    patch = shape.patch
    for pixels in dict.fromkeys((shape.size, 2 * patch, 4 * patch, 2 * shape.size, 8 * patch, 224, 64, 448)):
        for name in ("pixel_values", "pixel_values_images"):
            if name in names:
                yield {name: shape.noise(1, 3, pixels, pixels)}
                yield {name: shape.noise(1, 1, 3, pixels, pixels)}
    if "image_patches" in names:
        yield {"image_patches": shape.noise(1, 4, shape.channels * patch * patch)}
    yield {"pixel_values": shape.noise(1, 4, shape.channels * patch * patch)}
    yield {"pixel_values": shape.noise(4 + 2 * size, shape.frames, patch, patch, shape.channels)}


class _Shape:
    """What a config says of its pictures."""

    def __init__(self, config: Any, generator: torch.Generator) -> None:
        eye = getattr(config, "vision_config", None) or getattr(config, "vq_config", None) or config
        inner = [getattr(eye, name) for name in getattr(eye, "sub_configs", None) or {}]
        self.configs = [eye, config, *(one for one in inner if one is not None)]
        self.config, self._generator = config, generator
        self.patch = self.first("patch_size", default=14)
        self.size = self.first("image_size", default=28)
        self.channels = self.first("num_channels", "in_channels", "in_chans", default=3)
        self.frames = self.first("temporal_patch_size", default=1)
        self.merge = self.first("spatial_merge_size", "merge_size", default=2)

    def first(self, *names: str, default: int) -> int:
        for config in self.configs:
            for name in names:
                value = getattr(config, name, None)
                value = value[0] if isinstance(value, list | tuple) and value else value
                if isinstance(value, int) and value > 0:
                    return value
        return default

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * 0.5

    def fine(self) -> torch.Tensor:
        """The same picture for a second encoder, in more pixels."""
        size = getattr(getattr(self.config, "high_res_vision_config", None), "image_size", self.size)
        return self.noise(1, 3, size, size)


def _patches(shape: _Shape, names: set[str], size: int) -> Iterator[Inputs]:
    """All patches of a picture as rows, and how many there are in each direction."""
    merged = [(high * shape.merge // 2, wide * shape.merge // 2) for high, wide in _GRIDS]
    area = shape.channels * shape.patch * shape.patch
    for high, wide in dict.fromkeys((_GRIDS[size], merged[size])):
        more: Inputs = {}
        if "image_merge_sizes" in names or "merge_sizes" in names:
            more["image_merge_sizes"] = torch.tensor([shape.merge])
        grid = {"image_grid_thw": torch.tensor([[1, high, wide]])}
        if "image_grid_thw" not in names:
            grid = {"image_grid_hw": torch.tensor([[high, wide]])}
        for width in dict.fromkeys((area * shape.frames, area, 2 * area)):
            yield {"pixel_values": shape.noise(high * wide, width), **grid, **more}
        square = (shape.patch, shape.patch)
        for row in (
            (shape.channels, *square),
            (shape.channels, shape.frames, *square),
            (shape.frames, shape.channels, *square),
        ):
            yield {"pixel_values": shape.noise(high * wide, *row), **grid, **more}
    side = shape.merge * shape.patch  # of the pixels of a row
    yield {"pixel_values": shape.noise(_GRIDS[size][0] * _GRIDS[size][1], side, side, shape.channels), **grid}


def _padded_patches(shape: _Shape, size: int) -> Inputs:
    high, wide = _GRIDS[size]
    mask = torch.zeros(1, 64, dtype=torch.long)
    mask[:, : high * wide] = 1
    return {
        "pixel_values": shape.noise(1, 64, shape.channels * shape.patch**2),
        "spatial_shapes": torch.tensor([[high, wide]]),
        "pixel_attention_mask": mask,
    }


def _strips(shape: _Shape, size: int) -> Iterator[Inputs]:
    """All patches side by side."""
    for high, wide in (_GRIDS[size], ((8, 8), (8, 16), (16, 16))[size]):
        yield {
            "pixel_values": shape.noise(1, shape.channels, shape.patch, high * wide * shape.patch),
            "target_sizes": torch.tensor([[high, wide]], dtype=torch.int32),
        }


def _placed_patches(shape: _Shape) -> Iterator[Inputs]:
    kernel = shape.first("pooling_kernel_size", default=3)
    side, area = 2 * kernel, shape.channels * shape.patch**2
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1)
    for width in dict.fromkeys((area, area * kernel**2, shape.first("patch_dim", default=1))):
        yield {"pixel_values": shape.noise(1, side * side, width), "image_position_ids": places.reshape(1, -1, 2)}


def _pooled(shape: _Shape) -> Iterator[Inputs]:
    """Patches, and which of them make a row."""
    area = shape.channels * shape.patch**2
    count = (shape.size // shape.patch) ** 2
    for patches in dict.fromkeys((count, 729, 512)):
        rows = patches // 4
        pooling = torch.arange(rows * 4).reshape(rows, 4)
        for one in (pooling, pooling[None]):
            yield {
                "pixel_values": shape.noise(1, patches, area),
                "image_token_pooling": one,
                "image_grids": torch.tensor([[1, rows, 0, 0]]),
                "image_num_crops": torch.tensor([1]),
            }


def _tiles(shape: _Shape, size: int) -> Iterator[Inputs]:
    """A picture as a whole, and in as many tiles as its size."""
    one: Inputs = {"pixel_values": shape.noise(1, 3, shape.size, shape.size), "num_local_patches": [size]}
    if size:
        one["pixel_values_local"] = shape.noise(size, 3, shape.size, shape.size)
    yield {**one, "patches_grid": [[1, size]]}


def _crops(shape: _Shape, size: int) -> Inputs:
    """A picture as a whole and in crops, of which the last is not full; a row at the end of each line of rows."""
    high, wide = ((1, 1), (1, 2), (2, 2))[size]
    patches = shape.size // shape.patch
    mask = torch.ones(1, 1 + high * wide, patches, patches)
    mask[:, wide::wide, :, -2:] = 0
    side = patches // 2
    rows = high * side * wide * side + 1 + side * (side + 1)  # a column is not there, and each line has an end
    return {
        "image_pixel_values": shape.noise(1, 1 + high * wide, 3, shape.size, shape.size),
        "image_sizes": torch.tensor([[high * shape.size, wide * shape.size]]),
        "image_attention_mask": mask,
        "num_img_tokens": [rows],
    }


def _sized(shape: _Shape, size: int) -> Iterator[Inputs]:
    """Tiles with the size of the whole picture, or a picture of that size."""
    pixels = ((shape.size, 2 * shape.size), (2 * shape.size, shape.size), (2 * shape.size, 2 * shape.size))[size]
    tiles = 5 if size == 2 else 3
    yield {"pixel_values": shape.noise(1, tiles, 3, shape.size, shape.size), "image_sizes": torch.tensor([pixels])}
    high, wide = ((2, 2), (2, 4), (4, 4))[size]
    step = shape.patch * shape.first("spatial_merge_size", default=1)
    whole = (high * step, wide * step)
    yield {"pixel_values": shape.noise(1, 3, *whole), "image_sizes": torch.tensor([whole])}
    yield {
        "pixel_values": shape.noise(1, 3, shape.size, shape.size),
        "image_sizes": torch.tensor([[shape.size, shape.size]]),
    }


def _masked(shape: _Shape) -> Iterator[Inputs]:
    whole = shape.noise(1, 1, 3, shape.size, shape.size)
    yield {"pixel_values": whole}
    yield {"pixel_values": whole, "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)}
    yield {
        "pixel_values": whole,
        "pixel_attention_mask": torch.ones(1, 1, shape.size, shape.size, dtype=torch.bool),
    }
    yield {"pixel_values": shape.noise(1, 1, 3, 4 * shape.patch, 4 * shape.patch)}
