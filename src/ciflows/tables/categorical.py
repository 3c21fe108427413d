"""Columns of names: each value has a probability of its own."""

from __future__ import annotations

__all__ = ["Categorical"]

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.tables.column import MOST_NAMED, Column, dtype_name
from ciflows.tables.facts import MOST_CATEGORIES, Facts, spread_out
from ciflows.tables.lattice import is_narrow
from ciflows.tables.options import TableSettings

Array = NDArray[Any]


class Categorical(Column):
    """Names, or numbers of which there are so few that each has a probability of its own.

    Attributes:
        categories: The values in the order of their levels.
    """

    kind: Literal["categorical"] = "categorical"
    categories: list[bool | int | float | str]

    @classmethod
    def recognise(cls, facts: Facts, settings: TableSettings) -> Categorical | None:
        """The column, where the facts speak for this kind."""
        name, step = facts.name, settings.step_of(facts.name)
        if facts.dates:
            if facts.words:
                raise UserError(
                    f"categorical {name}: dates cannot be categorical: they are numbers of days."
                )
            return None
        if not facts.words:
            free = not {name} & {*settings.bounds, *settings.atoms, *settings.given} and step is None
            if not (free and facts.few) or is_narrow(facts, facts.step()):
                return None
        for option in ("bounds", "atoms", "step"):
            if name in getattr(settings, option):
                raise UserError(f"{option} {name}: the column is categorical and has none.")
        return cls.of(facts)

    @classmethod
    def of(cls, facts: Facts) -> Categorical:
        """The column with all of its values as categories; refused where there are too many."""
        name, count = facts.name, len(facts.values)
        if count > MOST_CATEGORIES or (count > 20 and 2 * count > facts.rows):
            many = f"more than {MOST_CATEGORIES}" if count > MOST_CATEGORIES else str(count)
            raise UserError(
                f"{name} has {many} different values in {facts.rows} rows, as names or dates do: "
                f"exclude {name}, or turn it into numbers."
            )
        return cls(name=name, dtype=dtype_name(facts), categories=_ordered(facts))

    @property
    def levels(self) -> int | None:
        return len(self.categories)

    @property
    def words(self) -> list[str]:
        return [str(value) for value in self.categories]

    @property
    def context_features(self) -> int:
        return len(self.categories)

    @property
    def measure(self) -> str:
        return "probability"

    def encode(self, values: pl.Series) -> Array:
        if self._numeric:
            return self._places(values)
        known = pl.Series(self.categories).cast(pl.String)
        places = pl.Series(range(len(known)), dtype=pl.Float64)
        found = values.cast(pl.String).replace_strict(known, places, default=math.nan)
        return found.cast(pl.Float64).to_numpy()

    @property
    def _numeric(self) -> bool:
        return not any(isinstance(value, bool | str) for value in self.categories)

    def _places(self, values: pl.Series) -> Array:
        """Levels of numbers, by their value however it is written."""
        known = np.array(self.categories, dtype=np.float64)
        numbers = values.cast(pl.Float64, strict=False).fill_null(math.nan).to_numpy()
        places = np.searchsorted(known, numbers).clip(max=len(known) - 1)
        return np.where(known[places] == numbers, places.astype(np.float64), np.nan)

    def complain(self, values: pl.Series) -> str:
        new = values.unique(maintain_order=True).to_list()
        return f"{self.name} has values that were not there in training: {spread_out(new, MOST_NAMED)}"

    def decode(self, numbers: Array) -> pl.Series:
        return self._series([self.categories[int(level)] for level in numbers])

    def context(self, values: pl.Series) -> Array:
        return np.eye(len(self.categories), dtype=np.float32)[self.encode(values).astype(int)]

    def from_context(self, context: Array) -> Array:
        return context.argmax(1).astype(np.float64)

    def _type(self) -> Any:
        return pl.Enum(self.words) if self.dtype == "Enum" else super()._type()


def _ordered(facts: Facts) -> list[Any]:
    if dtype_name(facts) == "Enum":
        return [value for value in facts.dtype.categories if value in facts.values]  # type: ignore
    if not facts.words and str(facts.dtype) == "String":
        return sorted({float(value) for value in facts.values})
    return sorted(facts.values)
