"""Tables with gaps: what a `Run` says of them, and the tables with the gaps filled."""

from __future__ import annotations

__all__ = ["DRAW", "check_done", "check_missing", "estimate_gaps", "impute"]

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ciflows.core.evaluate import Estimate
from ciflows.core.noise import random_seed
from ciflows.core.rows import Rows
from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.runs.frames import is_pandas
from ciflows.runs.metrics import MOST_DRAWS, estimate_rows
from ciflows.tables import Schema, TableLike
from ciflows.tables.integrate import FEWEST, ROUND, GapFlow
from ciflows.tables.schema import filled

MISSING = ("refuse", "integrate")
DRAW = "draw"
MOST_NAMED = 5


def check_missing(missing: str) -> None:
    """Refuse an unknown way to treat gaps."""
    if missing not in MISSING:
        raise UserError(f"missing: expected {' or '.join(MISSING)}; got {missing!r}.")


def check_done(failed: Tensor, what: str) -> None:
    """Refuse rows (rows,) whose gaps have too few effective draws."""
    rows = failed.nonzero()[:, 0].tolist()
    if rows:
        named = ", ".join(map(str, rows[:MOST_NAMED])) + (", ..." if len(rows) > MOST_NAMED else "")
        raise UserError(
            f"{len(rows)} of {len(failed)} rows cannot be {what}: of {ROUND} draws of their missing "
            f"values fewer than {FEWEST} count (rows {named}, from 0). Leave out those rows, or give "
            "more of their values."
        )


def estimate_gaps(
    gaps: GapFlow,
    rows: Rows,
    samples: int | None = None,
    seed: int | None = None,
    *,
    std_error: float | None = None,
    max_samples: int = 10_000,
) -> Estimate:
    """Estimate log p of rows with gaps, by draws as in `estimate_rows`; NaN where too few count.

    Rows with gaps get at least 100 draws where you do not say how many: a tenth of a proposal's draws
    may have no weight, and a few draws would miss it in their standard error.

    Arguments:
        rows: The rows, with NaN for gaps.
        samples: Draws for each row.
        seed: Seed of the draws; other draws at each call if None.
        std_error: Instead of `samples`, draw until each row's standard error is about this.
        max_samples: The most draws for one row then.
    """
    seed = random_seed() if seed is None else seed
    whole = partial(
        estimate_rows, samples=samples, seed=seed, std_error=std_error, max_samples=max_samples
    )
    if std_error is None:
        return gaps.estimate(rows, whole, partial(whole, samples=samples or MOST_DRAWS), seed)
    return gaps.estimate(rows, whole, partial(whole, min_samples=MOST_DRAWS), seed)


def impute(
    gaps: GapFlow, schema: Schema, data: TableLike, frame: pl.DataFrame, n: int, seed: int | None
) -> Any:
    """Fill the gaps of a table with draws; see `Run.impute`.

    Arguments:
        data: The table as you have it.
        frame: The same with the names of the columns.
    """
    if n < 1:
        raise UserError(f"At least one draw is needed; got n = {n}.")
    if n > 1 and DRAW in frame.columns:
        raise UserError(f"The table has a column {DRAW!r} already: rename it, or take n = 1.")
    rows = schema.encode(frame, gaps=True)
    drawn, failed = gaps.impute(rows, n, seed)
    check_done(failed, "imputed")
    missing = rows.x.isnan().numpy()
    drawings = [schema.decode(x) for x in drawn.cpu()]
    if is_pandas(data):
        return _join_pandas([_fill_pandas(data, values, schema, missing) for values in drawings])
    return _join([_fill(frame, values, schema, missing) for values in drawings])


def _fill(frame: pl.DataFrame, values: pl.DataFrame, schema: Schema, missing: Any) -> pl.DataFrame:
    """A table with its gaps filled, its types kept, and the columns that it lacks added behind."""
    series = []
    for name in values.columns:
        if frame.schema.get(name, pl.Null()) == pl.Null:
            series.append(values[name])
        else:
            (there,) = frame.select(filled(frame.select(name)))
            gap = pl.Series(_gaps(schema, name, ~there.to_numpy(), missing))
            dtype = _type_for(values[name].filter(gap), frame.schema[name])
            drawn, own = (table[name].cast(dtype, strict=False) for table in (values, frame))
            series.append(drawn.zip_with(gap, own).alias(name))
    return frame.with_columns(series)


def _type_for(drawn: pl.Series, own: pl.DataType) -> pl.DataType:
    """A column's own type, or that of the draws if it cannot hold them, as integers cannot hold 0.5."""
    again = drawn.cast(own, strict=False).cast(drawn.dtype, strict=False)
    return own if own.is_float() or own.is_decimal() or again.equals(drawn) else drawn.dtype


def _fill_pandas(data: Any, values: pl.DataFrame, schema: Schema, missing: Any) -> Any:
    """The same for a pandas frame."""
    result = data.copy()
    for name in values.columns:
        drawn = values[name].to_list()
        if name not in data.columns:
            result[name] = drawn
            continue
        gap = _gaps(schema, name, data[name].isna().to_numpy(), missing)
        if gap.any():
            dtype = data[name].dtype.type if data[name].dtype.kind == "f" else object
            chosen = np.array(drawn, dtype=dtype)[gap]
            column = _wide_enough(data[name], chosen)
            column[gap] = chosen
            result[name] = column
    return result


def _wide_enough(column: Any, drawn: Any) -> Any:
    """A copy of a pandas column in a type that can hold the draws."""
    if hasattr(column, "cat"):
        known = column.cat.categories
        return column.cat.add_categories([word for word in dict.fromkeys(drawn) if word not in known])
    if column.dtype.kind in "iu" and any(value != int(value) for value in drawn):
        return column.astype("Float64")
    return column.copy()


def _gaps(schema: Schema, name: str, empty: Any, missing: Any) -> Any:
    """Which rows of a column have gaps: of a constant one, those without a value."""
    return missing[:, schema.names.index(name)] if name in schema.names else empty


def _join(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """One table, or several below each other with their number in front."""
    for number, part in enumerate(parts if len(parts) > 1 else (), start=1):
        part.insert_column(0, pl.Series(DRAW, np.full(len(part), number)))
    return pl.concat(parts, how="vertical_relaxed")


def _join_pandas(parts: list[Any]) -> Any:
    """The same for pandas frames."""
    import pandas as pd

    for number, part in enumerate(parts if len(parts) > 1 else (), start=1):
        part.insert(0, DRAW, number)
    return pd.concat(parts)
