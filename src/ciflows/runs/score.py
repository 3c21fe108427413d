"""Scores of new data, written to files."""

from __future__ import annotations

__all__ = [
    "ScoreSettings",
    "Scored",
    "check_key",
    "score_data",
    "score_frame",
    "score_rows",
]

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ciflows.core.evaluate import Estimate, RunningSummary, Summary
from ciflows.core.rows import Rows
from ciflows.datasets import image_files, is_built_in, load_dataset, read_images
from ciflows.errors import GapsError, UserError, nearest
from ciflows.optional import polars as pl
from ciflows.pixels import bits_per_dim
from ciflows.runs.gaps import check_missing, estimate_gaps
from ciflows.runs.p_values import PValues
from ciflows.runs.run import SCORES, Run, load_run
from ciflows.tables import read_table
from ciflows.tables.faults import find_faults
from ciflows.tables.read import GrowingTable, check_output, errors_of, read_chunks, replace_frame
from ciflows.tables.schema import check_columns

ROWS = 10_000
BAD_ROWS = ("fail", "null", "drop")
# some rows to score, the faults of those that cannot be, and the key columns of all of them
Chunk = tuple[Rows, "pl.Series | None", "list[pl.Series]"]


class Scored(NamedTuple):
    """The scores of some data, summarised.

    Attributes:
        summary: Their mean and its errors.
        bits_per_dim: The same mean in bits per dimension; None if the data are not images.
        weights: The column that the mean is weighted by; None if all rows count the same.
        missing_weights: The weights column of training, if the data lack it.
        bad: How many rows could not be scored.
        bad_file: The file that lists them; None if there are none.
        impossible: Rows with a density of 0: values outside a column's bounds, or infinitely far off.
        failed: Rows with gaps that could not be scored, and do not count in the mean.
    """

    summary: Summary
    bits_per_dim: float | None
    weights: str | None
    missing_weights: str | None
    bad: int = 0
    bad_file: str | None = None
    impossible: int = 0
    failed: int = 0


@dataclass(frozen=True)
class ScoreSettings:
    """How rows are scored, whichever engine does it.

    Attributes:
        samples: Draws for each row; None for as many as 0.1 nats take, at most 100.
        std_error: Instead of `samples`, draw until each row's standard error is about this.
        max_samples: The most draws for one row with `std_error`.
        seed: Seed of the draws.
        on_bad_row: What to do with a row that cannot be scored: fail, give null, or drop it.
        missing: "refuse" gaps, or "integrate" over them.
    """

    samples: int | None = None
    std_error: float | None = None
    max_samples: int = 10_000
    seed: int = 0
    on_bad_row: str = "null"
    missing: str = "refuse"

    @property
    def integrate(self) -> bool:
        """Whether rows may have gaps."""
        return self.missing == "integrate"

    @property
    def precision(self) -> dict[str, Any]:
        """How many draws there are, as `Run.estimate` takes it."""
        return {"samples": self.samples, "std_error": self.std_error, "max_samples": self.max_samples}

    def __post_init__(self) -> None:
        check_missing(self.missing)
        if self.on_bad_row not in BAD_ROWS:
            choices = nearest(self.on_bad_row, BAD_ROWS)
            raise UserError(f"on_bad_row: there is no choice {self.on_bad_row!r}. {choices}")
        fewest = self.max_samples if self.samples is None else min(self.samples, self.max_samples)
        if fewest < 1:
            raise UserError(f"At least one draw is needed; got {fewest}.")
        if self.std_error is not None and not self.std_error > 0:
            raise UserError(f"The standard error to reach must be above 0; got {self.std_error}.")


def check_key(key: Sequence[str]) -> None:
    """Refuse key columns that cannot stand beside the scores."""
    taken = [name for name in key if name in (*SCORES, "p_value", "p_value_std_error")]
    if taken:
        raise UserError(f"The scores have a column {taken[0]} already: it cannot be a key.")
    twice = [name for name in key if key.count(name) > 1]
    if twice:
        raise UserError(f"The key names {twice[0]} twice.")


def score_frame(run: Run, frame: pl.DataFrame, settings: ScoreSettings) -> pl.DataFrame:
    """The score columns of a table's rows; each row's depend on the row and the settings alone.

    Rows that cannot be scored have nulls, or are refused in words.
    """
    frame = frame.drop(run.weights, strict=False) if run.weights else frame
    good, faults = encode_good(run, frame, settings)
    return spread(score_columns(run, score_rows(run, good, settings)), faults)


def encode_good(run: Run, frame: pl.DataFrame, settings: ScoreSettings) -> tuple[Rows, pl.Series | None]:
    """The rows that can be scored, and the columns at fault in each row, None if none is."""
    missing = settings.missing
    try:
        return run.rows(frame, missing), None
    except UserError as error:
        if isinstance(error, GapsError):
            error.command = "--missing integrate"
        if run.schema is None or settings.on_bad_row == "fail":
            raise
        faults = find_faults(run.schema, frame, settings.integrate)
        if not faults.is_not_null().any():
            raise
        return run.rows(frame.filter(faults.is_null()), missing), faults


def spread(scores: pl.DataFrame, faults: pl.Series | None) -> pl.DataFrame:
    """The scores of the good rows as those of all rows, with nulls for the others."""
    if faults is None:
        return scores
    good = faults.is_null()
    place = pl.select(pl.when(good).then(good.cum_sum().cast(pl.Int64) - 1)).to_series()
    return scores.select(pl.all().gather(place))


def score_rows(run: Run, rows: Rows, settings: ScoreSettings) -> Estimate:
    """Estimate log p(x) of rows that the run has encoded; NaN where gaps cannot be integrated over."""
    if settings.missing == "refuse" or settings.on_bad_row == "fail":
        return run.estimate(rows, seed=settings.seed, **settings.precision)
    return estimate_gaps(run.gaps, rows, seed=settings.seed, **settings.precision)


def score_columns(run: Run, estimate: Estimate) -> pl.DataFrame:
    """log_prob, std_error and effective_samples of each row, for images bits_per_dim too."""
    columns = {name: getattr(estimate, name) for name in SCORES}
    if run.images:
        columns["bits_per_dim"] = bits_per_dim(estimate.log_prob, math.prod(run.flow.shape))
    frame = pl.DataFrame({name: values.cpu().numpy() for name, values in columns.items()})
    return frame.with_columns(pl.when(pl.col("log_prob").is_not_nan()).then(pl.all()))


def score_data(
    folder: Path,
    data: str,
    out: Path,
    settings: ScoreSettings,
    device: str,
    console: Console,
    *,
    key: Sequence[str] = (),
    p_value: bool = False,
    n: int | None = None,
) -> Scored:
    """Write the score columns of each row of some data to a file, whole or not at all.

    Arguments:
        folder: The run folder.
        data: A table, a folder of images, or the name of a built-in set, whose test part is scored.
        out: The file to write.
        settings: How to score.
        device: auto, cpu or cuda.
        console: Shows progress.
        key: Columns of the table to write beside the scores; the number of the row if there are none.
        p_value: Whether to write p_value and p_value_std_error too.
        n: Samples of the run for p-values; see `Run.p_value`.
    """
    check_output(out)
    run = load_run(folder, device)
    running, weighted, bad = RunningSummary(1 if run.flow.exact else None), False, BadRows(out)
    impossible, failed = 0, 0
    if p_value and settings.missing != "refuse":
        raise UserError("P-values compare whole rows: rows with missing values have none.")
    p_values = PValues(run, n, settings.seed, **settings.precision) if p_value else None
    with GrowingTable(out) as table:
        for rows, faults, keys in _with_progress(_chunks(run, data, settings, console, key), console):
            part = score_rows(run, rows, settings)
            impossible += int(part.log_prob.isneginf().sum())
            done = ~part.log_prob.isnan()
            failed += int((~done).sum())
            if bool(done.any()):
                weight = None if rows.weight is None else rows.weight[done.cpu()]
                running.add(Estimate(*(column[done] for column in part)), weight)
            weighted = rows.weight is not None
            numbers = bad.add(len(rows), faults)
            scores = score_columns(run, part)
            scores = scores if p_values is None else scores.hstack(p_values.frame(rows, part))
            scores = spread(scores, faults).select(*(keys or [numbers]), pl.all())
            table.add(scores.drop_nulls("log_prob") if settings.on_bad_row == "drop" else scores)
        if not running.points and bad.count:
            raise UserError(
                f"{data}: no row can be scored. {', '.join(bad.columns)}: gaps, or values that training "
                "rules out (--on-bad-row fail says which)."
            )
        if not running.points:
            raise UserError(f"{data}: no rows to score{', but those with gaps' * bool(failed)}.")
        with errors_of(data):
            run.check_counts(running.counts)
    summary = running.result()
    bits = bits_per_dim(summary.log_prob, math.prod(run.flow.shape)) if run.images else None
    used, missing = (run.weights, None) if weighted else (None, run.weights)
    return Scored(summary, bits, used, missing, bad.count, bad.write(), impossible, failed)


class BadRows:
    """The rows of a file that could not be scored: their numbers, and the columns at fault.

    Arguments:
        out: The file of scores, beside which they are listed.
    """

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f"{out.stem}-bad-rows.csv")
        self.rows, self.count, self.found = 0, 0, list[tuple[int, str]]()

    def add(self, good: int, faults: pl.Series | None) -> pl.Series:
        """Count in the next rows, so many good ones alone or the faults of all; their numbers."""
        first = self.rows
        if faults is not None:
            named = ((self.rows + row, columns) for row, columns in enumerate(faults) if columns)
            self.found += named
        self.rows, self.count = self.rows + (good if faults is None else len(faults)), len(self.found)
        return pl.Series("row", range(first, self.rows), dtype=pl.Int64)

    @property
    def columns(self) -> list[str]:
        """The columns at fault in any row."""
        return list(dict.fromkeys(name for _, names in self.found for name in names.split(", ")))

    def write(self) -> str | None:
        """Write the list, if there are any; the file's name."""
        if not self.found:
            return None
        frame = pl.DataFrame(self.found, schema=["row", "columns"], orient="row")
        replace_frame(self.path, frame)
        return str(self.path)


def _with_progress(chunks: Iterator[Chunk], console: Console) -> Iterator[Chunk]:
    """The chunks that have rows, with a progress bar on a terminal."""
    hidden = not console.is_terminal
    shown = track(chunks, "scoring", console=console, transient=True, disable=hidden)
    return (chunk for chunk in shown if len(chunk[0]) or chunk[1] is not None)


def _chunks(
    run: Run, data: str, settings: ScoreSettings, console: Console, key: Sequence[str]
) -> Iterator[Chunk]:
    """The rows to score, encoded, some at a time, with the faults of those that cannot be, and keys."""
    if run.schema is None:
        if key:
            raise UserError(f"{data}: only a table of your own has key columns.")
        yield from ((Rows(part), None, []) for part in _points(run, data, console).split(ROWS))
        return
    check_key(key)
    with errors_of(data):
        for frame in read_chunks(Path(data), ROWS):
            check_columns(frame, key)
            yield *encode_good(run, frame, settings), [frame[name] for name in key]


def _points(run: Run, data: str, console: Console) -> Tensor:
    """The points of a run without a table's columns: of a built-in set, images, or a file of numbers."""
    wanted: list[str] = run.about["columns"]
    if is_built_in(data):
        x = load_dataset(data, say=partial(console.print, markup=False, soft_wrap=True)).test
    elif run.images and Path(data).is_dir():
        x = torch.from_numpy(read_images(image_files(Path(data)), run.flow.shape[0]))
    elif run.images:
        raise UserError(f"{data}: the run was trained on images: give a folder of images.")
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
