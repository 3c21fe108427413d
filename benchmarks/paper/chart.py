"""The page's chart: for each pair of rows the paper's plain flow and CIF, and ours."""

from __future__ import annotations

__all__ = ["Line", "draw_chart", "lines"]

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.paper.figures import Figure
from ciflows.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

PLAIN, CIF = "#7a7a7a", "#c4501b"
COLUMNS, WIDTH, LINE, REST = 2, 10.0, 0.42, 0.95
NATS, BITS = "test log-likelihood, nats", "bits per dimension (better to the right)"
GAP = "nats above the limit, or the best of ours if unknown"
SETS_OF_ONE_PANEL = 3  # a table of more data sets has one panel, with its sets as lines


class Line(NamedTuple):
    """A line of a panel: a plain row and its CIF, or one of them alone."""

    label: str
    plain: Figure | None
    cif: Figure | None


class Panel(NamedTuple):
    """A part of the chart, with a scale of its own."""

    title: str
    lines: list[Line]
    scale: str


def lines(figures: Sequence[Figure]) -> list[Line]:
    """Pairs of plain and CIF; rows that no CIF is compared with stand alone.

    Arguments:
        figures: The figures of one table on one data set.
    """
    rows = {figure.row: figure for figure in figures}
    paired = {figure.pair for figure in figures if figure.pair}
    return [
        Line(figure.row, rows.get(figure.pair or ""), figure)
        if figure.cif
        else Line(figure.row, figure, None)
        for figure in figures
        if figure.row not in paired
    ]


def draw_chart(path: Path, figures: Sequence[Figure]) -> None:
    """Draw a panel for each data set, or for each table of many sets, into a PNG file."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    panels = _panels(figures)
    rows = [panels[start : start + COLUMNS] for start in range(0, len(panels), COLUMNS)]
    heights = [REST + LINE * max(len(panel.lines) for panel in row) for row in rows]
    with matplotlib.rc_context({"font.size": 8, "svg.hashsalt": "0"}):
        canvas = Canvas(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
        grid = canvas.add_gridspec(len(rows), COLUMNS, height_ratios=heights)
        for place, panel in enumerate(panels):
            _draw_panel(canvas.add_subplot(grid[divmod(place, COLUMNS)]), panel)
        canvas.legend(handles=_legend(), loc="outside upper center", ncols=5, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as new:
            canvas.savefig(new, dpi=110, format="png", metadata={"Software": None})


def _panels(figures: Sequence[Figure]) -> list[Panel]:
    found = []
    for table in dict.fromkeys(figure.table for figure in figures):
        inside = [figure for figure in figures if figure.table == table]
        sets = list(dict.fromkeys(figure.data for figure in inside))
        each = {data: lines([one for one in inside if one.data == data]) for data in sets}
        if len(sets) <= SETS_OF_ONE_PANEL:
            scale = BITS if inside[0].bits else NATS
            titles = {data: f"{table}: {data}" if len(sets) > 1 else table for data in sets}
            found += [Panel(titles[data], each[data], scale) for data in sets]
        else:
            named = [
                _relative(line, _reference([one for one in inside if one.data == data]))
                for data in sets
                for line in each[data]
            ]
            found.append(Panel(table, named, GAP))
    return found


def _reference(figures: Sequence[Figure]) -> float:
    """The best that any model can reach on a data set; where nobody knows it, the best of ours."""
    limits = [one.limit for one in figures if one.limit is not None]
    values = [one.value for one in figures if one.value is not None]
    return limits[0] if limits else max(values, default=0.0)


def _relative(line: Line, reference: float) -> Line:
    """A line with its data set in front of its label, and its figures less a reference."""

    def less(figure: Figure | None) -> Figure | None:
        if figure is None:
            return None
        value, paper = (None if x is None else x - reference for x in (figure.value, figure.paper))
        return figure.model_copy(update={"value": value, "paper": paper, "limit": 0.0})

    some = line.cif or line.plain
    assert some is not None
    return Line(f"{some.data}, {line.label}", less(line.plain), less(line.cif))


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for height, line in enumerate(panel.lines):
        for figure, colour, offset in ((line.plain, PLAIN, -0.1), (line.cif, CIF, 0.1)):
            if figure is not None:
                _draw_marks(axes, figure, colour, height + offset)
    limits = {one.limit for line in panel.lines for one in line[1:] if one is not None}
    if len(limits) == 1 and None not in limits:
        axes.axvline(limits.pop() or 0.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(panel.lines)), [line.label for line in panel.lines])
    axes.set_ylim(len(panel.lines) - 0.5, -0.5)
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.set_xlabel(panel.scale)
    axes.locator_params(axis="x", nbins=6)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.scale == BITS:
        axes.invert_xaxis()


def _draw_marks(axes: Axes, figure: Figure, colour: str, height: float) -> None:
    """Ours filled, the paper's hollow; a cross where the paper's measures something else."""
    style: dict[str, Any] = {
        "color": colour,
        "markersize": 6,
        "capsize": 2,
        "linewidth": 1,
        "linestyle": "",
    }
    if figure.paper is not None:
        style |= {"marker": "o", "markerfacecolor": "white"} if figure.comparable else {"marker": "x"}
        axes.errorbar(figure.paper, height, xerr=figure.paper_error, **style)
    if figure.value is not None:
        style |= {"marker": "o", "markerfacecolor": colour}
        axes.errorbar(figure.value, height, xerr=figure.error, **style)


def _legend() -> list[Line2D]:
    from matplotlib.lines import Line2D as Mark

    kinds = {
        "the paper, plain": ("o", PLAIN, "white"),
        "the paper, CIF": ("o", CIF, "white"),
        "the paper, not comparable": ("x", CIF, CIF),
        "ours, plain": ("o", PLAIN, PLAIN),
        "ours, CIF": ("o", CIF, CIF),
    }
    return [
        Mark([], [], linestyle="", marker=marker, color=colour, markerfacecolor=inside, label=label)
        for label, (marker, colour, inside) in kinds.items()
    ]
