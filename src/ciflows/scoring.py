"""Scores of new data and samples from trained runs, as tables and pictures."""

from __future__ import annotations

__all__ = ["sample_data", "score_data"]

import io
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ciflows.data import (
    image_files,
    is_built_in,
    load_dataset,
    read_images,
    read_table,
    write_frame,
    write_table,
)
from ciflows.data.schema import Column, check_names
from ciflows.data.tables import GrowingTable, check_output, errors_of, read_chunks
from ciflows.errors import UserError
from ciflows.estimate import RunningSummary, Summary
from ciflows.files import write_bytes
from ciflows.images import bits_per_dim, image_grid, png
from ciflows.rows import Rows
from ciflows.run import Run, load_run, table_frame

if TYPE_CHECKING:
    import polars as pl

ROWS = 10_000
PICTURES = (".png", ".npy")
SCORES = ("log_prob", "std_error", "effective_samples")


def score_data(
    folder: Path,
    data: str,
    out: Path,
    samples: int,
    std_error: float | None,
    seed: int,
    device: str,
    console: Console,
    *,
    max_samples: int = 10_000,
) -> tuple[Summary, float | None]:
    """Write log_prob, std_error and effective_samples of each row, and return their summary.

    Images get their bits_per_dim too, and its mean is returned beside the summary.
    """
    if min(samples, max_samples) < 1:
        raise UserError(f"At least one draw is needed; got {min(samples, max_samples)}.")
    if std_error is not None and not std_error > 0:
        raise UserError(f"A standard error to reach must be above 0; got {std_error}.")
    check_output(out)
    run = load_run(folder, device)
    running, size = RunningSummary(1 if run.flow.exact else samples), math.prod(run.flow.shape)
    with GrowingTable(out) as table:
        pieces, hidden = _pieces(run, data, console), not console.is_terminal
        shown = track(pieces, "scoring", console=console, transient=True, disable=hidden)
        for index, rows in enumerate(rows for rows in shown if len(rows.x)):
            part = run.estimate(
                rows, samples, seed + index, std_error=std_error, max_samples=max_samples
            )
            running.add(part)
            columns = {name: getattr(part, name) for name in SCORES}
            if run.images:
                columns["bits_per_dim"] = bits_per_dim(part.log_prob, size)
            table.add(columns)
        if not running.points:
            raise UserError(f"{data}: no rows to score.")
    summary = running.result()
    return summary, bits_per_dim(summary.log_prob, size) if run.images else None


def sample_data(
    folder: Path,
    n: int | None,
    out: Path | None,
    seed: int,
    device: str,
    temperature: float = 1.0,
    given: str | None = None,
) -> tuple[int, Path]:
    """Write n points of a run's model under the names of its data's columns: how many, and the file.

    Images go to a .png file as one grid, or to an .npy file as bytes (n, channels, height, width).
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
    """What to condition on: a table's rows, or one row of values written as A=1,B=x."""
    import polars as pl

    if "=" not in given:
        return table_frame(given)
    pairs = [word.partition("=") for word in given.split(",")]
    columns = {} if run.schema is None else {column.name: column for column in run.schema.given}
    row = {name: value for name, _, value in pairs}
    if not columns:  # the run itself says that nothing can be given
        return pl.DataFrame({name: [text] for name, text in row.items()})
    check_names(list(row), list(columns), "--given")
    return pl.DataFrame({name: [_value(columns[name], text)] for name, text in row.items()})


def _value(column: Column, text: str) -> str | float | int:
    """A column's value from how it was written."""
    if column.categories:
        return text
    try:
        number = float(text)
        if column.kind != "integer":
            return number
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    kind = "a whole number" if column.kind == "integer" else "a number"
    raise UserError(f"--given {column.name}={text}: expected {kind}.")


def _write_images(path: Path, images: Tensor, levels: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".png":
        write_bytes(path, png(image_grid(images, levels)))
        return
    file = io.BytesIO()
    np.save(file, images.clamp(0, levels - 1).to(torch.uint8).cpu().numpy())
    write_bytes(path, file.getvalue())


def _pieces(run: Run, data: str, console: Console) -> Iterator[Rows]:
    """The rows to score, some at a time, with the columns that the run was trained on in their order."""
    if run.schema is None:
        yield from map(Rows, _plain_points(run, data, console).split(ROWS))
        return
    with errors_of(data):
        for chunk in read_chunks(Path(data), ROWS):
            yield run.schema.encode(chunk)


def _plain_points(run: Run, data: str, console: Console) -> Tensor:
    wanted: list[str] = run.about["columns"]
    if is_built_in(data):
        x = load_dataset(data, say=partial(console.print, markup=False, soft_wrap=True)).test
    elif run.images and Path(data).is_dir():
        x = torch.from_numpy(read_images(image_files(Path(data)), run.flow.shape[0]))
    elif run.images:
        raise UserError(f"{data}: the run was trained on images: give a folder of them.")
    else:
        x = read_table(Path(data), wanted).values
    if run.images or x.ndim > 2:
        return _check_images(run, data, x)
    if x.shape[1] != len(wanted):
        trained = f"{len(wanted)}: {', '.join(wanted)}"
        raise UserError(f"{data} has {x.shape[1]} columns; the run was trained on {trained}.")
    x = x.to(run.flow.dtype)
    if not bool(x.isfinite().all()):
        raise UserError(f"{data}: values too large for the run's {run.flow.dtype}.")
    return x


def _check_images(run: Run, data: str, x: Tensor) -> Tensor:
    sizes = ["×".join(map(str, shape)) for shape in (x.shape[1:], run.flow.shape)]
    if sizes[0] != sizes[1]:
        raise UserError(f"{data}: its points have size {sizes[0]}; the run was trained on {sizes[1]}.")
    levels = run.config.architecture["levels"]
    if int(x.max()) >= levels:
        raise UserError(
            f"{data}: pixels of value {int(x.max())}; the run was trained on {levels} levels."
        )
    return x
