"""How finely a column's values are recorded, and how often they would agree by chance."""

from __future__ import annotations

__all__ = ["MANY_ATOMS", "SINGLE", "by_chance", "frequent", "last_digits", "repeated"]

import math

import numpy as np
from numpy.typing import NDArray

from ciflows.optional import polars as pl

Array = NDArray[np.float64]
BITS = (11, 24)  # of half and single precision
DOUBLE, SINGLE = 2.0**-52, 2.0**-22  # relative distance between neighbours, at most
MOST_DECIMALS = 13  # that are told from full precision
NEAR = 5  # neighbours on each side that tell how dense values are
MANY_ATOMS = 10_000
MOST_FREQUENT, FEWEST, LEAST_SHARE = 32, 4, 0.002  # values, and rows of each, that are frequent
CHANCE = 0.01  # probability that a column without atoms has one found
LEAST_EXCESS = 3.0  # times as many rows as expected


def last_digits(values: Array, step: float | None = None) -> Array:
    """The unit of the last digit that each value (rows,) is recorded with.

    Values of one column are recorded alike: with so many decimals, with so many significant digits, or
    in half, single or double precision.

    Arguments:
        step: What divides all their differences, where they have few decimals.

    Example:
        >>> last_digits(np.array([1.27, 0.315, 41.9, 123.0])).round(9).tolist()
        [0.01, 0.001, 0.1, 1.0]
    """
    size = np.abs(values)
    decade = 10.0 ** np.floor(np.log10(np.maximum(size, 1e-300)))
    unit = _relative(values) * size
    for scale in (np.where(size > 0, decade, 0.0), np.ones_like(size)):
        decimals = _decimals(size / np.maximum(scale, 1e-300))
        unit = np.maximum(unit, 0.0 if decimals is None else scale * 10.0**-decimals)
    return np.maximum(unit, step or 0.0)


def _relative(values: Array) -> float:
    """Relative distance between neighbours of a type of numbers that holds all values, or wrote them."""
    mantissa = np.frexp(values)[0]
    for bits in BITS:
        scaled = mantissa * 2.0**bits
        if bool((scaled == np.round(scaled)).all()):
            return float(2.0 ** (2 - bits))
    with np.errstate(over="ignore"):
        written = pl.Series(values.astype(np.float32)).cast(pl.String)
    return SINGLE if bool((written.cast(pl.Float64).to_numpy() == values).all()) else DOUBLE


def _decimals(numbers: Array) -> int | None:
    """How many decimals some numbers can all be written with; None for very many."""
    for decimals in range(MOST_DECIMALS + 1):
        scaled = numbers * 10.0**decimals
        error = 1e-9 + 4 * DOUBLE * scaled
        if error.max(initial=0.0) > 0.1:
            return None
        if bool((np.abs(scaled - np.round(scaled)) <= error).all()):
            return decimals
    return None


def by_chance(values: Array, unit: Array) -> Array:
    """How many other rows a density would have at each of some values, given how dense they are.

    Arguments:
        values: Different values in ascending order (values,).
        unit: How finely each is recorded (values,).
    """
    places = np.arange(len(values))
    first, last = np.maximum(places - NEAR, 0), np.minimum(places + NEAR, len(values) - 1)
    width = np.maximum(values[last] - values[first], 1e-300)
    return unit * (last - first) / width


def repeated(values: Array, unit: Array) -> tuple[float, ...]:
    """Values that repeat more often than chance allows, in ascending order; the most frequent of many.

    Arguments:
        unit: How finely each is recorded (rows,).

    Example:
        >>> x = np.append(np.random.default_rng(0).normal(size=100), [0.5, 0.5])
        >>> repeated(x, last_digits(x)), repeated(x.round(2), last_digits(x.round(2)))
        ((0.5,), ())
    """
    different, first, counts = np.unique(values, return_index=True, return_counts=True)
    others = np.maximum(counts - 1.0, 1e-300)
    expected = np.maximum(by_chance(different, unit[first]), 1e-300)
    excess = others * np.log(others / expected) - (others - expected)  # nats, of Poisson counts
    often = (others > LEAST_EXCESS * expected) & (excess > math.log(max(len(counts), 1) / CHANCE))
    found = np.flatnonzero(often & (counts > 1))
    found = found[np.argsort(-counts[found], kind="stable")][:MANY_ATOMS]
    return tuple(sorted(different[found].tolist()))


def frequent(values: Array) -> tuple[float, ...]:
    """The few most frequent values, of which many rows have each."""
    different, counts = np.unique(values, return_counts=True)
    least = max(FEWEST, LEAST_SHARE * len(values))
    often = np.argsort(-counts, kind="stable")[:MOST_FREQUENT]
    return tuple(sorted(different[often[counts[often] >= least]].tolist()))
