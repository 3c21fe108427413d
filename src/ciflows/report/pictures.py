"""The report's pictures with their words, drawn for both themes; and the colour scales beside them."""

from __future__ import annotations

__all__ = ["Picture", "Scale", "densities", "draws", "make_picture", "marginals", "samples", "training"]

import base64
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ciflows.bijections import Residual, Series
from ciflows.data.tables import own_names
from ciflows.diagnostics import draws_curve
from ciflows.files import parse_toml
from ciflows.report.grids import DensityGrid, Entry, find_window, in_values, shared_top, true_grid
from ciflows.report.plots import (
    CHART,
    COLOURS,
    DARK,
    LIGHT,
    LOG_DECADES,
    PANEL,
    Draw,
    Theme,
    draw_density,
    draw_draws,
    draw_history,
    draw_marginal,
    draw_panel,
    draw_samples,
)
from ciflows.report.tables import set_number

CURVE_POINTS = 250
CURVE_COUNTS = (1, 2, 5, 10, 20, 50, 100)
IMAGE_CURVE_POINTS, IMAGE_CURVE_COUNTS = 10, CURVE_COUNTS[:5]
MOST_MARGINALS = 12


class Picture(NamedTuple):
    """A panel in both themes, as data addresses; sizes in CSS pixels."""

    light: str
    dark: str
    alt: str
    caption: str
    note: str
    width: int
    height: int


class Scale(NamedTuple):
    """A colour scale for a row of panels, drawn by the page itself.

    Attributes:
        label: What it measures.
        colours: Evenly spaced colours from its lower to its upper end.
        ticks: Where on it, in per cent, stands which number.
    """

    label: str
    colours: list[str]
    ticks: list[tuple[float, str]]


def densities(
    entries: Sequence[Entry], grids: Sequence[DensityGrid], log: bool
) -> tuple[list[Picture], Scale]:
    """The true density, where it is known, and each model's, on one scale; and the scale."""
    dataset = entries[0].dataset
    truth = None if dataset.truth is None else true_grid(dataset.truth)
    top = shared_top(grids if truth is None else [truth, *grids])
    dots = None if log else in_values(dataset, dataset.test)
    kind = "log density" if log else "density"
    named = [(entry.name, grid, _mass(grid)) for entry, grid in zip(entries, grids, strict=True)]
    if truth is not None:
        named.insert(0, ("truth", truth, _mass(truth)))
    pictures = [
        make_picture(
            _plain(partial(draw_density, grid=grid, top=top, log=log, dots=dots)),
            PANEL,
            f"Heat map of the {kind}: {name}",
            name,
            "" if log else note,
        )
        for name, grid, note in named
    ]
    return pictures, _scale(top, log)


def samples(entries: Sequence[Entry], drawn: Sequence[Tensor]) -> list[Picture]:
    """The data and each model's samples (n, 2), with those outside the support counted."""
    dataset = entries[0].dataset
    contains = None if dataset.truth is None else dataset.truth.contains
    window = find_window(dataset)
    pictures = []
    names = ["data", *(entry.name for entry in entries)]
    for name, codes in zip(names, [dataset.test[: len(drawn[0])], *drawn], strict=True):
        points = in_values(dataset, codes)
        inside = None if contains is None else contains(points)
        out = None if inside is None else int((~inside).sum())
        note = f"{len(points):,} points" if out is None else f"{out:,} of {len(points):,} outside"
        draw = partial(draw_samples, points=points, inside=inside, window=window)
        pictures.append(make_picture(draw, PANEL, f"Scatter plot of {name}: {note}", name, note))
    return pictures


def marginals(entries: Sequence[Entry], drawn: Sequence[Tensor]) -> list[Picture]:
    """Histograms of the first features."""
    dataset = entries[0].dataset
    data, models = dataset.test.flatten(1), [points.flatten(1) for points in drawn]
    columns = [*dataset.columns, *own_names(data.shape[1])][: data.shape[1]]
    pictures = []
    for index, column in enumerate(columns[:MOST_MARGINALS]):
        of_column = [(e.name, x[:, index]) for e, x in zip(entries, models, strict=True)]
        draw = partial(draw_marginal, column=column, data=data[:, index], samples=of_column)
        pictures.append(make_picture(draw, PANEL, f"Histograms of {column}, data and samples"))
    return pictures


def training(entries: Sequence[Entry]) -> list[Picture]:
    """Training loss and validation log-likelihood against the step."""
    limit = entries[0].metrics.get("limit")
    loss = partial(draw_history, entries=entries, key="loss")
    validation = partial(draw_history, entries=entries, key="validation", limit=limit)
    pictures = []
    if any(row.get("loss") is not None for entry in entries for row in entry.history):
        pictures.append(
            make_picture(loss, CHART, "Training loss against the step", _loss_words(entries))
        )
    if any(row.get("validation") is not None for entry in entries for row in entry.history):
        caption = "Validation log-likelihood: higher is better. The best weights are kept."
        alt = "Validation log-likelihood against the step"
        pictures.append(make_picture(validation, CHART, alt, caption))
    return pictures


def draws(entries: Sequence[Entry], seed: int) -> list[Picture]:
    """log_prob against m; nothing to see where every model is exact, and too dear for power series."""
    if all(entry.flow.exact for entry in entries) or any(_has_series(entry) for entry in entries):
        return []
    images = entries[0].dataset.images
    most, counts = (IMAGE_CURVE_POINTS, IMAGE_CURVE_COUNTS) if images else (CURVE_POINTS, CURVE_COUNTS)
    points = min(most, len(entries[0].dataset.test))
    curves = [
        draws_curve(e.flow, rows.x, counts, rows.context, seed)
        for e in entries
        for rows in [e.dataset.rows("test")[:points].to(e.flow.device, e.flow.dtype)]
    ]
    draw = partial(draw_draws, names=[entry.name for entry in entries], curves=curves)
    caption = f"Log-likelihood of the first {points} test points against the number of draws m."
    return [make_picture(draw, CHART, "Log-likelihood against the number of draws", caption)]


# -- inside ------------------------------------------------------------------------------------------


def _has_series(entry: Entry) -> bool:
    blocks = [block for block in entry.flow.modules() if isinstance(block, Residual)]
    return any(isinstance(block.log_det, Series) for block in blocks)


def _mass(grid: DensityGrid) -> str:
    return f"mass in the window: {set_number(grid.mass, '{:.3f}')}"


def _scale(top: float, log: bool) -> Scale:
    """Ticks at round numbers, or at every decade."""
    colours = [to_hex(matplotlib.colormaps[COLOURS](i / 20)) for i in range(21)]
    if log:
        first = math.log10(top) - LOG_DECADES
        powers = range(math.ceil(first), math.ceil(first) + LOG_DECADES)
        places = [(100 * (power - first) / LOG_DECADES, 10.0**power) for power in powers]
        label = f"density on a log scale; the darkest colour stands for all below {_short(10**first)}, "
        label += f"the brightest for all above {_short(top)}"
    else:
        values = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, top)
        places = [(100 * value / top, value) for value in values if 0 <= value <= top]
        label = f"density; the brightest colour stands for all above {_short(top)}"
    return Scale(label, colours, [(round(float(place), 2), _short(value)) for place, value in places])


def _short(value: float) -> str:
    return set_number(float(value), "{:.2g}")


def _loss_words(entries: Sequence[Entry]) -> str:
    """What the loss is: not the same thing for a plain flow and for one with an index."""
    kinds = [_objective(entry) for entry in entries]
    words = "Training loss, lower is better: the negative of "
    if len(set(kinds)) == 1:
        return f"{words}{kinds[0]}."
    named = "; ".join(f"{kind} for {entry.name}" for kind, entry in zip(kinds, entries, strict=True))
    return f"{words}{named}. Different quantities: compare models by their validation, not here."


def _objective(entry: Entry) -> str:
    if entry.flow.exact:
        return "the exact log-likelihood"
    settings = parse_toml(entry.config, entry.name).get("training", {})
    if settings.get("objective") == "elbo":
        return "a lower bound from one draw (the ELBO)"
    if "draws" not in settings:
        return "a lower bound from a few draws"
    return f"a lower bound from {settings['draws']} draws ({settings.get('objective')})"


def _plain(draw: Callable[[Axes], None]) -> Draw:
    """A panel that looks the same in every theme but for its frame."""

    def themed(axes: Axes, theme: Theme) -> None:
        draw(axes)

    return themed


def make_picture(
    draw: Draw, size: tuple[float, float], alt: str, caption: str = "", note: str = ""
) -> Picture:
    """A panel of a size in inches, drawn in both themes."""
    light, dark = (
        "data:image/png;base64," + base64.b64encode(draw_panel(draw, theme, size)).decode()
        for theme in (LIGHT, DARK)
    )
    return Picture(light, dark, alt, caption, note, int(100 * size[0]), int(100 * size[1]))
