"""Plots of columns and of pairs of columns: the data filled, each model's samples as lines."""

from __future__ import annotations

__all__ = ["Feature", "Part", "draw_marginal", "draw_pair"]

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ciflows.report.plots import Theme, finish_chart

Array = NDArray[np.float64]
MOST_NAMED = 8
CONTOURS = (0.5, 0.9)  # shares of the samples that they enclose


class Feature(NamedTuple):
    """What a plot has to know of a column.

    Attributes:
        words: Names of its levels, if it is categorical: its values are 0, 1, ...
        discrete: Whether each value has a probability.
        step: The distance of neighbouring values; 0 if there is none.
    """

    name: str
    words: Sequence[str] = ()
    discrete: bool = False
    step: float = 0.0

    @property
    def named(self) -> bool:
        """Whether its levels are few enough to be written out."""
        return 0 < len(self.words) <= MOST_NAMED


class Part(NamedTuple):
    """Values (n,) or pairs of values (n, 2): the data, always the first, or a model's samples."""

    name: str
    values: Array


Pair = tuple[Feature, Feature]


def draw_marginal(
    axes: Axes, theme: Theme, feature: Feature, parts: Sequence[Part], legend: bool
) -> None:
    """One column: a histogram, or the share of each value."""
    draw = _draw_shares if feature.discrete else _draw_histograms
    draw(axes, theme, feature, parts)
    _set_ticks(axes.xaxis, feature)
    finish_chart(axes, theme, legend)
    axes.set_yticks([])


def draw_pair(axes: Axes, theme: Theme, pair: Pair, parts: Sequence[Part]) -> None:
    """Two columns: contours of numbers, outlines of numbers for each name, or circles for names."""
    named = [feature.named for feature in pair]
    draw = _draw_circles if all(named) else _draw_outlines if any(named) else _draw_contours
    draw(axes, theme, pair, parts)
    axes.set_xlabel(pair[0].name[:32])
    axes.set_ylabel(pair[1].name[:32])
    for axis, feature in zip((axes.xaxis, axes.yaxis), pair, strict=True):
        _set_ticks(axis, feature)


def _draw_histograms(axes: Axes, theme: Theme, feature: Feature, parts: Sequence[Part]) -> None:
    edges = _edges(parts[0].values, feature.step)
    for index, (name, values) in enumerate(parts):
        axes.stairs(_bars(values, edges), edges, fill=not index, label=name, **_look(theme, index))
    axes.set_xlim(edges[0], edges[-1])


def _draw_shares(axes: Axes, theme: Theme, feature: Feature, parts: Sequence[Part]) -> None:
    levels = np.unique(np.concatenate([part.values for part in parts]))
    width = 0.8 * (feature.step or 1.0)
    for index, (name, values) in enumerate(parts):
        shares = [(values == level).mean() for level in levels]
        if index == 0:
            axes.bar(levels, shares, width, label=name, **_look(theme, 0))
        else:
            ends = levels - width / 2, levels + width / 2
            axes.hlines(shares, *ends, color=theme.of_model(index - 1), lw=2, label=name)


def _draw_contours(axes: Axes, theme: Theme, pair: Pair, parts: Sequence[Part]) -> None:
    """The data as dots, with lines around half and 90 % of each model's samples."""
    dots, *models = (_scattered(part.values, pair) for part in parts)
    edges = [_edges(dots[:, axis], bins=40) for axis in (0, 1)]
    axes.scatter(dots[:, 0], dots[:, 1], s=3, color=theme.data, linewidths=0, alpha=0.5)
    for index, points in enumerate(models):
        counts = np.histogram2d(points[:, 0], points[:, 1], bins=edges)[0]
        density = _blurred(_blurred(counts).T)
        levels = sorted({_mass_level(density, share) for share in CONTOURS})
        if levels[0] > 0:
            places = map(_middles, edges)
            axes.contour(*places, density, levels, colors=theme.of_model(index), linewidths=1.3)
    axes.set_xlim(edges[0][0], edges[0][-1])
    axes.set_ylim(edges[1][0], edges[1][-1])


def _draw_outlines(axes: Axes, theme: Theme, pair: Pair, parts: Sequence[Part]) -> None:
    """How a number is distributed for each name: the wider, the denser."""
    by, number = (0, 1) if pair[0].named else (1, 0)
    edges = _edges(parts[0].values[:, number], pair[number].step)
    fill, set_limits = (
        (axes.fill_betweenx, axes.set_ylim) if by == 0 else (axes.fill_between, axes.set_xlim)
    )
    for level in range(len(pair[by].words)):
        for index, (_, points) in enumerate(parts):
            bars = _blurred(_bars(points[points[:, by] == level, number], edges))
            bars = 0.42 * bars / max(bars.max(), 1e-300)
            look = _look(theme, index) | ({"facecolor": "none"} if index else {})
            fill(_middles(edges), level - bars, level + bars, **look)
    set_limits(edges[0], edges[-1])


def _draw_circles(axes: Axes, theme: Theme, pair: Pair, parts: Sequence[Part]) -> None:
    """A disc for each pair of names, with the area of its share; a ring for each model's."""
    for index, (_, points) in enumerate(parts):
        cells, counts = np.unique(points, axis=0, return_counts=True)
        look = _look(theme, index) | ({"facecolor": "none"} if index else {})
        axes.scatter(cells[:, 0], cells[:, 1], s=3000 * counts / len(points), **look)
    axes.margins(0.2)


def _look(theme: Theme, index: int) -> dict[str, Any]:
    """Filled for the data; lines in a model's colour."""
    if index == 0:
        return {"color": theme.data, "alpha": 0.45, "linewidth": 0}
    return {"edgecolor": theme.of_model(index - 1), "linewidth": 1.3}


def _set_ticks(axis: Axis, feature: Feature) -> None:
    if feature.named:
        axis.set_ticks(range(len(feature.words)), [word[:10] for word in feature.words])
    else:
        axis.set_major_locator(MaxNLocator(4, integer=feature.discrete and feature.step in (0, 1)))


def _edges(values: Array, step: float = 0.0, bins: int = 0) -> Array:
    """Ends of bins for nearly all values; with a step, each bin holds the same number of values."""
    low, high = np.quantile(values, [0.005, 0.995])
    room = 0.08 * (high - low) or 0.5
    bins = bins or int(np.clip(1.5 * math.sqrt(len(values)), 10, 48))
    width = (high - low + 2 * room) / bins
    if not step:
        return np.linspace(low - room, high + room, bins + 1)
    width, first = step * math.ceil(width / step), values.min() - step / 2
    return first + width * np.arange(math.floor((low - room - first) / width), bins + 1)


def _middles(edges: Array) -> Array:
    return (edges[1:] + edges[:-1]) / 2


def _scattered(points: Array, pair: Pair) -> Array:
    """Points spread over the steps of discrete columns, so that you see them all."""
    spread = np.array([0.8 * (feature.step or feature.discrete) for feature in pair])
    return points + spread * (np.random.default_rng(0).random(points.shape) - 0.5)


def _blurred(values: Array) -> Array:
    """Values smoothed along their first axis by a Gaussian."""
    kernel = np.exp(-0.5 * (np.arange(-5, 6) / 1.5) ** 2)
    blur = partial(np.convolve, v=kernel / kernel.sum())
    blurred = np.apply_along_axis(blur, 0, values)[5:-5]  # "same" would lengthen fewer than 11 values
    return np.asarray(blurred, dtype=np.float64)


def _mass_level(density: Array, share: float) -> float:
    """The density above which a share of the mass lies."""
    values = np.sort(density, axis=None)[::-1]
    mass = np.cumsum(values)
    return float(values[np.searchsorted(mass, share * mass[-1])])


def _bars(values: Array, edges: Array) -> Array:
    counts = np.histogram(values, edges)[0]
    return np.asarray(counts / (max(1, len(values)) * np.diff(edges)), dtype=np.float64)
