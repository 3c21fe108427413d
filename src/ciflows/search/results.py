"""What a search found, and the file that says so."""

from __future__ import annotations

__all__ = ["Candidate", "FailedSeed", "SearchResult", "SeedScore", "mean_and_error", "write_result"]

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ciflows.experiments import Published
from ciflows.files import write_json


class Candidate(NamedTuple):
    """A choice of settings that was tried.

    Attributes:
        settings: The values of what is searched over.
        validation: Its best validation log-likelihood; None where it never got as far as one.
        state: finished, pruned or failed.
        reason: Why, where it failed.
        folder: Its run folder, inside that of the search.
    """

    settings: dict[str, Any]
    validation: float | None
    state: str
    reason: str | None
    folder: str


class SeedScore(NamedTuple):
    """The test of the chosen settings with one seed; its own standard error is that over test points."""

    seed: int
    log_prob: float
    std_error: float
    elbo: float
    samples: int
    folder: str


class FailedSeed(NamedTuple):
    """A seed with which the chosen settings came to nothing."""

    seed: int
    reason: str
    folder: str


class SearchResult(NamedTuple):
    """The content of search.json.

    Attributes:
        experiment: Name of the experiment.
        data: Name of the data set.
        model: Name of the model.
        settings: The chosen values of what is searched over.
        candidates: All that was tried, the best first.
        seeds: The chosen settings' test results.
        failed_seeds: Seeds that have none.
        log_prob: Mean test log-likelihood over seeds.
        std_error: Its standard error over seeds; None from one seed alone.
        parameters: Number of parameters.
        published: What the paper says.
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
    """The mean, and its standard error s / √K with the sample deviation s; None where K = 1.

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
