"""What all kinds of columns have in common, and columns of numbers.

| kind | values | likelihood |
|---|---|---|
| `Categorical` | names, or numbers of which there are few different ones | a probability |
| `Circular` | numbers that wrap around, such as hours | a density, or a probability for each step |
| `Lattice` | whole numbers, or numbers in equal steps | a probability for each step |
| `Real` | all others | a density per unit of the file, and a probability for each atom |
"""

from __future__ import annotations

__all__ = ["Column", "Number", "check_limits", "check_range", "dtype_name"]

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.settings import Settings
from ciflows.tables.dates import from_numbers, polars_type, show, type_name, unit_of
from ciflows.tables.facts import Facts, as_numbers, spread_out
from ciflows.tables.options import Bounds, TableSettings
from ciflows.tables.tails import spread

Array = NDArray[Any]
MOST_NAMED = 5
LARGEST = 1e150
DIGITS = 1e3 * np.finfo(np.float64).eps


class Column(Settings):
    """One column of a table.

    Attributes:
        dtype: Its type in the file, for the tables that you get back.
    """

    name: str
    dtype: str

    @property
    def levels(self) -> int | None:
        """How many values it has, where each has its own probability; None for too many."""
        return None

    @property
    def words(self) -> list[str]:
        """Its values in words, where it is categorical."""
        return []

    @property
    def context_features(self) -> int:
        """How many numbers a value becomes when you condition on it."""
        return 1

    @property
    @abstractmethod
    def measure(self) -> str:
        """What its likelihood is relative to."""

    @abstractmethod
    def encode(self, values: pl.Series) -> Array:
        """Values as numbers (rows,) in float64; NaN for those that the column cannot have."""

    @abstractmethod
    def complain(self, values: pl.Series) -> str:
        """What is wrong with values that `encode` made NaN."""

    @abstractmethod
    def decode(self, numbers: Array) -> pl.Series:
        """Numbers (rows,) as values of the file's own type."""

    @abstractmethod
    def context(self, values: pl.Series) -> Array:
        """Values as float32 numbers (rows, context_features) to condition on."""

    @abstractmethod
    def from_context(self, context: Array) -> Array:
        """The numbers (rows,), or levels, that a `context` was made from, to its single precision."""

    def empty(self, rows: int) -> pl.Series:
        """A column of `rows` gaps."""
        return self._series([None] * rows)

    def _series(self, values: Any) -> pl.Series:
        return pl.Series(self.name, values).cast(self._type())

    def _type(self) -> Any:
        return polars_type(self.dtype)


class Number(Column):
    """A column of numbers.

    Attributes:
        low: The smallest possible value; None where there is none.
        high: The largest possible value.
        atoms: Values with a probability of their own, in ascending order.
        grid: Step of a grid that part of the values are rounded to; 0 for none.
        grid_origin: A value on the grid.
        centre: Middle of its values, for conditioning on it.
        spread: Their spread.
    """

    low: float | None = None
    high: float | None = None
    atoms: tuple[float, ...] = ()
    grid: float = 0.0
    grid_origin: float = 0.0
    centre: float = 0.0
    spread: float = 1.0

    def context(self, values: pl.Series) -> Array:
        numbers = (as_numbers(values) - self.centre) / self.spread
        return np.arcsinh(numbers).astype(np.float32)[:, None]

    def from_context(self, context: Array) -> Array:
        return np.sinh(context[:, 0]) * self.spread + self.centre

    def encode(self, values: pl.Series) -> Array:
        return as_numbers(values)

    def exact(self, numbers: Array, dtype: str | None = None) -> Array:
        """Numbers (rows,) as they were before a type of few digits, the column's own or another."""
        return numbers

    def complain(self, values: pl.Series) -> str:
        return f"{self.name} has values that are no numbers: {spread_out(values.to_list(), MOST_NAMED)}"

    def decode(self, numbers: Array) -> pl.Series:
        low = -np.inf if self.low is None else self.low
        numbers = np.clip(numbers, low, np.inf if self.high is None else self.high)
        return self._series(inside(numbers, self.dtype))

    @property
    def per(self) -> str:
        """The unit of its steps, where it needs to be said: " day" or " second" of dates."""
        unit = unit_of(self.dtype)
        return f" {unit}" if unit else ""

    def show(self, value: float) -> str:
        """A value in words."""
        return show(value, self.dtype)


def dtype_name(facts: Facts) -> str:
    """The name of the polars type that samples get."""
    name = type_name(facts.dtype)
    return "Float64" if name == "Decimal" or (name == "String" and not facts.words) else name


def inside(values: Array, dtype: str) -> Array:
    """Whole numbers that fit into a type of integers, or what a type of dates stores."""
    if unit_of(dtype):
        return from_numbers(values, dtype)
    if "Int" not in dtype:
        return values
    info = np.iinfo(dtype.lower())
    # the largest 64-bit integers are no floats: the float below them is
    return values.round().clip(float(info.min), np.nextafter(float(info.max), 0)).astype(dtype.lower())


def check_range(facts: Facts) -> None:
    """Refuse numbers that float64 cannot tell apart, or whose squares it cannot hold."""
    low, high, largest = facts.low, facts.high, max(-facts.low, facts.high)
    if largest > LARGEST or high - low < 1 / LARGEST:
        raise UserError(f"{facts.name} goes from {low:g} to {high:g}: give it another unit.")
    usual = float(np.median(np.abs(facts.sample)))  # far outliers have digits enough for themselves
    if usual * DIGITS > spread(facts.sample)[1] or (facts.whole and largest > 2.0**53):
        raise UserError(
            f"{facts.name} goes from {low:.17g} to {high:.17g}: its values are too large to be told "
            "apart in double precision. Take off a constant, or leave it out if it is an identifier."
        )


def check_limits(facts: Facts, settings: TableSettings) -> Bounds:
    """The bounds that you gave for a column; refused where its values lie outside."""
    low, high = settings.limits(facts.name)
    if (low is not None and facts.low < low) or (high is not None and facts.high > high):
        text = settings.bounds[facts.name]
        raise UserError(
            f"bounds {facts.name}={text}: its values go from {facts.low:g} to {facts.high:g}."
        )
    return low, high
