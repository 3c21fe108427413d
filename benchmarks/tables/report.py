"""The suite's results as one Markdown table and one picture."""

from __future__ import annotations

__all__ = ["Fit", "Mean", "markdown", "means", "picture", "read_fits", "write_report"]

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PARTS = ("development", "held-out")
BASE = "nsf"


class Fit(NamedTuple):
    """One fit of one method to one table.

    Attributes:
        table: The table's name.
        part: Development or held-out.
        method: The method's name.
        seed: Its seed.
        seconds: CPU seconds that it might take.
        log_prob: Mean log-likelihood of the test rows.
        std_error: Standard error of that over the test rows.
        spent: CPU seconds that it took.
        note: What the method says of itself.
        rows: Training rows.
        columns: Columns.
    """

    table: str
    part: str
    method: str
    seed: int
    seconds: float
    log_prob: float
    std_error: float
    spent: float
    note: str
    rows: int
    columns: int


class Mean(NamedTuple):
    """A mean over seeds, and its standard error; NaN for one seed."""

    value: float
    error: float


def read_fits(path: Path) -> list[Fit]:
    """The fits in a file of results; none where there is no such file."""
    if not path.exists():
        return []
    return [Fit(**json.loads(line)) for line in path.read_text().splitlines()]


def write_report(fits: Sequence[Fit], folder: Path) -> str:
    """Write tables.md and tables.png; the Markdown."""
    text = markdown(fits)
    (folder / "tables.md").write_text(text)
    if fits:
        picture(fits, folder / "tables.png")
    return text


def means(fits: Sequence[Fit], table: str) -> dict[str, Mean]:
    """Of each method its mean over seeds on a table."""
    found: dict[str, list[float]] = {}
    for fit in fits:
        if fit.table == table:
            found.setdefault(fit.method, []).append(fit.log_prob)
    return {method: _mean(values) for method, values in found.items()}


def _mean(values: Sequence[float]) -> Mean:
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    return Mean(statistics.fmean(values), spread / math.sqrt(len(values)))


def markdown(fits: Sequence[Fit]) -> str:
    """One table: mean log-likelihoods ± standard errors over seeds, the best in bold."""
    methods = list(dict.fromkeys(fit.method for fit in fits))
    several = len({fit.seed for fit in fits}) > 1
    names = ["table", *methods, *([f"default − {BASE}"] if several else [])]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for part in PARTS:
        tables = list(dict.fromkeys(fit.table for fit in fits if fit.part == part))
        if tables:
            lines.append(f"| **{part}** |" + " |" * (len(names) - 1))
        lines += [_row(fits, table, methods, several) for table in tables]
    return "\n".join(lines) + "\n"


def _row(fits: Sequence[Fit], table: str, methods: Sequence[str], several: bool) -> str:
    first = next(fit for fit in fits if fit.table == table)
    found = means(fits, table)
    best = max(mean.value for mean in found.values())
    cells = [f"{table}, {first.rows:,} × {first.columns}"]
    cells += [_cell(found.get(method), best) for method in methods]
    if several:
        gain = _gain(fits, table)
        cells.append("–" if gain is None else _text(gain, "+"))
    return f"| {' | '.join(cells)} |"


def _cell(mean: Mean | None, best: float) -> str:
    if mean is None:
        return "–"
    return f"**{_text(mean)}**" if mean.value == best else _text(mean)


def _text(mean: Mean, sign: str = "") -> str:
    error = "" if math.isnan(mean.error) else f" ± {mean.error:.3f}"
    return f"{mean.value:{sign}.3f}{error}"


def _gain(fits: Sequence[Fit], table: str) -> Mean | None:
    """What the default is ahead of the plain flow, seed by seed."""
    values = {(fit.method, fit.seed): fit.log_prob for fit in fits if fit.table == table}
    both = [seed for method, seed in values if method == BASE and ("default", seed) in values]
    return _mean([values["default", seed] - values[BASE, seed] for seed in both]) if both else None


def picture(fits: Sequence[Fit], path: Path) -> None:
    """Each method's distance to the plain flow on each table, in nats, on a scale linear near 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = list(dict.fromkeys(fit.table for fit in fits))
    methods = [m for m in dict.fromkeys(fit.method for fit in fits) if m != BASE]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.4 * len(tables)), layout="constrained")
    for place, method in enumerate(methods):
        points = [(row, *_distance(fits, table, method)) for row, table in enumerate(tables)]
        rows, values, errors = zip(*points, strict=True)
        heights = [row + 0.12 * (place - (len(methods) - 1) / 2) for row in rows]
        axes.errorbar(values, heights, xerr=errors, fmt="o", markersize=4, label=method)
    held_out = {fit.table for fit in fits if fit.part == "held-out"}
    axes.set_yticks(range(len(tables)), [f"{t} (held out)" if t in held_out else t for t in tables])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_xlabel(f"test log-likelihood, ahead of plain {BASE} (nats, mean ± s.e. over seeds)")
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=len(methods))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _distance(fits: Sequence[Fit], table: str, method: str) -> tuple[float, float]:
    found = means(fits, table)
    if method not in found or BASE not in found:
        return math.nan, 0.0
    error = found[method].error
    return found[method].value - found[BASE].value, 0.0 if math.isnan(error) else error
