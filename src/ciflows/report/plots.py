"""The report's pictures, each drawn for a light and for a dark page.

A picture is one small panel; the page sets panels side by side, or below each other where it is narrow.
"""

from __future__ import annotations

__all__ = [
    "CHART",
    "DARK",
    "LIGHT",
    "PANEL",
    "Draw",
    "Theme",
    "colour_norm",
    "draw_density",
    "draw_draws",
    "draw_history",
    "draw_panel",
    "draw_samples",
    "draw_scores",
    "style",
    "to_png",
]

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple, Protocol

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from ciflows.diagnostics import CurvePoint
from ciflows.report.grids import DensityGrid, Entry, Window

Array = NDArray[np.float64]

PANEL = (3.0, 2.9)
CHART = (3.4, 2.7)
COLOURS = "viridis"
LOG_DECADES = 3
DOTS = 800


class Theme(NamedTuple):
    """Colours of the pictures on a page.

    Attributes:
        text: Words and axes.
        faint: Lines of the grid.
        data: The data.
        leaked: Samples outside the support.
        models: One colour a model, told apart by colour-blind readers too.
    """

    text: str
    faint: str
    data: str
    leaked: str
    models: tuple[str, ...]

    def of_model(self, index: int) -> str:
        return self.models[index % len(self.models)]


LIGHT = Theme(
    "#30363d",
    "#d8dde3",
    "#5c6b7a",
    "#d55e00",
    ("#0072b2", "#b07a00", "#b3538c", "#00835f", "#4a4fc4", "#7a5c3e"),
)
DARK = Theme(
    "#c9d1d9",
    "#353c45",
    "#93a4b5",
    "#ff8a3d",
    ("#58b4f0", "#e6c229", "#e59ac4", "#35c79b", "#a3a8ff", "#c8a27c"),
)


# -- panels ------------------------------------------------------------------------------------------


class Draw(Protocol):
    """Fills a panel in the colours of a theme."""

    def __call__(self, axes: Axes, theme: Theme) -> None: ...


def draw_panel(draw: Draw, theme: Theme, size: tuple[float, float]) -> bytes:
    """One panel of a size in inches, as the bytes of a PNG file with a transparent page."""
    with matplotlib.rc_context(style(theme)):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots(), theme)
        return to_png(figure, transparent=True)


def draw_density(
    axes: Axes,
    theme: Theme,
    grid: DensityGrid,
    top: float,
    log: bool = False,
    dots: Tensor | None = None,
) -> None:
    """A heat map, with data laid over it as in Figure 1; it looks the same in both themes."""
    norm = colour_norm(top, log)
    # A density of 0 has no logarithm: it takes the lowest colour.
    axes.imshow(
        np.maximum(grid.density, norm.vmin or 0.0),
        origin="lower",
        extent=grid.window,
        norm=norm,
        cmap=COLOURS,
        interpolation="nearest",
    )
    if dots is not None:
        x = dots[:DOTS].double().cpu().numpy()
        axes.scatter(x[:, 0], x[:, 1], s=0.9, color="black", linewidths=0, alpha=0.55)
    _frame(axes, grid.window)


def draw_samples(
    axes: Axes,
    theme: Theme,
    points: Tensor,
    inside: Tensor | None,
    window: Window,
    size: float = 2.0,
) -> None:
    """Points (n, 2); those outside the support, if it is known, in another colour."""
    x = points.double().cpu().numpy()
    kept = np.ones(len(x), dtype=bool) if inside is None else inside.cpu().numpy()
    within, out = x[kept], x[~kept]
    axes.scatter(within[:, 0], within[:, 1], s=size, color=theme.data, linewidths=0, alpha=0.8)
    axes.scatter(out[:, 0], out[:, 1], s=2 * size, color=theme.leaked, linewidths=0, zorder=3)
    _frame(axes, window)


def draw_history(
    axes: Axes, theme: Theme, entries: Sequence[Entry], key: str, limit: float | None = None
) -> None:
    """One column of the training history against the step, for all models."""
    curves = [history_curve(entry.history, key) for entry in entries]
    first = first_shown(curves)
    for index, (entry, (steps, values)) in enumerate(zip(entries, curves, strict=True)):
        late = steps >= first
        marker = "o" if late.sum() <= 30 else None
        colour = theme.of_model(index)
        axes.plot(steps[late], values[late], color=colour, label=entry.name, marker=marker, ms=3)
    if limit is not None:
        axes.axhline(limit, color=theme.text, lw=1, ls=(0, (4, 3)), label="limit")
    axes.set_xlabel("step" if first == 0 else f"step, from {first:,.0f} on")
    finish_chart(axes, theme)


def first_shown(curves: Sequence[tuple[Array, Array]]) -> float:
    """The step at which a chart of some curves begins: 0, or past a fall that would dwarf all else.

    Past the first 5% of the steps where values span over six times there what they span after it.
    """
    steps, values = (np.concatenate(column) for column in zip(*curves, strict=True))
    late = steps > 0.05 * steps.max(initial=0.0)
    if late.sum() < 20 or np.ptp(values) <= 6 * np.ptp(values[late]):
        return 0.0
    return float(steps[late].min())


def history_curve(
    history: Sequence[Mapping[str, Any]], key: str, most: int = 300
) -> tuple[Array, Array]:
    """Steps and finite values of one column, averaged in blocks where there are very many."""
    rows = [(row["step"], row[key]) for row in history if row.get(key) is not None]
    pairs = np.array(rows, dtype=np.float64).reshape(-1, 2)
    pairs = pairs[np.isfinite(pairs[:, 1])]
    if len(pairs) > most:
        pairs = np.array([block.mean(0) for block in np.array_split(pairs, most)])
    return pairs[:, 0], pairs[:, 1]


def draw_draws(
    axes: Axes, theme: Theme, names: Sequence[str], curves: Sequence[Sequence[CurvePoint]]
) -> None:
    """log_prob against the number of draws: bars of two Monte-Carlo errors, a band for the data's."""
    for index, (name, curve) in enumerate(zip(names, curves, strict=True)):
        m, mean, spread, error = np.array(curve, dtype=np.float64).T
        colour = theme.of_model(index)
        axes.fill_between(m, mean - spread, mean + spread, color=colour, alpha=0.14, lw=0)
        axes.errorbar(m, mean, 2 * error, color=colour, marker="o", ms=3, capsize=2.5, label=name)
    ticks = [point.samples for point in curves[0]]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("draws m")
    finish_chart(axes, theme)


def draw_scores(axes: Axes, theme: Theme, held_out: Array, drawn: Array) -> None:
    """Distribution functions of log p over test rows and over samples."""
    for values, colour, label in (
        (held_out, theme.data, "test rows"),
        (drawn, theme.models[0], "samples"),
    ):
        finite = np.sort(values[np.isfinite(values)])
        axes.step(finite, np.arange(1, len(finite) + 1) / len(values), color=colour, label=label)
    low = np.quantile(np.concatenate([held_out, drawn]), 0.005)
    axes.set_xlim(left=float(low) if np.isfinite(low) else None)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("log p(x)")
    finish_chart(axes, theme)


# -- shared ------------------------------------------------------------------------------------------


def style(theme: Theme) -> Any:
    """Matplotlib's settings for a theme."""
    return {
        "font.size": 9,
        "text.color": theme.text,
        "axes.labelcolor": theme.text,
        "axes.edgecolor": theme.text,
        "axes.linewidth": 0.7,
        "axes.facecolor": "none",
        "xtick.color": theme.text,
        "ytick.color": theme.text,
        "xtick.major.width": 0.7,
        "ytick.major.width": 0.7,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "legend.handlelength": 1.4,
        "lines.linewidth": 1.5,
    }


def to_png(figure: Figure, transparent: bool) -> bytes:
    """A figure as the bytes of a PNG file."""
    file = BytesIO()
    metadata = {"Software": None}  # so that the same picture is the same file
    figure.savefig(file, format="png", dpi=200, transparent=transparent, metadata=metadata)
    return file.getvalue()


def colour_norm(top: float, log: bool) -> Normalize:
    """The colour scale of densities up to `top`: linear, or three decades."""
    return LogNorm(top * 10.0**-LOG_DECADES, top) if log else Normalize(0, top)


def finish_chart(axes: Axes, theme: Theme, legend: bool = True) -> None:
    """Add lines of a grid and a legend; take off the frame above and on the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=theme.faint, lw=0.6)
    axes.set_axisbelow(True)
    if legend:
        axes.legend()


def _frame(axes: Axes, window: Window) -> None:
    x_low, x_high, y_low, y_high = window
    axes.set_xlim(x_low, x_high)
    axes.set_ylim(y_low, y_high)
    square = math.isclose(x_high - x_low, y_high - y_low, rel_tol=1e-6)
    axes.set_aspect("equal" if square else "auto")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    for spine in axes.spines.values():
        spine.set_linewidth(0.5)
