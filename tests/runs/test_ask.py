"""Questions to a density whose law is known: answers within their errors, and errors that hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy import stats

import ciflows
from ciflows.errors import UserError
from ciflows.runs import fit as fitting
from ciflows.runs import samples
from ciflows.runs.config import resolve
from ciflows.runs.densest import densest
from ciflows.tables.circular import Circular
from known_run import circle_run, discrete_run, gaussian_run, moments

X = np.linspace(-3, 3, 400)
GIVEN = {"x": X}
LAW = moments(X)


def check_errors(found: Any, truth: Any, errors: Any) -> None:
    """Deviations in units of their errors: as many beyond 2 as there should be, and none far off."""
    z = ((np.asarray(found) - np.asarray(truth)) / np.asarray(errors)).ravel()
    assert abs(z.mean()) < 5 / np.sqrt(len(z))
    assert 0.8 < np.sqrt((z**2).mean()) < 1.2
    assert 0.02 < (np.abs(z) > 2).mean() < 0.09


# -- a conditional Gaussian: independent samples for each of 400 rows --------------------------------


@pytest.mark.parametrize("q", [0.05, 0.5, 0.8, 0.99])
def test_quantiles_are_within_their_errors(q: float) -> None:
    found = gaussian_run().quantile(q, GIVEN, n=500 if q < 0.9 else 2000)
    assert found.columns == ["a", "a_std_error", "b", "b_std_error"]
    truth = LAW.mean + stats.norm.ppf(q) * LAW.std
    check_errors(found[["a", "b"]], truth, found[["a_std_error", "b_std_error"]])


def test_distribution_functions_are_within_their_errors() -> None:
    run, points = gaussian_run(), LAW.mean + 0.7 * LAW.std
    found = run.cdf({"b": points[:, 1], "a": points[:, 0]}, GIVEN, n=500)
    assert found.columns == ["a", "a_std_error", "b", "b_std_error"]
    check_errors(found[["a", "b"]], stats.norm.cdf(0.7), found[["a_std_error", "b_std_error"]])
    far = run.cdf({"a": 1e6}, GIVEN, n=500)
    assert (far["a"] == 1).all()
    assert (far["a_std_error"] > 0).all()


def test_intervals_are_within_their_errors() -> None:
    run = gaussian_run()
    central = run.interval(0.9, GIVEN, n=500)
    ends = [f"{name}_{side}" for name in "ab" for side in ("low", "high")]
    assert central.columns == [name for end in ends for name in (end, f"{end}_std_error")]
    truth = stats.norm.ppf(0.95) * LAW.std
    for place, name in enumerate("ab"):
        for side, sign in (("low", -1), ("high", 1)):
            end = central[f"{name}_{side}"]
            error = central[f"{name}_{side}_std_error"]
            check_errors(end, LAW.mean[:, place] + sign * truth[:, place], error)


def test_highest_density_regions_are_within_their_errors() -> None:
    found = gaussian_run().interval(0.8, {"x": X[:200]}, kind="hdr", columns=["a"], n=1000)
    assert found.columns == ["row", "column", "low", "high", "mass", "low_std_error", "high_std_error"]
    assert (found["column"] == "a").all()
    single = found.filter(pl.len().over("row") == 1)
    assert len(single) > 190  # noise may cut a region in two
    rows = single["row"].to_numpy()
    assert np.abs(single["mass"] - 0.8).max() < 0.02
    half = stats.norm.ppf(0.9) * LAW.std[rows, 0]
    for side, sign in (("low", -1), ("high", 1)):
        z = (single[side] - LAW.mean[rows, 0] - sign * half) / single[f"{side}_std_error"]
        assert abs(z.mean()) < 0.25  # the bootstrap's errors are a little wide
        assert 0.7 < z.std() < 1.15


def test_means_and_expectations_are_within_their_errors() -> None:
    run = gaussian_run()
    found = run.mean(GIVEN, n=300)
    check_errors(found[["a", "b"]], LAW.mean, found[["a_std_error", "b_std_error"]])
    found = run.expectation(lambda table: (table["a"] - 2 * table["x"]) ** 2, GIVEN, n=2000)
    assert found.columns == ["expectation", "std_error"]
    truth = LAW.covariance[:, 0, 0] + (LAW.mean[:, 0] - 2 * X) ** 2
    check_errors(found["expectation"], truth, found["std_error"])
    both = run.expectation(
        lambda table: {"product": table["a"] * table["b"], "above": table["a"] > table["b"]}, GIVEN
    )
    assert both.columns == ["product", "product_std_error", "above", "above_std_error"]
    truth = LAW.covariance[:, 0, 1] + LAW.mean.prod(1)
    check_errors(both["product"], truth, both["product_std_error"])


# -- rows, seeds and kinds of tables -----------------------------------------------------------------


def test_rows_follow_given_and_depend_on_their_own_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run, some = gaussian_run(), X[::50]
    together = run.quantile([0.1, 0.9], {"x": some}, n=200)
    assert together["q"].to_list() == [0.1, 0.9] * len(some)
    monkeypatch.setattr(samples, "VALUES", 1200)  # three rows at a time
    backwards = run.quantile([0.9, 0.1], {"x": some[::-1]}, n=200)
    np.testing.assert_allclose(together.to_numpy(), backwards.to_numpy()[::-1], rtol=1e-9)
    other = run.quantile([0.1, 0.9], {"x": some}, n=200, seed=1)
    assert np.abs(other["a"] - together["a"]).min() > 0


def test_without_given_the_samples_are_those_of_sample() -> None:
    run = discrete_run()
    drawn = run.sample(1001, seed=4)["spend"].sort()
    assert run.quantile(0.5, columns=["spend"], n=1001, seed=4)["spend"].item() == drawn[500]


def test_pandas_in_gives_pandas_out() -> None:
    run = gaussian_run()
    given = pd.DataFrame({"x": [0.0, 1.0]}, index=["r", "s"])
    assert list(run.mean(given, n=10).index) == ["r", "s"]
    assert list(run.quantile(0.5, given, n=10).index) == ["r", "s"]
    assert list(run.quantile([0.3, 0.5, 0.7], given, n=10).index) == [*"rrrsss"]
    assert list(run.interval(0.5, given, n=10).index) == ["r", "s"]
    assert list(run.cdf({"a": 0.0}, given, n=10).index) == ["r", "s"]
    regions = run.interval(0.5, given, kind="hdr", n=100)
    assert list(regions.index) == [["r", "s"][row] for row in regions["row"]]
    found = run.expectation(lambda table: table["a"].where(table["a"] > 0, 0.0), given, n=10)
    assert list(found.index) == ["r", "s"]
    assert isinstance(run.mean({"x": [0.0]}, n=10), pl.DataFrame)
    points = pd.DataFrame({"spend": [0.0, 1.0, 2.0]}, index=[*"abc"])
    assert list(discrete_run().cdf(points, n=10).index) == [*"abc"]


def test_several_values_of_one_row() -> None:
    run = gaussian_run()
    found = run.cdf({"a": [-1.0, 1.0, 3.0]}, {"x": [0.0]}, n=4000)
    assert np.abs(found["a"] - stats.norm.cdf([-2, 0, 2])).max() < 0.04
    with pytest.raises(UserError, match="3 values for 2 rows"):
        run.cdf({"a": [-1.0, 1.0, 3.0]}, {"x": [0.0, 1.0]})


# -- atoms, lattices, names --------------------------------------------------------------------------


def test_atoms_and_lattices_have_jumps() -> None:
    run = discrete_run()
    found = run.cdf({"spend": [-1.0, 0.0, 1.0], "count": [0, 1.5, 4]})
    truth = np.array([[0, 0.4, 0.7], [0.2, 0.4, 1.0]])
    for name, values in zip(("spend", "count"), truth, strict=True):
        assert (np.abs(found[name] - values) <= 4 * found[f"{name}_std_error"]).all()
    quantiles = run.quantile([0.35, 0.5], n=2000)
    assert quantiles["spend"][0] == quantiles["spend_std_error"][0] == 0
    assert quantiles["count"].to_list() == [1, 2]
    median = np.exp(stats.norm.ppf(1 / 6))
    assert abs(quantiles["spend"][1] - median) < 4 * quantiles["spend_std_error"][1]


def test_categorical_columns_are_answered_by_probabilities() -> None:
    run = discrete_run()
    found = run.mean()
    assert found.columns[4:] == ["city=Bonn", "city=Bonn_std_error", "city=Oslo", "city=Oslo_std_error"]
    assert abs(found["city=Oslo"].item() - 0.5) < 4 * found["city=Oslo_std_error"].item()
    assert abs(found["count"].item() - 2) < 4 * found["count_std_error"].item()
    assert run.quantile(0.5).columns == ["spend", "spend_std_error", "count", "count_std_error"]
    for ask in (
        lambda: run.quantile(0.5, columns=["city"]),
        lambda: run.interval(0.5, columns=["count", "city"], kind="hdr"),
        lambda: run.cdf({"city": 0}),
    ):
        with pytest.raises(UserError, match=r"^city: categorical.*`mean` gives their probabilities"):
            ask()


def test_highest_density_regions_take_atoms_first() -> None:
    found = discrete_run().interval(0.7, kind="hdr")
    spend = found.filter(column="spend").to_dicts()
    assert (spend[0]["low"], spend[0]["high"], spend[0]["low_std_error"]) == (0, 0, 0)
    assert spend[0]["mass"] == pytest.approx(0.4, abs=0.02)
    assert sum(row["mass"] for row in spend) == pytest.approx(0.7, abs=0.01)
    count = found.filter(column="count").to_dicts()
    assert sum(row["high"] - row["low"] + 1 for row in count) == 4  # of five values alike


@pytest.mark.parametrize(
    ("law", "ends"),
    [
        (stats.gamma(2), (0.0838, 3.9321)),
        (stats.lognorm(0.6), (0.2210, 2.2027)),
        (stats.lognorm(1), (0.0375, 3.6127)),
        (stats.expon(), (0.0, 2.3026)),
    ],
)
@pytest.mark.parametrize("n", [1000, 10_000])
def test_errors_hold_where_a_density_is_steep(law: Any, ends: tuple[float, float], n: int) -> None:
    """Smoothing moves the lower end there, and the region may begin with the smallest number."""
    found = [densest(law.rvs(n, random_state=seed), 0.9) for seed in range(10)]
    errors = np.array([(f[0].low_std_error, f[-1].high_std_error) for f in found])
    away = np.array([(f[0].low, f[-1].high) for f in found]) - ends
    assert np.abs(away / errors).max() < 4
    assert errors.max() < 0.7


def test_a_region_of_two_parts_has_two_intervals() -> None:
    rng = np.random.default_rng(0)
    x = rng.choice([-5.0, 5.0], 10_000) + rng.normal(size=10_000)
    first, second = densest(x, 0.9)
    for interval, centre in ((first, -5), (second, 5)):
        assert abs(interval.low - centre + 1.645) < 4 * interval.low_std_error < 0.2
        assert abs(interval.high - centre - 1.645) < 4 * interval.high_std_error < 0.2
    far = densest(np.exp(2 * rng.normal(size=10_000)), 0.5)
    assert far[0].low < 0.01
    assert abs(far[-1].high - 1) < 0.15


def test_a_circle_has_a_direction_and_regions_that_pass_its_seam() -> None:
    run = circle_run()
    mean = run.mean().row(0, named=True)
    assert min(mean["hour"], 24 - mean["hour"]) == pytest.approx(0.5, abs=4 * mean["hour_std_error"])
    assert mean["hour_std_error"] == pytest.approx(2 / math.sqrt(10_000), rel=0.2)
    (hour,) = run.interval(0.9, kind="hdr", columns="hour").to_dicts()
    assert hour["low"] == pytest.approx(24.5 - 2 * 1.645, abs=4 * hour["low_std_error"])
    assert hour["high"] == pytest.approx(0.5 + 2 * 1.645, abs=4 * hour["high_std_error"])
    assert run.quantile(0.5).columns == ["y", "y_std_error"]
    with pytest.raises(UserError, match="hour: a circle has no quantiles"):
        run.quantile(0.5, columns=["hour"])
    whole = Circular(name="hour", dtype="Int64", high=24.0, step=1.0)
    (steps,) = densest(np.repeat([22.0, 23.0, 0.0, 1.0, 12.0], [20, 30, 30, 15, 5]), 0.95, whole)
    assert (steps.low, steps.high, steps.mass) == (22, 1, 0.95)


# -- what cannot be answered -------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0, 1, -0.2, [0.5, 1.5], float("nan"), [], "half"])
def test_shares_outside_0_and_1_are_refused(q: Any) -> None:
    with pytest.raises(UserError, match="quantile lies between 0 and 1; got"):
        gaussian_run().quantile(q, GIVEN)


def test_what_cannot_be_answered_is_said_in_one_sentence() -> None:
    run, free = gaussian_run(), discrete_run()
    with pytest.raises(UserError, match=r"there is no column 'c'"):
        run.quantile(0.5, GIVEN, columns=["c"])
    with pytest.raises(UserError, match=r"there is no column 'spent'. Did you mean spend"):
        free.mean(columns=["spent"])
    with pytest.raises(UserError, match="columns: name at least one"):
        free.mean(columns=[])
    with pytest.raises(UserError, match="conditional density: give x"):
        run.mean()
    with pytest.raises(UserError, match="takes no `given`"):
        free.mean({"x": [0.0]})
    with pytest.raises(UserError, match=r"given: lacks the column x; it has y"):
        run.mean({"y": [0.0]})
    with pytest.raises(UserError, match=r"given: missing or infinite values in x \(1\)"):
        run.mean({"x": [0.0, None]})
    with pytest.raises(UserError, match=r"Several columns are modelled: give x as {column: value}"):
        run.cdf(0.0, GIVEN)
    with pytest.raises(UserError, match="cdf of a: expected a number"):
        run.cdf({"a": "low"}, GIVEN)
    with pytest.raises(UserError, match='"central" or "hdr"; got'):
        run.interval(0.5, GIVEN, kind="narrow")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="share of an interval lies between 0 and 1; got 90"):
        run.interval(90, GIVEN)
    with pytest.raises(UserError, match=r"a number for each of the 20 samples; got \(\)"):
        run.expectation(lambda table: table["a"].mean(), {"x": [1.0]}, n=20)
    with pytest.raises(UserError, match="At least two samples"):
        free.mean(n=1)


def test_numbers_of_any_type_and_arrays_are_taken() -> None:
    """An array's columns go by their order in training."""
    run = gaussian_run()
    expected = run.quantile(0.5, GIVEN)
    assert run.quantile(np.float32(0.5), GIVEN).equals(expected)
    assert run.quantile(0.5, np.array(GIVEN["x"])[:, None]).equals(expected)
    assert run.quantile(np.array([0.5]), GIVEN).drop("q").equals(expected)
    assert run.quantile(0.5, GIVEN, columns="a").equals(run.quantile(0.5, GIVEN, columns=["a"]))
    with pytest.raises(UserError, match="given: lacks the column x; it has x1, x2"):
        run.quantile(0.5, np.zeros((3, 2)))


def test_too_few_samples_for_a_quantile_have_an_infinite_error() -> None:
    found = gaussian_run().quantile([0.5, 0.999], {"x": [0.0]}, n=500)
    assert np.isfinite(found["a_std_error"][0])
    assert np.isinf(found["a_std_error"][1])


def test_points_of_a_built_in_set_have_answers_and_images_do_not(tmp_path: Path) -> None:
    tiny = {"training": {"steps": 2}, "architecture": {"layers": 1}}
    run = fitting.fit(resolve("annulus", "maf", layers=[tiny]), tmp_path / "run")
    drawn = run.sample(1001, seed=0)
    found = run.quantile(0.5, n=1001, seed=0)
    assert found["x2"].item() == pytest.approx(drawn[:, 1].median().item())
    assert run.expectation(lambda table: table["x1"] > table["x2"], n=50).shape == (1, 2)
    images = ciflows.Run(run.path, run.config, image_flow(), {"columns": []}, {}, [])
    with pytest.raises(UserError, match="density over images: only tables and points have columns"):
        images.quantile(0.5)
    with pytest.raises(UserError, match="density over images"):
        images.expectation(lambda table: table)


def image_flow() -> ciflows.Flow:
    return ciflows.build_model("realnvp-image", shape=(1, 4, 4)).eval()
