"""The test of a trained flow: what metrics.json says, and the score of each row."""

from __future__ import annotations

__all__ = ["Evaluation", "estimate_rows", "evaluate", "read_summary"]

import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from ciflows.core.evaluate import FIRST_DRAWS, Estimate, Summary, summarise
from ciflows.core.flow import Flow
from ciflows.core.indexed import Indexed
from ciflows.core.rows import Rows
from ciflows.core.same_bits import SameBits
from ciflows.datasets import Dataset
from ciflows.devices import device_name
from ciflows.diagnostics import Share, index_use, leaked_mass, log_det_error, sandwich
from ciflows.errors import InversionError
from ciflows.layers import Residual, Series
from ciflows.pixels import bits_per_dim
from ciflows.runs.config import RunConfig
from ciflows.runs.folder import RowScores
from ciflows.tables.selftest import check_mass
from ciflows.training.processes import ALONE, Processes

TOLERANCE, MOST_DRAWS = 0.1, 100
LOG_DET_POINTS = 100
SANDWICH_POINTS = 500
INDEX_POINTS, INDEX_DRAWS = 200, 10


class Evaluation(NamedTuple):
    """A flow's test result.

    Attributes:
        metrics: What metrics.json says about the flow.
        scores: The log-likelihood of each test row.
    """

    metrics: dict[str, Any]
    scores: RowScores


@torch.no_grad()
def estimate_rows(
    flow: Flow,
    rows: Rows,
    samples: int | None = None,
    seed: int | None = None,
    *,
    std_error: float | None = None,
    min_samples: int = FIRST_DRAWS,
    max_samples: int = 10_000,
) -> Estimate:
    """Estimate log p(x) of each row; every score in a run comes from here.

    By default each row gets as many draws as a standard error of 0.1 nats takes, and at most 100.

    The draws of a row depend on the seed and the row alone: the command, a `Run` and the scikit-learn
    estimator give it the same score, in any batch and order; on CPUs of one kind, to the bit.

    Arguments:
        flow: The flow.
        rows: The rows, as the flow takes them.
        samples: Draws for each row.
        seed: Seed of the draws; other draws at each call if None.
        std_error: Instead of `samples`, draw until each row's standard error is about this.
        min_samples: The fewest draws for one row then.
        max_samples: The most.
    """
    rows = rows.on(flow)
    estimate = partial(flow.estimate, rows.x, context=rows.context, seed=seed)
    with SameBits(), warnings.catch_warnings():
        if std_error is not None:
            return estimate(std_error=std_error, min_samples=min_samples, max_samples=max_samples)
        if samples is not None:
            return estimate(samples)
        warnings.simplefilter("ignore")  # of rows that would take more draws: their errors say so
        return estimate(std_error=TOLERANCE, max_samples=MOST_DRAWS)


def evaluate(
    flow: Flow, dataset: Dataset, config: RunConfig, processes: Processes = ALONE
) -> Evaluation:
    """Test a trained flow on the test part of its data.

    Arguments:
        flow: The flow, in eval mode.
        dataset: Its data.
        config: The run's configuration.
        processes: Those that share the test rows; the first of them does the rest.
    """
    samples, seed = 1 if flow.exact else config.evaluation.samples, config.evaluation.seed
    rows = _spread_out(dataset.rows("test"), config.evaluation.points).on(flow)
    own = estimate_rows(flow, rows[processes.share(len(rows))], samples, seed)
    estimate = Estimate(*(processes.whole(column, len(rows)) for column in own))
    return processes.from_main(lambda: _evaluation(flow, dataset, rows, estimate, samples, seed))


def _evaluation(
    flow: Flow, dataset: Dataset, rows: Rows, estimate: Estimate, samples: int, seed: int
) -> Evaluation:
    """The test result, from the estimates of all test rows."""
    summary = summarise(estimate, samples, rows.weight)
    bits, bits_error = (
        bits_per_dim(value, dataset.features) if dataset.images else None
        for value in (summary.log_prob, -summary.std_error)
    )
    limit = None if dataset.truth is None else dataset.truth.limit
    leak = _leak(flow, dataset, seed)
    metrics = {
        "test": summary._asdict(),
        "bits_per_dim": bits,
        "bits_per_dim_std_error": bits_error,
        "log_det": _log_det(flow, rows, samples, seed),
        "limit": limit,
        "gap": None if limit is None else limit - summary.log_prob,
        "leaked_mass": leak.share if leak else None,
        "leaked_mass_std_error": leak.std_error if leak else None,
        "leaked_mass_upper": leak.upper if leak else None,
        "sandwich": _sandwich(flow, rows, samples, seed),
        "index": _index(flow, rows, seed),
        **_table_facts(flow, dataset, rows),
        "parameters": sum(p.numel() for p in flow.parameters()),
        "device": device_name(flow.device),
    }
    weight = None if rows.weight is None else rows.weight.cpu()
    return Evaluation(metrics, RowScores(estimate.log_prob.cpu(), weight))


def _sandwich(flow: Flow, rows: Rows, samples: int, seed: int) -> dict[str, float] | None:
    """Bounds on a likelihood from both sides, on points that the flow makes; None if it is exact."""
    if flow.exact:
        return None
    context = None if rows.context is None else _spread_out(rows, SANDWICH_POINTS).context
    try:
        return sandwich(flow, SANDWICH_POINTS, samples, context, seed)._asdict()
    except InversionError:
        return None


def _index(flow: Flow, rows: Rows, seed: int) -> dict[str, Any] | None:
    """What indices do at some test rows, together and one by one; None without any, and for images."""
    some = _spread_out(rows, INDEX_POINTS)
    indexed = any(isinstance(layer, Indexed) for layer in flow.layers)
    if not indexed or len(flow.shape) > 1 or len(some) < 2:
        return None
    use = index_use(flow, some.x, some.context, INDEX_DRAWS, seed)
    return {"total": use.total._asdict(), "indices": [index._asdict() for index in use.indices]}


def _table_facts(flow: Flow, dataset: Dataset, rows: Rows) -> dict[str, Any]:
    """What metrics.json says of a table: its measure, its self-test, and rows that the test lacks."""
    if dataset.schema is None:
        return {}
    return {
        "measure": dataset.schema.measure,
        "self_test": check_mass(flow, rows.context)._asdict(),
        "duplicates": dataset.duplicates,
        "left_out": list(dataset.left_out),
    }


def read_summary(test: Mapping[str, Any]) -> Summary:
    """The test result of metrics.json; NaN for what is null there, or missing in older runs."""
    known: dict[str, Any] = {name: test.get(name) for name in Summary._fields}
    known |= {name: math.nan for name, value in known.items() if value is None}
    return Summary(**known)


def _spread_out(points: Rows, most: int | None) -> Rows:
    """At most `most` points, evenly spread: the beginning of a set may differ from the rest."""
    if most is None or most >= len(points):
        return points
    return points[torch.arange(most) * len(points) // most]


def _leak(flow: Flow, dataset: Dataset, seed: int) -> Share | None:
    """The share of samples outside the support of the data; None if that is not known."""
    if dataset.truth is None or dataset.truth.contains is None:
        return None
    try:
        return leaked_mass(flow, dataset.truth.contains, seed=seed)
    except InversionError:
        return None


def _log_det(flow: Flow, test: Rows, samples: int, seed: int) -> dict[str, float] | None:
    """What estimated log-determinants add to the test result; None if all are exact."""
    blocks = [block for block in flow.modules() if isinstance(block, Residual)]
    if not any(isinstance(block.log_det, Series) for block in blocks):
        return None
    some = _spread_out(test, LOG_DET_POINTS)
    error = log_det_error(flow, some.x, samples, some.context, seed)
    # rows have independent probes: their error falls with the number of rows
    std_error = error.std_error * math.sqrt(len(some) / len(test))
    return error._replace(std_error=std_error)._asdict()
