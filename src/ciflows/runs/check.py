"""Does a run's density mean what it says? Its calibration on rows of a table, told and written."""

from __future__ import annotations

__all__ = ["check_data", "coverage", "write_picture"]

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ciflows.core.rows import Rows
from ciflows.datasets import is_built_in, load_dataset
from ciflows.diagnostics import Coverage, calibrate
from ciflows.errors import UserError
from ciflows.files import write_bytes, write_json
from ciflows.optional import polars as pl
from ciflows.runs.samples import modelled
from ciflows.tables import TableLike, write_frame
from ciflows.tables.read import errors_of, read_chunks
from ciflows.tables.values import column_values

if TYPE_CHECKING:
    from ciflows.runs.run import Run

SAMPLES, SAMPLES_A_ROW = 2000, 200
ROWS = 5000


def coverage(
    run: Run,
    x: TableLike | Rows | None = None,
    *,
    samples: int | None = None,
    draws: int = 20,
    rows: int | None = ROWS,
    seed: int = 0,
) -> Coverage:
    """Check the density with rows that it was not trained on; print the result to read it.

    Each modelled column is checked given the columns that it is conditioned on, by the places of the
    rows among samples of the run (PIT), and the whole density by its highest-density regions. If the run
    was trained with weights and the table has that column, shares are weighted. Categorical columns are
    checked in the order of their values.

    Arguments:
        x: A table in the units of the data; the test rows of the run's own data if None.
        samples: Samples of the run: 2,000 if None, or 200 for each row of a conditional density.
        draws: Draws of the index for each log p; few are enough.
        rows: The most rows to look at, evenly spread; all if None.
        seed: Seed of the samples.
    """
    names = [column.name for column in modelled(run)]
    source = run.dataset().rows("test") if x is None else x
    found = source if isinstance(source, Rows) else run.rows(source)
    found = found[torch.from_numpy(_spread_out(len(found), rows))]
    if len(found) < 2:
        raise UserError(f"At least two rows are needed; got {len(found)}.")
    samples = samples or (SAMPLES if found.context is None else SAMPLES_A_ROW)
    return calibrate(run.flow, found, names, partial(column_values, run.schema), samples, draws, seed)


def check_data(
    run: Run,
    data: str | None,
    folder: Path,
    samples: int | None,
    rows: int | None,
    seed: int,
) -> Coverage:
    """Check a run; write coverage.json, and coverage.csv with the ranks of each row.

    Arguments:
        data: A table's path, or a built-in set, whose test part is taken; the run's own if None.
        folder: The folder to create.
    """
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another folder.")
    modelled(run)
    found = _read(run, data)
    result = coverage(run, found, samples=samples, rows=rows, seed=seed)
    folder.mkdir(parents=True)
    write_json(folder / "coverage.json", result.as_dict())
    ranks = {check.name: check.ranks for check in result.checks}
    write_frame(folder / "coverage.csv", pl.DataFrame({"row": _spread_out(len(found), rows), **ranks}))
    return result


def write_picture(result: Coverage, folder: Path) -> None:
    """Draw a check into coverage.png; needs matplotlib."""
    from ciflows.report.coverage_pages import coverage_figure

    write_bytes(folder / "coverage.png", coverage_figure(result))


def _read(run: Run, data: str | None) -> Rows:
    """The rows to check with."""
    if data is None:
        return run.dataset().rows("test")
    if is_built_in(data):
        return run.rows(load_dataset(data).test)
    if run.schema is None:
        return run.rows(data)
    with errors_of(data):
        return run.rows(pl.concat(read_chunks(Path(data))))


def _spread_out(count: int, most: int | None) -> NDArray[np.int64]:
    """At most `most` numbers from 0 to count, evenly spread."""
    kept = min(count, most or count)
    return np.arange(kept) * count // max(1, kept)
