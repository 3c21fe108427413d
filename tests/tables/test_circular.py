"""Columns on a circle: no seam, mass 1, and the same fit wherever the circle is cut."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import ciflows
from ciflows.cli import app
from ciflows.core.noise import Noise
from ciflows.diagnostics import sandwich
from ciflows.errors import UserError
from ciflows.runs.run import Run
from ciflows.tables import TableSettings
from ciflows.tables.survey import survey_table
from ciflows.tables.wrapped import Wrapped

SMALL = {"layers": 1, "hidden": [16], "steps": 150, "validate_every": 50}
DAY = {"hour": (0.0, 24.0)}
CENTRES = (0.0, 13.0)


def hours(centre: float, n: int, seed: int) -> pl.DataFrame:
    """Hours around a centre, by von Mises, and a column that depends on them."""
    rng = np.random.default_rng(seed)
    angle = rng.vonmises(0, 2, n)
    return pl.DataFrame(
        {"hour": (centre + angle * 12 / np.pi) % 24, "y": np.cos(angle) + 0.3 * rng.normal(size=n)}
    )


def truth(frame: pl.DataFrame, centre: float) -> np.ndarray:
    angle = (frame["hour"].to_numpy() - centre) * np.pi / 12
    hour = stats.vonmises(2).logpdf(angle) + math.log(np.pi / 12)
    return np.asarray(hour + stats.norm(np.cos(angle), 0.3).logpdf(frame["y"].to_numpy()))


@pytest.fixture(scope="module")
def runs() -> dict[float, Run]:
    return {c: ciflows.fit(hours(c, 1500, 0), "nsf", circular=DAY, seed=0, **SMALL) for c in CENTRES}


def test_a_peak_on_the_seam_is_fitted_as_well_as_one_elsewhere(runs: dict[float, Run]) -> None:
    losses = {}
    for centre, run in runs.items():
        fresh = hours(centre, 1000, 1)
        losses[centre] = (truth(fresh, centre) - run.log_prob(fresh, seed=0).numpy()).mean()
    on_seam, elsewhere = losses.values()
    assert abs(on_seam - elsewhere) < 0.01
    assert on_seam < 0.06


def test_there_is_no_notch_at_the_peak_on_the_seam(runs: dict[float, Run]) -> None:
    near = np.array([23.5, 23.9, 23.99, 24 - 1e-6, 0.0, 1e-6, 0.01, 0.1, 0.5])
    frame = pl.DataFrame({"hour": near, "y": np.ones(9)})
    scores = runs[0.0].log_prob(frame, 2000, seed=0).numpy()
    assert np.abs(scores[2:7] - scores[4]).max() < 0.02
    assert np.abs(scores - truth(frame, 0.0)).max() < 0.3


def test_samples_lie_on_the_circle(runs: dict[float, Run]) -> None:
    drawn = runs[0.0].sample(2000, seed=0)["hour"]
    assert 0 <= drawn.min() < 1
    assert 23 < drawn.max() < 24
    share = ((drawn < 2) | (drawn > 22)).mean()
    assert share == pytest.approx(stats.vonmises(2).cdf(np.pi / 6) * 2 - 1, abs=0.05)


def test_values_wrap_around(runs: dict[float, Run]) -> None:
    run, frame = runs[0.0], hours(0.0, 20, 2)
    turned = frame.with_columns(pl.col("hour") - 24)
    scores = [run.log_prob(each, 500, seed=0) for each in (frame, turned)]
    assert torch.allclose(*scores, atol=0.05)


def test_values_that_go_round_more_than_once_are_told() -> None:
    frame = hours(0.0, 100, 0)
    said: list[str] = []
    survey_table([frame], TableSettings(circular={"hour": "0:24"}), said.append)
    survey_table([frame], TableSettings(circular={"hour": "0:12"}), said.append)
    told = [sentence for sentence in said if not sentence.startswith("Columns:")]
    assert [sentence[:43] for sentence in told] == ["More than once around the circle: hour from"]


def test_the_mass_is_1() -> None:
    hour = hours(3.0, 800, 0).select("hour")
    run = ciflows.fit(hour, "nsf", circular=DAY, seed=0, **SMALL)
    grid = np.arange(400) * 24 / 400
    density = np.exp(run.log_prob({"hour": grid}, 300, seed=0).double().numpy())
    assert density.mean() * 24 == pytest.approx(1, abs=0.01)
    assert run.schema is not None
    assert run.schema.measure == {"hour": "density on a circle of 24"}


def test_a_missing_hour_is_integrated_over(runs: dict[float, Run]) -> None:
    run = runs[0.0]
    estimate = run.estimate({"y": [0.5]}, 2000, seed=0, missing="integrate")
    grid = np.arange(200) * 24 / 200
    frame = {"hour": grid, "y": np.full(200, 0.5)}
    total = np.exp(run.log_prob(frame, 300, seed=0).double().numpy()).mean() * 24
    assert estimate.log_prob.exp().item() == pytest.approx(total, rel=0.03)
    drawn = run.impute({"y": [1.0] * 300}, seed=0)["hour"].to_numpy()
    assert np.cos(drawn * np.pi / 12).mean() > 0.7


def test_whole_hours_have_probabilities() -> None:
    whole = hours(0.0, 800, 0).select(pl.col("hour").floor().cast(pl.Int32), "y")
    run = ciflows.fit(whole, "nsf", columns=["hour"], circular=DAY, seed=0, **SMALL)
    p = np.exp(run.log_prob({"hour": np.arange(24)}, 1000, seed=0).double().numpy())
    assert p.sum() == pytest.approx(1, abs=0.02)
    assert p[0] == pytest.approx(p[23], rel=0.15)
    drawn = run.sample(500, seed=0)["hour"]
    assert drawn.dtype == pl.Int32
    assert set(drawn) <= set(range(24))
    assert run.log_prob({"hour": [24]}, 5000, seed=0).exp().item() == pytest.approx(p[0], rel=0.05)
    with pytest.raises(UserError, match=r"steps of 1 in training, and now has 0\.5"):
        run.log_prob({"hour": [0.5]})


def test_a_given_angle_becomes_its_cosine_and_sine() -> None:
    frame = hours(0.0, 300, 0)
    run = ciflows.fit(frame, "nsf", given=["hour"], circular=DAY, seed=0, **SMALL)
    assert run.flow.context_shape == (2,)
    scores = run.log_prob({"hour": [0.0, 24.0, 48.0], "y": [0.5] * 3}, seed=0)
    assert torch.allclose(scores, scores[:1].expand(3), atol=1e-5)


def test_the_map_is_consistent() -> None:
    layer = Wrapped(torch.tensor([-180.0, 0.0]), torch.tensor([360.0, 24.0]), torch.tensor([0.0, 0.5]))
    layer.scale.copy_(torch.tensor([100.0, 3.0]))
    x = torch.stack([torch.linspace(-180, 179, 48), torch.arange(48) * 0.5], -1).double()
    z, log_weight = layer.encode(x, Noise.seeded(0))
    assert torch.allclose(layer.decode(z, Noise()), x, atol=1e-9)
    density = torch.exp(log_weight - 0.5 * z**2) / math.sqrt(2 * math.pi)
    truth = stats.norm(scale=100).pdf(x[:, 0].numpy()[:, None] + 360 * np.arange(-5, 6)).sum(1)
    assert np.allclose(density[:, 0], truth)


def test_true_turns_are_recorded(runs: dict[float, Run]) -> None:
    bounds = sandwich(runs[0.0].flow, 100, 50, seed=0)
    assert bounds.upper - bounds.lower < 0.05


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    frame = hours(0.0, 100, 0).with_columns(word=pl.lit("a"), whole=pl.col("hour").floor())
    frame = frame.with_columns(calm=pl.when(pl.col("hour") < 2).then(0.0).otherwise(pl.col("hour")))
    for circular, words in (
        ({"word": (0, 1)}, "its values are no numbers"),
        ({"whole": (0, 2 * math.pi)}, r"period 6\.28319 is no multiple of its step 1"),
        ({"calm": (0, 24)}, "it repeats 0, as no density does"),
        ({"hour": (24, 0)}, "write it as LOW:HIGH"),
        ({"our": (0, 24)}, "no column 'our'"),
    ):
        with pytest.raises(UserError, match=words):
            ciflows.fit(frame.with_columns(word=pl.Series(["a", "b"] * 50)), circular=circular)
    with pytest.raises(UserError, match="it has bounds too"):
        ciflows.fit(frame, circular=DAY, bounds={"hour": (0, None)})
    frame.select("hour", "y").write_csv(tmp_path / "hours.csv")
    words = ["fit", str(tmp_path / "hours.csv"), "--circular", "hour=0", "--out", str(tmp_path / "run")]
    assert "write it as LOW:HIGH" in str(CliRunner().invoke(app, words).exception)
