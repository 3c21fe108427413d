"""Columns on a circle: angles, hours of the day, days of the year."""

from __future__ import annotations

__all__ = ["Circular"]

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.tables.column import MOST_NAMED, Number, dtype_name
from ciflows.tables.facts import Facts, as_numbers, spread_out
from ciflows.tables.lattice import decimals_of, on_lattice
from ciflows.tables.options import TableSettings
from ciflows.tables.resolution import frequent

Array = NDArray[Any]


class Circular(Number):
    """Numbers on a circle: `low` and `high` are the same point, and values beyond them wrap around.

    Attributes:
        step: The distance between neighbours, where each value has a probability; 0 for a density.
        origin: One of the values, where there are steps.
        decimals: Decimals of the values then.
    """

    kind: Literal["circular"] = "circular"
    low: float = 0.0
    high: float = 1.0
    step: float = 0.0
    origin: float = 0.0
    decimals: int = -1

    @classmethod
    def recognise(cls, facts: Facts, settings: TableSettings) -> Circular | None:
        """The column, where you said that it is one."""
        ends, name = settings.ends_of(facts.name), facts.name
        if ends is None:
            return None
        other = [what for what in ("bounds", "atoms") if name in getattr(settings, what)]
        if facts.words or facts.dates or other:
            what = f"it has {other[0]} too" if other else "its values are no numbers"
            raise UserError(f"circular {name}: {what}.")
        about: dict[str, Any] = {"name": name, "dtype": dtype_name(facts), "low": ends[0]}
        if name in settings.given:
            return cls(**about, high=ends[1])
        asked = settings.step_of(name)
        step = facts.step() if asked is None else asked
        if not step:
            _refuse_atoms(facts)
            return cls(**about, high=ends[1])
        _check_step(facts, step, ends[1] - ends[0])
        decimals = decimals_of(step, facts)
        return cls(**about, high=ends[1], step=step, origin=facts.low, decimals=decimals)

    @property
    def period(self) -> float:
        """Length of the circle."""
        return self.high - self.low

    @property
    def measure(self) -> str:
        what = f"probability for each step of {self.step:g}" if self.step else "density"
        return f"{what} on a circle of {self.period:g}"

    @property
    def context_features(self) -> int:
        return 2

    def context(self, values: pl.Series) -> Array:
        angle = 2 * math.pi * (as_numbers(values) - self.low) / self.period
        return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)

    def from_context(self, context: Array) -> Array:
        turns = np.arctan2(context[:, 1], context[:, 0]) / (2 * math.pi)
        return self.low + self.period * np.mod(turns, 1)

    def encode(self, values: pl.Series) -> Array:
        numbers = as_numbers(values)
        wrapped = self._wrapped(numbers)
        if not self.step:
            return wrapped
        return np.where(on_lattice(numbers, self.origin, self.step, 1e-12), wrapped, np.nan)

    def complain(self, values: pl.Series) -> str:
        first = as_numbers(values)[0]
        return f"{self.name} had steps of {self.step:g} in training, and now has {first:g}"

    def decode(self, numbers: Array) -> pl.Series:
        if self.decimals >= 0:
            numbers = np.round(numbers, self.decimals)
        if self.dtype == "Float32":
            numbers = numbers.astype(np.float32).astype(np.float64)
        return super().decode(self._wrapped(numbers))

    def _wrapped(self, numbers: Array) -> Array:
        """Values in [low, high); gaps stay NaN."""
        inside = self.low + np.mod(numbers - self.low, self.period)
        return np.where(inside >= self.high, self.low, inside)


def _refuse_atoms(facts: Facts) -> None:
    found = frequent(facts.sample)
    if found:
        values = spread_out(list(found), MOST_NAMED)
        raise UserError(
            f"circular {facts.name}: it repeats {values}, as no density does. Give it a step, or leave "
            "out the rows where that stands for something else."
        )


def _check_step(facts: Facts, step: float, period: float) -> None:
    if not on_lattice(np.array([period]), 0.0, step, facts.tolerance).all():
        raise UserError(
            f"circular {facts.name}: its period {period:g} is no multiple of its step {step:g}."
        )
    off = facts.counts[0][~on_lattice(facts.counts[0], facts.low, step, facts.tolerance)]
    if len(off):
        raise UserError(
            f"step {facts.name}={step:g}: {off[0]:g} is not a multiple of it away from {facts.low:g}."
        )
