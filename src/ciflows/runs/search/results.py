"""The result of a search, and its file."""

from __future__ import annotations

__all__ = ["Candidate", "FailedSeed", "SearchResult", "SeedScore", "mean_and_error", "write_result"]

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ciflows.files import write_json
from ciflows.runs.experiments import Published


class Candidate(NamedTuple):
    """One trial.

    Attributes:
        settings: The values of the searched settings.
        validation: Its best validation log-likelihood; None if it has none.
        state: finished, pruned or failed.
        reason: Why it failed, if it did.
        folder: Its run folder, relative to that of the search.
    """

    settings: dict[str, Any]
    validation: float | None
    state: str
    reason: str | None
    folder: str


class SeedScore(NamedTuple):
    """The test result of one seed; `std_error` is over test points."""

    seed: int
    log_prob: float
    std_error: float
    elbo: float
    samples: int
    folder: str


class FailedSeed(NamedTuple):
    """A seed whose run failed."""

    seed: int
    reason: str
    folder: str


class SearchResult(NamedTuple):
    """The content of search.json.

    Attributes:
        settings: The best values of the searched settings.
        candidates: All trials, best first.
        seeds: Test results of the best settings.
        failed_seeds: Seeds whose runs failed.
        log_prob: Mean test log-likelihood over seeds.
        std_error: Its standard error over seeds; None for a single seed.
    """

    experiment: str
    data: str
    model: str
    settings: dict[str, Any]
    candidates: list[Candidate]
    seeds: list[SeedScore]
    failed_seeds: list[FailedSeed]
    log_prob: float
    std_error: float | None
    parameters: int
    published: Published


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of K values and its standard error s / √K, with s the sample deviation; None if K = 1.

    Example:
        >>> mean_and_error([1.0, 2.0, 3.0])
        (2.0, 0.5773502691896258)
    """
    if len(values) < 2:
        return values[0], None
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def write_result(path: Path, result: SearchResult) -> None:
    """Write search.json."""
    rows = {
        key: [row._asdict() for row in getattr(result, key)]
        for key in ("candidates", "seeds", "failed_seeds")
    }
    write_json(path, {**result._asdict(), **rows, "published": result.published.model_dump()})
