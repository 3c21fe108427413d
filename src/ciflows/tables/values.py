"""The numbers that a table's rows stand for."""

from __future__ import annotations

__all__ = ["column_values"]

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ciflows.tables.schema import Schema


def column_values(schema: Schema, codes: Tensor) -> NDArray[np.float64]:
    """Codes (rows, columns), such as samples, as values of the file; levels of what is categorical."""
    numbers = codes.double().cpu().numpy()
    columns = [
        numbers[:, i] if column.words else column.decode(numbers[:, i]).to_numpy()
        for i, column in enumerate(schema.columns)
    ]
    return np.stack(columns, axis=1).astype(np.float64)
