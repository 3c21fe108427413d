"""Columns of dates: numbers of days or seconds inside, dates outside."""

from __future__ import annotations

from datetime import date, datetime, timedelta

import numpy as np
import polars as pl
import pytest

import ciflows
from ciflows.errors import UserError
from ciflows.runs.run import Run
from ciflows.tables.faults import find_faults
from ciflows.tables.values import column_values

SMALL = {"layers": 1, "hidden": [8], "steps": 20}
ROWS = 300


@pytest.fixture(scope="module")
def frame() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    days = [date(2024, 1, 1) + timedelta(days=int(d)) for d in rng.gamma(9, 30, ROWS)]
    seconds = [datetime(1969, 12, 1) + timedelta(seconds=float(s)) for s in rng.gamma(9, 9e5, ROWS)]
    table = pl.DataFrame({"day": days, "when": seconds, "y": rng.normal(size=ROWS)})
    return table.with_columns(
        zoned=pl.Series(
            [datetime(2024, 5, 1) + timedelta(minutes=int(m)) for m in rng.poisson(900, ROWS)]
        ).dt.replace_time_zone("Europe/Berlin"),
        since=pl.lit(date(2020, 2, 3)),
    )


@pytest.fixture(scope="module")
def run(frame: pl.DataFrame) -> Run:
    return ciflows.fit(frame, "nsf", seed=0, **SMALL)


def test_samples_are_dates_again(run: Run, frame: pl.DataFrame) -> None:
    sample = run.sample(200, seed=0)
    assert sample.schema == frame.schema
    assert sample["since"].unique().to_list() == [date(2020, 2, 3)]
    assert (sample["zoned"].dt.second() == 0).all()
    middle = frame["day"].cast(pl.Int32).median()
    assert abs(sample["day"].cast(pl.Int32).median() - middle) < 60


def test_the_unit_is_said(run: Run) -> None:
    assert run.schema is not None
    assert run.schema.measure == {
        "day": "probability for each step of 1 day",
        "when": "density per second",
        "y": "density",
        "zoned": "probability for each step of 60 seconds",
    }


def test_the_likelihood_is_that_of_the_numbers(run: Run, frame: pl.DataFrame) -> None:
    """The same model of days and seconds since 1970 gives each row the same score."""
    numbers = frame.with_columns(
        day=pl.col("day").cast(pl.Int64),
        when=pl.col("when").cast(pl.Int64) / 1e6,
        zoned=pl.col("zoned").cast(pl.Int64) // 10**6,
    )
    other = ciflows.fit(numbers, "nsf", seed=0, **SMALL)
    scores = run.log_prob(frame[:20], seed=0), other.log_prob(numbers[:20], seed=0)
    assert np.allclose(*scores, atol=0.02)  # values differ in the last bit, and so their draws


def test_dates_with_a_time_at_midnight_are_dates(run: Run, frame: pl.DataFrame) -> None:
    as_times = frame.with_columns(pl.col("day").cast(pl.Datetime("ns")))
    assert np.array_equal(run.log_prob(as_times[:9], seed=0), run.log_prob(frame[:9], seed=0))
    with pytest.raises(UserError, match="day had steps of 1 day"):
        run.log_prob(as_times.with_columns(pl.col("day") + timedelta(hours=6)))


def test_gaps_in_dates_are_imputed(run: Run, frame: pl.DataFrame) -> None:
    gaps = frame[:6].with_columns(pl.when(pl.Series([True, False] * 3)).then(pl.col("day")).alias("day"))
    filled = run.impute(gaps, seed=0)
    assert filled.schema == frame.schema
    assert filled["day"][::2].to_list() == frame["day"][:6][::2].to_list()
    assert filled["day"].null_count() == 0


def test_a_conditional_density_takes_dates(frame: pl.DataFrame) -> None:
    run = ciflows.fit(frame, "nsf", columns=["y"], given=["day", "when"], seed=0, **SMALL)
    drawn = run.sample(2, given=frame[:2], seed=0)
    assert drawn["day"].to_list() == [frame["day"][0]] * 2 + [frame["day"][1]] * 2


def test_a_report_shows_numbers_of_days(run: Run) -> None:
    dataset = run.dataset()
    values = column_values(dataset.schema, dataset.test)
    assert np.allclose(values, dataset.test.numpy(), atol=1e-5)


def test_questions_about_dates_are_answered_in_their_units(run: Run, frame: pl.DataFrame) -> None:
    assert len(run.coverage(samples=50).columns) == 4
    answers = run.quantile(0.5, n=500)
    assert abs(answers["day"][0] - frame["day"].cast(pl.Int32).median()) < 60
    assert abs(answers["when"][0] - frame["when"].dt.epoch("s").median()) < 5e6


def test_a_distribution_function_takes_dates(run: Run) -> None:
    days = [date(2024, 8, 1), date(2024, 12, 1)]
    expected = run.cdf({"day": [(day - date(1970, 1, 1)).days for day in days]}, n=500)
    assert run.cdf({"day": days}, n=500).equals(expected)
    assert run.cdf({"day": pl.Series(days).cast(pl.Datetime)}, n=500).equals(expected)
    assert run.cdf({"day": days[0]}, n=500).equals(expected[:1])
    with pytest.raises(UserError, match="cdf of y: expected a number"):
        run.cdf({"y": days[0]})


def test_dates_may_be_text_or_numpys(run: Run, frame: pl.DataFrame) -> None:
    few, whens = frame[:3], frame["when"][:3]
    expected = run.log_prob(few, seed=0)
    text = few.with_columns(pl.col("day").cast(pl.String), pl.col("when").dt.to_string("iso"))
    assert run.log_prob(text.with_columns(since=pl.lit("2020-02-03")), seed=0).equal(expected)
    assert run.log_prob({**few.to_dict(), "when": list(whens.to_numpy())}, seed=0).equal(expected)
    day = run.cdf({"day": frame["day"][0]}, n=50)
    for value in (
        str(frame["day"][0]),
        np.datetime64(frame["day"][0]),
        np.datetime64(frame["day"][0], "s"),
    ):
        assert run.cdf({"day": value}, n=50).equals(day)
    bad = text.with_columns(day=pl.Series([few["day"][0].isoformat(), "2024-13-45", "soon"]))
    assert run.schema is not None
    assert find_faults(run.schema, bad).to_list() == [None, "day", "day"]
    with pytest.raises(UserError, match="in training and are not now: day"):
        run.log_prob(bad)


def test_what_cannot_be_is_refused(run: Run, frame: pl.DataFrame) -> None:
    with pytest.raises(UserError, match="in training and are not now: day"):
        run.log_prob(frame.with_columns(day=1))
    with pytest.raises(UserError, match=r"constant in training and are not now: since"):
        run.log_prob(frame.with_columns(since=pl.col("day")))
    with pytest.raises(UserError, match=r"times of day and durations .* clock \(Time\)"):
        ciflows.fit(frame.with_columns(clock=pl.col("when").dt.time()))
    with pytest.raises(UserError, match="dates cannot be categorical"):
        ciflows.fit(frame, categorical=["day"])
