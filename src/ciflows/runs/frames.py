"""Tables that users hand over, and results of the same kind."""

from __future__ import annotations

__all__ = ["columns_of", "is_pandas", "like", "read_given", "to_pandas"]

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.tables import Schema, TableLike, as_frame
from ciflows.tables.read import own_names, read_frame


def read_given(schema: Schema | None, given: TableLike | None) -> tuple[pl.DataFrame, Tensor] | None:
    """The rows to condition on, and their contexts; None if the density is not conditional."""
    if schema is None or not schema.given:
        if given is not None:
            raise UserError(
                "This run is no conditional density: it takes no `given`. `impute` draws the other "
                "columns of a table that has some."
            )
        return None
    names = [name for name in schema.order if name in {column.name for column in schema.given}]
    if given is None:
        raise UserError(f"This run is a conditional density: give {', '.join(names)}.")
    frame = read_frame(given)
    if tuple(frame.columns) == own_names(len(names)) and not set(names) & set(frame.columns):
        frame = frame.rename(dict(zip(frame.columns, names, strict=True)))  # an array
    context = schema.encode_given(frame)
    assert context is not None
    return frame, context


def like(data: TableLike, frame: pl.DataFrame, repeats: int | Sequence[int] = 1) -> Any:
    """A result as pandas, with the index of the input, if the input was pandas.

    Arguments:
        repeats: Rows of the result for each row of the input.
    """
    return to_pandas(frame, data.index.repeat(repeats)) if is_pandas(data) else frame


def is_pandas(data: TableLike) -> bool:
    """Whether a table is a pandas data frame."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, pandas.DataFrame)


def to_pandas(frame: pl.DataFrame, index: Any = None) -> Any:
    """A polars data frame as a pandas one; unlike polars' own method it needs no pyarrow."""
    import pandas as pd

    return pd.DataFrame(frame.to_dict(as_series=False), index=index)


def columns_of(found: Any, rows: int) -> dict[str, NDArray[np.float64]]:
    """What a user's function gave, as columns of numbers (rows,)."""
    several = hasattr(found, "columns") or isinstance(found, Mapping)
    named = as_frame(found).to_dict() if several else {"expectation": found}
    columns = {}
    for name, values in named.items():
        try:
            columns[name] = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            raise UserError(f"f must give numbers; {name} has {type(values).__name__}.") from None
        if columns[name].shape != (rows,):
            raise UserError(
                f"f must give a number for each of the {rows} samples; got {columns[name].shape}."
            )
    return columns
