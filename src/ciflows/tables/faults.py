"""Which rows of a table cannot be scored, and by the fault of which columns."""

from __future__ import annotations

__all__ = ["check_types", "find_faults"]


import numpy as np

from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.tables.column import Column, Number
from ciflows.tables.dates import dates_from_text, in_unit_of, is_date, unit_of
from ciflows.tables.schema import Constant, Schema, filled


def check_types(schema: Schema, frame: pl.DataFrame, gaps: bool = False) -> None:
    """Refuse a table without the needed columns, or with words alone where numbers were in training.

    With `gaps` modelled columns need not be there.
    """
    frame = schema.completed(frame) if gaps else frame
    schema.select(frame.clear())
    wrong = []
    for column in [*schema.columns, *schema.given]:
        values = frame[column.name].drop_nulls()
        if (
            isinstance(column, Number)
            and len(values)
            and not _numbers(column, values).is_not_null().any()
        ):
            wrong.append(f"{column.name} ({values.dtype})")
    if wrong:
        raise UserError(f"columns that were numbers in training and are not now: {', '.join(wrong)}.")


def find_faults(schema: Schema, frame: pl.DataFrame, gaps: bool = False) -> pl.Series:
    """The columns at fault in each row, as "a, b"; null where the row can be scored.

    A value is at fault where it is missing, infinite or no number, was not there in training, is out of
    bounds, or differs from a column that was constant in training. With `gaps` modelled columns may have
    gaps, or not be there.
    """
    frame = schema.completed(frame) if gaps else frame
    check_types(schema, frame)
    wrong = {column.name: _wrong(column, frame, gaps) for column in schema.columns}
    wrong |= {column.name: _wrong(column, frame) for column in schema.given}
    if schema.weights in frame.columns:
        wrong[str(schema.weights)] = ~_filled(frame[str(schema.weights)])
    wrong |= {c.name: _differs(c, frame[c.name]) for c in schema.constants if c.name in frame.columns}
    named = [pl.when(pl.lit(mask)).then(pl.lit(name)) for name, mask in wrong.items()]
    faults = frame.select(pl.concat_str(named, separator=", ", ignore_nulls=True).alias("columns"))
    return faults["columns"].replace("", None)


def _wrong(column: Column, frame: pl.DataFrame, gaps: bool = False) -> pl.Series:
    """Where a row's value of a column cannot be encoded."""
    values = frame[column.name]
    values = _numbers(column, values) if isinstance(column, Number) else values
    good = _filled(values).to_numpy()
    wrong = ~good & (not gaps)
    wrong[good] = np.isnan(column.encode(values.filter(pl.Series(good))))
    return pl.Series(wrong)


def _numbers(column: Number, values: pl.Series) -> pl.Series:
    """Text as numbers, and dates in the column's unit; null where it is neither."""
    if unit_of(column.dtype):
        return _in_unit(values, column.dtype)
    if values.dtype != pl.String:
        return values
    return values.str.strip_chars().cast(pl.Float64, strict=False)


def _in_unit(values: pl.Series, dtype: str) -> pl.Series:
    """Dates, also as text, in a type's unit; null where text is no date."""
    dates = dates_from_text(values) if values.dtype == pl.String else values
    return in_unit_of(dates, dtype) if is_date(dates.dtype) else dates


def _filled(values: pl.Series) -> pl.Series:
    frame = values.alias("value").to_frame()
    return frame.select(filled(frame))["value"]


def _differs(constant: Constant, values: pl.Series) -> pl.Series:
    if isinstance(constant.value, bool | str):
        words = {str(constant.value), str(constant.value).lower()}
        return ~values.cast(pl.String).is_in(list(words)).fill_null(True)
    values = _in_unit(values, constant.dtype) if unit_of(constant.dtype) else values
    return (values.cast(pl.Float64, strict=False) != float(constant.value)).fill_null(False)
