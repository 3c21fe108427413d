"""What a report shows of flows over images: data beside samples, and how well images come back."""

from __future__ import annotations

__all__ = ["GRID_IMAGES", "image_pictures", "reconstructions"]

import base64
from collections.abc import Sequence

import torch
from torch import Tensor

from ciflows.dequantise import Dequantise
from ciflows.diagnostics import reconstruction_error
from ciflows.errors import InversionError
from ciflows.flow import Flow
from ciflows.images import image_grid, png
from ciflows.report.grids import Entry, on_device
from ciflows.report.pictures import Picture
from ciflows.report.tables import NOTHING, Table, set_number

GRID_IMAGES = 36
WIDTH = 300
ROUND_TRIPS = 16


def image_pictures(entries: Sequence[Entry], drawn: Sequence[Tensor]) -> list[Picture]:
    """Test images and each model's samples (n, C, H, W), as grids."""
    named = [("data", entries[0].dataset.test[:GRID_IMAGES], "test images")]
    named += [(e.name, images, "samples") for e, images in zip(entries, drawn, strict=True)]
    levels = _levels(entries[0].flow)
    return [
        _picture(image_grid(torch.nan_to_num(images.float()), levels), name, f"{len(images)} {what}")
        for name, images, what in named
    ]


def reconstructions(entries: Sequence[Entry], seed: int) -> Table:
    """The round-trip error of each model over images."""
    table = Table(("model", "largest error, in levels of a pixel"), [])
    for entry in entries:
        x = on_device(entry.dataset.test[:ROUND_TRIPS], entry.flow)
        try:
            error = set_number(reconstruction_error(entry.flow, x, seed), "{:.1e}")
        except InversionError:
            error = NOTHING
        table.rows.append((entry.name, error))
    return table


def _levels(flow: Flow) -> int:
    return next((layer.levels for layer in flow.layers if isinstance(layer, Dequantise)), 256)


def _picture(grid: Tensor, caption: str, note: str) -> Picture:
    address = "data:image/png;base64," + base64.b64encode(png(grid)).decode()
    height = round(WIDTH * grid.shape[1] / grid.shape[2])
    return Picture(address, address, f"Grid of {note}: {caption}", caption, note, WIDTH, height)
