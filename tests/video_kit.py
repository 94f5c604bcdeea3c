"""Videos for tests, and stand-ins for parts of processors that need torchvision."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

from scheduler.media import processor_reader

PATCH, MERGE, TEMPORAL = 7, 2, 2  # as the tiny models have them
SIDE = PATCH * MERGE


def film(frames: int = 4, width: int = 48, height: int = 64, format: str = "GIF", **options: Any) -> bytes:
    """An animation of random pixels."""
    from PIL import Image

    noise = np.random.default_rng((frames, width)).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    first, *others = (Image.fromarray(one) for one in noise)
    target = io.BytesIO()
    first.save(target, format, save_all=True, append_images=others, **{"duration": 250, **options})
    return target.getvalue()


class VideoPatches(dict[str, Any]):
    """In the place of transformers' own, which need torchvision; the arguments of the model are in the same form."""

    merge_size = MERGE
    temporal_patch_size = TEMPORAL

    def __call__(self, videos: Any, **options: Any) -> dict[str, Any]:
        made = [self._patches(frames) for frames in videos]
        grids = torch.tensor([grid for _, grid in made])
        return {"pixel_values_videos": torch.cat([patches for patches, _ in made]), "video_grid_thw": grids}

    @staticmethod
    def _patches(frames: Any) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """``[t * h * w, 3 * TEMPORAL * PATCH * PATCH]``, and t, h, w."""
        width, height = (max(1, side // SIDE) * SIDE for side in frames[0].size)
        pixels = np.stack([np.asarray(one.resize((width, height)), np.float32) for one in frames]) / 127.5 - 1
        if len(pixels) % TEMPORAL:
            pixels = np.concatenate([pixels, pixels[-1:]])
        grid = (len(pixels) // TEMPORAL, height // PATCH, width // PATCH)
        cut = pixels.transpose(0, 3, 1, 2).reshape(
            grid[0], TEMPORAL, 3, grid[1] // MERGE, MERGE, PATCH, grid[2] // MERGE, MERGE, PATCH
        )
        rows = cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(grid[0] * grid[1] * grid[2], -1)
        return torch.from_numpy(rows.copy()), grid


class PictureCrops(dict[str, Any]):
    """In the place of that of Phi-4 multimodal: each picture as a whole, and in squares side by side."""

    side = 28

    @staticmethod
    def fetch_images(images: Any) -> Any:
        return images

    def __call__(self, images: Any, **options: Any) -> dict[str, Any]:
        most = 1 + max(map(self._wide, images))
        patches, rows = self.side // PATCH, self.side // PATCH // MERGE
        counts = [rows * (rows * self._wide(one) + 1) + 1 + rows * (rows + 1) for one in images]
        return {
            "image_pixel_values": torch.stack([self._crops(one, most) for one in images]),
            "image_sizes": torch.tensor([[self.side, self.side * self._wide(one)] for one in images]),
            "image_attention_mask": torch.ones(len(images), most, patches, patches),
            "num_img_tokens": counts,
        }

    @staticmethod
    def _wide(picture: Any) -> int:
        return max(1, int(picture.width) // int(picture.height))

    def _crops(self, picture: Any, most: int) -> torch.Tensor:
        """``[most, 3, side, side]``, of which some are empty."""
        wide = self._wide(picture)
        made = torch.zeros(most, 3, self.side, self.side)
        for number, width in ((0, self.side), (1, self.side * wide)):
            pixels = np.asarray(picture.resize((width, self.side)), np.float32).transpose(2, 0, 1) / 127.5 - 1
            parts = torch.split(torch.from_numpy(pixels.copy()), self.side, -1)
            made[number : number + len(parts)] = torch.stack(parts)
        return made


class _Watching:
    """In the place of ``AutoProcessor``."""

    @staticmethod
    def from_pretrained(folder: str) -> Any:
        named, _ = transformers.ProcessorMixin.get_processor_dict(folder)
        if named["processor_class"] == "Phi4MultimodalProcessor":
            made = processor_reader._without(("image",), transformers.Phi4MultimodalProcessor).from_pretrained(folder)
            made.image_processor = PictureCrops()
            return made
        made = processor_reader._without(("video",), transformers.Qwen2VLProcessor).from_pretrained(folder)
        made.video_processor = VideoPatches()
        return made


@contextmanager
def watching() -> Iterator[None]:
    """Processors that are read meanwhile take what otherwise needs torchvision."""
    with mock.patch.object(processor_reader, "AutoProcessor", _Watching):
        yield
