"""Samples of a run, and tables with their gaps filled, written to files."""

from __future__ import annotations

__all__ = ["impute_data", "sample_data"]

import io
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ciflows.errors import UserError
from ciflows.files import write_bytes
from ciflows.optional import polars as pl
from ciflows.pixels import image_grid, png
from ciflows.runs.gaps import DRAW
from ciflows.runs.run import Run, load_run
from ciflows.tables import write_frame, write_table
from ciflows.tables.categorical import Categorical
from ciflows.tables.column import Column
from ciflows.tables.dates import unit_of
from ciflows.tables.lattice import Lattice
from ciflows.tables.read import check_output, errors_of, read_frame
from ciflows.tables.schema import check_names, count_gaps

PICTURES = (".png", ".npy")


def impute_data(
    folder: Path, data: Path, n: int, out: Path, seed: int, device: str
) -> tuple[int, dict[str, int]]:
    """Write a table with its gaps filled; how many rows were written, and how many gaps it filled.

    A column that the table lacks is one gap a row; those of columns that the run does not know stay.
    """
    check_output(out)
    run = load_run(folder, device)
    frame = read_frame(data)
    with errors_of(data):
        frame = run.named(frame) if run.schema else frame
        filled = run.impute(frame, n, seed)
    write_frame(out, filled)
    left = count_gaps(filled)
    gaps = {name: count for name, count in count_gaps(frame).items() if name not in left}
    lacking = [name for name in filled.columns if name not in (*frame.columns, DRAW)]
    return len(filled), gaps | dict.fromkeys(lacking, len(frame))


def sample_data(
    folder: Path,
    n: int | None,
    out: Path | None,
    seed: int,
    device: str,
    temperature: float = 1.0,
    given: str | None = None,
) -> tuple[int, Path]:
    """Write n samples to a file; return how many were written, and the file.

    A table has the columns of the data. Images go to a .png file as one grid, or to an .npy file as
    bytes (n, channels, height, width).

    Arguments:
        n: How many, for each row of `given` if there are such rows; 1000 or 1 if None.
        out: The file; samples.csv or samples.png if None.
        given: The values to condition on: a table's path, or A=1,B=x.
    """
    if not temperature > 0:
        raise UserError(f"A temperature must be above 0; got {temperature}.")
    run = load_run(folder, device)
    out = out or Path("samples.png" if run.images else "samples.csv")
    check_output(out, PICTURES) if run.images else check_output(out)
    table = None if given is None else _given_table(run, given)
    n = n or (1000 if table is None or len(table) == 1 else 1)
    points = run.sample(n, seed=seed, temperature=temperature, given=table)
    if run.images:
        _write_images(out, points, run.config.architecture["levels"])
    elif run.schema is not None:
        write_frame(out, points)
    else:
        write_table(out, dict(zip(run.about["columns"], points.unbind(-1), strict=True)))
    return len(points), out


def _given_table(run: Run, given: str) -> pl.DataFrame:
    """The values to condition on: the rows of a table, or one row written as A=1,B=x."""
    if "=" not in given:
        return read_frame(given)
    row = {name: value for name, _, value in (word.partition("=") for word in given.split(","))}
    columns = {} if run.schema is None else {column.name: column for column in run.schema.given}
    if not columns:  # Run.sample refuses it
        return pl.DataFrame({name: [text] for name, text in row.items()})
    check_names(list(row), list(columns), "--given")
    return pl.DataFrame({name: [_value(columns[name], text)] for name, text in row.items()})


def _value(column: Column, text: str) -> str | float | int | datetime:
    """The value of a column, from its text on the command line."""
    if isinstance(column, Categorical):
        return text
    if unit_of(column.dtype):
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            raise UserError(f"--given {column.name}={text}: expected a date, as 2026-01-31.") from None
    whole = isinstance(column, Lattice) and not column.decimals
    try:
        number = float(text)
        if not whole:
            return number
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    kind = "a whole number" if whole else "a number"
    raise UserError(f"--given {column.name}={text}: expected {kind}.")


def _write_images(path: Path, images: Tensor, levels: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".png":
        write_bytes(path, png(image_grid(images, levels)))
        return
    file = io.BytesIO()
    np.save(file, images.clamp(0, levels - 1).to(torch.uint8).cpu().numpy())
    write_bytes(path, file.getvalue())
