"""What the columns of a table are: all that is needed to check another table and to encode its rows."""

from __future__ import annotations

__all__ = [
    "AnyColumn",
    "Constant",
    "Encoded",
    "Schema",
    "check_columns",
    "check_names",
    "count_gaps",
    "filled",
]

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ciflows.core.rows import Rows
from ciflows.errors import GapsError, UserError, nearest
from ciflows.optional import polars as pl
from ciflows.settings import Settings
from ciflows.tables.categorical import Categorical
from ciflows.tables.circular import Circular
from ciflows.tables.column import Number
from ciflows.tables.dates import as_dates, from_numbers, in_unit_of, polars_type, show, unit_of
from ciflows.tables.facts import as_numbers
from ciflows.tables.lattice import Lattice
from ciflows.tables.real import Real

Kind = type[Circular] | type[Categorical] | type[Lattice] | type[Real]
KINDS: tuple[Kind, ...] = (Circular, Categorical, Lattice, Real)
AnyColumn = Annotated[Circular | Categorical | Lattice | Real, Field(discriminator="kind")]


class Constant(Settings):
    """A column with a single value: left out of training, and back in samples."""

    name: str
    dtype: str
    value: bool | int | float | str

    @property
    def shown(self) -> str:
        """Its value in words."""
        return show(float(self.value), self.dtype) if unit_of(self.dtype) else str(self.value)

    def column(self, rows: int) -> pl.Series:
        """`rows` rows of its value."""
        dates, value = unit_of(self.dtype), self.value
        stored = from_numbers(np.array([value]), self.dtype) if dates else [value]
        return pl.Series(self.name, stored).cast(polars_type(self.dtype)).new_from_index(0, rows)


class Encoded(NamedTuple):
    """Rows that can be encoded, and what is wrong with the others.

    Attributes:
        rows: The rows that can be encoded.
        bad: Which rows of the table cannot be (rows,).
        reasons: What is wrong with them, a sentence for each column.
    """

    rows: Rows
    bad: NDArray[np.bool_]
    reasons: list[str]


class Schema(Settings):
    """All columns of a table that matter.

    Attributes:
        columns: Those that are modelled, in the order of a flow's features.
        given: Those that are conditioned on.
        constants: Those that have one value only.
        weights: The one with the rows' weights.
        order: The names of all but the weights, as they stand in the file.
    """

    columns: tuple[AnyColumn, ...]
    given: tuple[AnyColumn, ...] = ()
    constants: tuple[Constant, ...] = ()
    weights: str | None = None
    order: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modelled columns."""
        return tuple(column.name for column in self.columns)

    @property
    def context_features(self) -> int:
        """Size of what the density is conditioned on."""
        return sum(column.context_features for column in self.given)

    @property
    def measure(self) -> dict[str, str]:
        """What each column's likelihood is relative to."""
        return {column.name: column.measure for column in self.columns}

    def needed(self, weights: bool = False) -> list[str]:
        """The columns that a table must have to be scored, or to be trained on."""
        names = [column.name for column in [*self.columns, *self.given]]
        return [*names, self.weights] if weights and self.weights else names

    def encode(self, frame: pl.DataFrame, weights: bool = False, gaps: bool = False) -> Rows:
        """A table's rows as float64 numbers; refused in words where a value is impossible.

        Other columns than those needed may hold anything. With `gaps` modelled columns may have gaps, or
        not be there at all: NaN stands for what is missing.
        """
        encoded = self.encode_some(frame, weights, gaps)
        if encoded.reasons:
            raise UserError(f"{'; '.join(encoded.reasons)}.")
        return encoded.rows

    def encode_some(self, frame: pl.DataFrame, weights: bool = False, gaps: bool = False) -> Encoded:
        """The rows of a table that can be encoded, with the others counted and their faults named."""
        frame = self._with_nulls(frame, weights) if gaps else self.select(frame, weights)
        modelled = self.names if gaps else ()
        check_gaps(frame, [name for name in self.needed(weights) if name not in modelled], self.names)
        changed = [c.name for c in self.constants if c.name in frame.columns and _changed(frame, c)]
        if changed:
            raise UserError(
                f"columns that were constant in training and are not now: {', '.join(changed)}."
            )
        bad = np.zeros(len(frame), dtype=bool)
        reasons: list[str] = []
        x = np.empty((len(frame), len(self.columns)))
        for place, column in enumerate([*self.columns, *self.given]):
            values = frame[column.name]
            numbers = column.encode(values)
            if place < len(self.columns):
                x[:, place] = numbers
            wrong = np.isnan(numbers) & values.is_not_null().to_numpy()
            if wrong.any():
                bad |= wrong
                reasons.append(column.complain(values.filter(wrong)))
        good = frame.filter(~bad)
        weight = None
        if weights and self.weights:
            weight = torch.tensor(_weights(good[self.weights]))
        return Encoded(Rows(torch.from_numpy(x[~bad]), self._context(good), weight), bad, reasons)

    def encode_given(self, frame: pl.DataFrame) -> Tensor | None:
        """What a table's rows are conditioned on: (rows, context_features)."""
        if not self.given:
            return None
        names = [column.name for column in self.given]
        check_columns(frame, names)
        frame = self._as_numbers(frame.select(names))
        check_gaps(frame, names)
        for column in self.given:
            bad = np.isnan(column.encode(frame[column.name]))
            if bad.any():
                raise UserError(f"{column.complain(frame[column.name].filter(bad))}.")
        return self._context(frame)

    def select(self, frame: pl.DataFrame, weights: bool = False) -> pl.DataFrame:
        """The columns that matter, with numbers that are written as text turned into numbers."""
        check_columns(frame, self.needed(weights))
        constants = [constant.name for constant in self.constants if constant.name in frame.columns]
        return self._as_numbers(frame.select(self.needed(weights) + constants))

    def completed(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The table with gaps for the modelled columns that it lacks; it must have one of them."""
        if not set(self.names) & set(frame.columns):
            raise UserError(f"has none of the columns {', '.join(self.names)}.")
        empty = [c for c in self.columns if frame.schema.get(c.name, pl.Null) == pl.Null]
        return frame.with_columns([column.empty(len(frame)) for column in empty])

    def decode(self, x: Tensor, given: pl.DataFrame | None = None) -> pl.DataFrame:
        """Numbers (rows, features) as a table with all columns of the file, beside those given.

        Where there are n times as many rows as in `given`, n in turn belong to each of those.
        """
        values = x.double().cpu().numpy()
        series = {c.name: c.decode(values[:, i]) for i, c in enumerate(self.columns)}
        for constant in self.constants:
            series[constant.name] = constant.column(len(x))
        if given is not None:
            places = np.repeat(np.arange(len(given)), len(x) // max(1, len(given)))
            series |= {column.name: given[column.name][places] for column in self.given}
        return pl.DataFrame([series[name] for name in self.order if name in series])

    def decode_given(self, context: Tensor) -> pl.DataFrame:
        """Contexts (rows, context_features) as a table of the given columns, to single precision."""
        ends = np.cumsum([column.context_features for column in self.given])
        parts = np.split(context.double().cpu().numpy(), ends[:-1], axis=1)
        each = zip(self.given, parts, strict=True)
        return pl.DataFrame({c.name: c.decode(c.from_context(part)) for c, part in each})

    def _with_nulls(self, frame: pl.DataFrame, weights: bool) -> pl.DataFrame:
        """The columns that matter, with nulls for all that is missing, infinite or not there."""
        frame = self.select(self.completed(frame), weights)
        named = zip(frame.columns, filled(frame), strict=True)
        kept = [pl.when(there).then(pl.col(n)).alias(n) for n, there in named if n in self.names]
        return frame.with_columns(kept)

    def _context(self, frame: pl.DataFrame) -> Tensor | None:
        if not self.given:
            return None
        parts = [column.context(frame[column.name]) for column in self.given]
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def _as_numbers(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Turn text in columns of numbers into numbers; refuse other text."""
        wrong, changed = [], []
        for column in [*self.columns, *self.given]:
            if isinstance(column, Number) and column.name in frame.columns:
                dtype = frame.schema[column.name]
                numbers = _numbers(column, frame[column.name])
                if numbers is None or not numbers.dtype.is_numeric():
                    wrong.append(f"{column.name} ({dtype})")
                else:
                    changed.append(numbers)
        if wrong:
            raise UserError(
                f"columns that were numbers in training and are not now: {', '.join(wrong)}."
            )
        return frame.with_columns(changed)


def _numbers(column: Number, values: pl.Series) -> pl.Series | None:
    """The values of a column as numbers: from text, or from dates; None where they are neither."""
    from ciflows.tables.text import numbers_from_text

    if values.dtype == pl.Null:
        return values.cast(pl.Float64)
    if not unit_of(column.dtype):
        return numbers_from_text(values)
    dates = as_dates(values)
    return None if dates is None else in_unit_of(dates, column.dtype)


def _weights(values: pl.Series) -> NDArray[np.float64]:
    """Weights as numbers (rows,), checked as those of a fit are."""
    try:
        numbers = as_numbers(values)
    except pl.exceptions.PolarsError:
        raise UserError(f"weights {values.name}: weights have to be numbers.") from None
    if (numbers < 0).any():
        raise UserError(f"weights {values.name}: weights have to be positive numbers, or 0.")
    return numbers


def _changed(frame: pl.DataFrame, constant: Constant) -> bool:
    values = frame[constant.name].drop_nulls()
    values = values.drop_nans() if values.dtype.is_float() else values
    if not len(values):
        return False
    dates = as_dates(values) if unit_of(constant.dtype) else None
    values = values if dates is None else in_unit_of(dates, constant.dtype)
    if isinstance(constant.value, bool | str):
        return bool((values.cast(pl.String) != str(constant.value).lower()).any()) and bool(
            (values.cast(pl.String) != str(constant.value)).any()
        )
    return not values.dtype.is_numeric() or bool((values != constant.value).any())


def check_columns(frame: pl.DataFrame, names: Sequence[str]) -> None:
    """Refuse a table that lacks some columns."""
    missing = [name for name in names if name not in frame.columns]
    if missing:
        columns = f"column{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise UserError(f"lacks the {columns}; it has {', '.join(frame.columns)}.")


def check_gaps(frame: pl.DataFrame, names: Sequence[str], modelled: Sequence[str] = ()) -> None:
    """Refuse a table with gaps in some columns; those modelled could be integrated over."""
    counts = count_gaps(frame.select(names)) if names else {}
    if counts:
        found = ", ".join(f"{name} ({count})" for name, count in counts.items())
        error = GapsError if set(counts) <= set(modelled) else UserError
        raise error(f"missing or infinite values in {found}.")


def count_gaps(frame: pl.DataFrame) -> dict[str, int]:
    """How many values of each column are missing, not a number or infinite; only where some are."""
    counts = frame.select([(~there).sum() for there in filled(frame)])
    return {name: count for name, count in counts.row(0, named=True).items() if count}


def filled(frame: pl.DataFrame) -> list[pl.Expr]:
    """Expressions that are true, column by column, where there is a value."""
    return [
        pl.col(name).is_finite().fill_null(False) if dtype.is_float() else pl.col(name).is_not_null()
        for name, dtype in frame.schema.items()
    ]


def check_names(names: Sequence[str], known: Sequence[str], what: str) -> None:
    """Refuse names of columns that are not there."""
    for name in names:
        if name not in known:
            raise UserError(f"{what}: there is no column {name!r}. {nearest(name, known)}")
