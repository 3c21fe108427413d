"""Pictures of a density's calibration: PIT histograms, and coverage beside what it should be."""

from __future__ import annotations

__all__ = ["coverage_block", "coverage_figure"]

import math
from collections.abc import Sequence
from functools import partial

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ciflows.diagnostics import Check, Coverage, calibrate
from ciflows.report.grids import Entry
from ciflows.report.page import Block, Picture, make_picture
from ciflows.report.plots import LIGHT, PANEL, Draw, Theme, style, to_png
from ciflows.tables.values import column_values

Array = NDArray[np.float64]
ROWS, SAMPLES, DRAWS = 1000, 1000, 20
ROWS_GIVEN, SAMPLES_GIVEN, DRAWS_GIVEN = 300, 50, 5  # each row has samples of its own
BINS, MOST_HISTOGRAMS = 10, 3
LEVELS = np.linspace(0, 1, 101)


def coverage_block(entries: Sequence[Entry], seed: int) -> Block:
    """Coverage of each model on a table's test rows."""
    words = (
        "Do intervals of the model hold the share of rows that they should? The curves count test rows "
        "in central intervals (columns) and highest-density regions (joint density) of every level. If "
        "the model is right, they follow the diagonal, 19 of 20 times within the band. The histograms "
        "show the ranks of test rows among samples (PIT), for the columns that are most off. Level: the "
        "model is right. Hump: too wide. Bowl: too narrow. Slope: too low or too high."
    )
    pictures = [picture for entry in entries for picture in _coverage_pictures(entry, seed)]
    return Block("Coverage", words, pictures)


def _coverage_pictures(entry: Entry, seed: int) -> list[Picture]:
    """Coverage of a run on its test rows, and PIT histograms of the columns that are most off."""
    schema = entry.dataset.schema
    assert schema is not None
    given = bool(schema.given)
    rows = entry.dataset.rows("test")[: ROWS_GIVEN if given else ROWS]
    samples, draws = (SAMPLES_GIVEN, DRAWS_GIVEN) if given else (SAMPLES, DRAWS)
    values = partial(column_values, schema)
    coverage = calibrate(entry.flow, rows, schema.names, values, samples, draws, seed)
    worst = sorted(coverage.columns, key=lambda check: -check.gap)[:MOST_HISTOGRAMS]
    whole = partial(draw_coverage, coverage=coverage)
    words = f"Observed against expected coverage: {entry.name}"
    note = f"joint density: {coverage.joint.verdict}"
    return [
        make_picture(whole, PANEL, words, entry.name, note),
        *(
            make_picture(
                partial(draw_ranks, check=check, coverage=coverage),
                PANEL,
                f"PIT histogram of {check.name}: {check.verdict}",
                check.name,
                check.verdict,
            )
            for check in worst
        ),
    ]


def coverage_figure(coverage: Coverage) -> bytes:
    """All of a check in one picture: coverage, then the ranks of each column, as a PNG file."""
    draws: list[tuple[str, Draw]] = [("coverage", partial(draw_coverage, coverage=coverage))]
    draws += [
        (check.name, partial(draw_ranks, check=check, coverage=coverage)) for check in coverage.checks
    ]
    columns = min(4, len(draws))
    lines = math.ceil(len(draws) / columns)
    with matplotlib.rc_context(style(LIGHT)):
        figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * lines), layout="constrained")
        panels: Sequence[Axes] = figure.subplots(lines, columns, squeeze=False).ravel().tolist()
        for axes in panels[len(draws) :]:
            axes.set_visible(False)
        for axes, (name, draw) in zip(panels, draws, strict=False):
            draw(axes, LIGHT)
            axes.set_title(name, fontsize=9)
        return to_png(figure, transparent=False)


def draw_coverage(axes: Axes, theme: Theme, coverage: Coverage) -> None:
    """Shares of the rows in intervals of every level: on the diagonal if the model is right."""
    low, high = np.array([coverage.band(level) for level in LEVELS]).T
    axes.fill_between(LEVELS, low, high, color=theme.data, alpha=0.25, lw=0)
    for place, check in enumerate(coverage.checks):
        joint = check is coverage.joint
        order = np.argsort(check.depths)
        share = np.concatenate([[0], coverage.weight[order].cumsum() / coverage.weight.sum()])
        colour = theme.of_model(0) if joint else theme.data
        label = "joint density" if joint else "columns" if place == 0 else None
        depths = np.concatenate([[0], check.depths[order]])
        axes.plot(depths, share, color=colour, lw=1.6 if joint else 0.8, label=label)
    axes.plot([0, 1], [0, 1], color=theme.text, lw=0.7, ls=(0, (4, 3)))
    axes.set_xlabel("expected share")
    axes.set_ylabel("observed share")
    axes.set_aspect("equal")
    axes.legend(loc="upper left")


def draw_ranks(axes: Axes, theme: Theme, check: Check, coverage: Coverage) -> None:
    """A histogram of ranks, level if the model is right, with the band for each bar."""
    shares = np.histogram(check.ranks, BINS, (0, 1), weights=coverage.weight)[0] / coverage.weight.sum()
    low, high = coverage.band(1 / BINS)
    axes.axhspan(BINS * low, BINS * high, color=theme.data, alpha=0.25, lw=0)
    colour = theme.data if check.fine else theme.leaked
    axes.stairs(BINS * shares, np.linspace(0, 1, BINS + 1), color=colour, lw=1.5)
    axes.axhline(1, color=theme.text, lw=0.7, ls=(0, (4, 3)))
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1)
    axes.set_xlabel("rank by density" if check is coverage.joint else "PIT")
