"""Scores of new data and samples from trained runs, as tables."""

from __future__ import annotations

__all__ = ["sample_data", "score_data"]

from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ciflows.data import is_built_in, load_dataset, read_table, write_table
from ciflows.data.tables import check_output
from ciflows.errors import UserError
from ciflows.estimate import Estimate, Summary, summarise
from ciflows.run import Run, load_run

ROWS = 10_000


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
) -> Summary:
    """Write log_prob, std_error and effective_samples of each row, and return their summary."""
    if min(samples, max_samples) < 1:
        raise UserError(f"At least one draw is needed; got {min(samples, max_samples)}.")
    if std_error is not None and not std_error > 0:
        raise UserError(f"A standard error to reach must be above 0; got {std_error}.")
    check_output(out)
    run = load_run(folder, device)
    x = _points(run, data, console)
    parts = [
        run.flow.estimate(
            rows.to(run.flow.device),
            samples,
            std_error=std_error,
            max_samples=max_samples,
            seed=seed + index,
        )
        for index, rows in track(
            list(enumerate(x.split(ROWS))), "scoring", console=console, transient=True
        )
    ]
    estimate = Estimate(*(torch.cat(column) for column in zip(*parts, strict=True)))
    names = ("log_prob", "std_error", "effective_samples")
    write_table(out, {name: getattr(estimate, name) for name in names})
    return summarise(estimate, 1 if run.flow.exact else samples)


def sample_data(folder: Path, n: int, out: Path, seed: int, device: str) -> None:
    """Write n points of a run's model under the names of its data's columns."""
    check_output(out)
    run = load_run(folder, device)
    points = run.sample(n, seed=seed)
    write_table(out, dict(zip(run.about["columns"], points.unbind(-1), strict=True)))


def _points(run: Run, data: str, console: Console) -> Tensor:
    """The rows to score, with the columns that the run was trained on, in their order."""
    wanted: list[str] = run.about["columns"]
    if is_built_in(data):
        x = load_dataset(data, say=partial(console.print, markup=False, soft_wrap=True)).test
    else:
        x = read_table(Path(data), wanted).values
    if x.shape[1] != len(wanted):
        trained = f"{len(wanted)}: {', '.join(wanted)}"
        raise UserError(f"{data} has {x.shape[1]} columns; the run was trained on {trained}.")
    x = x.to(run.flow.dtype)
    if not bool(x.isfinite().all()):
        raise UserError(f"{data}: values too large for the run's {run.flow.dtype}.")
    return x
