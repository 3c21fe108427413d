"""Scores and samples in a folder of many files: parts that any process may make, in any order.

A part is some rows of one input file. Its file gets its name when it is whole, so that a job that was
killed goes on where it stood. What a part holds depends on the job and its number alone, never on who
makes it.
"""

from __future__ import annotations

__all__ = [
    "Job",
    "Made",
    "Part",
    "check_job",
    "make_part",
    "open_job",
    "plan_samples",
    "plan_scores",
    "remaining",
    "sum_up",
]

import hashlib
import json
import math
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ciflows.errors import UserError
from ciflows.files import read_json, write_json
from ciflows.optional import polars as pl
from ciflows.runs.folder import WEIGHTS
from ciflows.runs.run import Run
from ciflows.runs.score import ScoreSettings, check_key, score_frame
from ciflows.tables.faults import check_types, find_faults
from ciflows.tables.many_files import table_files
from ciflows.tables.read import errors_of, readable, replace_frame
from ciflows.tables.schema import Schema, check_columns

PART_ROWS = 100_000
JOB, RESULT, BAD = "_job.json", "_result.json", "_bad_rows"
FAULT = "columns"  # of a bad row, beside its key
ROW = "row"  # the number of a row, over all files in their order


class Part(NamedTuple):
    """Some rows of one input file, or some samples.

    Attributes:
        number: Its place in the job.
        path: The input file; empty for samples.
        first: Its first row there.
        rows: How many rows.
        offset: Number of its first row over all files.
    """

    number: int
    path: str
    first: int
    rows: int
    offset: int

    @property
    def name(self) -> str:
        return f"part-{self.number:06d}.parquet"


@dataclass(frozen=True)
class Job:
    """What is to be made: scores of files, or samples.

    Attributes:
        run: The run folder.
        out: The folder to write to.
        parts: All parts.
        settings: How to score; None for samples.
        key: Columns that are carried over; the row's number if there are none.
        seed: Seed of samples.
        temperature: Of samples.
    """

    run: str
    out: str
    parts: tuple[Part, ...]
    settings: ScoreSettings | None = None
    key: tuple[str, ...] = ()
    seed: int = 0
    temperature: float = 1.0

    def record(self) -> dict[str, Any]:
        """What _job.json says: all that its result depends on."""
        weights = (Path(self.run) / WEIGHTS).read_bytes()
        described = {**asdict(self), "weights": hashlib.sha256(weights).hexdigest()}
        return json.loads(json.dumps({key: described[key] for key in described if key != "out"}))


class Made(NamedTuple):
    """A job's result.

    Attributes:
        rows: Rows that were written.
        bad: Rows that could not be scored.
        bad_file: The file that lists them; None if there are none.
        log_prob: Mean over the rows that could; None for samples.
        std_error: Standard error of that mean.
        late: Rows whose standard error is above the one that was asked for.
        reused: Parts that were there already.
        impossible: Rows with a density of 0: values outside a column's bounds, or infinitely far off.
    """

    rows: int
    bad: int
    bad_file: str | None
    log_prob: float | None
    std_error: float | None
    late: int
    reused: int
    impossible: int = 0


def plan_scores(run: Run, data: str, out: Path, settings: ScoreSettings, key: tuple[str, ...]) -> Job:
    """The job of scoring Parquet files, each of whose columns are checked before any work is done.

    Arguments:
        run: The run.
        data: A Parquet file, a folder of them, or a pattern such as big/*.parquet.
        out: The folder to write to.
        settings: How to score.
        key: Columns to carry over.
    """
    if run.schema is None:
        raise UserError("Only a run over a table scores into a folder of files: give one file.")
    check_key(key)
    if FAULT in key:
        raise UserError(f"The list of bad rows has a column {FAULT} already: it cannot be a key.")
    parts: list[Part] = []
    types: dict[str, pl.DataType] = {}
    offset = 0
    for path in find_files(data):
        with errors_of(path):
            table = _scan(path)
            head = table.head(0 if parts else 1000).collect()
            check_columns(head, key)
            check_types(run.schema, head, settings.integrate)
            rows = int(table.select(pl.len()).collect().item())
            if rows:
                _check_key_types({name: head.schema[name] for name in key}, types)
        for first in range(0, rows, PART_ROWS):
            some = min(PART_ROWS, rows - first)
            parts.append(Part(len(parts), str(path.absolute()), first, some, offset + first))
        offset += rows
    if not parts:
        raise UserError(f"{data}: no rows to score.")
    return Job(str(run.path.absolute()), str(out.absolute()), tuple(parts), settings, key)


def _check_key_types(found: dict[str, pl.DataType], first: dict[str, pl.DataType]) -> None:
    """Refuse key columns that CSV cannot hold, or of other types than in the first file."""
    for name, dtype in found.items():
        if dtype.is_nested() or dtype in (pl.Binary, pl.Duration, pl.Object):
            raise UserError(f"the key {name} is {dtype}, which no list of bad rows (CSV) can hold.")
        if first.setdefault(name, dtype) != dtype:
            raise UserError(f"the key {name} is {dtype} here, and {first[name]} in the first file.")


def plan_samples(run: Run, n: int, out: Path, seed: int, temperature: float) -> Job:
    """The job of drawing n rows into many files."""
    if run.schema is None or run.schema.given:
        raise UserError("Only a run over a table without given columns samples into a folder of files.")
    starts = range(0, n, PART_ROWS)
    parts = (Part(i, "", 0, min(PART_ROWS, n - first), first) for i, first in enumerate(starts))
    where = str(run.path.absolute()), str(out.absolute())
    return Job(*where, tuple(parts), seed=seed, temperature=temperature)


def find_files(data: str) -> tuple[Path, ...]:
    """The Parquet files that are meant, by name: those that a fit would read."""
    with errors_of(data):
        files = table_files(data)
    if not files or not files[0].is_file():
        raise UserError(f"{data}: there is no such file, nor a Parquet file in such a folder.")
    if files[0].suffix.lower() != ".parquet":
        raise UserError(f"{data}: only Parquet files are scored into a folder: give --out a suffix.")
    return files


def check_job(job: Job, resume: bool) -> None:
    """Refuse a folder in which this job can neither begin nor go on."""
    out = Path(job.out)
    if not resume:
        if out.exists():
            raise UserError(f"{out} exists already: choose another folder, or resume the job in it.")
        return
    if not (out / JOB).is_file():
        raise UserError(f"{out}: no job was begun here.")
    before, now = read_json(out / JOB), job.record()
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        raise UserError(f"{out}: its job began with other {', '.join(changed)}.")


def open_job(job: Job, resume: bool) -> None:
    """Begin in a new folder, or clear away what a killed process left."""
    out = Path(job.out)
    if not resume:
        out.mkdir(parents=True)
        write_json(out / JOB, job.record())
    for left in out.glob(".part-*.tmp"):
        left.unlink()


def remaining(job: Job) -> list[Part]:
    """The parts that have no file yet."""
    return [part for part in job.parts if not (Path(job.out) / part.name).exists()]


def make_part(run: Run, job: Job, part: Part) -> None:
    """Make a part's file, whole or not at all; the same to the bit wherever it is made."""
    frame = _sample_part(run, job, part) if job.settings is None else _score_part(run, job, part)
    replace_frame(Path(job.out) / part.name, frame)


def _score_part(run: Run, job: Job, part: Part) -> pl.DataFrame:
    """The key and the scores of a part's rows; its bad rows are listed in a file of their own."""
    assert job.settings is not None
    assert run.schema is not None
    table = _scan(Path(part.path))
    used = {*run.schema.needed(), *(c.name for c in run.schema.constants), *job.key}
    names = [name for name in table.collect_schema().names() if name in used]
    frame = table.select(names).slice(part.first, part.rows).collect()
    with errors_of(part.path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*standard error above")  # counted in the end
        scores = score_frame(run, frame, job.settings)
    numbers = pl.int_range(part.offset, part.offset + part.rows, dtype=pl.Int64, eager=True)
    ids = frame.select(job.key) if job.key else numbers.alias(ROW).to_frame()
    if scores["log_prob"].null_count():
        faults = _faults(run.schema, frame, job.settings.integrate)
        bad = ids.with_columns(faults.alias(FAULT)).filter(scores["log_prob"].is_null())
        replace_frame(Path(job.out) / BAD / part.name.replace(".parquet", ".csv"), bad)
    whole = pl.concat([ids, scores], how="horizontal")
    return whole.drop_nulls("log_prob") if job.settings.on_bad_row == "drop" else whole


def _faults(schema: Schema, frame: pl.DataFrame, integrate: bool) -> pl.Series:
    """The columns at fault in each row; those with gaps where these could not be integrated over."""
    faults = find_faults(schema, frame, integrate)
    if not integrate:
        return faults
    return faults.zip_with(faults.is_not_null(), find_faults(schema, schema.completed(frame)))


def _sample_part(run: Run, job: Job, part: Part) -> Any:
    """The samples of a part, with a seed of its own."""
    seed = np.random.SeedSequence([job.seed, part.number]).generate_state(1)[0]
    return run.sample(part.rows, seed=int(seed), temperature=job.temperature)


def sum_up(job: Job, reused: int) -> Made:
    """The result of a job whose parts are all there, also written to _result.json."""
    out = Path(job.out)
    if job.settings is None:
        return Made(sum(part.rows for part in job.parts), 0, None, None, None, 0, reused)
    lists = [pl.read_csv(path, infer_schema=False) for path in sorted((out / BAD).glob("*.csv"))]
    bad, bad_file = sum(map(len, lists)), out / f"{BAD}.csv"
    if bad:
        replace_frame(bad_file, pl.concat(lists))
    log_prob, limit = pl.col("log_prob"), job.settings.std_error
    late = pl.col("std_error") > (np.inf if limit is None else limit)
    files = [out / part.name for part in job.parts]
    found = pl.scan_parquet(files, glob=False).select(
        rows=pl.len(),
        mean=log_prob.cast(pl.Float64).mean(),
        error=log_prob.std() / log_prob.count().sqrt(),
        late=late.sum(),
        impossible=(log_prob == -np.inf).sum(),
    )
    rows, mean, error, late, impossible = found.collect().row(0)
    error = None if error is None or math.isnan(error) else error  # as where a row has density 0
    listed = str(bad_file) if bad else None
    made = Made(rows, bad, listed, mean, error, late or 0, reused, impossible or 0)
    write_json(out / RESULT, made._asdict())
    return made


def _scan(path: Path) -> pl.LazyFrame:
    with readable(".parquet"):
        table = pl.scan_parquet(path, glob=False)
        table.collect_schema()
    return table
