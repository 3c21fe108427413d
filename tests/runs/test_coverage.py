"""Calibration: a density that is right is called fine, one that is wrong is called off, and how."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from scipy import stats

import ciflows
from ciflows.core.rows import Rows
from ciflows.diagnostics.calibration import LEVELS, Coverage, uniform_gap, uniform_p_value
from ciflows.errors import UserError
from ciflows.runs.compare import report_runs
from known_run import discrete_run, draw_known, gaussian_run, moments

TINY = {"layers": 1, "hidden": [8], "steps": 200, "validate_every": 100}
X = np.random.default_rng(0).normal(size=2000)


def known_table(seed: int = 1, wider: float = 1.0, higher: float = 0.0) -> dict[str, np.ndarray]:
    """Rows of the law that `gaussian_run` has, or of one that differs in column a."""
    y, law = draw_known(X, seed), moments(X)
    a = law.mean[:, 0] + higher * law.std[:, 0] + wider * (y[:, 0] - law.mean[:, 0])
    return {"x": X, "a": a, "b": y[:, 1]}


def verdicts(coverage: Coverage) -> dict[str, str]:
    return {check.name: check.verdict.partition(" (")[0] for check in coverage.checks}


# -- known laws --------------------------------------------------------------------------------------


def test_intervals_of_the_right_law_hold_what_they_should() -> None:
    """A known conditional law: 50, 80, 90 and 95 % within their bands; ranks uniform."""
    coverage = gaussian_run().coverage(known_table())
    assert [check.name for check in coverage.checks] == ["a", "b", "joint density"]
    assert coverage.off == []
    for check in coverage.checks:
        assert stats.kstest(check.ranks, "uniform").pvalue > 0.005
        for level, share in zip(LEVELS, check.coverage, strict=True):
            assert abs(share - level) < 3.3 * np.sqrt(level * (1 - level) / len(X))


def test_the_right_law_is_rarely_called_off() -> None:
    """Of 60 tables few are called off, also with few samples for each row, which rows do not share."""
    run, tables = gaussian_run(), [known_table(seed) for seed in range(30)]
    own = [run.coverage(table, samples=20, rows=200, seed=s) for s, table in enumerate(tables)]
    free = discrete_run()
    shared = [
        free.coverage(free.sample(300, seed=100 + s), samples=300, draws=4, seed=s) for s in range(30)
    ]
    assert sum(bool(coverage.off) for coverage in own) <= 5
    assert sum(bool(coverage.off) for coverage in shared) <= 5
    inside = [
        coverage.band(level)[0] <= share <= coverage.band(level)[1]
        for coverage in (*own, *shared)
        for check in coverage.checks
        for level, share in zip(LEVELS, check.coverage, strict=True)
    ]
    assert 0.92 < np.mean(inside) < 0.99


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"wider": 1.3}, "off: the model is too narrow"),
        ({"wider": 0.75}, "off: the model is too wide"),
        ({"higher": 0.3}, "off: the model is too low"),
        ({"higher": -0.3}, "off: the model is too high"),
        ({"higher": 0.1}, "slightly off: the model is too low"),
    ],
)
def test_a_wrong_column_is_named_and_told(wrong: dict[str, float], words: str) -> None:
    coverage = gaussian_run().coverage(known_table(**wrong))
    found = verdicts(coverage)
    assert found["a"] == words
    assert found["b"] == "fine"
    if "wider" in wrong:
        assert found["joint density"] == words
    last = repr(coverage).splitlines()[-1]
    assert last.startswith("Off: a")
    assert "Fine: b" in last


def test_dependence_shows_in_the_joint_density_alone() -> None:
    table = known_table()
    residual = table["b"] - moments(X).mean[:, 1]
    table["b"] = table["b"] - 2 * residual  # the same marginal, the opposite correlation
    coverage = gaussian_run().coverage(table)
    assert coverage.off == ["joint density"]


def test_weights_count() -> None:
    """Rows of too high a value with weights that make up for it."""
    run = discrete_run()
    table = run.sample(4000, seed=5)
    rows = run.rows(table)
    biased = torch.rand(4000) < torch.where(rows.x[:, 1] >= 3, 1.0, 0.25)
    kept = rows.x[biased]
    weight = torch.where(kept[:, 1] >= 3, 1.0, 4.0).double()
    assert "count" in run.coverage(Rows(kept), draws=4).off
    coverage = run.coverage(Rows(kept, None, weight), draws=4)
    assert "count" not in coverage.off
    assert coverage.effective < len(kept)


def test_gaps_and_their_probabilities_are_those_of_kolmogorov_and_smirnov() -> None:
    ranks = np.random.default_rng(0).random(300) ** 1.1
    expected = stats.kstest(ranks, "uniform")
    gap = uniform_gap(ranks, np.ones(300))
    assert gap == pytest.approx(expected.statistic)
    assert uniform_p_value(gap, 300) == pytest.approx(expected.pvalue, rel=0.02)
    twice = np.concatenate([ranks[:100], ranks[:100], ranks[100:]])
    weighted = uniform_gap(ranks, np.where(np.arange(300) < 100, 2.0, 1.0))
    assert weighted == pytest.approx(stats.kstest(twice, "uniform").statistic)


# -- the command and the report ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> ciflows.Run:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 2, 900)
    frame = pl.DataFrame({"x": x, "y": x + 0.2 * rng.normal(size=900), "k": rng.integers(0, 4, 900)})
    folder = tmp_path_factory.mktemp("runs")
    frame.write_csv(folder / "data.csv")
    return ciflows.fit(folder / "data.csv", "nsf", given=["x"], out=folder / "run", **TINY)


def test_check_writes_and_says_what_it_found(
    branches: ciflows.Run, tmp_path: Path, command: Callable[..., str]
) -> None:
    data = str(branches.path.parent / "data.csv")
    text = command("check", str(branches.path), data, "--rows", "100", "-n", "50")
    coverage = branches.coverage(data, rows=100, samples=50)
    assert repr(coverage) in text
    found = json.loads((tmp_path / "check" / "coverage.json").read_text())
    assert found == json.loads(json.dumps(coverage.as_dict()))
    assert [column["name"] for column in found["columns"]] == ["y", "k"]
    ranks = pl.read_csv(tmp_path / "check" / "coverage.csv")
    assert ranks.columns == ["row", "y", "k", "joint density"]
    assert ranks["row"].to_list() == list(range(0, 900, 9))
    np.testing.assert_allclose(ranks["y"], coverage.columns[0].ranks)
    assert (tmp_path / "check" / "coverage.png").read_bytes().startswith(b"\x89PNG")
    assert "check exists already" in command("check", str(branches.path), data, code=1)
    own = json.loads(command("check", str(branches.path), "--out", "own", "--json", "-n", "20"))
    assert own["rows"] == len(branches.dataset().test)
    pl.DataFrame({"y": [1.0]}).write_csv(tmp_path / "other.csv")
    text = command("check", str(branches.path), "other.csv", "--out", "c", code=1)
    assert "other.csv: lacks the columns k, x; it has y" in text
    assert not (tmp_path / "c").exists()


def test_the_report_shows_coverage(branches: ciflows.Run, tmp_path: Path) -> None:
    report_runs([branches], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Observed against expected coverage: nsf" in page
    assert "PIT histogram of y: " in page


def test_what_cannot_be_checked_is_refused(branches: ciflows.Run) -> None:
    with pytest.raises(UserError, match="At least two rows are needed; got 1"):
        branches.coverage({"x": [1.0], "y": [1.0], "k": [1]})
    with pytest.raises(UserError, match="lacks the column x"):
        branches.coverage({"y": [1.0], "k": [1]})


# -- a real table ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_coverage_on_a_real_table() -> None:
    """Blood values and progression of 442 diabetics: half to train, half to check."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes(as_frame=True, scaled=False).frame[["bmi", "bp", "s3", "s5", "target"]]
    half = data.sample(frac=0.5, random_state=0)
    run = ciflows.fit(half, given=["bmi", "bp", "s3", "s5"], seed=0)
    coverage = run.coverage(data.drop(half.index))
    assert coverage.off == []
    for check in coverage.checks:
        for level, share in zip(LEVELS, check.coverage, strict=True):
            assert abs(share - level) < 3.3 * np.sqrt(level * (1 - level) / 221)
