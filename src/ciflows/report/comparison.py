"""One picture for some models in the plane: their densities, and below them their samples.

It is Figure 1 of the paper in miniature. Densities show how well the data are fitted; what leaks is too
thin to show on the same scale, so samples tell it. Several data sets get a row each, of densities alone.
"""

from __future__ import annotations

__all__ = ["compare_picture"]

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from ciflows.errors import UserError
from ciflows.files import write_bytes
from ciflows.report.grids import (
    DensityGrid,
    Entry,
    density_grids,
    find_window,
    in_plane,
    shared_top,
    true_grid,
)
from ciflows.report.page import set_error, set_number
from ciflows.report.plots import COLOURS, LIGHT, colour_norm, draw_density, draw_samples, style, to_png

SAMPLES = 10_000  # so many that a bridge of leaked mass is seen as one
SIDE = 2.55  # inches: three panels and a colour scale are 900 pixels at 100 an inch
NAME: Any = {"fontsize": 11, "fontweight": "bold"}
Row = list[tuple[Entry, DensityGrid]]


def compare_picture(
    path: Path,
    entries: Sequence[Entry],
    seed: int = 0,
    grids: Sequence[DensityGrid | None] | None = None,
) -> None:
    """Draw Figure 1: the true density where it is known, each model's, and below them samples.

    Arguments:
        path: The PNG file to write; it gets two rows, or for several data sets one for each.
        grids: What `density_grids` gave for these entries, where it has been called already.
    """
    if not entries or not all(in_plane(entry.dataset) for entry in entries):
        raise UserError("A picture of densities needs runs on data with two features, one at least.")
    rows: dict[str, Row] = {}
    for entry, grid in zip(entries, grids or density_grids(entries, seed), strict=True):
        assert grid is not None
        rows.setdefault(entry.dataset.fingerprint, []).append((entry, grid))
    several = len(rows) > 1
    columns = max(len(row) + (several or _has_truth(row)) for row in rows.values())
    lines = len(rows) if several else 2
    with matplotlib.rc_context(style(LIGHT)):
        size = (SIDE * columns + 1.1, (SIDE + 0.475) * lines)
        figure = Figure(figsize=size, layout="compressed")
        ratios = [*[1] * columns, 0.05]
        axes = figure.subplots(lines, columns + 1, squeeze=False, width_ratios=ratios).tolist()
        for index, row in enumerate(rows.values()):
            _draw_densities(figure, axes[index], row, name_data=several)
        if not several:
            _draw_samples(axes[1], next(iter(rows.values())), seed)
        write_bytes(Path(path), to_png(figure, transparent=False))


def _has_truth(row: Row) -> bool:
    """Whether the true density is known: it gets a column, with the data below it."""
    truth = row[0][0].dataset.truth
    return truth is not None and truth.log_density is not None


def _draw_densities(figure: Figure, axes: list[Axes], row: Row, name_data: bool = False) -> None:
    *panels, bar = axes
    dataset = row[0][0].dataset
    if name_data and not _has_truth(row):
        ax, *panels = panels
        points = dataset.train[:SAMPLES].double().cpu()
        draw_samples(ax, LIGHT, points, None, find_window(dataset), size=0.8)
        ax.set_title(f"{dataset.name}: data", **NAME)
    truth = None if dataset.truth is None else true_grid(dataset.truth)
    dots = dataset.test.double().cpu() if truth is None else None
    named = [(entry.name, _result(entry), grid) for entry, grid in row]
    if dataset.truth is not None and truth is not None:
        words = f"at best {set_number(dataset.truth.limit, '{:.3f}')} nats"
        leaks = "" if dataset.truth.contains is None else "\nnothing leaks"
        title = f"{dataset.name}: truth" if name_data else "true density"
        named.insert(0, (title, words + leaks, truth))
    top = shared_top(grid for *_, grid in named)
    for ax, (name, words, grid) in zip(panels, named, strict=False):
        draw_density(ax, LIGHT, grid, top, dots=dots)
        ax.set_title(words, fontsize=8.5)
        above = 32 if "\n" in words else 20
        ax.annotate(name, (0.5, 1), (0, above), "axes fraction", "offset points", ha="center", **NAME)
    _hide(panels[len(named) :])
    colours = ScalarMappable(colour_norm(top, log=False), COLOURS)
    scale = figure.colorbar(colours, cax=bar, extend="max", label="density")
    scale.outline.set_visible(False)


def _draw_samples(axes: list[Axes], row: Row, seed: int) -> None:
    dataset = row[0][0].dataset
    contains = None if dataset.truth is None else dataset.truth.contains
    samples = [entry.flow.sample(SAMPLES, seed=seed) for entry, _ in row]
    drawn = [(points.double().cpu(), "samples") for points in samples]
    if _has_truth(row):
        drawn.insert(0, (dataset.train[:SAMPLES], "data points"))
    for ax, (points, name) in zip(axes, drawn, strict=False):
        inside = None if contains is None else contains(points)
        draw_samples(ax, LIGHT, points, inside, find_window(dataset), size=0.8)
        leaked = 0 if inside is None else int((~inside).sum())
        words = f"{leaked:,} of {len(points):,} {name} leaked" if leaked else f"{len(points):,} {name}"
        ax.set_title(words, fontsize=8.5, color=LIGHT.leaked if leaked else LIGHT.text)
    _hide(axes[len(drawn) :])


def _result(entry: Entry) -> str:
    """A model's test log-likelihood, and where the support is known its leaked mass."""
    test, metrics = entry.metrics.get("test") or {}, entry.metrics
    words = f"log-likelihood {set_error(test.get('log_prob'), test.get('std_error'), '{:.3f}')} nats"
    if entry.dataset.truth is None or entry.dataset.truth.contains is None:
        return words
    leaked = set_error(metrics.get("leaked_mass"), metrics.get("leaked_mass_std_error"), "{:.1%}")
    return f"{words}\nleaked mass {leaked}"


def _hide(axes: Sequence[Axes]) -> None:
    for ax in axes:
        ax.set_axis_off()
