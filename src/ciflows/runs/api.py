"""`ciflows.fit`: from a data frame, an array or a file to a density, in one call."""

from __future__ import annotations

__all__ = ["fit", "in_temporary_folder"]

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.runs.config import default_model, place_settings, resolve, suited_settings
from ciflows.runs.fit import fit as fit_config
from ciflows.runs.folder import TABLE
from ciflows.runs.run import Run
from ciflows.tables import TableLike, as_frame


def fit(
    data: TableLike,
    model: str | None = None,
    *,
    out: Path | str | None = None,
    columns: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    given: Sequence[str] = (),
    weights: str | Sequence[float] | None = None,
    bounds: Mapping[str, tuple[float | None, float | None]] | None = None,
    atoms: Mapping[str, Sequence[float]] | None = None,
    step: Mapping[str, float] | None = None,
    circular: Mapping[str, tuple[float, float]] | None = None,
    group: str | None = None,
    categorical: Sequence[str] = (),
    missing: str = "refuse",
    seed: int = 0,
    device: str = "auto",
    max_minutes: float | None = None,
    progress: bool = False,
    **settings: Any,
) -> Run:
    """Fit a density to a table.

    Arguments:
        data: A polars or pandas data frame, an array (rows, columns), a path, or the name of a built-in
            set.
        model: Name of a model; cif-nsf for a table if None.
        out: The run folder; if None, a temporary one that is deleted with the run.
        columns: Columns to use; all if None.
        exclude: Columns to leave out.
        given: Columns to condition on: p(the rest | these).
        weights: The column with the rows' weights, or the weights themselves (rows,).
        bounds: Bounds of columns, such as {"age": (0, 120)}; None for an open end.
        atoms: Values with a probability of their own, such as {"spend": [0]}; [] for none.
        step: Columns whose values come in steps, such as {"price": 0.05}; 0 asks for a density.
        circular: Columns whose values wrap around, such as {"hour": (0, 24)}.
        group: Column whose equal values stay together in the split; it is not modelled.
        categorical: Columns of numbers that are category labels.
        missing: "refuse" rows with missing values, or "drop" them.
        seed: Seed of parameters, data order and draws.
        device: auto, cpu, cuda or cuda:N.
        max_minutes: The longest time to train, in minutes.
        progress: Whether to print progress.
        settings: Settings of the model and of training, such as layers=5 or steps=1000.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> run = fit({"a": rng.normal(size=100), "b": rng.integers(0, 3, 100)}, steps=20, layers=1)
        >>> run.log_prob({"a": [0.1], "b": [2]}).shape
        torch.Size([1])
        >>> run.sample(5, seed=0).columns
        ['a', 'b']
    """
    in_file = isinstance(data, str | Path)
    name = str(data) if in_file else TABLE
    frame = None if in_file else as_frame(data)
    if weights is not None and not isinstance(weights, str):
        frame, weights = _with_weights(frame, weights)
    table = {
        "columns": None if columns is None else list(columns),
        "exclude": list(exclude),
        "given": list(given),
        "weights": weights,
        "bounds": {key: _ends(ends) for key, ends in (bounds or {}).items()},
        "atoms": {key: ",".join(map(str, values)) or "none" for key, values in (atoms or {}).items()},
        "step": dict(step or {}),
        "circular": {key: _ends(ends) for key, ends in (circular or {}).items()},
        "group": group,
        "categorical": list(categorical),
        "missing": missing,
    }
    model = model or default_model(name)
    training = {} if max_minutes is None else {"max_minutes": max_minutes}
    own = [place_settings(model, settings), {"training": training, "table": table}]
    config = resolve(name, model, seed, [*suited_settings(name), *own])
    console = Console(quiet=not progress)
    make = partial(fit_config, config, device=device, console=console, table=frame)
    return in_temporary_folder(make) if out is None else make(out)


def in_temporary_folder(make: Callable[[Path], Run]) -> Run:
    """Make a run in a temporary folder, which is deleted with the run."""
    folder = Path(tempfile.mkdtemp(prefix="ciflows-"))
    try:
        run = make(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(run, shutil.rmtree, folder, ignore_errors=True)
    return run


def _with_weights(frame: pl.DataFrame | None, weights: Sequence[float]) -> tuple[pl.DataFrame, str]:
    """Add the weights to a table as a column; the table and the column's name."""
    if frame is None:
        raise UserError("The weights of a table in a file are one of its columns: give its name.")
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != (len(frame),):
        raise UserError(f"Expected a weight for each of {len(frame)} rows; got shape {values.shape}.")
    name = "weight"
    while name in frame.columns:
        name = f"{name}_"
    return frame.with_columns(pl.Series(name, values)), name


def _ends(ends: tuple[float | None, float | None]) -> str:
    return ":".join("" if end is None else repr(float(end)) for end in ends)
