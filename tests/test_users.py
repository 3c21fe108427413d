"""What users of other libraries asked for in vain, of tables: each complaint is a test.

Those about kinds of columns, gaps, weights and conditional densities are in test_own_tables.py, those
about large files in test_streams.py.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import ciflows
from ciflows.errors import UserError

ROWS = 1500


@pytest.fixture(scope="module")
def table() -> pl.DataFrame:
    """A heavy tail, two peaks that lie apart, and a share that piles up at its bounds."""
    rng = np.random.default_rng(0)
    return pl.DataFrame(
        {
            "tail": rng.standard_cauchy(ROWS),
            "peaks": rng.normal(size=ROWS) + 10 * rng.choice([-1, 1], ROWS),
            "share": rng.beta(0.5, 0.5, ROWS),
        }
    )


@pytest.fixture(scope="module")
def run(table: pl.DataFrame) -> ciflows.Run:
    return ciflows.fit(table, steps=150, layers=2, hidden=[32])


def test_heavy_tails_do_not_break_training(run: ciflows.Run) -> None:
    """normalizing-flows#73, bayesflow#721: the loss is not a number, or infinite."""
    assert run.metrics["rollbacks"] == 0
    assert all(math.isfinite(row["loss"]) for row in run.history)


def test_far_values_have_finite_scores_that_fall(run: ciflows.Run) -> None:
    far = pl.DataFrame({"tail": [0.0, 1e3, 1e6, 1e9], "peaks": [10.0] * 4, "share": [0.5] * 4})
    scores = run.log_prob(far, samples=20, seed=0)
    assert bool(scores.isfinite().all())
    assert scores.tolist() == sorted(scores.tolist(), reverse=True)


def test_many_samples_are_finite_and_inside_the_bounds(run: ciflows.Run) -> None:
    """nflows#87, zuko#20, sbi#741: sampling crashes once in a while, is infinite, or leaks."""
    drawn = run.sample(5000, seed=0)
    assert np.isfinite(drawn.to_numpy()).all()
    assert drawn["share"].is_between(0, 1).all()


def test_peaks_that_lie_apart_stay_apart(run: ciflows.Run) -> None:
    """nessai#380: data with several modes need clustering bolted on."""
    drawn = run.sample(2000, seed=0)["peaks"]
    assert (drawn.abs() < 5).mean() < 0.05  # type: ignore[operator]
    assert (drawn > 0).mean() == pytest.approx(0.5, abs=0.08)


def test_scores_are_those_of_the_samples(run: ciflows.Run, table: pl.DataFrame) -> None:
    """normalizing-flows#24, zuko#55: good samples with a wrong log_prob; one above the truth.

    E[q(x) / p(x)] over samples of p is 1 for every density q: here q is another simple one.
    """
    drawn = run.sample(4000, seed=1)
    log_p = run.log_prob(drawn, samples=50, seed=2).double().numpy()
    tail, peaks, share = (drawn[name].to_numpy() for name in ("tail", "peaks", "share"))
    log_q = -np.log(math.pi * 0.25 * (1 + (tail / 0.25) ** 2))
    log_q += -0.5 * (peaks - 10) ** 2 - 0.5 * math.log(2 * math.pi)
    log_q += np.log(6 * np.maximum(share * (1 - share), 1e-300))
    ratios = np.exp(log_q - log_p)
    assert ratios.mean() == pytest.approx(1, abs=5 * ratios.std() / math.sqrt(len(ratios)))
    assert ratios.std() / math.sqrt(len(ratios)) < 0.1


def test_two_calls_agree_with_a_seed_and_within_their_errors_without(
    run: ciflows.Run, table: pl.DataFrame
) -> None:
    """sbi#1350: two calls of log_prob disagree."""
    rows = table[:200]
    first, again = run.estimate(rows, seed=0), run.estimate(rows, seed=0)
    assert torch.equal(first.log_prob, again.log_prob)
    other = run.estimate(rows, seed=1)
    error = (first.std_error.square() + other.std_error.square()).sqrt() + 1e-6
    assert float(((first.log_prob - other.log_prob) / error).abs().mean()) < 2


def test_one_column_is_fitted_or_refused_in_words(table: pl.DataFrame) -> None:
    """sbi#1315: a MAF of one column silently fits a Gaussian."""
    with pytest.raises(UserError, match="only a Gaussian: use nsf or resflow"):
        ciflows.fit(table.select("peaks"), "maf", steps=5)


def test_a_run_is_plain_files(run: ciflows.Run, tmp_path: Path) -> None:
    """sbi#1254: saved models break across versions; no pickles, and the format has a number."""
    saved = run.save(tmp_path / "run")
    kinds = {path.suffix for path in saved.path.iterdir() if path.is_file()}
    assert kinds == {".toml", ".json", ".jsonl", ".safetensors", ".parquet"}
    assert saved.about["format"] == 2
