"""Dates as numbers: days since 1970-01-01 for dates, seconds since then (UTC) for dates with a time."""

from __future__ import annotations

__all__ = [
    "date_numbers",
    "from_numbers",
    "in_unit_of",
    "is_date",
    "polars_type",
    "show",
    "type_name",
    "unit_of",
]

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ciflows.optional import polars as pl

Array = NDArray[Any]
DAY = 86_400.0
FIRST, LAST = -719_162, 2_932_896  # days of the years 1 and 9999, which Python's dates end with
PER_SECOND = {"ms": 1e3, "us": 1e6, "ns": 1e9}


def is_date(dtype: pl.DataType) -> bool:
    """Whether a type is that of dates, with or without a time."""
    return dtype in (pl.Date, pl.Datetime)


def unit_of(dtype: str) -> str | None:
    """The unit in which a column of dates is modelled, from the name of its type; None for no dates."""
    return {"Date": "day", "Datetime": "second"}.get(dtype.partition("(")[0])


def type_name(dtype: pl.DataType) -> str:
    """The name of a type, with the time zone of dates that have one."""
    zone = getattr(dtype, "time_zone", None)
    return f"{dtype.base_type()}({zone})" if zone else str(dtype.base_type())


def polars_type(name: str) -> Any:
    """The type that `type_name` gave the name of."""
    base, _, zone = name.removesuffix(")").partition("(")
    return pl.Datetime("us", zone or None) if base == "Datetime" else getattr(pl, base)


def date_numbers(values: pl.Series) -> Array:
    """Dates as float64 numbers (rows,) in their own unit; NaN for gaps.

    Example:
        >>> import datetime
        >>> import polars as pl
        >>> date_numbers(pl.Series([datetime.date(1970, 1, 3)])).tolist()
        [2.0]
        >>> date_numbers(pl.Series([datetime.datetime(1970, 1, 1, 1)])).tolist()
        [3600.0]
    """
    numbers = values.to_physical().cast(pl.Float64).to_numpy()
    unit = getattr(values.dtype, "time_unit", None)
    return numbers / PER_SECOND[unit] if unit else numbers


def in_unit_of(values: pl.Series, dtype: str) -> pl.Series:
    """Dates with or without a time as numbers, in the unit of a column of the named type."""
    numbers = date_numbers(values)
    own, wanted = unit_of(type_name(values.dtype)), unit_of(dtype)
    if own != wanted:
        numbers = numbers / DAY if wanted == "day" else numbers * DAY
    return pl.Series(values.name, numbers, nan_to_null=True)


def from_numbers(numbers: Array, dtype: str) -> Array:
    """What a column of dates stores for some numbers: whole days, or microseconds."""
    if unit_of(dtype) == "day":
        return np.round(numbers.clip(FIRST, LAST)).astype(np.int32)
    return np.round(1e6 * numbers.clip(FIRST * DAY, LAST * DAY)).astype(np.int64)


def show(value: float, dtype: str) -> str:
    """A value in words: a date, where the type is one of dates."""
    if unit_of(dtype) is None:
        return f"{value:g}"
    return str(pl.Series(from_numbers(np.array([value]), dtype)).cast(polars_type(dtype))[0])
