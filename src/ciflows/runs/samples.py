"""Samples of a run that questions are answered from: some for each row that the density is given."""

from __future__ import annotations

__all__ = ["Samples", "modelled"]

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ciflows.core.row_samples import sample_rows
from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.runs.frames import read_given
from ciflows.tables import TableLike
from ciflows.tables.circular import Circular
from ciflows.tables.column import Column
from ciflows.tables.read import errors_of
from ciflows.tables.values import column_values

if TYPE_CHECKING:
    from ciflows.runs.run import Run

Array = NDArray[np.float64]
COUNT, COUNT_A_ROW = 10_000, 1_000
VALUES = 2**22  # numbers in memory at once


class Modelled(NamedTuple):
    """A column of a run's density.

    Attributes:
        place: Its place among the features of the flow.
        column: What it is; None for a built-in set, whose columns are real numbers.
    """

    name: str
    place: int
    column: Column | None

    @property
    def words(self) -> list[str]:
        """Its values in words, if it is categorical."""
        return [] if self.column is None else self.column.words

    @property
    def circle(self) -> Circular | None:
        """The column, if its values lie on a circle."""
        return self.column if isinstance(self.column, Circular) else None


def modelled(run: Run) -> list[Modelled]:
    """The columns of a run's density; refused for images."""
    if run.images:
        raise UserError("This run is a density over images: only tables and points have columns.")
    if run.schema is None:
        return [Modelled(name, place, None) for place, name in enumerate(run.about["columns"])]
    return [Modelled(column.name, place, column) for place, column in enumerate(run.schema.columns)]


class Samples:
    """Samples of a run, given each row of a table if the density is conditional.

    Without `given` they are those of `Run.sample` with the same seed. With it, the samples of a row
    depend on the seed and on that row alone.

    Arguments:
        n: Samples for each row; 10,000 if None, or 1,000 for each row of `given`.
    """

    def __init__(self, run: Run, given: TableLike | None, n: int | None, seed: int | None) -> None:
        with errors_of("given"):
            found = read_given(run.schema, given)
        self.run, self.seed = run, seed
        self.frame = None if found is None else found[0]
        self.context = None if found is None else found[1]
        self.n = n or (COUNT if found is None else COUNT_A_ROW)
        if self.n < 2:
            raise UserError(f"At least two samples are needed; got {n}.")
        if self.frame is not None and not len(self.frame):
            raise UserError("given: the table has no rows.")

    @property
    def rows(self) -> int:
        """How many rows there are to condition on; 1 if the density is not conditional."""
        return 1 if self.frame is None else len(self.frame)

    def codes(self) -> Iterator[tuple[Tensor, pl.DataFrame | None]]:
        """Samples (rows, n, features) as the flow makes them, for some rows at a time; these rows."""
        flow = self.run.flow
        if self.context is None or self.frame is None:
            yield flow.sample(self.n, seed=self.seed)[None], None
            return
        step = max(1, VALUES // (self.n * torch.Size(flow.shape).numel()))
        for start in range(0, self.rows, step):
            some = slice(start, start + step)
            yield (
                sample_rows(flow, self.n, self.context[some], self.seed).transpose(0, 1),
                self.frame[some],
            )

    def values(self) -> Iterator[Array]:
        """Samples (rows, n, columns) in the units of the file; levels of what is categorical."""
        for codes, _ in self.codes():
            values = column_values(self.run.schema, codes.flatten(0, 1))
            yield values.reshape(*codes.shape[:2], -1)

    def tables(self) -> Iterator[pl.DataFrame]:
        """Samples as tables, n rows for each row of `given`, in its order, with the given columns."""
        schema = self.run.schema
        for codes, rows in self.codes():
            flat = codes.flatten(0, 1)
            if schema is None:
                yield pl.DataFrame(flat.cpu().numpy(), schema=list(self.run.about["columns"]))
            else:
                yield schema.decode(flat, rows)
