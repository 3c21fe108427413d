"""The figures of the page: one for each row and data set, from run folders or from a file."""

from __future__ import annotations

__all__ = ["Figure", "Result", "collect", "read_figures", "read_results", "write_figures"]

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import Field

from benchmarks.paper.plan import Job
from ciflows.errors import UserError
from ciflows.files import parse_toml, read_json, write_text
from ciflows.runs.folder import is_finished, read_metrics
from ciflows.settings import Settings, parse_settings


class Figure(Settings):
    """What a row came to on a data set, beside the paper's figure."""

    table: str = Field(description="the table's name, which is that of its page in the appendix")
    data: str
    row: str = Field(description="the row's name on the page")
    pair: str | None = Field(None, description="the plain row that a CIF is compared with")
    cif: bool = Field(False, description="whether the row has an index")
    bits: bool = Field(False, description="bits per dimension, lower is better; otherwise nats")
    value: float | None = Field(None, description="mean over seeds; none if there is no run yet")
    error: float | None = Field(None, description="its standard error")
    seeds: int = Field(0, description="number of seeds; of one, the error is over test points")
    steps: str = Field("", description="steps that the runs took")
    parameters: int | None = None
    paper: float | None = None
    paper_error: float | None = None
    comparable: bool = Field(True, description="whether the paper's figure measures the same")
    limit: float | None = Field(None, description="the best that any model can reach")
    note: str = Field("", description="what a reader has to know of it")


class Result(NamedTuple):
    """A finished run."""

    job: Job
    metrics: dict[str, Any]
    machine: str


def read_results(jobs: Sequence[Job], folder: Path) -> list[Result]:
    """The finished ones of some runs."""
    return [
        Result(
            job, read_metrics(folder / job.key), read_json(folder / job.key / "about.json")["machine"]
        )
        for job in jobs
        if is_finished(folder / job.key)
    ]


def collect(jobs: Sequence[Job], results: Sequence[Result]) -> list[Figure]:
    """A figure for each row and data set, over the seeds that are finished.

    Arguments:
        jobs: The runs of the queue.
        results: Those that are finished.
    """
    found = {result.job.key: result for result in results}
    ordered = sorted(jobs, key=_order(jobs))
    return [_figure(list(some), found) for _, some in groupby(ordered, key=_place)]


def write_figures(path: Path, figures: Sequence[Figure]) -> None:
    """Write figures as TOML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [figure.model_dump(exclude_defaults=True) for figure in figures]
    write_text(path, tomli_w.dumps({"figures": rows}))


def read_figures(path: Path) -> list[Figure]:
    """Read what `write_figures` wrote, or what was written by hand."""
    try:
        values = parse_toml(path.read_text(encoding="utf-8"), str(path))
    except OSError:
        raise UserError(f"There is no file {path}.") from None
    return [parse_settings(Figure, value, str(path)) for value in values.get("figures", [])]


def _place(job: Job) -> tuple[str, str, str]:
    return job.table.name, job.data, job.row.name


def _order(jobs: Sequence[Job]) -> Any:
    """Sort by first appearance, with all seeds of a row together."""
    first: dict[tuple[str, str, str], int] = {}
    for index, job in enumerate(jobs):
        first.setdefault(_place(job), index)
    return lambda job: first[_place(job)]


def _figure(jobs: Sequence[Job], found: dict[str, Result]) -> Figure:
    table, row, data = jobs[0].table, jobs[0].row, jobs[0].data
    runs = [found[job.key].metrics for job in jobs if job.key in found]
    published = row.published(data)
    bits = published.bits_per_dim is not None
    value, error = _mean(runs, bits)
    return Figure(
        table=table.name,
        data=data,
        row=row.label,
        pair=next((one.label for one in table.rows if one.name == row.pair), None),
        cif=jobs[0].config().model.startswith("cif-"),
        bits=bits,
        value=value,
        error=error,
        seeds=len(runs),
        steps=_range([run["steps"] for run in runs]),
        parameters=runs[0]["parameters"] if runs else None,
        paper=published.bits_per_dim if bits else published.log_prob,
        paper_error=published.bits_per_dim_std_error if bits else published.std_error,
        comparable=row.comparable,
        limit=next((run["limit"] for run in runs), None),
        note="",
    )


def _mean(runs: Sequence[dict[str, Any]], bits: bool) -> tuple[float | None, float | None]:
    """Mean and standard error over seeds; over test points if there is one seed."""
    values = [run["bits_per_dim"] if bits else run["test"]["log_prob"] for run in runs]
    if not values:
        return None, None
    if len(values) == 1:
        return values[0], runs[0]["bits_per_dim_std_error"] if bits else runs[0]["test"]["std_error"]
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _range(steps: Sequence[int]) -> str:
    ends: Iterator[int] = iter(sorted({min(steps), max(steps)})) if steps else iter(())
    return "–".join(f"{end:,}" for end in ends)
