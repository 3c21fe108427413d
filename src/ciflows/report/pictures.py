"""Blocks of pictures: densities and samples in the plane, images, training, and the number of draws."""

from __future__ import annotations

__all__ = ["density_blocks", "draws_picture", "images_block", "samples_block", "training_block"]

import math
from collections.abc import Sequence
from functools import partial

import matplotlib
import torch
from matplotlib.colors import to_hex
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ciflows.core.flow import Flow
from ciflows.diagnostics import draws_curve
from ciflows.files import parse_toml
from ciflows.layers import Residual, Series
from ciflows.layers.dequantise import Dequantise
from ciflows.pixels import image_grid, png
from ciflows.report.grids import FEWEST_DRAWS, DensityGrid, Entry, find_window, shared_top, true_grid
from ciflows.report.page import Block, Picture, Scale, make_picture, png_address, set_number
from ciflows.report.plots import (
    CHART,
    COLOURS,
    LOG_DECADES,
    PANEL,
    draw_density,
    draw_draws,
    draw_history,
    draw_samples,
)

CURVE_POINTS = 250
CURVE_COUNTS = (1, 2, 5, 10, 20, 50, 100)
IMAGE_CURVE_POINTS, IMAGE_CURVE_COUNTS = 10, CURVE_COUNTS[:5]
GRID_IMAGES, IMAGE_WIDTH = 36, 300


def density_blocks(entries: Sequence[Entry], grids: Sequence[DensityGrid]) -> list[Block]:
    """The true density, if it is known, and each model's, on a plain and on a logarithmic scale."""
    dataset = entries[0].dataset
    truth = None if dataset.truth is None else true_grid(dataset.truth)
    named = [] if truth is None else [("truth", truth)]
    named += [(entry.name, grid) for entry, grid in zip(entries, grids, strict=True)]
    top, draws = shared_top(grid for _, grid in named), max(grid.samples for grid in grids)
    x, y = dataset.columns
    plain = f"Brighter is denser. {x} runs to the right, {y} upward; black dots are test points."
    log = "On a logarithmic scale you see thin mass between and around the data."
    if draws > 1:
        plain += (
            f" If a model is not exact, a cell averages {draws} draws near the model's samples and "
            f"{FEWEST_DRAWS} elsewhere."
        )
        log += (
            " Far from the data, single bright cells are noise: few draws find the little mass there. "
            "Samples do not have this noise."
        )
    dots = dataset.test.double().cpu()
    return [
        Block("Densities", plain, _maps(named, top, False, dots), _scale(top, False)),
        Block("Log-densities", log, _maps(named, top, True, None), _scale(top, True)),
    ]


def _maps(
    named: Sequence[tuple[str, DensityGrid]], top: float, log: bool, dots: Tensor | None
) -> list[Picture]:
    kind = "log density" if log else "density"
    pictures = []
    for name, grid in named:
        draw = partial(draw_density, grid=grid, top=top, log=log, dots=dots)
        note = "" if log else f"mass in the window: {set_number(grid.mass, '{:.3f}')}"
        pictures.append(make_picture(draw, PANEL, f"Heat map of the {kind}: {name}", name, note))
    return pictures


def samples_block(entries: Sequence[Entry], drawn: Sequence[Tensor]) -> Block:
    """The data and each model's samples (n, 2), with those outside the support counted."""
    dataset = entries[0].dataset
    contains = None if dataset.truth is None else dataset.truth.contains
    names = ["data", *(entry.name for entry in entries)]
    pictures = []
    for name, codes in zip(names, [dataset.test[: len(drawn[0])], *drawn], strict=True):
        points = codes.double().cpu()
        inside = None if contains is None else contains(points)
        note = f"{len(points):,} points"
        note = note if inside is None else f"{int((~inside).sum()):,} of {note} leaked"
        draw = partial(draw_samples, points=points, inside=inside, window=find_window(dataset))
        pictures.append(make_picture(draw, PANEL, f"Scatter plot of {name}: {note}", name, note))
    leak = "" if contains is None else " Orange points lie outside the support of the data: leaked mass."
    return Block("Samples", f"Points that each model draws, beside data.{leak}", pictures)


def images_block(entries: Sequence[Entry], seed: int) -> Block:
    """Test images and each model's samples, as grids."""
    named = [("data", entries[0].dataset.test[:GRID_IMAGES], "test images")]
    named += [(e.name, e.flow.sample(GRID_IMAGES, seed=seed).cpu(), "samples") for e in entries]
    levels = _levels(entries[0].flow)
    pictures = []
    for name, images, what in named:
        grid = image_grid(torch.nan_to_num(images.float()), levels)
        address, note = png_address(png(grid)), f"{len(images)} {what}"
        height = round(IMAGE_WIDTH * grid.shape[1] / grid.shape[2])
        alt = f"Grid of {note}: {name}"
        pictures.append(Picture(address, address, alt, name, note, IMAGE_WIDTH, height))
    words = "Images that each model draws, beside test images. Values are clipped to those of a pixel."
    return Block("Samples", words, pictures)


def training_block(entries: Sequence[Entry]) -> Block:
    """Training loss and validation log-likelihood against the step."""
    limit = entries[0].metrics.get("limit")
    curves = {
        "loss": ("Training loss", _loss_words(entries), None),
        "validation": (
            "Validation log-likelihood",
            "Validation log-likelihood: higher is better. The best weights are kept.",
            limit,
        ),
    }
    pictures = []
    for key, (alt, caption, line) in curves.items():
        if any(row.get(key) is not None for entry in entries for row in entry.history):
            draw = partial(draw_history, entries=entries, key=key, limit=line)
            pictures.append(make_picture(draw, CHART, f"{alt} against the step", "", caption))
    return Block("Training", pictures=pictures)


def draws_picture(entries: Sequence[Entry], seed: int) -> list[Picture]:
    """log p against m; none if every model is exact, or if power series make it too slow."""
    if all(entry.flow.exact for entry in entries) or any(_has_series(entry) for entry in entries):
        return []
    images = entries[0].dataset.images
    most, counts = (IMAGE_CURVE_POINTS, IMAGE_CURVE_COUNTS) if images else (CURVE_POINTS, CURVE_COUNTS)
    points = min(most, len(entries[0].dataset.test))
    curves = [
        draws_curve(e.flow, rows.x, counts, rows.context, seed)
        for e in entries
        for rows in [e.dataset.rows("test")[:points].on(e.flow)]
    ]
    draw = partial(draw_draws, names=[entry.name for entry in entries], curves=curves)
    caption = (
        f"Log-likelihood of {points} test points against the number of draws m. Bars: two Monte-Carlo "
        "standard errors; band: one standard error over points. Once the curve is level, more draws "
        "change nothing."
    )
    return [make_picture(draw, CHART, "Log-likelihood against the number of draws", "", caption)]


# -- inside ------------------------------------------------------------------------------------------


def _has_series(entry: Entry) -> bool:
    blocks = [block for block in entry.flow.modules() if isinstance(block, Residual)]
    return any(isinstance(block.log_det, Series) for block in blocks)


def _levels(flow: Flow) -> int:
    return next((layer.levels for layer in flow.layers if isinstance(layer, Dequantise)), 256)


def _scale(top: float, log: bool) -> Scale:
    """Ticks at round numbers, or at every decade."""
    colours = [to_hex(matplotlib.colormaps[COLOURS](i / 20)) for i in range(21)]
    if log:
        first = math.log10(top) - LOG_DECADES
        powers = range(math.ceil(first), math.ceil(first) + LOG_DECADES)
        places = [(100 * (power - first) / LOG_DECADES, 10.0**power) for power in powers]
        label = f"density, log scale; darkest: below {_short(10**first)}, brightest: above {_short(top)}"
    else:
        values = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, top)
        places = [(100 * value / top, value) for value in values if 0 <= value <= top]
        label = f"density; brightest: above {_short(top)}"
    return Scale(label, colours, [(round(float(place), 2), _short(value)) for place, value in places])


def _short(value: float) -> str:
    return set_number(float(value), "{:.2g}")


def _loss_words(entries: Sequence[Entry]) -> str:
    """What the loss is: not the same for a plain flow and for one with an index."""
    kinds = [_objective(entry) for entry in entries]
    words = "Training loss, lower is better: minus "
    if len(set(kinds)) == 1:
        return f"{words}{kinds[0]}."
    named = "; ".join(f"{kind} for {entry.name}" for kind, entry in zip(kinds, entries, strict=True))
    return f"{words}{named}. These differ: compare models by their validation instead."


def _objective(entry: Entry) -> str:
    if entry.flow.exact:
        return "the exact log-likelihood"
    settings = parse_toml(entry.config, entry.name).get("training", {})
    if settings.get("objective") == "elbo":
        return "a lower bound from one draw (the ELBO)"
    if "draws" not in settings:
        return "a lower bound from a few draws"
    return f"a lower bound from {settings['draws']} draws ({settings.get('objective')})"
