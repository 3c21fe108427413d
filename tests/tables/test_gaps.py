"""Rows with gaps: log p of what is there and draws of what is not, against closed forms."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import ciflows
from ciflows.cli import app
from ciflows.core.flow import Flow
from ciflows.core.noise import Noise
from ciflows.core.rows import Rows
from ciflows.errors import UserError
from ciflows.layers.gaussian_mixture import GaussianMixture
from ciflows.runs.gaps import estimate_gaps
from ciflows.runs.run import Run
from ciflows.tables import integrate
from ciflows.tables.cells import Cells
from ciflows.tables.column_layer import ColumnLayer
from ciflows.tables.completion import Completion
from ciflows.tables.integrate import GapFlow
from ciflows.tables.marginals import Smooth

NAN = math.nan
COVARIANCE = torch.tensor([[1.0, 0.8, 0.3], [0.8, 1.0, 0.5], [0.3, 0.5, 1.0]])


def smooth(columns: int) -> Smooth:
    return Smooth(torch.full((columns,), -math.inf), torch.full((columns,), math.inf))


def gaussian(covariance: torch.Tensor = COVARIANCE) -> GapFlow:
    """A table of three numbers that are exactly Gaussian."""
    base = GaussianMixture(1, 3)
    base.set(torch.ones(1), torch.zeros(1, 3), covariance[None])
    return GapFlow(Flow([ColumnLayer(3, [([0, 1, 2], smooth(3))])], base).eval())


def rows_with_gaps(n: int = 60) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator).double() @ torch.linalg.cholesky(COVARIANCE).T.double()
    gap = torch.rand(n, 3, generator=generator) < 0.4
    return torch.where(gap, NAN, x)


def marginal_log_prob(x: torch.Tensor) -> torch.Tensor:
    values = []
    for row in x.numpy():
        there = ~np.isnan(row)
        covariance = COVARIANCE.numpy()[np.ix_(there, there)]
        law = stats.multivariate_normal(cov=covariance) if there.any() else None
        values.append(0.0 if law is None else law.logpdf(row[there]))
    return torch.tensor(np.array(values))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    rng = np.random.default_rng(0)
    a = rng.normal(size=400)
    spend = np.where(rng.random(400) < 0.3, 0.0, np.exp(a / 2 + 0.3 * rng.normal(size=400)))
    kind = np.array(["x", "y"])[(a + rng.normal(size=400) > 0).astype(int)]
    count = rng.poisson(np.exp(1 + 0.5 * a))
    table = pl.DataFrame({"a": a, "spend": spend, "count": count, "kind": kind, "year": [2020] * 400})
    folder = tmp_path_factory.mktemp("gaps") / "run"
    return ciflows.fit(table, out=folder, steps=40, layers=1, hidden=[16], seed=0)


@pytest.fixture
def table(run: Run) -> pl.DataFrame:
    """Samples of the run with gaps, one row without any and one without values."""
    frame = run.sample(12, seed=1)
    kept = np.random.default_rng(1).random((12, 5)) < 0.6
    kept[0], kept[1] = True, False
    return frame.select(
        pl.when(pl.Series(kept[:, place])).then(pl.col(name)).alias(name)
        for place, name in enumerate(frame.columns)
    )


def test_the_density_of_what_is_there_is_a_gaussians_marginal() -> None:
    x = rows_with_gaps()
    estimate = estimate_gaps(gaussian(), Rows(x), 200, seed=0)
    there = estimate.std_error > 0
    error = estimate.log_prob - estimate.bias - marginal_log_prob(x)
    assert torch.allclose(error[~there], torch.zeros(1).double(), atol=1e-5)  # whole and empty rows
    score = error[there] / estimate.std_error[there]
    assert there.sum() > 20
    assert estimate.effective_samples[there].min() > 100
    assert abs(score.mean()) < 4 / math.sqrt(len(score))
    assert score.abs().max() < 4.5
    assert 0.6 < score.std() < 1.6


@pytest.mark.parametrize("std_error", [None, 0.05])
def test_errors_hold_where_the_missing_value_has_several_modes(std_error: float | None) -> None:
    """A tenth of the proposal's draws have no weight here: four draws and their error miss it."""
    angle = torch.arange(12) * math.pi / 6
    means = 8 * torch.stack([angle.cos(), angle.sin()], 1)
    base = GaussianMixture(12, 2)
    base.set(torch.ones(12) / 12, means, 0.05 * torch.eye(2).expand(12, 2, 2))
    gaps = GapFlow(Flow([ColumnLayer(2, [([0, 1], smooth(2))])], base).eval())
    a = (base.draw((200,), noise=Noise.seeded(0))[:, 0]).double()
    law = torch.distributions.Normal(means[:, 0].double(), math.sqrt(0.05))
    truth = torch.logsumexp(law.log_prob(a[:, None]), 1) - math.log(12)
    rows = Rows(torch.stack([a, torch.full_like(a, NAN)], 1))
    estimate = estimate_gaps(gaps, rows, seed=0, std_error=std_error)
    scores = (estimate.log_prob - estimate.bias - truth) / estimate.std_error
    assert scores.abs().max() < 5
    assert (scores.abs() > 3).float().mean() < 0.03


def test_imputed_values_are_a_gaussians_conditional_law() -> None:
    x, n = torch.tensor([[1.5, NAN, NAN], [NAN, -1.0, 2.0]]).double(), 3000
    drawn, failed = gaussian().impute(Rows(x), n, seed=0)
    assert not failed.any()
    for row, (there, gaps) in enumerate([([0], [1, 2]), ([1, 2], [0])]):
        c = COVARIANCE.double()
        weights = c[gaps][:, there] @ torch.linalg.inv(c[there][:, there])
        mean = weights @ x[row, there]
        covariance = c[gaps][:, gaps] - weights @ c[there][:, gaps]
        values = drawn[:, row][:, gaps]
        error = (covariance.diagonal() / n).sqrt()
        assert torch.all((values.mean(0) - mean).abs() < 5 * error)
        assert torch.allclose(values.T.cov().reshape(covariance.shape), covariance, atol=0.06)
        assert torch.equal(drawn[:, row][:, there], x[row, there].expand(n, -1))


def test_a_missing_category_is_summed_over() -> None:
    base = GaussianMixture(1, 2)
    base.set(torch.ones(1), torch.zeros(1, 2), torch.tensor([[[1.0, 0.7], [0.7, 1.0]]]))
    layer = ColumnLayer(2, [([0], smooth(1)), ([1], Cells(torch.tensor([3])))])
    flow = Flow([layer], base).eval()
    levels = torch.tensor([[0.4, 0.0], [0.4, 1.0], [0.4, 2.0]]).double()
    total = torch.logsumexp(flow.log_prob(levels, 4000, seed=0), 0).item()
    gap = estimate_gaps(GapFlow(flow), Rows(torch.tensor([[0.4, NAN]]).double()), 4000, seed=0)
    assert abs(total - stats.norm.logpdf(0.4)) < 0.02
    assert abs(gap.log_prob.item() - stats.norm.logpdf(0.4)) < 0.02
    drawn, _ = GapFlow(flow).impute(Rows(torch.tensor([[NAN, 2.0]]).double()), 2000, seed=0)
    above = stats.norm.ppf(2 / 3)
    truth = 0.7 * stats.norm.pdf(above) / stats.norm.sf(above)  # E[x | level 2]
    assert abs(drawn[:, 0, 0].mean().item() - truth) < 0.1


def test_a_bad_first_proposal_is_adapted_to_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's two columns differ by 0.002; the first proposal does not know it."""
    covariance = torch.eye(3)
    covariance[0, 1] = covariance[1, 0] = 1 - 2e-6
    gaps, row = gaussian(covariance), Rows(torch.tensor([[2.5, NAN, NAN]]).double())
    blind = integrate.GapProposal(
        torch.ones(1).double(), torch.zeros(1, 3).double(), torch.eye(3).double()[None]
    )
    monkeypatch.setattr(GapFlow, "_proposal", blind)
    (plan,) = gaps.plans(row, 0)
    assert integrate._trial(gaps._completing(blind), row, 0).item() < 0.03 < plan.share.item()
    estimate = estimate_gaps(gaps, row, 2000, seed=0)
    assert abs(estimate.log_prob.item() - stats.norm.logpdf(2.5)) < 5 * estimate.std_error.item() < 0.5


def test_a_row_has_the_same_estimate_in_any_company() -> None:
    gaps, x = gaussian(), rows_with_gaps(20)
    together = estimate_gaps(gaps, Rows(x), seed=3).log_prob
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(
        estimate_gaps(gaps, Rows(x[order]), seed=3).log_prob, together[order], atol=1e-5
    )
    alone = torch.cat([estimate_gaps(gaps, Rows(row[None]), seed=3).log_prob for row in x[:5]])
    assert torch.allclose(alone, together[:5], atol=1e-5)


def test_a_table_is_scored_where_it_has_values(run: Run, table: pl.DataFrame) -> None:
    scores = run.scores(table, seed=0, missing="integrate")
    assert np.isfinite(scores.to_numpy()).all()
    assert scores["log_prob"][1] == 0
    whole = run.scores(table[:1], seed=0)
    assert scores["log_prob"][0] == pytest.approx(whole["log_prob"][0], abs=1e-5)
    with pytest.raises(UserError, match="missing or infinite values in a"):
        run.scores(table)
    one = run.estimate({"kind": ["x", "y"]}, 3000, seed=0, missing="integrate")
    assert one.log_prob.exp().sum().item() == pytest.approx(1, abs=0.03)


def test_who_refuses_gaps_says_how_to_integrate_over_them(
    run: Run, table: pl.DataFrame, tmp_path: Path, command: Callable[..., str]
) -> None:
    call = re.escape('To integrate over them: run.estimate(x, missing="integrate").')
    for ask in (run.scores, run.log_prob, run.score, run.estimate):
        with pytest.raises(UserError, match=call):
            ask(table)
    with pytest.raises(UserError, match=r"values in [^.]*\.$"):
        run.coverage(table)
    table.write_parquet(tmp_path / "gaps.parquet")
    words = ["score", str(run.path), "gaps.parquet", "--on-bad-row", "fail"]
    for out in ("one.csv", "folder"):
        said = command(*words, "--out", out, code=1)
        assert said.endswith("). Try '--missing integrate'.\n")


def test_gaps_in_given_columns_are_not_integrated_over() -> None:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame({"y": rng.normal(size=100), "x": rng.normal(size=100)})
    run = ciflows.fit(frame, "nsf", given="x", layers=1, hidden=[8], steps=2)
    with pytest.raises(UserError, match=r"values in x \(1\)\.$"):
        run.scores(pl.DataFrame({"y": [1.0], "x": [None]}, schema_overrides={"x": pl.Float64}))


def test_imputed_tables_keep_values_types_and_draw_differently(run: Run, table: pl.DataFrame) -> None:
    filled = run.impute(table, 2, seed=0)
    assert filled["draw"].to_list() == [1] * 12 + [2] * 12
    assert not sum(filled.null_count().row(0))
    assert filled.drop("draw").schema == table.schema
    twice = pl.concat([table, table])
    for name in table.columns:
        there = twice[name].is_not_null()
        assert filled[name].filter(there).to_list() == twice[name].filter(there).to_list()
    assert filled["year"].unique().to_list() == [2020]
    conditional = run.impute({"a": [0.5] * 20}, seed=0)
    assert conditional["spend"].n_unique() > 10
    assert conditional.columns == table.columns
    assert run.impute({"a": [0.5] * 20}, seed=0).equals(conditional)


def test_pandas_in_pandas_out(run: Run, table: pl.DataFrame) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(table.to_dict(as_series=False), index=range(100, 112))
    frame["kind"] = frame["kind"].astype("category")
    filled = run.impute(frame, 2, seed=0)
    assert list(filled.index) == [*range(100, 112)] * 2
    assert not filled.isna().any(axis=None)
    assert (filled.drop(columns="draw").dtypes == frame.dtypes).all()
    first = filled[filled["draw"] == 1].drop(columns="draw")
    pandas.testing.assert_frame_equal(first.where(frame.notna()), frame.where(frame.notna()))
    assert run.scores(frame, missing="integrate").index.equals(frame.index)


def test_types_that_cannot_hold_the_draws_give_way(run: Run) -> None:
    """Column a has real values: a table with 0 and 1 there alone must not round its draws."""
    a: list[int | None] = [0, 1, *[None] * 200]
    kinds = pl.Series(["x", *[None] * 201], dtype=pl.Enum(["x"]))
    table = pl.DataFrame({"a": a, "kind": kinds})
    filled = run.impute(table, seed=0)
    wanted = run.impute(table.cast({"a": pl.Float64, "kind": pl.String}), seed=0)
    assert filled.equals(wanted)
    assert run.impute(table[:2], seed=0).schema["a"] == pl.Int64
    assert set(run.impute(table[:3], 20, seed=0)["kind"]) == {"x", "y"}
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": pandas.array(a, dtype="Int64"), "kind": ["x", *[None] * 201]})
    frame["kind"] = frame["kind"].astype("category")
    same = run.impute(frame, seed=0)
    assert same["a"].tolist() == wanted["a"].to_list()
    assert same["kind"].tolist() == wanted["kind"].to_list()


def test_rows_with_too_few_effective_draws_are_refused(
    run: Run, table: pl.DataFrame, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(integrate, "FEWEST", 10**6)
    with pytest.raises(UserError, match=r"rows cannot be imputed: of 512 draws"):
        run.impute(table, seed=0)
    with pytest.raises(UserError, match=r"of 12 rows cannot be scored"):
        run.scores(table, missing="integrate", seed=0)
    table.write_parquet(tmp_path / "gaps.parquet")
    words = ["score", str(run.path), str(tmp_path / "gaps.parquet"), "--out", str(tmp_path / "s.csv")]
    result = CliRunner().invoke(app, [*words, "--missing", "integrate"])
    scores = pl.read_csv(tmp_path / "s.csv")
    assert result.exit_code == 0
    assert "rows could not be scored" in result.output
    assert 0 < scores["log_prob"].null_count() < 12


def test_the_commands(run: Run, table: pl.DataFrame, tmp_path: Path) -> None:
    table.drop("spend").with_columns(note=None).write_csv(tmp_path / "gaps.csv")
    out = tmp_path / "filled.parquet"
    words = ["impute", str(run.path), str(tmp_path / "gaps.csv"), "-n", "3", "--out", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert pl.read_parquet(out).shape == (36, 7)
    filled = sum(table[name].null_count() for name in ("a", "count", "kind", "year"))
    text = result.output.partition("Filled in: ")[2]
    assert sum(map(int, re.findall(r"\((\d+)\)", text))) == filled + 12
    assert "spend (12)" in text
    assert "note" not in text
    table[:0].write_csv(tmp_path / "empty.csv")
    words = ["impute", str(run.path), str(tmp_path / "empty.csv"), "--out", str(tmp_path / "none.csv")]
    assert "Wrote 0 rows" in CliRunner().invoke(app, words).output


def test_what_cannot_be_is_refused(run: Run) -> None:
    with pytest.raises(UserError, match="`impute` draws the other columns"):
        run.sample(3, given={"a": [1.0]})
    with pytest.raises(UserError, match="expected refuse or integrate"):
        run.estimate({"a": [1.0]}, missing="drop")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="none of the columns a, spend"):
        run.impute({"other": [1.0]})
    with pytest.raises(UserError, match="values that were not there in training: w"):
        run.impute({"kind": ["w", None]})


def test_given_columns_have_no_gaps() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=300)
    frame = pl.DataFrame({"x": x, "y": x + rng.normal(size=300), "z": rng.normal(size=300)})
    run = ciflows.fit(frame, "nsf", given=["x"], steps=20, layers=1, hidden=[8], seed=0)
    gaps = frame[:4].with_columns(y=pl.Series([None, 1.0, None, 0.5]))
    scores = run.scores(gaps, missing="integrate", seed=0)
    assert scores["log_prob"].is_finite().all()
    assert (scores["effective_samples"] >= 2).all()
    assert run.impute(gaps, seed=0)["x"].to_list() == frame["x"][:4].to_list()
    with pytest.raises(UserError, match="missing or infinite values in x"):
        run.scores(gaps.with_columns(x=pl.Series([None] * 4, dtype=pl.Float64)), missing="integrate")


def test_a_completion_gives_observed_scores_as_they_are() -> None:
    gaps = gaussian()
    layer = gaps._completing(gaps._proposal).layers[0]
    assert isinstance(layer, Completion)
    x = rows_with_gaps(8)
    z, log_weight = layer.encode(x)
    there = ~x.isnan()
    assert torch.allclose(z[there].double(), x[there])
    assert bool(log_weight.isfinite().all())
