"""Relations between columns of numbers, in all rows or in some: columns without a joint density."""

from __future__ import annotations

__all__ = ["find_line", "follows_from_two", "quadratic_terms", "scale"]

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)
ROUNDING = 8 * EPS  # relative error of a sum or product of two columns
LEAST_SHARE, FEWEST = 0.005, 5  # rows in which two columns are tied, before it is no chance
TRIPLES = 4000
LEAST_ON_LINE = 0.05  # share of the rows on a line with a slope and a constant
MOST_TERMS = 150
NEIGHBOURS = 8
SURFACE_ROWS = 1000
ON_SURFACE = 0.03  # of its spread that a column may be off a plane through its neighbours
FALL = 0.45  # of what it was off with a quarter of the rows
CROWD = 1000  # tolerances around a value: rows that lie there are no evidence of a line


class Line(NamedTuple):
    """A relation of two columns in a share of the rows: `term`, such as "y - x", has one value there."""

    term: str
    value: float
    share: float


def find_line(x: Array, y: Array, names: tuple[str, str], slanted: bool = True) -> Line | None:
    """A value that y - x, y + x, y / x or y · x has in many rows, or a line that many rows lie on.

    Arguments:
        y: Values of another, which has a density by itself (rows,).
        slanted: Whether to look for lines of any slope; points of two lattices lie on many by chance.
    """
    tolerance = ROUNDING * float(np.abs(x).max() + np.abs(y).max())
    # two columns that crowd at 0 agree there up to rounding, and neither determines the other
    away = np.minimum(np.abs(x), np.abs(y)) > CROWD * tolerance
    first, second = names
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.abs(x)), np.log(np.abs(y))
        terms = {
            f"{second} - {first}": ((y - x)[away], tolerance),
            f"{second} + {first}": ((y + x)[away], tolerance),
            f"{second} / {first}": (logs[1] - logs[0], 100 * EPS),
            f"{second} · {first}": (logs[1] + logs[0], 100 * EPS),
        }
    for term, (values, tolerance) in terms.items():
        found = _repeated(values, tolerance, len(x))
        if found is not None:
            value, share = found
            return Line(term, value if term.count("+") + term.count(" - ") else math.exp(value), share)
    return _slanted(x, y, names) if slanted else None


def _repeated(values: Array, tolerance: float, rows: int) -> tuple[float, float] | None:
    """A value that many of some numbers have, up to rounding, and their share."""
    values = np.sort(values[np.isfinite(values)])
    by_chance = tolerance / max(float(values.std()), 1e-300) if len(values) else 0.0
    least = max(FEWEST, math.ceil(rows * max(LEAST_SHARE, 20 * by_chance)))
    if len(values) < least:
        return None
    close = values[least - 1 :] - values[: len(values) - least + 1] <= tolerance
    if not close.any():
        return None
    value = float(values[np.argmax(close)])
    value = 0.0 if abs(value) <= tolerance else value
    return value, float((np.abs(values - value) <= 2 * tolerance).sum() / rows)


def _slanted(x: Array, y: Array, names: tuple[str, str]) -> Line | None:
    """A line y = slope · x + constant that many rows lie on: three rows at random would never."""
    rng = np.random.default_rng(0)
    i, j, k = rng.integers(0, len(x), (3, TRIPLES))
    cross = (y[j] - y[i]) * (x[k] - x[i]) - (y[k] - y[i]) * (x[j] - x[i])
    reach_x = np.maximum(np.abs(x[j] - x[i]), np.abs(x[k] - x[i]))
    reach_y = np.maximum(np.abs(y[j] - y[i]), np.abs(y[k] - y[i]))
    error = ROUNDING * (np.abs(y).max() * reach_x + np.abs(x).max() * reach_y)
    apart = (x[i] != x[j]) & (x[i] != x[k]) & (x[j] != x[k]) & (y[i] != y[j]) & (y[i] != y[k])
    hits = np.flatnonzero(apart & (np.abs(cross) <= error))
    for hit in hits[:20]:
        slope = (y[j[hit]] - y[i[hit]]) / (x[j[hit]] - x[i[hit]])
        rest = y - slope * x
        tolerance = 1e-9 * float(y.std())
        on_line = np.abs(rest - rest[i[hit]]) <= tolerance
        away = np.abs(y - np.median(y[on_line])) > CROWD * tolerance
        share = float((on_line & away).mean())
        if share >= LEAST_ON_LINE:
            sign = "-" if slope > 0 else "+"
            return Line(f"{names[1]} {sign} {abs(slope):g}·{names[0]}", float(rest[i[hit]]), share)
    return None


def quadratic_terms(columns: Mapping[str, Array], own: Array | None) -> dict[tuple[str, ...], Array]:
    """Columns in units of their spread, and their products, by the names of their factors.

    Arguments:
        own: Values of a column whose square the terms are to explain, with products of it too; its name
            among the factors is empty.
    """
    scaled = {name: scale(values) for name, values in columns.items()}
    names = [*scaled]
    terms: dict[tuple[str, ...], Array] = {(name,): values for name, values in scaled.items()}
    terms |= {(a, b): scaled[a] * scaled[b] for place, a in enumerate(names) for b in names[place:]}
    if own is not None:
        mine = scale(own)
        terms |= {("",): mine} | {("", name): mine * values for name, values in scaled.items()}
    return terms if len(terms) <= MOST_TERMS else {}


def scale(values: Array) -> Array:
    """Values with mean 0 and variance 1."""
    return (values - values.mean()) / max(float(values.std()), 1e-300)


def follows_from_two(a: Array, b: Array, y: Array) -> bool:
    """Whether y looks like a smooth function of two columns: the more rows, the nearer to a plane.

    What y is off a plane through its neighbours falls with the square of their distance, as 1/rows, if y
    is a function of a and b; noise would stay.
    """
    rows = min(len(y), SURFACE_ROWS)
    spread = float(np.subtract(*np.quantile(y, [0.75, 0.25])))
    if rows < 200 or not spread > 0:
        return False
    points = np.stack([_ranks(a[:rows]), _ranks(b[:rows])], axis=1)
    few = _off_plane(points[: rows // 4], y[: rows // 4]) / spread
    if few > 6 * ON_SURFACE:
        return False
    many = _off_plane(points, y[:rows]) / spread
    return many < ON_SURFACE and many < FALL * few


def _ranks(values: Array) -> Array:
    return values.argsort().argsort() / len(values)


def _off_plane(points: Array, y: Array) -> float:
    """Median distance of y from a plane through the values of its nearest neighbours."""
    distance = ((points[:, None] - points) ** 2).sum(-1)
    np.fill_diagonal(distance, np.inf)
    near = np.argpartition(distance, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
    around = np.concatenate([np.ones((len(y), NEIGHBOURS, 1)), points[near] - points[:, None]], axis=2)
    square = around.transpose(0, 2, 1) @ around + 1e-12 * np.eye(3)
    plane = np.linalg.solve(square, around.transpose(0, 2, 1) @ y[near][..., None])
    return float(np.median(np.abs(plane[:, 0, 0] - y)))
