"""What is known of a column's values after some chunks of a table."""

from __future__ import annotations

__all__ = ["FEW_VALUES", "MOST_CATEGORIES", "Facts", "as_numbers", "spread_out"]

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ciflows.optional import polars as pl
from ciflows.tables.dates import date_numbers, is_date

Array = NDArray[np.float64]
MOST_CATEGORIES = 1000
FEW_VALUES = 12
MOST_DECIMALS = 8
TIED = 0.9  # share of different values below which numbers with a point are no density's
FEWEST_TIED = 20  # rows below which nothing is read into ties
WIDEST_GAP_LATTICE = 100_000
FEWEST_LAST = 8  # values with a last decimal before what divides all of them is more than chance


@dataclass
class Facts:
    """What the training rows say of one column; `sample` is there once all chunks are seen.

    Attributes:
        words: Whether its values are names: text, booleans, or numbers that you said are.
        sample: Some tens of thousands of its values, evenly spread; all of a smaller table's.
    """

    name: str
    dtype: pl.DataType
    words: bool
    rows: int = 0
    gaps: int = 0
    low: float = math.inf
    high: float = -math.inf
    whole: bool = True
    decimals: int | None = 0
    divisor: int = 0
    anchor: float | None = None
    values: set[Any] = field(default_factory=set)
    sample: Array = field(default_factory=lambda: np.empty(0))

    def add(self, values: pl.Series) -> None:
        """Count in some more values, none of them missing."""
        self.rows += len(values)
        if len(self.values) <= MOST_CATEGORIES:
            self.values |= set(values.unique().to_list())
        if self.words:
            return
        numbers = as_numbers(values)
        self.low, self.high = min(self.low, numbers.min()), max(self.high, numbers.max())
        self.whole = self.whole and bool((numbers == np.round(numbers)).all())
        self._add_steps(np.unique(numbers))

    def _add_steps(self, numbers: Array) -> None:
        """Follow how many decimals the values have, and what divides all their differences."""
        if self.decimals is None:
            return
        needed = _decimals(numbers, self.decimals, self.tolerance)
        if needed is None:
            self.decimals = None
            return
        self.divisor *= 10 ** (needed - self.decimals)
        self.decimals = needed
        self.anchor = float(numbers[0]) if self.anchor is None else self.anchor
        counts = np.round((numbers - self.anchor) * 10.0**needed).astype(np.int64)
        self.divisor = math.gcd(self.divisor, int(np.gcd.reduce(np.abs(counts))))

    @property
    def tolerance(self) -> float:
        """Relative rounding error of its values."""
        return 1e-6 if str(self.dtype) == "Float32" else 1e-14

    @property
    def dates(self) -> bool:
        """Whether its values are dates."""
        return is_date(self.dtype)

    @cached_property
    def counts(self) -> tuple[Array, NDArray[np.int64]]:
        """The different values of the sample in ascending order, and how often each is there."""
        values, counts = np.unique(self.sample, return_counts=True)
        return values, counts

    @property
    def tied(self) -> bool:
        """Whether more values repeat than those of a density would."""
        n = len(self.sample)
        return n >= FEWEST_TIED and len(self.counts[0]) <= TIED * n

    @property
    def few(self) -> bool:
        """Whether it has so few values, each often, that they are as good as names."""
        counts, rows = self.counts[1], len(self.sample)
        most = min(FEW_VALUES, rows // 5)
        if self.step() is None and len(self.values) <= MOST_CATEGORIES:
            most = max(most, min(MOST_CATEGORIES, rows // 3))
        once = int((counts == 1).sum())  # where many occur once, others are still to come
        return max(len(counts), len(self.values)) <= most and once <= max(1, len(counts) // 4)

    def step(self) -> float | None:
        """The step of the lattice that its values lie on; None without a lattice."""
        distinct = len(self.counts[0])
        if self.whole:
            return float(self.divisor or 1) if self.rows >= 50 and distinct >= 5 else 1.0
        if not self.tied:
            return None
        if self.recorded_step:
            return self.recorded_step
        return self._smallest_gap() if self.rows == len(self.sample) else None

    @property
    def recorded_step(self) -> float | None:
        """What divides all differences of its values, where they have few decimals; tied or not."""
        if self.decimals is None or not self.divisor:
            return None
        last = np.round(self.counts[0] * 10.0**self.decimals) % 10 != 0  # values that need all decimals
        return (self.divisor if last.sum() >= FEWEST_LAST else 1) / 10**self.decimals

    def _smallest_gap(self) -> float | None:
        """The smallest difference of two values, where it divides all others."""
        values = self.counts[0]
        gap = float(np.diff(values).min())
        steps = (values - values[0]) / gap
        near = np.abs(steps - np.round(steps)) <= 1e-6 * np.maximum(1.0, steps)
        return gap if steps[-1] <= WIDEST_GAP_LATTICE and bool(near.all()) else None


def _decimals(numbers: Array, start: int, tolerance: float) -> int | None:
    """How many decimals all of some numbers can be written with; None for more than a few."""
    for decimals in range(start, MOST_DECIMALS + 1):
        scaled = numbers * 10.0**decimals
        error = 1e-9 + 2 * tolerance * np.abs(scaled)
        if error.max(initial=0.0) > 0.01:
            return None
        if bool((np.abs(scaled - np.round(scaled)) <= error).all()):
            return decimals
    return None


def spread_out(values: Sequence[Any], most: int) -> str:
    """Some values in words, and dots for the rest."""
    shown = ", ".join(
        f"{value:g}" if isinstance(value, float) else str(value) for value in values[:most]
    )
    return f"{shown}, ..." if len(values) > most else shown


def as_numbers(values: pl.Series) -> Array:
    """Values as float64 numbers (rows,); dates in days or seconds since 1970."""
    if is_date(values.dtype):
        return date_numbers(values)
    return values.to_physical().cast(pl.Float64).to_numpy()
