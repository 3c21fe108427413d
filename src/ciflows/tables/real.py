"""Columns of numbers with a density, but for atoms."""

from __future__ import annotations

__all__ = ["SOME_TIED", "Real"]

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.tables.categorical import Categorical
from ciflows.tables.column import MOST_NAMED, Number, check_limits, check_range, dtype_name
from ciflows.tables.facts import Facts, as_numbers, spread_out
from ciflows.tables.options import Bounds, TableSettings
from ciflows.tables.resolution import MANY_ATOMS, SINGLE, frequent, last_digits, repeated
from ciflows.tables.rounding import EPS, Grid, crowded, find_grid, on_grid
from ciflows.tables.tails import natural_bounds, spread

Array = NDArray[Any]
FEWEST_ROWS = 20  # from which on repeated values are refused
GRID_DECIMALS = 10
FEWEST_TIED = 3  # rows that repeat another's value before it is said
SOME_TIED, MOST_TIED = 0.01, 0.1  # their share before it is said, and before each repeated value counts


class Real(Number):
    """Numbers with a density, but for atoms."""

    kind: Literal["real"] = "real"

    @classmethod
    def recognise(cls, facts: Facts, settings: TableSettings) -> Real | Categorical:
        """The column: all that is no other kind; categorical where there is nothing but atoms."""
        check_range(facts)
        low, high = check_limits(facts, settings)
        asked = settings.atoms_of(facts.name)
        conditioned = facts.name in settings.given
        free = asked is None and not conditioned and settings.step_of(facts.name) is None
        atoms, grid = _atoms_and_grid(facts) if free else (_plain_atoms(facts, settings), None)
        rest = facts.sample[~np.isin(facts.sample, atoms)]
        if len(rest) < 2 or rest.min() == rest.max():
            return Categorical.of(facts)
        if facts.name not in settings.bounds and not conditioned:
            low, high = _end_atoms(atoms, rest)
            found = natural_bounds(rest, rest.min(), rest.max()) if not facts.dates else (None, None)
            low, high = (found[0] if low is None else low), (found[1] if high is None else high)
        if not conditioned:
            on_bounds = {
                end for end in (low, high) if end is not None and end in (facts.low, facts.high)
            }
            atoms = tuple(sorted({*atoms, *on_bounds} if asked is None else atoms))
        centre, scale = spread(rest)
        step, origin = grid or (0.0, 0.0)
        column = cls(
            name=facts.name, dtype=dtype_name(facts), low=low, high=high, atoms=atoms,
            grid=step, grid_origin=origin, centre=centre, spread=scale,
        )  # fmt: skip
        if free and column.tied(facts.sample) > MOST_TIED and len(facts.sample) >= FEWEST_ROWS:
            raise UserError(
                f"{facts.name} has more than {MANY_ATOMS:,} values that repeat, in no equal steps: it "
                "has no density. Exclude it, or give its atoms (none, to take it for a density)."
            )
        return column

    @property
    def measure(self) -> str:
        shown = spread_out([self.show(atom) for atom in self.atoms], MOST_NAMED)
        what, places = f"density per{self.per}" if self.per else "density", [shown] if shown else []
        places += [f"steps of {self.grid:g} from {self.grid_origin:g}"] if self.grid else []
        return f"{what}, probability at {' and at '.join(places)}" if places else what

    def has_density(self, values: Array) -> NDArray[np.bool_]:
        """Which values are at no atom and on no grid (rows,)."""
        values = self.exact(values)
        free = ~np.isin(values, self.atoms)
        return free & ~on_grid(values, self._steps) if self.grid else free

    def tied(self, values: Array) -> float:
        """The share of rows that repeat another's value though it has a density; 0 for very few."""
        free = values[self.has_density(values)]
        more = len(free) - len(np.unique(free))
        return more / len(values) if more >= FEWEST_TIED else 0.0

    def encode(self, values: pl.Series) -> Array:
        return self.exact(as_numbers(values), str(values.dtype))

    def exact(self, numbers: Array, dtype: str | None = None) -> Array:
        """Numbers (rows,) as they were before they lost digits: those next to the grid on it."""
        eps = precision(dtype or self.dtype)
        if not self.grid or eps == EPS:
            return numbers
        return np.where(on_grid(numbers, self._steps, eps), nearest(numbers, self._steps), numbers)

    def decode(self, numbers: Array) -> pl.Series:
        if self.grid:
            numbers = np.where(on_grid(numbers, self._steps), nearest(numbers, self._steps), numbers)
        return super().decode(numbers)

    @property
    def _steps(self) -> Grid:
        return Grid(self.grid, self.grid_origin)


def precision(dtype: str) -> float:
    """Relative precision of a type of numbers, as `on_grid` takes it."""
    return SINGLE / 16 if dtype == "Float32" else EPS


def nearest(values: Array, grid: Grid) -> Array:
    """The values of a grid that are nearest to some (rows,)."""
    count = np.round((values - grid.origin) / grid.step)
    exact: Array = grid.origin + grid.step * count
    decimal = round(grid.step, GRID_DECIMALS) == grid.step
    return np.round(exact, GRID_DECIMALS) if decimal else exact


def _plain_atoms(facts: Facts, settings: TableSettings) -> tuple[float, ...]:
    """The atoms of a column of which you said what it is, or on which others are conditioned."""
    asked = settings.atoms_of(facts.name)
    if asked is not None or facts.name in settings.given:
        return tuple(asked or ())
    step = facts.step()
    unit = last_digits(facts.sample, facts.recorded_step)
    return crowded(facts.sample, step) if step else repeated(facts.sample, unit)


def _atoms_and_grid(facts: Facts) -> tuple[tuple[float, ...], Grid | None]:
    """Values that repeat, and the grid that part of the values are rounded to.

    Where many still repeat, as logarithms of whole numbers do, each value that does is an atom.
    """
    values, eps = facts.sample, precision(str(facts.dtype))
    unit = last_digits(values, facts.recorded_step)
    grid = find_grid(values, unit, repeated(values, unit), frequent(values), eps)
    on = on_grid(values, grid, eps) if grid is not None else np.zeros(len(values), dtype=bool)
    off = values[~on]
    atoms = set(repeated(off, unit[~on]))
    if grid is not None:
        atoms |= set(crowded(nearest(values[on], grid), grid.step))
    different, counts = np.unique(off[~np.isin(off, [*atoms])], return_counts=True)
    twice = different[counts > 1]
    if counts.sum() - len(different) > MOST_TIED * len(values) and len(twice) <= MANY_ATOMS:
        atoms |= set(twice.tolist())
    return tuple(sorted(atoms)), grid


def _end_atoms(atoms: tuple[float, ...], rest: Array) -> Bounds:
    """Atoms at the ends of a column's values are its bounds, where the other values come near."""
    if not atoms:
        return None, None
    near = rest.max() - rest.min()
    low = atoms[0] if rest.min() - near < atoms[0] < rest.min() else None
    high = atoms[-1] if rest.max() < atoms[-1] < rest.max() + near else None
    return low, high
