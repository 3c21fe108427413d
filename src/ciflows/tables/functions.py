"""Columns that others determine: a table with such a column has no density."""

from __future__ import annotations

__all__ = ["Function", "find_function", "find_likely_function"]

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ciflows.tables.relations import find_line, follows_from_two, quadratic_terms, scale

Array = NDArray[np.float64]
Rows = NDArray[np.bool_]
Terms = Mapping[tuple[str, ...], Array]
ROWS = 5000
FEWEST = 20
EXACT = 1e-10  # share of its spread that a linear function may be off
SMOOTH = 1e-4  # and that a line through its neighbours may be, in the median
MOST_COLUMNS = 8  # of which all pairs are tried
CURVATURE = 30.0  # of a curve over n points a line through neighbours is off by about this over n²


class Function(NamedTuple):
    """A column that others determine.

    Attributes:
        name: The column.
        of: The columns that determine it.
        formula: How, where that can be written down.
        share: Share of the rows in which it is determined.
        instead: What may be modelled in its place, where that is not all of them.
    """

    name: str
    of: tuple[str, ...]
    formula: str
    share: float = 1.0
    instead: str = ""


def find_function(columns: Mapping[str, Array], targets: Mapping[str, Rows]) -> Function | None:
    """The first of some columns that is a function of others, if any is.

    It finds sums and other linear functions, products, powers and exponentials (linear functions with
    logarithms), quadratic functions and quadrics such as x² + y² = 1, smooth functions of a single other
    column, and lines over a single other column that only part of the rows lie on.

    Arguments:
        columns: Values of all columns of numbers (rows,).
        targets: The columns that have a density, and the rows (rows,) in which they are at no atom.

    Example:
        >>> x, y = np.random.default_rng(0).normal(size=(2, 100))
        >>> rows = np.ones(100, dtype=bool)
        >>> find_function({"x": x, "y": y, "z": 2 * x - y + 1}, {"z": rows})
        Function(name='z', of=('x', 'y'), formula='z = 2·x - 1·y + 1', share=1.0, instead='')
        >>> find_function({"x": x, "y": y}, {"x": rows, "y": rows}) is None
        True
    """
    if len(columns) < 2:
        return None
    for name in reversed([*targets]):
        some = _some(columns, targets[name])
        if len(some[name]) < FEWEST:
            continue
        found = _linear(some, name) or _quadratic(some, name) or _curve(some, name)
        found = found or _line(columns, targets, name)
        if found is not None:
            return found
    return None


def find_likely_function(columns: Mapping[str, Array], targets: Mapping[str, Rows]) -> Function | None:
    """The first of some columns that looks like a smooth function of two others, if any does."""
    for name in reversed([*targets]) if len(columns) <= MOST_COLUMNS else ():
        some = _some(columns, targets[name])
        others = [other for other in columns if other != name]
        for place, a in enumerate(others):
            for b in others[place + 1 :]:
                if follows_from_two(some[a], some[b], some[name]):
                    return Function(name, (a, b), f"{name} is a function of {a} and {b}")
    return None


def _some(columns: Mapping[str, Array], rows: Rows) -> dict[str, Array]:
    places = np.flatnonzero(rows)[:ROWS]
    return {name: values[places] for name, values in columns.items()}


def _linear(columns: Mapping[str, Array], name: str) -> Function | None:
    """A column, or its logarithm, as a linear function of others, or of others and their logarithms."""
    others = {other: values for other, values in columns.items() if other != name}
    logs = {f"log {other}": np.log(values) for other, values in others.items() if values.min() > 0}
    y = columns[name]
    for label, target in ((name, y), (f"log {name}", np.log(y) if y.min() > 0 else y)):
        for terms in (others, {**others, **logs}):
            found = _solve(terms, target)
            if found is not None:
                kept, weights, shift = found
                words = [f"{_signed(w)}·{term}" for term, w in zip(kept, weights, strict=True)]
                words += [_signed(shift)] if abs(shift) > 1e-9 else []
                names = dict.fromkeys(term.removeprefix("log ") for term in kept)
                return Function(name, tuple(names), f"{label} = {' '.join(words).removeprefix('+ ')}")
    return None


def _signed(number: float) -> str:
    return f"{'-' if number < 0 else '+'} {abs(number):g}"


def _solve(terms: Mapping[str, Array], y: Array) -> tuple[list[str], list[float], float] | None:
    """The terms that y is a linear function of, with their weights and the constant."""
    if len(y) <= len(terms) + 2 or not terms:
        return None
    x = np.stack([*terms.values()], axis=1)
    middle, scale = x.mean(0), np.maximum(x.std(0), 1e-300)
    size = max(float(y.std()), 1e-300)
    a, b = (x - middle) / scale, (y - y.mean()) / size
    weights, *_ = np.linalg.lstsq(a, b, rcond=1e-12)
    if float(np.sqrt(np.mean((a @ weights - b) ** 2))) > EXACT:
        return None
    kept = [i for i in range(len(terms)) if abs(weights[i]) > 1e-7]
    slopes = [float(weights[i] * size / scale[i]) for i in kept]
    shift = float(y.mean() - sum(w * middle[i] for w, i in zip(slopes, kept, strict=True)))
    return [[*terms][i] for i in kept], slopes, shift


def _quadratic(columns: Mapping[str, Array], name: str) -> Function | None:
    """A column, or its square, as a quadratic function of others."""
    others = {other: values for other, values in columns.items() if other != name}
    y = scale(columns[name])
    for own, target in ((None, y), (y, y**2)):
        terms = quadratic_terms(others, own)
        found = _solve({str(place): term for place, term in enumerate(terms.values())}, target)
        if found is None:
            continue
        kept = {[*terms][int(place)]: weight for place, weight in zip(*found[:2], strict=True)}
        if own is not None and not _crosses(y, terms, kept, found[2]):
            continue
        names = tuple(dict.fromkeys(factor for factors in kept for factor in factors if factor))
        what = name if own is None else f"{name}²"
        return Function(name, names, f"{what} is a quadratic function of {', '.join(names)}")
    return None


def _crosses(y: Array, terms: Terms, weights: Mapping[tuple[str, ...], float], shift: float) -> bool:
    """Whether f = y² - terms vanishes at y itself, and not only near it as (y - a)² does for y ≈ a."""
    f = y**2 - shift - sum(weight * terms[factors] for factors, weight in weights.items())
    slope = 2 * y
    for factors, weight in weights.items():
        if factors[0] == "":
            slope = slope - weight * (terms[factors[1:]] if factors[1:] else 1.0)
    return float(np.median(np.abs(f) / np.maximum(np.abs(slope), 1e-300))) < 10 * EXACT


def _line(columns: Mapping[str, Array], targets: Mapping[str, Rows], name: str) -> Function | None:
    """A column that lies on a line over one of the others in some of the rows."""
    for other in columns:
        rows = targets[name] & _once(columns[name])
        rows = rows & targets[other] & _once(columns[other]) if other in targets else rows
        some = _some(columns, rows)
        if other == name or len(some[name]) < FEWEST:
            continue
        line = find_line(some[other], some[name], (other, name), slanted=other in targets)
        if line is not None:
            formula = f"{line.term} = {line.value:g} in {line.share:.1%} of the rows"
            return Function(name, (other,), formula, line.share, line.term)
    return None


def _once(values: Array) -> Rows:
    """Which values occur once: sums of values that repeat would repeat too."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray(counts[places] == 1)


def _curve(columns: Mapping[str, Array], name: str) -> Function | None:
    """A column that lies on a smooth curve over one of the others."""
    for other, values in columns.items():
        if other != name and _on_curve(values, columns[name]):
            return Function(name, (other,), f"{name} is a function of {other}")
    return None


def _on_curve(x: Array, y: Array) -> bool:
    """Whether y follows from x: between its neighbours in x it lies on a straight line, almost."""
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    if len(np.unique(x)) < len(x) // 2:
        return False
    width = x[2:] - x[:-2]
    inner = width > 0
    share = (x[1:-1] - x[:-2])[inner] / width[inner]
    line = y[:-2][inner] + share * (y[2:] - y[:-2])[inner]
    quarter, three = np.quantile(y, [0.25, 0.75])
    off = np.median(np.abs(line - y[1:-1][inner])) / max(float(three - quarter), 1e-300)
    return bool(off < min(SMOOTH, CURVATURE / len(x) ** 2))
