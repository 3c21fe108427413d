"""Plots of how cost grows with one size at a time."""

from __future__ import annotations

__all__ = ["draw_growth"]

import statistics
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.cases import GROWING, GROWTH
from benchmarks.results import WORKS, Result
from ciflows.files import write_bytes
from ciflows.report.plots import LIGHT, style, to_png


def draw_growth(path: Path, result: Result) -> None:
    """One panel per size, one line per model, on log axes; a dotted line shows linear growth."""
    with matplotlib.rc_context(style(LIGHT)):
        figure = Figure(figsize=(3.0 * len(GROWTH), 2.9), layout="constrained")
        panels = figure.subplots(1, len(GROWTH), squeeze=False)[0]
        for axes, growth in zip(panels, GROWTH, strict=True):
            points = [one for one in result.growth if one.size == growth.size]
            for model, colour in zip(GROWING, LIGHT.models, strict=False):
                line = [one for one in points if one.model == model]
                if not line:  # the benchmark was interrupted
                    continue
                sizes = [one.value for one in line]
                ms = [statistics.median(one.timing.ms) for one in line]
                axes.loglog(sizes, ms, "o-", color=colour, markersize=3, label=model)
                axes.loglog(sizes, [ms[-1] * size / sizes[-1] for size in sizes], ":", color=colour)
            axes.set_xticks(growth.values, [str(value) for value in growth.values], minor=False)
            axes.set_xticks([], minor=True)
            axes.set(xlabel=growth.size, ylabel=f"{WORKS[growth.work]}, ms")
        panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, to_png(figure, transparent=False))
