"""Bits per dimension, and grids of images as PNG files."""

from __future__ import annotations

__all__ = ["bits_per_dim", "image_grid", "png"]

import io
import math
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Number = TypeVar("Number", float, Tensor)
BORDER = 1
GROUND = 128  # grey between images, which are often black or white
LONGEST = 600


def bits_per_dim(log_prob: Number, size: int) -> Number:
    """Bits per dimension, -log2 p(x) / size, from log p(x) in nats."""
    return -log_prob / (size * math.log(2))


def image_grid(images: Tensor, levels: int = 256) -> Tensor:
    """Arrange images (n, C, H, W) with values 0, ..., levels - 1 in a grid: bytes (C, height, width).

    Values outside are clamped. Images with other than one or three channels show their first one.

    Example:
        >>> image_grid(torch.zeros(6, 1, 4, 4)).shape
        torch.Size([1, 11, 16])
    """
    images = images if images.shape[1] in (1, 3) else images[:, :1]
    pixels = images.float().clamp(0, levels - 1) * (255 / (levels - 1))
    pixels = F.pad(pixels.round(), (BORDER, 0, BORDER, 0), value=GROUND)
    columns = math.ceil(math.sqrt(len(pixels)))
    rows = math.ceil(len(pixels) / columns)
    empty = pixels.new_full((rows * columns - len(pixels), *pixels.shape[1:]), GROUND)
    cells = torch.cat([pixels, empty]).unflatten(0, (rows, columns))
    grid = cells.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    return F.pad(grid, (0, BORDER, 0, BORDER), value=GROUND).to(torch.uint8).cpu()


def png(grid: Tensor) -> bytes:
    """Encode bytes (C, height, width) as a PNG file; a small picture is enlarged by a whole factor."""
    from PIL import Image

    factor = max(1, LONGEST // max(grid.shape[1:]))
    pixels = grid.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    array = pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(array).save(file, format="PNG")
    return file.getvalue()
