"""P-values: shares of a model's own samples, whatever the chunks, and keys beside the scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy import stats

import ciflows
from ciflows.errors import UserError
from ciflows.runs import p_values
from ciflows.runs import score as scoring
from known_run import discrete_run, draw_known, gaussian_run, moments

TINY = {"layers": 1, "hidden": [8], "steps": 50, "validate_every": 50}


def table(rows: int = 120) -> pl.DataFrame:
    rng = np.random.default_rng(0)
    g = rng.choice(["a", "b"], rows)
    y = rng.normal(size=rows) + 3 * (g == "b")
    names = [f"n{i}" for i in range(rows)]
    return pl.DataFrame(
        {"id": np.arange(rows) * 7, "g": g, "y": y, "k": rng.integers(0, 3, rows), "name": names}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on one table, conditional and not."""
    path = tmp_path_factory.mktemp("runs")
    table().write_csv(path / "data.csv")
    for name, given in (("free", []), ("given", ["g"])):
        options = {"columns": [*given, "y", "k"], "given": given, "staged": False, **TINY}
        ciflows.fit(table(), "cif-nsf", out=path / name, **options)
    return path


def test_p_values_of_a_gaussian_are_those_of_its_mahalanobis_distance() -> None:
    """p(s) <= p(x) where the distance of s is at least that of x: exp(-d² / 2) in the plane."""
    x = np.random.default_rng(0).normal(size=400)
    y, law = draw_known(x, seed=1), moments(x)
    centred = y - law.mean
    distance = np.einsum("ni,nij,nj->n", centred, np.linalg.inv(law.covariance), centred)
    found = gaussian_run().p_value({"x": x, "a": y[:, 0], "b": y[:, 1]}, n=300)
    z = (found["p_value"] - np.exp(-distance / 2)) / found["p_value_std_error"]
    assert abs(z.mean()) < 5 / np.sqrt(400)
    assert 0.85 < z.std() < 1.15
    assert stats.kstest(found["p_value"], "uniform").pvalue > 0.005


def test_rows_that_are_equally_likely_count() -> None:
    """All rows without spending are as likely: samples of them count as no likelier."""
    run = discrete_run()
    rows = pl.DataFrame({"spend": [0.0, 0.0], "count": [0, 4], "city": ["Oslo", "Bonn"]})
    found = run.p_value(rows)
    likelier = run.log_prob(run.sample(4000, seed=9), seed=0) > run.log_prob(rows, seed=0)[0] + 1e-3
    assert abs(found["p_value"] - (1 - likelier.double().mean().item())).max() < 0.05


@pytest.mark.parametrize("name", ["free", "given"])
def test_scores_do_not_depend_on_chunks(
    folder: Path, name: str, tmp_path: Path, command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("score", str(folder / name), str(folder / "data.csv"), "-m", "10", "--p-value", "-n", "40")
    command(*words, "--out", "whole.csv", "--key", "id,name")
    monkeypatch.setattr(scoring, "ROWS", 7)
    monkeypatch.setattr(p_values, "VALUES", 40)
    command(*words, "--out", "cut.csv", "--key", "id,name")
    whole, cut = (pl.read_csv(tmp_path / f"{part}.csv") for part in ("whole", "cut"))
    scores = ["log_prob", "std_error", "effective_samples", "p_value", "p_value_std_error"]
    assert whole.columns == cut.columns == ["id", "name", *scores]
    assert cut["id"].to_list() == table()["id"].to_list()
    assert cut["name"].to_list() == table()["name"].to_list()
    for score in scores:
        np.testing.assert_allclose(cut[score], whole[score], atol=1e-3)
    run = ciflows.load_run(folder / name)
    shuffled = table().sample(fraction=1.0, shuffle=True, seed=0)
    again = shuffled.hstack(run.p_value(shuffled, n=40, samples=10)).sort("id")
    np.testing.assert_allclose(again["p_value"], whole["p_value"], atol=1e-6)


def test_p_values_with_a_tolerance(folder: Path, tmp_path: Path, command: Callable[..., str]) -> None:
    words = ("score", str(folder / "free"), str(folder / "data.csv"), "--std-error", "0.5")
    command(*words, "--p-value", "-n", "50")
    assert pl.read_csv(tmp_path / "scores.csv")["p_value"].is_between(0, 1).all()


def test_the_error_counts_that_of_the_density(folder: Path) -> None:
    run = ciflows.load_run(folder / "free")
    rows = run.rows(table())
    estimate = run.estimate(rows, 10, seed=0)
    source = p_values.PValues(run, 100, 0, samples=10)
    p, error = source.of(rows, estimate)
    _, known = source.of(rows, estimate._replace(std_error=0 * estimate.std_error))
    smooth = (100 * p + 1) / 102
    assert ((smooth * (1 - smooth) / 100).sqrt() - known).abs().max() < 1e-12
    assert (error >= known).all()
    assert (error > known).any()


def test_pandas_in_gives_pandas_out(folder: Path) -> None:
    frame = pd.DataFrame(table().head(3).to_dict(as_series=False), index=["u", "v", "w"])
    found = ciflows.load_run(folder / "given").p_value(frame, n=10, samples=2)
    assert list(found.index) == ["u", "v", "w"]


def test_what_cannot_be_written_is_refused(
    folder: Path, tmp_path: Path, command: Callable[..., str]
) -> None:
    data = str(folder / "data.csv")
    text = command("score", str(folder / "free"), data, "--key", "id,nome", code=1)
    assert "data.csv: lacks the column nome; it has id, g, y, k, name" in text
    table().rename({"id": "log_prob"}).write_csv(tmp_path / "rows.csv")
    text = command("score", str(folder / "free"), "rows.csv", "--key", "log_prob", code=1)
    assert "The scores have a column log_prob already" in text
    assert not (tmp_path / "scores.csv").exists()
    run = ciflows.load_run(folder / "free")
    flow = ciflows.build_model("realnvp-image", shape=(1, 4, 4)).eval()
    images = ciflows.Run(run.path, run.config, flow, {"columns": []}, {}, [])
    with pytest.raises(UserError, match="P-values are for tables and points"):
        p_values.PValues(images, None, 0)
