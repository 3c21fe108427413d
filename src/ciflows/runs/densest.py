"""The shortest set of intervals that holds a share of some numbers: a highest-density region.

Numbers are counted in cells: a value of a lattice, an atom, or one of many narrow bins. With c_j counts
in cell j of width w_j, smoothed counts s_j and n numbers in all:

    region = the cells of highest density s_j / w_j, as many as it takes for Σ c_j >= level n

Neighbours in the region form an interval, and so do those with a gap between them too short to be told
from noise. There may be several, and they always hold the share. Atoms have no width: they come first.
"""

from __future__ import annotations

__all__ = ["Interval", "densest"]

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ciflows.runs.circles import rolled, unrolled
from ciflows.tables.circular import Circular
from ciflows.tables.column import Column, Number
from ciflows.tables.lattice import Lattice

Array = NDArray[np.float64]
FEWEST_BINS, MOST_BINS, REPLICATES = 1000, 20_000, 50
WINDOW = 0.05  # share of the numbers in the windows that a bandwidth is found from
GAP = 3  # bandwidths: what lies closer together is one interval, as noise in a tail
ROUGH = 0.3  # of the bandwidth, in every other replicate
NORMAL = 0.153  # median width of such windows, for numbers of a standard normal distribution


class Interval(NamedTuple):
    """One interval of a highest-density region, both ends included.

    Attributes:
        low: Its lower end.
        high: Its upper end; the lower one again for a single value.
        mass: Share of the numbers in it.
        low_std_error: Standard error of the lower end.
        high_std_error: Standard error of the upper end.
    """

    low: float
    high: float
    mass: float
    low_std_error: float
    high_std_error: float


class Cells(NamedTuple):
    """Cells in ascending order, with what was counted in them.

    Attributes:
        low: Their lower ends (cells,).
        high: Their upper ends (cells,).
        counts: Numbers in each (cells,).
        joined: Whether a cell touches the one before (cells,).
        width: Widths (cells,); 1 for values of a lattice, 0 for an atom.
        bins: Which cells are bins, and are smoothed (cells,).
        reach: How many bins a bandwidth is.
    """

    low: Array
    high: Array
    counts: Array
    joined: NDArray[np.bool_]
    width: Array
    bins: NDArray[np.bool_]
    reach: float = 0.0


def densest(x: Array, level: float, column: Column | None = None, seed: int = 0) -> list[Interval]:
    """The shortest intervals that hold a share of some numbers, in ascending order.

    Standard errors are those of a bootstrap: in each replicate the nearest end of the same side counts.
    Every other replicate is smoothed less, since smoothing moves an end where the density is steep. An
    end at the smallest or largest number may lie anywhere among the √n / 4 next to it.

    Arguments:
        column: What they are: a lattice, numbers with atoms, or on a circle, where an interval whose
            low end is above the high one passes the seam; a density if None.
        seed: Seed of the bootstrap.

    Example:
        >>> x = np.random.default_rng(0).normal(size=10_000)
        >>> [interval] = densest(x, 0.9)
        >>> abs(interval.low + 1.645) < 4 * interval.low_std_error
        True
    """
    if isinstance(column, Circular):
        return _on_circle(x, level, column, seed)
    return _intervals(x, _count(x, column), level, seed)


def _intervals(x: Array, cells: Cells, level: float, seed: int) -> list[Interval]:
    """The intervals of numbers (n,) that were counted in cells."""
    level = _before_joining(cells, level)
    chosen = _region(cells, cells.counts[None], level)[0]
    draws = np.random.default_rng(seed).multinomial(len(x), cells.counts / len(x), REPLICATES)
    rough = cells._replace(reach=ROUGH * cells.reach)
    again = [
        region
        for some, counts in ((cells, draws[::2]), (rough, draws[1::2]))
        for region in _region(some, counts.astype(np.float64), level)
    ]
    spans = _spans(cells, chosen)
    others = [_ends(cells, _spans(cells, each)) for each in again]
    low, high = _ends(cells, spans)
    mass = [float(cells.counts[i:j].sum() / len(x)) for i, j in spans]
    low_error, high_error = (
        np.sqrt(np.mean([_nearest(side, other[k]) ** 2 for other in others], axis=0))
        for k, side in enumerate((low, high))
    )
    ordered, k = np.sort(x), math.ceil(math.sqrt(len(x)) / 4)
    if cells.bins[0] and low[0] == cells.low[0]:
        low_error[0] = max(low_error[0], ordered[k] - ordered[0])
    if cells.bins[-1] and high[-1] == cells.high[-1]:
        high_error[-1] = max(high_error[-1], ordered[-1] - ordered[-1 - k])
    columns = (low.tolist(), high.tolist(), mass, low_error.tolist(), high_error.tolist())
    return [Interval(*row) for row in zip(*columns, strict=True)]


def _on_circle(x: Array, level: float, circle: Circular, seed: int) -> list[Interval]:
    """The same for values on a circle, cut open where they are few: an interval may pass the seam."""
    x = unrolled(x, circle)
    found = _intervals(x, _values(x, circle.step) if circle.step else _bins(x), level, seed)
    ends = rolled(np.array([(part.low, part.high) for part in found]), circle).tolist()
    turned = zip(found, ends, strict=True)
    return sorted(part._replace(low=low, high=high) for part, (low, high) in turned)


def _count(x: Array, column: Column | None) -> Cells:
    if isinstance(column, Lattice) and column.levels is not None:
        return _values(x, column.step)
    atoms = np.array(column.atoms if isinstance(column, Number) else (), dtype=np.float64)
    rest = x[~np.isin(x, atoms)]
    if not len(rest):
        return _values(x, 0.0)
    present = atoms[np.isin(atoms, x)]
    return _with_atoms(_bins(rest), present, np.array([np.sum(x == atom) for atom in present]))


def _values(x: Array, step: float) -> Cells:
    """A cell for each value that occurs."""
    values, counts = np.unique(x, return_counts=True)
    joined = np.diff(values, prepend=-np.inf) < 1.5 * step
    ones = np.ones(len(values))
    return Cells(values, values, counts.astype(np.float64), joined, ones, ones < 0)


def _bins(x: Array) -> Cells:
    """Narrow bins: equal after a map that brings in far tails, arcsinh((x - centre) / scale)."""
    x = np.sort(x)
    low, high = np.quantile(x, [0.1, 0.9])
    centre, scale = (low + high) / 2, (high - low) / 2 or 1.0
    z = np.arcsinh((x - centre) / scale)
    bandwidth = 0.9 * _scale(z) * len(z) ** -0.2
    bins = int(np.clip(8 * (z[-1] - z[0]) / bandwidth, FEWEST_BINS, MOST_BINS))
    edges = np.linspace(z[0], z[-1], bins + 1)
    if not edges[1] > edges[0]:
        return _values(x, 0.0)
    counts = np.histogram(z, edges)[0].astype(np.float64)
    ends = np.clip(centre + scale * np.sinh(edges), x[0], x[-1])
    first = np.arange(bins) == 0
    reach = bandwidth / (edges[1] - edges[0])
    return Cells(ends[:-1], ends[1:], counts, ~first, np.diff(ends), ~first | first, reach)


def _scale(x: Array) -> float:
    """The standard deviation of sorted numbers if they are normal; that of a part if they have parts."""
    k = min(len(x) - 1, math.ceil(WINDOW * len(x)))
    width = float(np.median(x[k:] - x[: len(x) - k])) / NORMAL
    return width or float(x[-1] - x[0]) or 1.0


def _with_atoms(cells: Cells, atoms: Array, counts: Array) -> Cells:
    """Cells with atoms at their places among them; an atom touches what is within a bin's width."""
    places = np.searchsorted(cells.low, atoms, side="right")
    before = cells.high[np.maximum(places - 1, 0)], cells.width[np.maximum(places - 1, 0)]
    after = np.minimum(places, len(cells.low) - 1)
    near = (places > 0) & (atoms <= before[0] + before[1])
    follows = (places < len(cells.low)) & (cells.low[after] - atoms <= cells.width[after])
    joined = cells.joined.copy()
    joined[after[places < len(cells.low)]] = follows[places < len(cells.low)]
    return Cells(
        np.insert(cells.low, places, atoms),
        np.insert(cells.high, places, atoms),
        np.insert(cells.counts, places, counts),
        np.insert(joined, places, near),
        np.insert(cells.width, places, 0.0),
        np.insert(cells.bins, places, False),
        cells.reach,
    )


def _before_joining(cells: Cells, level: float) -> float:
    """The share to ask for so that, with short gaps closed, the wanted share is held."""

    def holds(share: float) -> bool:
        spans = _spans(cells, _region(cells, cells.counts[None], share)[0])
        return bool(sum(cells.counts[i:j].sum() for i, j in spans) >= level * cells.counts.sum())

    low, high = 0.0, level
    for _ in range(8 if holds(0.999 * level) else 0):  # else nothing was joined
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _region(cells: Cells, counts: Array, level: float) -> NDArray[np.bool_]:
    """Which cells belong to the region, for several counts (replicates, cells)."""
    density = counts.copy()
    density[:, cells.bins] = _smooth(counts[:, cells.bins], cells.reach)
    width = np.where(cells.width > 0, cells.width, np.finfo(np.float64).tiny)
    order = np.argsort(-np.log(density + 1e-300) + np.log(width), axis=1, kind="stable")
    held = np.take_along_axis(counts, order, axis=1).cumsum(1)
    needed = held - np.take_along_axis(counts, order, axis=1) < level * held[:, -1:]
    region = np.zeros(counts.shape, dtype=bool)
    np.put_along_axis(region, order, needed, axis=1)
    return region


def _smooth(counts: Array, reach: float) -> Array:
    """Counts (replicates, bins) smoothed by three boxes, nearly a Gaussian; mirrored at both ends."""
    half = round((math.sqrt(4 * reach**2 + 1) - 1) / 2)
    for _ in range(3 if half else 0):
        wide = np.pad(counts, ((0, 0), (half + 1, half)), mode="symmetric").cumsum(1)
        counts = (wide[:, 2 * half + 1 :] - wide[:, : -2 * half - 1]) / (2 * half + 1)
    return counts


def _spans(cells: Cells, chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First cell and the one behind the last of each run of chosen cells; short gaps are closed."""
    linked = chosen & np.concatenate([[False], chosen[:-1]]) & cells.joined
    starts = np.flatnonzero(chosen & ~linked)
    ends = np.flatnonzero(chosen & ~np.concatenate([linked[1:], [False]])) + 1
    spans = [(int(i), int(j)) for i, j in zip(starts, ends, strict=True)]
    kept = spans[:1]
    for i, j in spans[1:]:
        whole = bool(cells.joined[kept[-1][1] : i + 1].all())
        if whole and i - kept[-1][1] < GAP * cells.reach:
            kept[-1] = kept[-1][0], j
        else:
            kept.append((i, j))
    return kept


def _ends(cells: Cells, spans: list[tuple[int, int]]) -> tuple[Array, Array]:
    """Lower and upper ends of intervals."""
    low = np.array([cells.low[i] for i, _ in spans])
    return low, np.array([cells.high[i:j].max() for i, j in spans])


def _nearest(ends: Array, others: Array) -> Array:
    """Distances of ends to the nearest of some others."""
    return np.abs(ends[:, None] - others[None]).min(1)
