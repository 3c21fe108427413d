"""The numbers that a table's rows stand for."""

from __future__ import annotations

__all__ = ["column_values", "given_values"]

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ciflows.tables.facts import as_numbers
from ciflows.tables.schema import Schema


def column_values(schema: Schema | None, codes: Tensor) -> NDArray[np.float64]:
    """Codes (rows, *), such as samples, as values of the file (rows, columns), dates as in `as_numbers`.

    Levels stand for what is categorical. Without a schema the codes are the values.
    """
    numbers = codes.flatten(1).double().cpu().numpy()
    if schema is None:
        return numbers
    columns = [
        numbers[:, i] if column.words else as_numbers(column.decode(numbers[:, i]))
        for i, column in enumerate(schema.columns)
    ]
    return np.stack(columns, axis=1)


def given_values(schema: Schema, context: Tensor) -> NDArray[np.float64]:
    """Contexts (rows, context_features) as values of the given columns (rows, columns), likewise."""
    frame = schema.decode_given(context)
    columns = [
        column.encode(frame[column.name]) if column.words else as_numbers(frame[column.name])
        for column in schema.given
    ]
    return np.stack(columns, axis=1)
