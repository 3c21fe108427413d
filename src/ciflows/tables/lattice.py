"""Columns of numbers in equal steps, such as whole ones: each step has a probability."""

from __future__ import annotations

__all__ = ["Lattice", "decimals_of", "is_narrow", "on_lattice"]

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.tables.column import MOST_NAMED, Number, check_limits, check_range, dtype_name
from ciflows.tables.facts import Facts, as_numbers, spread_out
from ciflows.tables.options import Bounds, TableSettings
from ciflows.tables.rounding import coarser_grid, crowded, on_grid
from ciflows.tables.tails import natural_bounds, spread

Array = NDArray[Any]
MOST_LEVELS = 64  # a lattice of more values is modelled as numbers, not value by value
ROWS_A_LEVEL = 5  # and so is one with fewer rows for each value
CROWDED_AT_ZERO = 0.01  # share of the rows at 0 or 1 from which on a count cannot be below 0


class Lattice(Number):
    """Numbers in equal steps, such as whole ones: each has a probability.

    Attributes:
        step: The distance between neighbours.
        origin: One of the values; the smallest where there is a count.
        count: How many values there are from `origin` on, where each is modelled by itself.
        decimals: Decimals of the values.
    """

    kind: Literal["lattice"] = "lattice"
    step: float
    origin: float
    count: int | None = None
    decimals: int = 0

    @classmethod
    def recognise(cls, facts: Facts, settings: TableSettings) -> Lattice | None:
        """The column, where the facts speak for this kind."""
        step, name = settings.step_of(facts.name), facts.name
        if name in settings.given:
            return None
        asked, step = step is not None, facts.step() if step is None else step
        if not step:
            return None
        check_range(facts)
        decimals = 0 if facts.whole and step == round(step) else decimals_of(step, facts)
        about: dict[str, Any] = {
            "name": name,
            "dtype": dtype_name(facts),
            "step": step,
            "decimals": decimals,
        }
        low, high = check_limits(facts, settings)
        origin = facts.low
        whole = on_lattice(facts.counts[0], origin, step, facts.tolerance)
        if not whole.all():
            if not asked:
                return None
            off = facts.counts[0][~whole][0]
            raise UserError(
                f"step {name}={step:g}: {off:g} is not a multiple of it away from {origin:g}."
            )
        atoms = settings.atoms_of(name)
        if is_narrow(facts, step) and not atoms:
            return cls(**about, **_narrow_range(facts, step, (low, high)))
        rest = _wide_range(facts, step, (low, high), settings)
        for end in ("low", "high", "atoms"):  # as `encode` writes them, to the last digit
            if rest[end] is not None and (end == "atoms" or rest[end] in (facts.low, facts.high)):
                rest[end] = nearest_value(np.array(rest[end]), origin, step, decimals).tolist()
        return cls(**about, origin=origin, **rest)

    @property
    def levels(self) -> int | None:
        return self.count

    @property
    def measure(self) -> str:
        return f"probability for each step of {self.spacing}"

    @property
    def spacing(self) -> str:
        """Its step in words: a number, with the unit of dates."""
        return f"{self.step:g}{self.per}{'s' if self.per and self.step != 1 else ''}"

    @property
    def below(self) -> bool:
        """Whether one more level stands for all values below the first."""
        return self.count is not None and self.low is None

    @property
    def above(self) -> bool:
        """Whether one more level stands for all values above the last."""
        return self.count is not None and self.high is None

    def encode(self, values: pl.Series) -> Array:
        numbers = as_numbers(values)
        tolerance = 1e-6 if str(values.dtype) == "Float32" else 1e-14
        on = on_lattice(numbers, self.origin, self.step, tolerance)
        return np.where(on, nearest_value(numbers, self.origin, self.step, self.decimals), np.nan)

    def complain(self, values: pl.Series) -> str:
        first = self.show(as_numbers(values)[0])
        whole = self.step == 1 and not self.decimals and not self.per
        what = "whole numbers" if whole else f"steps of {self.spacing}"
        return f"{self.name} had {what} in training, and now has {first}"

    def decode(self, numbers: Array) -> pl.Series:
        return super().decode(np.round(numbers, self.decimals) if self.decimals >= 0 else numbers)


def nearest_value(values: Array, origin: float, step: float, decimals: int) -> Array:
    """The nearest values of a lattice, rounded to `decimals`; not rounded for -1."""
    exact = origin + step * np.round((values - origin) / step)
    return np.round(exact, decimals) if decimals >= 0 else exact


def on_lattice(values: Array, origin: float, step: float, tolerance: float) -> NDArray[np.bool_]:
    """Which values are whole steps away from the origin, up to rounding."""
    off = np.abs((values - origin) / step - np.round((values - origin) / step))
    near: NDArray[np.bool_] = off <= 1e-6 + 4 * tolerance * np.abs(values) / step
    return near


def decimals_of(step: float, facts: Facts) -> int:
    """Decimals that the values are rounded to; -1 where they have too many to be rounded."""
    if facts.decimals is not None:
        return facts.decimals
    digits = next((n for n in range(12) if round(step, n) == step), -1)
    return digits if digits >= 0 and round(facts.low, digits) == facts.low else -1


def is_narrow(facts: Facts, step: float | None) -> bool:
    """Whether a lattice has so few places that each can have a probability of its own."""
    if not step:
        return False
    count = round((facts.high - facts.low) / step) + 1
    return count <= MOST_LEVELS and count * ROWS_A_LEVEL <= facts.rows


def _narrow_range(facts: Facts, step: float, bounds: Bounds) -> dict[str, Any]:
    """Where a lattice of few places begins, and how many there are; counts begin at 0."""
    low, high = bounds
    count = round((facts.high - facts.low) / step) + 1
    if low is None and 0 <= facts.low <= step:
        crowded = (facts.sample == facts.low).mean() >= CROWDED_AT_ZERO
        whole = on_lattice(np.zeros(1), facts.low, step, facts.tolerance).all()
        low = 0.0 if crowded and whole else None
    first = facts.low if low is None else facts.low - step * _steps(low, facts.low, step)
    last = facts.high if high is None else facts.high + step * _steps(facts.high, high, step)
    count = round((last - first) / step) + 1
    if count > 4 * MOST_LEVELS:  # a bound far away: values beyond those seen share one level
        first, low, high = facts.low, None, None
        count = round((facts.high - first) / step) + 1
    centre, scale = spread(facts.sample)
    return {"origin": first, "count": count, "low": low, "high": high, "centre": centre, "spread": scale}


def _steps(start: float, end: float, step: float) -> int:
    """How many whole steps lie between two values."""
    return math.floor((end - start) / step + 1e-9)


def _wide_range(facts: Facts, step: float, bounds: Bounds, settings: TableSettings) -> dict[str, Any]:
    """Bounds of a lattice of many places, crowded ones, and a coarser grid that some are rounded to."""
    low, high = bounds
    asked, values = settings.atoms_of(facts.name), facts.sample
    grid = coarser_grid(values, step) if facts.name not in settings.step else None
    atoms = tuple(asked) if asked is not None else crowded(values, step)
    if grid is not None and asked is None:
        on = on_grid(values, grid)
        atoms = tuple(sorted({*crowded(values[on], grid.step), *crowded(values[~on], step)}))
    off = [atom for atom in atoms if not on_lattice(np.array([atom]), facts.low, step, 1e-14).all()]
    if off:
        raise UserError(
            f"atoms {facts.name}={spread_out(off, MOST_NAMED)}: its values are steps of {step:g} from "
            f"{facts.low:g}."
        )
    if facts.name not in settings.bounds and not facts.dates:
        low, high = natural_bounds(facts.sample + 0.5 * step, facts.low, facts.high)
    low = facts.low if facts.low in atoms else low
    high = facts.high if facts.high in atoms else high
    centre, scale = spread(facts.sample)
    grid_step, grid_origin = grid or (0.0, 0.0)
    return {
        "low": low, "high": high, "atoms": atoms, "grid": grid_step, "grid_origin": grid_origin,
        "centre": centre, "spread": scale,
    }  # fmt: skip
