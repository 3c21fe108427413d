"""Whether part of a column's values are rounded to a grid, and which values are crowded."""

from __future__ import annotations

__all__ = ["Grid", "coarser_grid", "crowded", "find_grid", "on_grid"]

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)
ROUND = (1.0, 1.25, 2.0, 2.5, 5.0, 6.25)  # times a power of ten: the steps that people round to
DECADES = range(-8, 10)
FEWEST_ON_GRID, LEAST_ON_GRID = 4, 0.01  # different values on a grid, and their share of all rows
SAME = 0.98
FAR_FROM_CHANCE = 5.0  # standard deviations
WIDEST, NEAR_STEP = 10**7, 1e-6  # steps of a grid that repeated values tell, and what they may be off
MOST_DECIMALS = 4  # of the gaps between them
MULTIPLES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 24, 25, 30, 36, 40, 50, 60, 75, 90)
MOST_MULTIPLE = 10**6
LEAST_GAIN = 0.02  # nats a row that a grid on top of a lattice has to bring
CERTAIN = 12.0  # nats in all
PEAKS = 3  # most frequent values, which tell nothing of a grid
CROWDED, NEAR = 3.0, 5  # times as many rows as at the neighbours, of which so many on each side count
FEWEST_AT_ATOM, LEAST_SHARE = 4, 0.002  # rows, and share of them, at a crowded value
BY_CHANCE = 0.01  # probability that a column without atoms has one found


class Grid(NamedTuple):
    """A grid that part of the values are rounded to."""

    step: float
    origin: float


def on_grid(values: Array, grid: Grid, eps: float = EPS) -> NDArray[np.bool_]:
    """Which values are on a grid, up to rounding: eps is their precision."""
    count = (values - grid.origin) / grid.step
    off = np.abs(count - np.round(count))
    size = np.abs(values) + abs(grid.origin)  # no share of the step: many tiny values are near 0
    near: NDArray[np.bool_] = off <= 8 * eps * size / grid.step
    return near


def find_grid(
    values: Array,
    unit: Array,
    atoms: tuple[float, ...] = (),
    often: tuple[float, ...] = (),
    eps: float = EPS,
) -> Grid | None:
    """The coarsest grid on which far more values of a column with a density lie than chance allows.

    Arguments:
        unit: How finely each is recorded (rows,): a grid ten times as coarse has a tenth by chance.
        atoms: Those of them that repeat: they may lie on a grid of their own, such as thirds.
        often: Those that repeat so often that they need no grid.
    """
    rest, first = np.unique(values[~np.isin(values, often)], return_index=True)
    if not len(rest):
        return None
    unit = unit[~np.isin(values, often)][first]
    finest = 100 * eps * float(np.abs(values).max())
    steps = [first * 10.0**decade for decade in DECADES for first in ROUND]
    grids = [Grid(step, 0.0) for step in steps] + _common_grid(np.array(atoms))
    grids = [grid for grid in grids if finest < grid.step < np.ptp(rest)]
    more = [_more_than_chance(rest, unit, grid, eps) for grid in grids]
    most = max(more, default=0.0)
    if most < max(FEWEST_ON_GRID, LEAST_ON_GRID * len(values)):
        return None
    fitting = [grid for grid, count in zip(grids, more, strict=True) if count >= SAME * most]
    coarsest = max(grid.step for grid in fitting)
    # few may lie on it by chance
    likely = coarsest * (1.0 if most > CERTAIN else math.exp(-CERTAIN / most))
    found = max((grid for grid in fitting if grid.step <= likely), default=None)
    return None if found is None else _with_origin(rest, found, eps)


def _with_origin(values: Array, grid: Grid, eps: float) -> Grid:
    """A grid, or the coarser one from another origin that almost all values on it lie on: x.99."""
    on = values[on_grid(values, grid, eps)]
    coarser = coarser_grid(on, grid.step)
    every = coarser is not None and on_grid(on, coarser, eps).mean() >= SAME
    return coarser if coarser is not None and every else grid


def _common_grid(values: Array) -> list[Grid]:
    """The grid that some values (in ascending order) all lie on, where they are enough to tell."""
    if len(values) < FEWEST_ON_GRID:
        return []
    from_first = values[1:] - values[0]
    step = _divisor(np.diff(values), 8 * EPS * float(np.abs(values).max()))
    counts = np.round(from_first / step)
    if counts[-1] > WIDEST or (np.abs(from_first / step - counts) > NEAR_STEP * counts).any():
        return []
    step = _plain(float(from_first[-1] / counts[-1]))  # over the longest way it has the most digits
    on_zero = abs(values[0] / step - np.round(values[0] / step)) <= NEAR_STEP
    return [Grid(step, 0.0 if on_zero else float(values[0]))]


def _divisor(gaps: Array, error: float) -> float:
    """What divides all of some gaps, where they have few decimals; the smallest of them otherwise."""
    for decimals in range(MOST_DECIMALS + 1):
        scaled = gaps * 10.0**decimals
        if bool((np.abs(scaled - np.round(scaled)) <= 1e-9 + error * 10.0**decimals).all()):
            return int(np.gcd.reduce(np.round(scaled).astype(np.int64))) / 10**decimals
    return float(gaps.min())


def _plain(step: float) -> float:
    """A step as the short decimal number or the fraction 1/n that it is up to rounding."""
    plain = float(f"{step:.10g}"), 1 / max(1, round(1 / step))
    return next((number for number in plain if abs(number / step - 1) < 1e-12), step)


def _more_than_chance(values: Array, unit: Array, grid: Grid, eps: float) -> float:
    """How many more values lie on a grid than chance explains; 0 where it explains all."""
    count = int(on_grid(values, grid, eps).sum())
    unit = np.maximum(unit, 16 * eps * np.abs(values))  # what `on_grid` takes for equal
    expected = float(np.minimum(1.0, unit / grid.step).sum())
    more = count - expected - FAR_FROM_CHANCE * math.sqrt(expected)
    return max(0.0, more) if count < len(values) else 0.0


def coarser_grid(values: Array, step: float) -> Grid | None:
    """A coarser grid on which far more values of a lattice lie than chance allows."""
    different, counts = np.unique(values, return_counts=True)
    often = different[np.argsort(-counts, kind="stable")[:PEAKS]]
    rest = values[~np.isin(values, often)]
    if len(rest) < 100:
        return None
    best, best_gain = None, max(LEAST_GAIN, CERTAIN / len(rest))
    start = float(rest[0])
    places = np.round((rest - start) / step).astype(np.int64)
    zero = np.round(-start / step)
    tens = [10**decade for decade in range(7)]
    for multiple in sorted({many * ten for many in MULTIPLES for ten in tens}):
        if multiple > min(MOST_MULTIPLE, np.ptp(places) / 10):
            break
        remainders, numbers = np.unique(places % multiple, return_counts=True)
        remainder = remainders[numbers.argmax()]
        _, at_value = np.unique(places[places % multiple == remainder], return_counts=True)
        alone = at_value.max()  # a grid has many values, not one
        share = (numbers.max() - alone) / (len(rest) - alone)
        gain = _gain(float(share), 1 / multiple) - math.log(multiple) / len(rest)
        if gain > best_gain:
            first = remainder if (zero - remainder) % multiple else zero
            best, best_gain = Grid(step * multiple, start + step * float(first)), gain
    return best


def _gain(share: float, expected: float) -> float:
    """Nats a row that a share tells from an expected one; 0 where it is smaller."""
    if share <= expected:
        return 0.0
    other = (1 - share) * math.log((1 - share) / (1 - expected)) if share < 1 else 0.0
    return share * math.log(share / expected) + other


def crowded(values: Array, step: float) -> tuple[float, ...]:
    """Values of a lattice that are far more frequent than their neighbours."""
    different, counts = np.unique(values, return_counts=True)
    least = max(FEWEST_AT_ATOM, LEAST_SHARE * len(values))
    found = []
    for place in np.flatnonzero(counts >= least).tolist():
        first, last = max(0, place - NEAR), min(len(counts) - 1, place + NEAR)
        below, above = counts[first:place].sum(), counts[place + 1 : last + 1].sum()
        width, more = (round(abs(different[place] - different[end]) / step) for end in (first, last))
        sides = [(rows + 1) / steps for rows, steps in ((below, width), (above, more)) if steps]
        expected = float(max(sides, default=1.0))
        count = float(counts[place])
        excess = count * math.log(count / expected) - (count - expected)  # nats, of Poisson counts
        if count > CROWDED * expected and excess > math.log(len(counts) / BY_CHANCE):
            found.append(float(different[place]))
    return tuple(found)
