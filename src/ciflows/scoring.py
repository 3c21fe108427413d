"""Scores of new data and samples from trained runs, as tables."""

from __future__ import annotations

__all__ = ["sample_data", "score_data"]

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ciflows.data import SYNTHETIC, load_dataset, read_table, write_table
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
) -> Summary:
    """Write log_prob, std_error and effective_samples of each row, and return their summary."""
    check_output(out)
    run = load_run(folder, device)
    x = _points(run, data)
    parts = [
        run.flow.estimate(
            rows.to(run.flow.device, run.flow.dtype), samples, std_error=std_error, seed=seed + index
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


def check_output(path: Path) -> None:
    """Refuse a file that exists or that we cannot write, before any work is done."""
    if path.exists():
        raise UserError(f"{path} exists already: choose another --out.")
    if path.suffix not in (".csv", ".parquet"):
        raise UserError(f"{path}: cannot write {path.suffix!r} files; give .csv or .parquet.")


def _points(run: Run, data: str) -> Tensor:
    """The rows to score, with the columns that the run was trained on, in their order."""
    if data in SYNTHETIC:
        return load_dataset(data).test
    table = read_table(Path(data))
    wanted = run.about["columns"]
    missing = [column for column in wanted if column not in table.columns]
    if missing:
        raise UserError(
            f"{data} lacks the column {', '.join(missing)}; the run was trained on {', '.join(wanted)}."
        )
    return table.values[:, [table.columns.index(column) for column in wanted]]
