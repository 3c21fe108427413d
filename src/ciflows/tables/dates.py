"""Dates as numbers: days since 1970-01-01 for dates, seconds since then (UTC) for dates with a time."""

from __future__ import annotations

__all__ = [
    "as_dates",
    "date_numbers",
    "dates_from_text",
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
from ciflows.tables.text import without_gaps

Array = NDArray[Any]
DAY = 86_400.0
FIRST, LAST = -719_162, 2_932_896  # days of the years 1 and 9999, which Python's dates end with
FORMS = ("%F", "%F %H:%M", "%F %T%.f")
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


def dates_from_text(text: pl.Series) -> pl.Series:
    """Text such as 2024-06-01 or 2024-06-01T10:30 as dates with a time; null where it is neither."""
    spaced = without_gaps(text).str.replace(r"^(\S{10})T", "${1} ").str.strip_suffix("Z")
    found = [pl.lit(spaced).str.to_datetime(form, time_unit="us", strict=False) for form in FORMS]
    return pl.select(pl.coalesce(found).alias(text.name)).to_series()


def as_dates(values: pl.Series) -> pl.Series | None:
    """Dates, with or without a time, also from text; None where some of it is neither a date nor a gap.

    Example:
        >>> import polars as pl
        >>> as_dates(pl.Series(["2024-06-01", "n/a"])).to_list()
        [datetime.datetime(2024, 6, 1, 0, 0), None]
        >>> as_dates(pl.Series(["06/01/2024"])) is None
        True
    """
    if values.dtype != pl.String:
        return values if is_date(values.dtype) else None
    dates = dates_from_text(values)
    return None if dates.null_count() > without_gaps(values).null_count() else dates


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
